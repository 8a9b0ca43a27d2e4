"""Serve the demo: one machine, one port, no request to anywhere else.

The app is mounted in a server of our own rather than by Gradio's `launch`, which obeys environment variables that open
tunnels and folders, and which asks itself whether it is up through whatever proxy is set.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
import numpy as np
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir.demo.app import build_app
from cbmir.demo.examples import find_examples
from cbmir.demo.theme import CSS, theme
from cbmir.errors import UserError
from cbmir.runtime.finder import Finder

log = logging.getLogger("cbmir")

MAX_UPLOAD = 64 * 2**20
_FOLDER = "GRADIO_TEMP_DIR"


def serve(
    finder: Finder,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    examples: Path | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until Ctrl-C; port 0 takes any free one. `ready` is called with the URL once the page answers.

    The model has run once before that. Uploads lie in a private folder that ends with the server. Raises UserError for
    a port or host that cannot be had, or a folder without examples.
    """
    with _bound(host, port) as listener, _uploads():
        if not _is_loopback(host):
            log.warning("%s can be reached from other machines, and there is no password: the gallery is patient data.",
                        host)  # fmt: skip
        app = _mounted(build_app(finder, find_examples(finder, examples)), host)
        _warm_up(finder)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        try:
            _Server(config, lambda: ready(url)).run(sockets=[listener])
        except KeyboardInterrupt:
            log.info("Stopped.")


@contextmanager
def _uploads() -> Iterator[None]:
    """A private folder for what is uploaded, which Gradio finds by its environment variable."""
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(prefix="cbmir-demo-") as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


class _NotFramed:
    """ASGI middleware: no other page may show this one in a frame, where a visitor would click without knowing it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Frame-Options"] = "DENY"
                headers["Content-Security-Policy"] = "frame-ancestors 'none'"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def _mounted(blocks: gr.Blocks, host: str) -> FastAPI:
    app = FastAPI(openapi_url=None)
    if _is_loopback(host):  # so that no web page can reach in by a name of its own for this machine
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost", "127.0.0.1", "[::1]"])
    app.add_middleware(_NotFramed)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        theme=theme(),
        css=CSS,
        max_file_size=MAX_UPLOAD,
        allowed_paths=[],
        show_error=False,
        footer_links=[],
        run_history=False,
        root_path="",
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        pwa=False,
        app_kwargs={"openapi_url": None},  # no pages about the API
    )
    return app


def _bound(host: str, port: int) -> socket.socket:
    """A socket that holds the port and does not listen yet."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UserError(
            f"expected a free port to listen on, found that {host} port {port} cannot be had ({error.strerror}); "
            f"choose another with --port (0: any free one)"
        ) from error
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warm_up(finder: Finder) -> None:
    """Run the model once, so that the first visitor does not wait for it."""
    side = finder.card.preprocess.crop
    ramp = np.linspace(0, 255, side * side).astype(np.uint8).reshape(1, 1, side, side)
    finder.embed(ramp)
