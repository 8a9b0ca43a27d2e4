"""The ASGI application around the page's Gradio blocks: it serves only the routes that the page uses, with limits.

Among others, it denies the routes that write answers to the disk (`deep_link`), serve files (`file=`), fetch URLs
(`proxy=`) or bypass the queue (`run`, `api`). Uploads have their own route (`UploadStore`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI, Request
from gradio import processing_utils
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cbmir.demo.page.layout import theme
from cbmir.demo.page.markup import static
from cbmir.demo.upload_store import MOST_OF_FILE, UploadStore
from cbmir.runtime.serving.limits import BodyLimit
from cbmir.runtime.serving.problems import Problem, answer_problem
from cbmir.runtime.serving.security import Credential, Guard, SecurityHeaders

#: Gradio's routes by method: scripts and styles, then the requests of the page and `gradio_client`. A route that a new
#: version adds is denied until it is listed here.
ALLOWED = {
    "GET": (
        "/", "/config", "/theme.css", "/favicon.ico", "/assets/{path:path}", "/static/{path:path}",
        "/svelte/{path:path}", "/gradio_api/info", "/gradio_api/startup-events",
        "/gradio_api/heartbeat/{session_hash}", "/gradio_api/queue/data", "/gradio_api/call/{api_name}/{event_id}",
    ),
    "POST": (
        "/gradio_api/queue/join", "/gradio_api/call/{api_name}", "/gradio_api/cancel", "/gradio_api/reset",
        "/gradio_api/component_server",
    ),
}  # fmt: skip
ASKING = ("/gradio_api/queue/join", "/gradio_api/call/{api_name}")  # the routes that add to the queue
UPLOAD = "/gradio_api/upload"
MOST_UNREAD = 64  # answers, not counting those to questions that are still in the queue
MOST_OF_QUESTION = 256 * 2**10  # bytes of a body; as parsed JSON it takes at most about 6 MB of memory
QUESTION_S = 30.0  # for the body of a question
#: Gradio's own scripts need inline code and `eval`; the page may not exchange anything with other machines.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
#: The page and its answers contain patients' images: browsers must not store them after the page is closed.
_OF_PATIENTS = ("text/html", "application/json", "text/event-stream", "image/jpeg")


async def _no_download(*_: object, **__: object) -> str:
    raise ValueError("expected the path of an upload, found an address on the network")


processing_utils.async_ssrf_protected_download = _no_download  # Gradio uses it to fetch a file that a question names


def create_app(blocks: gr.Blocks, hosts: Sequence[str] = (), login: Credential | None = None) -> FastAPI:
    """Make the application. Requests must be for one of `hosts` (empty: any) and carry the login."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(BodyLimit, most=MOST_OF_QUESTION, timeout_s=QUESTION_S, streamed=(UPLOAD,))
    app.add_middleware(Guard, hosts=hosts, credential=login)
    app.add_middleware(SecurityHeaders, policy=_POLICY, private=_OF_PATIENTS)
    app.add_exception_handler(Problem, answer_problem)
    store = UploadStore(Path(blocks.GRADIO_CACHE), blocks.upload_file_set)

    @app.post(UPLOAD)
    async def upload(request: Request) -> list[str]:
        return await store.take(request)

    gr.mount_gradio_app(
        app, blocks, path="/", theme=theme(), css=static("page.css"), max_file_size=MOST_OF_FILE,
        allowed_paths=[], show_error=False, footer_links=[], run_history=False, root_path="", ssr_mode=False,
        mcp_server=False, enable_monitoring=False, pwa=False,
        app_kwargs={"openapi_url": None},  # no pages about the API
    )  # fmt: skip
    mount = app.router.routes.pop()
    assert isinstance(mount, Mount)
    to = dict.fromkeys(ASKING, _BoundedAnswers(mount.app, blocks._queue))
    for method, paths in ALLOWED.items():
        app.router.routes += [Route(path, to.get(path, mount.app), methods=[method], name=path) for path in paths]
    return app


class _BoundedAnswers:
    """The route to Gradio's queue, which stores the unread answers of up to 2,000 pages. If there are more than
    MOST_UNREAD, the page with the oldest one is forgotten, and gets an error when it asks for its answers."""

    def __init__(self, app: ASGIApp, queue: Any) -> None:
        self._app, self._queue = app, queue
        self._unread: dict[str, str] = {}  # question -> page, oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        questions, messages = self._queue.pending_event_ids_session, self._queue.pending_messages_per_session
        running = self._queue.event_ids_to_events.keys()
        unread = {one: page for page, own in questions.items() for one in own - running}
        self._unread = {one: page for one, page in self._unread.items() if one in unread} | unread
        while len(self._unread) > MOST_UNREAD:
            oldest = next(iter(self._unread.values()))
            left, kept = questions.pop(oldest) & running, messages.pop(oldest, None)
            if left and kept is not None:  # for the answers to questions that are still running
                questions[oldest], messages[oldest] = left, type(kept)()
            self._unread = {one: page for one, page in self._unread.items() if page != oldest}
        await self._app(scope, receive, send)
