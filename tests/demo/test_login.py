"""The optional login."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Receive, Scope, Send

from cbmir.demo import load_login
from cbmir.errors import UserError
from cbmir.runtime.serving.security import Guard


async def _page(scope: Scope, receive: Receive, send: Send) -> None:
    from starlette.responses import PlainTextResponse

    await PlainTextResponse("page")(scope, receive, send)


def test_nothing_is_served_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_LOGIN", "ada:correct horse")
    client = TestClient(Guard(_page, credential=load_login("env:DEMO_LOGIN")))
    assert client.get("/").status_code == 401
    assert client.get("/").headers["www-authenticate"].startswith("Basic")
    assert client.get("/", auth=("ada", "wrong horse")).status_code == 401
    assert client.get("/", headers={"authorization": b"Basic \xe4"}).status_code == 401
    assert client.get("/", auth=("ada", "correct horse")).text == "page"
    with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/"):
        pass
    assert refused.value.status_code == 401


def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_LOGIN", "ada:correct horse\n")
    expected = "Basic " + base64.b64encode(b"ada:correct horse").decode()
    assert load_login("env:DEMO_LOGIN").admits(expected)
    file = tmp_path / "login"
    file.write_text("ada:correct horse\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        load_login(str(file))
    file.chmod(0o600)
    assert load_login(str(file)).admits(expected)
    assert "horse" not in repr(load_login(str(file)))


@pytest.mark.parametrize("place", ["env:NOT_SET_AT_ALL", "/nowhere/login"])
def test_missing_login(place: str) -> None:
    with pytest.raises(UserError):
        load_login(place)


@pytest.mark.parametrize("secret", ["", "ada", ":correct horse", "ada:short"])
def test_weak_login(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_LOGIN", secret)
    with pytest.raises(UserError, match="at least 8"):
        load_login("env:DEMO_LOGIN")
