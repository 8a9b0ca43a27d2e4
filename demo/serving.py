"""Serve the demo: one machine, one port, no request to anywhere else.

The app is mounted in a server of our own rather than by Gradio's `launch`, which obeys environment variables that open
tunnels and folders, and which asks itself whether it is up through whatever proxy is set.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from cbmir.demo.app import build_app
from cbmir.demo.examples import find_examples
from cbmir.demo.files import add_files
from cbmir.demo.page import STATIC
from cbmir.demo.security import Login, LoginRequired, OwnPages
from cbmir.errors import GalleryError
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.hot_reload import warm_up
from cbmir.runtime.sockets import bound, is_loopback, url_of

log = logging.getLogger("cbmir")

MAX_UPLOAD = 64 * 2**20
_FOLDER = "GRADIO_TEMP_DIR"


def serve(
    finder: Finder,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    examples: Path | None = None,
    login: Login | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until Ctrl-C; port 0 takes any free one. `ready` is called with the URL once the page answers.

    The model has run once before that. Uploads lie in a private folder that ends with the server. Raises UserError for
    a port or host that cannot be had, or a folder without examples.
    """
    with bound(host, port) as listener, _uploads():
        if login is None and not is_loopback(host):
            log.warning(
                "%s can be reached from other machines, and no --login is asked for: the gallery is patient data.", host
            )
        chart = _chart(finder)
        app = _mounted(finder, build_app(finder, find_examples(finder, examples), chart), chart, host, login)
        warm_up(finder)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        url = url_of(listener, host)
        try:
            _Server(config, lambda: ready(url)).run(sockets=[listener])
        except KeyboardInterrupt:
            log.info("Stopped.")


def _chart(finder: Finder) -> GalleryProjection | None:
    """The gallery's map, where it has one. Raises GalleryError for one made with another model's embeddings."""
    chart = GalleryProjection.load(finder.gallery.path) if isinstance(finder.gallery, Gallery) else None
    if chart is not None and chart.fingerprint != finder.card.fingerprint:
        raise GalleryError("expected a map made with this model, found one of another; make it anew: 'cbmir index map'")
    return chart


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


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def _mounted(
    finder: Finder, blocks: gr.Blocks, chart: GalleryProjection | None, host: str, login: Login | None
) -> FastAPI:
    app = FastAPI(openapi_url=None)
    if is_loopback(host):  # so that no web page can reach in by a name of its own for this machine
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost", "127.0.0.1", "[::1]"])
    if login is not None:
        app.add_middleware(LoginRequired, login=login)
    app.add_middleware(OwnPages)
    if finder.gallery is not None:
        add_files(app, finder.gallery, chart)
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        theme=_theme(),
        css_paths=STATIC / "style.css",
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


def _theme() -> gr.themes.Base:
    """For what Gradio itself shows, the place in the queue: bare, with fonts of the system. Else `static/style.css`."""
    fonts = [gr.themes.Font(name) for name in ("system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Arial")]
    mono = [gr.themes.Font(name) for name in ("ui-monospace", "Consolas", "Menlo", "monospace")]
    return gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", text_size="sm",
        font=(*fonts, gr.themes.Font("sans-serif")), font_mono=mono,
    )  # fmt: skip
