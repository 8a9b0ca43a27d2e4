"""The served demo without a browser: what it binds, whom it answers, what it keeps to itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import httpx
import pytest

from cbmir.cli import main
from cbmir.demo.serving import MAX_UPLOAD, _bound, serve
from cbmir.demo.theme import theme
from cbmir.errors import UserError
from cbmir.runtime import Finder


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def test_page(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "Not a medical device" in answer.text


def test_another_host_name_is_refused(client: httpx.Client) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(("path", "host"), [("/", "localhost"), ("/config", "localhost"), ("/", "evil.example")])
def test_no_other_page_may_frame_it(client: httpx.Client, path: str, host: str) -> None:
    headers = client.get(path, headers={"host": host}).headers
    assert headers["x-frame-options"] == "DENY"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_environment_is_left_as_it_was(
    before: str | None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("GRADIO_TEMP_DIR", before)
    with Finder.open(tiny_model) as finder, pytest.raises(UserError, match="expected a folder of example images"):
        serve(finder, port=0, examples=tmp_path / "absent")
    assert os.environ.get("GRADIO_TEMP_DIR") == before


def test_files_of_the_machine_are_not_served(client: httpx.Client, demo_gallery: Path) -> None:
    for path in (demo_gallery.parent / "image_0.png", demo_gallery / "gallery.sqlite", Path("/etc/passwd")):
        assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_no_api_pages_and_no_analytics(client: httpx.Client) -> None:
    for path in ("/docs", "/openapi.json", "/monitoring"):
        assert client.get(path).status_code in (404, 403), path
    config = client.get("/config").json()
    assert config["analytics_enabled"] is False
    assert all(dependency["api_visibility"] == "private" for dependency in config["dependencies"])
    assert config["footer_links"] == []


def test_upload_limit(client: httpx.Client) -> None:
    answer = client.post("/gradio_api/upload", files={"files": ("big.png", bytes(MAX_UPLOAD + 1))})
    assert answer.status_code == 413


def test_fonts_are_the_system_s() -> None:
    look = theme()
    assert look._stylesheets == []
    assert not [font for font in (*look._font, *look._font_mono) if type(font) is not gr.themes.Font]


def test_port_in_use(tiny_model: Path, tiny_gallery: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(["demo", str(tiny_model), str(tiny_gallery), "--port", str(port)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"port {port}" in error
    assert "--port" in error


def test_unknown_host(tiny_model: Path) -> None:
    with Finder.open(tiny_model) as finder, pytest.raises(UserError, match=r"256\.0\.0\.1"):
        serve(finder, host="256.0.0.1", port=0)


def test_bound_socket_does_not_listen_yet() -> None:
    with _bound("127.0.0.1", 0) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())


def test_missing_model_is_told_before_gradio_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", str(tmp_path / "model.onnx"), str(tmp_path)])
    assert stop.value.code == 2
    assert "no such model file" in capsys.readouterr().err
