"""The demo's server: one port, and no request to another machine.

It does not use Gradio's `launch`, which obeys environment variables that open tunnels and folders, and uses proxies.
"""

from __future__ import annotations

import base64
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from cbmir.demo.app import build
from cbmir.demo.asgi import create_app
from cbmir.demo.upload_store import UPLOAD_S
from cbmir.errors import GalleryError, UserError
from cbmir.files import read_secret
from cbmir.process import sigterm_interrupts
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.hot_reload import warm_up
from cbmir.runtime.serving.security import MOST_OF_HEADERS, Credential
from cbmir.runtime.serving.server import Server, with_deadline
from cbmir.runtime.sockets import allowed_hosts, bound, is_loopback, url_of

log = logging.getLogger("cbmir")

_FOLDER = "GRADIO_TEMP_DIR"
_DELETE = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1])"
_SHORTEST = 8  # characters in a password
_GRACE = 10.0  # seconds after an upload's own limit before its connection is closed
_ADVICE = "write it with: (umask 077; echo NAME:PASSWORD > LOGINFILE)"


def serve(
    finder: Finder, *, host: str = "127.0.0.1", port: int = 7860, examples: Path | None = None,
    feedback: Path | None = None, login: Credential | None = None, ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        port: 0 chooses a free one.
        ready: Called with the URL once the model is warm.

    Raises:
        UserError: The port, the host or the file for feedback cannot be used, or the folder has no examples.
        GalleryError: The gallery's map was made with another model.
    """
    with sigterm_interrupts(), bound(host, port) as listener, _uploads():  # uvicorn raises SIGTERM again when it stops
        if login is None and not is_loopback(host):
            log.warning(
                "%s can be reached from other machines, and no --login is set: the gallery is patient data.", host
            )
        app = create_app(build(finder, examples, _chart(finder), feedback), allowed_hosts(host), login)
        warm_up(finder)
        config = uvicorn.Config(
            app, http=with_deadline(UPLOAD_S + _GRACE), ws="none", log_level="warning", access_log=False,
            h11_max_incomplete_event_size=MOST_OF_HEADERS, timeout_graceful_shutdown=1,
        )  # fmt: skip
        try:
            Server(config, lambda: ready(url_of(listener, host))).run(sockets=[listener])
        except KeyboardInterrupt:
            log.info("Stopped.")


def load_login(place: str) -> Credential:
    """Read the name and password that protect the whole server, with `read_secret`. HTTP Basic sends them unencrypted.
    Raises UserError."""
    login = read_secret(place, "a login as NAME:PASSWORD", _ADVICE)
    name, _, password = login.partition(b":")
    if not name or len(password) < _SHORTEST:
        raise UserError(f"expected NAME:PASSWORD with a password of at least {_SHORTEST} characters, found other text")
    return Credential("Basic", base64.b64encode(login), "the demo's name and password")


def _chart(finder: Finder) -> GalleryProjection | None:
    """Load the gallery's map, if it has one. Raises GalleryError if it was made with another model."""
    chart = GalleryProjection.load(finder.gallery.path) if isinstance(finder.gallery, Gallery) else None
    if chart is not None and chart.fingerprint != finder.card.fingerprint:
        raise GalleryError("expected a map made with this model, found one of another; rebuild it: 'cbmir index map'")
    return chart


@contextmanager
def _uploads() -> Iterator[None]:
    """Create a private folder for uploads, which Gradio finds by its environment variable. A second process deletes it
    when this one ends, even if this one is killed."""
    before, folder = os.environ.get(_FOLDER), tempfile.mkdtemp(prefix="cbmir-demo-")
    # Its input closes when this process ends. It has its own session, so that Ctrl-C does not reach it.
    with subprocess.Popen(
        [sys.executable, "-ISc", _DELETE, folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/",
        start_new_session=True,
    ) as deleter:  # fmt: skip
        assert deleter.stdin is not None
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            deleter.stdin.close()
            del os.environ[_FOLDER]
            if before is not None:
                os.environ[_FOLDER] = before
