"""The optional login."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Receive, Scope, Send

from cbmir.demo.login import Login
from cbmir.errors import UserError
from cbmir.runtime.serving.security import Guard


async def _page(scope: Scope, receive: Receive, send: Send) -> None:
    from starlette.responses import PlainTextResponse

    await PlainTextResponse("page")(scope, receive, send)


def test_nothing_is_answered_without_it() -> None:
    client = TestClient(Guard(_page, credential=Login(b"ada:correct horse")))
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
    assert Login.load("env:DEMO_LOGIN").admits(expected)
    file = tmp_path / "login"
    file.write_text("ada:correct horse\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        Login.load(str(file))
    file.chmod(0o600)
    assert Login.load(str(file)).admits(expected)
    assert "horse" not in repr(Login.load(str(file)))


@pytest.mark.parametrize("place", ["env:NOT_SET_AT_ALL", "/nowhere/login"])
def test_login_that_is_not_there(place: str) -> None:
    with pytest.raises(UserError):
        Login.load(place)


@pytest.mark.parametrize("secret", [b"", b"ada", b":correct horse", b"ada:short"])
def test_weak_login(secret: bytes) -> None:
    with pytest.raises(UserError, match="at least 8"):
        Login(secret)
