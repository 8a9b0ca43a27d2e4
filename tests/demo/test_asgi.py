"""The layer around Gradio: which of its routes exist, and how large requests and answers may be."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import httpx
import pytest
import uvicorn
from gradio.processing_utils import async_move_files_to_cache
from gradio_client import Client, handle_file

from cbmir.demo import asgi
from cbmir.demo.asgi import ALLOWED, MOST_OF_QUESTION, UPLOAD, create_app
from cbmir.demo.page.layout import theme
from cbmir.runtime.serving.server import Server
from cbmir.runtime.sockets import bound

KNOWN = (Path(__file__).parent / "gradio_routes.txt").read_text("utf-8").splitlines()


async def make(act: Callable[[gr.Blocks], Any]) -> Any:
    """Apply `act` to blocks with an endpoint for a file's size, in a running loop, or Gradio would open its own."""
    with gr.Blocks(analytics_enabled=False) as blocks:
        file, size = gr.File(), gr.Number()
        gr.Button().click(lambda path: Path(path).stat().st_size, file, size, api_name="size")
    blocks.queue(api_open=False)
    return act(blocks)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=60, follow_redirects=True) as client:
        yield client


@pytest.fixture
def upload(client: httpx.Client) -> str:
    """The path of an upload that has not been read yet."""
    (path,) = client.post(UPLOAD, files={"files": ("1~chest.png", b"an upload")}).json()
    return str(path)


def routes_of(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        inner = getattr(route, "original_router", None)  # how newer versions of FastAPI include a router
        if inner is None:
            yield from (f"{method} {route.path.rstrip('/') or '/'}" for method in route.methods)
        else:
            yield from routes_of(inner.routes)


def test_every_route_of_gradio_was_reviewed() -> None:
    """New routes are denied. Add one to `gradio_routes.txt` after deciding whether the page needs it."""
    app = asyncio.run(make(partial(gr.routes.App.create_app, app_kwargs={"openapi_url": None})))
    there = set(routes_of(app.routes))
    assert sorted(there - set(KNOWN)) == []
    assert sorted({f"{method} {path}" for method, paths in ALLOWED.items() for path in paths} - there) == []


def test_routes_that_are_not_allowed_do_not_exist(client: httpx.Client, upload: str) -> None:
    for method, path in (known.split(" ") for known in KNOWN):
        if path not in ALLOWED.get("GET" if method == "HEAD" else method, ()) and path != UPLOAD:
            filled = re.sub("{path(_or_url)?:path}", upload, path)
            for one in (filled, f"{filled}/", re.sub("{.*?}", "1", filled)):
                assert client.request(method, one).status_code in (404, 405), (method, one)


def test_an_upload_is_not_served_and_nothing_is_written(client: httpx.Client, upload: str) -> None:
    before = sorted(Path(upload).parents[1].iterdir())
    for path in ("file=", "file/", "../gradio_api/file=", "/file=", "%66ile="):
        assert client.get(f"/gradio_api/{path}{upload}").status_code == 404
    assert client.get("/gradio_api/deep_link", params={"session_hash": "abc"}).status_code == 404
    assert sorted(Path(upload).parents[1].iterdir()) == before
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/gradio_api/queue/join", "/gradio_api/call/ask", "/gradio_api/cancel", "/gradio_api/nothing", "/"]
)
def test_a_large_body_is_refused_on_every_route(path: str, client: httpx.Client) -> None:
    large = bytes(MOST_OF_QUESTION + 1)
    chunks = (large[start : start + 2**14] for start in range(0, len(large), 2**14))
    for body in (large, chunks):
        answer = client.post(path, content=body)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:cbmir:problem:too-large")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"data": ' + b"[" * 50_000, b"\xff", b"", b"null"])
def test_a_malformed_request_is_refused(body: bytes, client: httpx.Client) -> None:
    answer = client.post("/gradio_api/queue/join", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)


def test_gradios_own_client_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    app = asyncio.run(make(lambda blocks: create_app(blocks)))
    file = tmp_path / "chest.bin"
    file.write_bytes(bytes(70_000))
    started = threading.Event()
    with bound("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = Server(config, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert started.wait(60)
            client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", verbose=False)
            try:
                assert "/size" in client.view_api(return_format="dict")["named_endpoints"]  # type: ignore[index]
                assert client.predict(handle_file(str(file)), api_name="/size") == 70_000
            finally:
                client.close()
        finally:
            server.should_exit = True
            thread.join(60)


def test_only_system_fonts_are_used() -> None:
    look = theme()
    assert look._stylesheets == []
    assert not [font for font in (*look._font, *look._font_mono) if type(font) is not gr.themes.Font]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_file_given_by_its_url_is_not_fetched(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    file = {"path": f"{scheme}://images.example/chest.png", "meta": {"_type": "gradio.FileData"}}
    moving = async_move_files_to_cache(file, gr.File(render=False), check_in_upload_folder=True)
    with pytest.raises(ValueError, match="found an address on the network"):
        asyncio.run(moving)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:gradio.queueing")  # from pandas, when Gradio counts its answers
@pytest.mark.parametrize("pages", [2, 20])
def test_unread_answers_are_bounded(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MOST_UNREAD", 4)
    answer = "x" * 100_000

    async def ask() -> tuple[int, list[str]]:
        """The number of characters Gradio keeps after twenty requests, and what the first and last page then read."""
        with gr.Blocks(analytics_enabled=False) as blocks:
            text = gr.Text()
            gr.Button().click(lambda: answer, None, text, api_name="ask")
        blocks.queue(api_open=False)
        app, queue = create_app(blocks), blocks._queue
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # Gradio reports errors, then raises
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as web:
            await web.get("/gradio_api/startup-events")
            for number in range(20):
                question = {"data": [], "fn_index": 0, "session_hash": f"page{number * pages // 20}"}
                assert (await web.post("/gradio_api/queue/join", json=question)).status_code == 200
                while queue.event_ids_to_events:
                    await asyncio.sleep(0.005)
            waiting = [one._queue for one in queue.pending_messages_per_session.values()]
            kept = sum(len(str(message.model_dump())) for messages in waiting for message in messages)
            assert set(queue.pending_event_ids_session) == set(queue.pending_messages_per_session)
            read = []
            for page in (0, pages - 1):
                found = await web.get("/gradio_api/queue/data", params={"session_hash": f"page{page}"})
                read.append(found.text)
            queue.close()
        return kept, read

    kept, (first, last) = asyncio.run(asyncio.wait_for(ask(), 120))
    assert kept < 6 * len(answer)
    assert "session_not_found" in first and answer not in first  # it gets an error instead of waiting
    assert answer in last


def test_a_page_that_is_always_busy_keeps_no_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its requests is always still running: that one will be answered, and the others are dropped."""
    monkeypatch.setattr(asgi, "MOST_UNREAD", 4)

    async def asked(*_: object) -> None:
        return None

    async def ask() -> tuple[object, bool]:
        kept: asyncio.Queue[str] = asyncio.Queue()
        for number in range(9):
            kept.put_nowait(str(number))
        queue = SimpleNamespace(
            pending_event_ids_session={"page": {*map(str, range(9)), "running"}},
            pending_messages_per_session={"page": kept}, event_ids_to_events={"running": object()},
        )  # fmt: skip
        await asgi._BoundedAnswers(asked, queue)({}, asked, asked)
        return queue.pending_event_ids_session, queue.pending_messages_per_session["page"].empty()

    assert asyncio.run(ask()) == ({"page": {"running"}}, True)
