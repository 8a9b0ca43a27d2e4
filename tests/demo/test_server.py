"""The served demo without a browser: its address, which requests it accepts, and what it keeps private."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import getsource, signature
from pathlib import Path

import gradio as gr
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.cli import main
from cbmir.demo.page.layout import points
from cbmir.demo.server import serve
from cbmir.demo.upload_store import MOST_OF_FILE
from cbmir.errors import GalleryError, UserError
from cbmir.runtime import Entry, Finder, Gallery
from cbmir.runtime.gallery.database import live_folder
from cbmir.runtime.gallery.projection import GalleryProjection, principal_plane


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def test_page(client: httpx.Client) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "Not a medical device" in answer.text


def test_another_host_name_is_refused(client: httpx.Client) -> None:
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(("path", "host"), [("/", "localhost"), ("/config", "localhost"), ("/", "evil.example")])
def test_no_other_page_may_frame_it(client: httpx.Client, path: str, host: str) -> None:
    headers = client.get(path, headers={"host": host}).headers
    assert headers["x-frame-options"] == "DENY"
    assert headers["content-security-policy"].endswith("frame-ancestors 'none'")
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:1"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_upload(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    files = {"files": ("1~a.png", b"no image")}
    assert client.post("/gradio_api/upload", files=files, headers=headers).status_code == status
    own = str(client.base_url).rstrip("/")
    assert client.post("/gradio_api/upload", files=files, headers={"origin": own}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/config"])
def test_browsers_cache_no_patient_data(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert "no-store" in answer.headers["cache-control"]


def test_the_browser_may_contact_no_other_machine(client: httpx.Client) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "http" not in policy
    assert "*" not in policy


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
    for path in (
        demo_gallery.parent / "image_0.png",
        live_folder(demo_gallery) / "gallery.sqlite",
        Path("/etc/passwd"),
    ):
        assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_twenty_sessions_at_once(client: httpx.Client, make_xray: Callable[..., NDArray[np.uint8]]) -> None:
    """Each gets the answer for its own image, through the server's queue and the endpoint for programs."""

    def visit(number: int) -> str:
        file = io.BytesIO()
        Image.fromarray(make_xray(number, 64 + number)).save(file, "PNG")
        (path,) = client.post("/gradio_api/upload", files={"files": (f"chest {number}.png", file.getvalue())}).json()
        image = {"path": path, "meta": {"_type": "gradio.FileData"}}
        asked = client.post("/gradio_api/call/analyze", json={"data": [image, 3 + number % 5, "", ""]})
        assert asked.status_code == 200, asked.text
        with client.stream("GET", f"/gradio_api/call/analyze/{asked.json()['event_id']}") as events:
            data = [line.removeprefix("data:") for line in events.iter_lines() if line.startswith("data:")]
        assert not Path(path).exists()
        (answer,) = json.loads(data[-1])
        return f"{number} {len(answer['neighbours'])}"

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(visit, range(20))) == [f"{number} {3 + number % 5}" for number in range(20)]


def test_the_map_shows_the_current_entries_of_the_gallery(tiny_model: Path, tmp_path: Path) -> None:
    """Removed entries, for example of a patient who withdraws consent, are no longer on it."""
    with Finder.open(tiny_model) as plain, Gallery.create(tmp_path / "gallery", plain.card) as gallery:
        entries = [Entry(name, "", "", labels={"Mass": of}) for name, of in zip("abcd", (1, 0, -1, None), strict=True)]
        gallery.add(entries, np.eye(4, 8, dtype=np.float32))
        chart = GalleryProjection.make(gallery, principal_plane, "principal components")
        before = points(gallery, chart, "Mass")
        assert list(before["finding"]) == ["with it", "without it", "uncertain", "not known"]
        gallery.remove(ids=["b"])
        after = points(gallery, chart, "Mass")
    assert list(after["image"]) == ["a", "c", "d"]
    assert list(after["x"]) == [list(before["x"])[at] for at in (0, 2, 3)]


def test_a_map_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with Finder.open(tiny_model) as plain, Gallery.create(tmp_path / "gallery", plain.card) as gallery:
        gallery.add([Entry(name, "", "") for name in "abc"], np.eye(3, 8, dtype=np.float32))
        chart = GalleryProjection.make(gallery, principal_plane, "principal components")
        replace(chart, fingerprint="another").save(gallery.path)
        with pytest.raises(GalleryError, match="cbmir index map"):
            serve(Finder(plain.engine, gallery), port=0)


def test_no_pages_about_the_api_and_no_analytics(client: httpx.Client) -> None:
    for path in ("/docs", "/openapi.json", "/monitoring"):
        assert client.get(path).status_code in (404, 403), path
    config = client.get("/config").json()
    assert config["analytics_enabled"] is False
    public = {one["api_name"] for one in config["dependencies"] if one["api_visibility"] == "public"}
    assert public == {"analyze", "search_by_findings", "search_by_region", "refine", "report"}
    assert config["footer_links"] == []


def test_upload_limit(client: httpx.Client) -> None:
    answer = client.post("/gradio_api/upload", files={"files": ("big.png", bytes(MOST_OF_FILE + 1))})
    assert answer.status_code == 413


def test_gradio_has_the_parts_that_the_page_needs() -> None:
    """Because of them, pyproject.toml bounds the version of Gradio. The browser tests check their behaviour."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    (asked,) = [one for one in project["optional-dependencies"]["demo"] if one.startswith("gradio")]
    assert "<" in asked and ">=" in asked
    needed = {
        gr.mount_gradio_app: {"css", "theme", "max_file_size", "allowed_paths", "run_history", "ssr_mode", "pwa"},
        gr.HTML: {"js_on_load", "html_template", "css_template", "apply_default_css", "server_functions", "elem_id"},
        gr.Blocks: {"analytics_enabled", "delete_cache", "fill_width"},
    }
    gone = [name for part, names in needed.items() for name in sorted(names - set(signature(part).parameters))]
    gone += [] if "self.GRADIO_CACHE = " in getsource(gr.blocks.Block) else ["Blocks.GRADIO_CACHE"]  # for uploads
    assert gr.EventData(None, {"question": 1}).question == 1
    assert not gone, f"Gradio {gr.__version__} has no {', '.join(gone)} any more: see demo/app.py"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_uploaded_outlives_the_server(
    how: signal.Signals, tiny_model: Path, demo_gallery: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "cbmir", "demo", str(tiny_model), str(demo_gallery), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[0]
            (path,) = httpx.post(f"{url}/gradio_api/upload", files={"files": ("1~a.png", b"chest")}, timeout=60).json()
            (folder,) = tmp_path.glob("cbmir-demo-*")
            assert Path(path).is_relative_to(folder)
            assert folder.stat().st_mode & 0o077 == 0
        except BaseException:
            server.kill()
            raise
        server.send_signal(how)
    assert server.returncode == (0 if how == signal.SIGTERM else -how)
    patience = time.monotonic() + 60
    while how == signal.SIGKILL and folder.exists():
        assert time.monotonic() < patience
        time.sleep(0.01)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or "cbmir" in path.name] == []


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


def test_a_missing_model_is_reported_before_gradio_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", str(tmp_path / "model.onnx"), str(tmp_path)])
    assert stop.value.code == 2
    assert "no such model file" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--open"]])
def test_open_shows_the_page(
    options: list[str], tiny_model: Path, tiny_gallery: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("cbmir.demo.serve", lambda finder, *, ready, **others: ready("http://127.0.0.1:1"))
    with pytest.raises(SystemExit):
        main(["demo", str(tiny_model), str(tiny_gallery), *options])
    assert opened == ["http://127.0.0.1:1"] * len(options)
