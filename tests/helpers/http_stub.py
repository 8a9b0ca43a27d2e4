"""HTTP servers of canned answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


class Quiet:
    """A base of request handlers that log nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in a thread, and yield its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
