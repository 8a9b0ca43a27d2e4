"""Requests to an untrusted HTTP server: its answers are limited in length and time, and can be interrupted.

`requests` reads credentials from `.netrc` (or the file that `NETRC` names) and authorities from `REQUESTS_CA_BUNDLE`.
Errors name the server and the HTTP status, never the requested address, which contains UIDs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from cbmir.errors import AnswerSizeError, PacsAwayError, PacsError
from cbmir.input_file import parse_json
from cbmir.process import Closing
from cbmir.runtime.logs import what_failed

TIMEOUT = (10.0, 60.0)  # seconds: to connect, and between two bytes of an answer
ANSWER_TIME = 60.0  # seconds for a whole answer, from connecting to its last byte
MOST_BYTES = 2**24  # in a JSON answer, which takes up to 25 times as much memory
_CHUNK = 2**20
_NO_URL = "expected the URL of a server, http://HOST/… or https://HOST/…; found something else"
_AWAY = (401, 403, 407, 429, 502, 503, 504)  # statuses that say nothing about the requested object
_HEADERS = {
    "User-Agent": "cbmir",
    "Accept-Encoding": "identity",  # uncompressed answers cannot inflate
    "Connection": "close",  # each answer has its own connection, which can be cut
}


@dataclass(frozen=True)
class PeerAnswer:
    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        """Parse the body; None if it is empty. Raises ValueError."""
        return parse_json(self.body.decode("utf-8-sig"), errors="surrogatepass") if self.body else None


class HttpServer(Closing):
    """A server that many threads can use, each for one request at a time."""

    def __init__(self, url: str) -> None:
        """`url` is the root of the service. Raises PacsError, which does not quote it."""
        if "@" in url:
            raise PacsError(
                "expected a URL without credentials, which logs would show; found some: put them into ~/.netrc"
            )
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one:
            raise PacsError(_NO_URL)
        self.url = url.rstrip("/")
        self._lock = threading.Lock()
        self._asked = set[_Exchange]()  # those that wait for an answer
        self._cancelled = False
        self._own = threading.local()  # holds each thread's `exchange`
        self._session = requests.Session()
        self._session.headers.update(_HEADERS)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(lambda connection: self._own.exchange.add(connection)))

    def cancel(self) -> None:
        """Interrupt running requests in all threads, and refuse further ones with PacsAwayError."""
        with self._lock:
            self._cancelled = True
            for exchange in self._asked:
                exchange.cut()

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def _asking(self, what: str, within: float | None = None) -> Iterator[None]:
        """Make one request in the block, up to the last byte of its answer. Errors become PacsError or PacsAwayError,
        because the messages of libraries contain UIDs."""
        within = ANSWER_TIME if within is None else within
        exchange = self._own.exchange = _Exchange()
        timer = threading.Timer(within, exchange.cut)
        timer.daemon = True
        try:
            with self._lock:
                if self._cancelled:
                    raise PacsAwayError(f"{self.url}: cannot {what}: stopped")
                self._asked.add(exchange)
            timer.start()
            error: Exception | None = None
            try:
                yield
            except Exception as raised:  # noqa: BLE001 - raised again, without libraries' messages
                error = raised
            if exchange.is_cut:  # even without an error: a cut answer may look complete
                found = "stopped" if self._cancelled else f"no complete answer within {within:g} seconds"
                raise PacsAwayError(f"{self.url}: cannot {what}: {found}") from None
            if error is not None:
                raise self._translated(what, error) from None
        finally:
            timer.cancel()
            with self._lock:
                self._asked.discard(exchange)
            exchange.close()

    def _translated(self, what: str, error: Exception) -> Exception:
        if isinstance(error, requests.HTTPError) and error.response is not None:
            status = error.response.status_code
            kind = PacsAwayError if status in _AWAY else PacsError
            return kind(f"{self.url}: cannot {what}: the server answered with status {status}")
        if isinstance(error, requests.ConnectionError | requests.Timeout | HTTPError):
            return PacsAwayError(f"{self.url}: cannot {what}: {type(error).__name__}")
        if isinstance(error, requests.RequestException):
            return PacsError(f"{self.url}: cannot {what}: {type(error).__name__}")
        if isinstance(error, LookupError | TypeError | ValueError | AttributeError | OverflowError):
            found = f"the answer does not follow the standard ({what_failed(error)})"
            return PacsError(f"{self.url}: cannot {what}: {found}")
        return error

    def _answer(
        self, method: str, path: str, *, most: int | None = None, passed: Collection[int] = (), **more: Any
    ) -> PeerAnswer:
        """Return the whole answer, within `_asking`. An error status raises, except those in `passed`.

        Raises AnswerSizeError if the answer has more than `most` bytes, by default `MOST_BYTES`.
        """
        most = MOST_BYTES if most is None else most
        with self._session.request(
            method, self.url + path, stream=True, timeout=TIMEOUT, allow_redirects=False, **more
        ) as answer:
            if answer.status_code not in passed:
                answer.raise_for_status()
                if answer.is_redirect:  # not followed: it may lead anywhere, and is read without limits
                    raise requests.HTTPError(response=answer)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError("it is compressed, though it was requested uncompressed")
            body = bytearray()
            while chunk := answer.raw.read(_CHUNK):
                body += chunk
                if len(body) > most:
                    raise AnswerSizeError(f"{self.url}: expected an answer of at most {most:,} bytes, found more")
            return PeerAnswer(answer.status_code, answer.headers.get("Content-Type", ""), bytes(body))


class _Exchange:
    """A request and its answer, whose connections another thread can cut."""

    def __init__(self) -> None:
        self.is_cut = False
        self._lock = threading.Lock()
        self._handles: list[socket.socket] = []

    def add(self, connection: socket.socket) -> None:
        # A separate handle, because TLS takes over the connection, and HTTP closes it before the answer is read.
        with self._lock:
            self._handles.append(connection.dup())
            if self.is_cut:
                self._shut_down()

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            self._shut_down()

    def close(self) -> None:
        with self._lock:
            for handle in self._handles:
                handle.close()
            self._handles.clear()

    def _shut_down(self) -> None:
        for handle in self._handles:
            with suppress(OSError):  # already closed by the other side
                handle.shutdown(socket.SHUT_RDWR)


class _Adapter(HTTPAdapter):
    """An adapter that reports each connection that is made, before its first byte."""

    def __init__(self, made: Callable[[socket.socket], None]) -> None:
        self._made = made
        super().__init__()

    def get_connection_with_tls_context(self, *args: Any, **more: Any) -> Any:
        pool = super().get_connection_with_tls_context(*args, **more)
        base: Any = pool.ConnectionCls
        if not issubclass(base, _Watched):
            pool.ConnectionCls = type("Watched", (_Watched, base), {"made": staticmethod(self._made)})
        return pool


class _Watched:
    """urllib3's connection, which reports when it is made. It is not reused, because only its first user can cut it."""

    made: Callable[[socket.socket], None]
    is_connected = False

    def _new_conn(self) -> socket.socket:
        connection: socket.socket = super()._new_conn()  # type: ignore[misc]
        self.made(connection)
        return connection
