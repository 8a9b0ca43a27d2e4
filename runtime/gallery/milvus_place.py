"""Where a Milvus collection is, and a connection to it whose errors are GalleryError.

::

    milvus://HOST:19530/NAME          a server or cluster; milvus+https://… with TLS
    milvus:./file.db                  Milvus Lite, embedded in this process: one process at a time

`?consistency=`, `?shards=` and `?replicas=` may follow (docs/milvus.md). What a server asks for to let one in, a token
or `user:password`, is taken from the environment variable CBMIR_MILVUS_TOKEN, never from a place: those are logged.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from cbmir.errors import GalleryError, require

TOKEN = "CBMIR_MILVUS_TOKEN"
#: Consistency levels of reads. The first, the default, sees all that was written before, by whomever.
CONSISTENCY = ("strong", "session", "bounded", "eventually")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")  # Milvus takes 255 characters; a suffix is ours
_EMBEDDED_NAME = "gallery"
_CONNECT, _SECONDS = 10.0, 30.0  # to be let in; for one call, but loading a collection, which has no limit


@dataclass(frozen=True)
class Place:
    """`uri` is what pymilvus takes, `name` the collection's; `shards` counts when it is made, `replicas` then too."""

    text: str
    uri: str
    name: str
    consistency: str = CONSISTENCY[0]
    shards: int = 1
    replicas: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises GalleryError for a text that names no place. No error has a password that stands in it."""
        if "@" in text and text.partition(":")[2].startswith("//"):
            raise GalleryError(f"expected no password in the place of a gallery, found one; set {TOKEN} instead")
        try:
            parts = urlsplit(text)
            port = parts.port or (443 if parts.scheme == "milvus+https" else 19530)
        except ValueError as error:
            raise _wrong(text, f"a host and a port ({error})") from error
        if parts.scheme == "milvus" and not parts.netloc:
            path = parts.path
            if not path.endswith(".db"):
                raise _wrong(text, "an embedded collection's path to end in .db")
            return cls(text, str(Path(path).absolute()), _EMBEDDED_NAME, **_options(text, parts.query))
        name = parts.path.strip("/")
        if parts.scheme not in ("milvus", "milvus+https") or not parts.hostname or not _NAME.fullmatch(name):
            raise _wrong(text, "a host, and a name of letters, digits and underscores")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        scheme = "https" if parts.scheme == "milvus+https" else "http"
        return cls(text, f"{scheme}://{host}:{port}", name, **_options(text, parts.query))

    @property
    def embedded(self) -> bool:
        return self.uri.endswith(".db")


def _options(text: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for key, value in options.items():
        if key == "consistency" and value in CONSISTENCY:
            continue
        if key in ("shards", "replicas") and re.fullmatch(r"[1-9]\d?", value):
            options[key] = int(value)
            continue
        raise _wrong(text, f"consistency={'|'.join(CONSISTENCY)}, shards=N or replicas=N after the question mark")
    return options


def _wrong(text: str, expected: str) -> GalleryError:
    shown = re.sub(r":.*@", ":…@", text.partition("?")[0])  # two slashes may be missing before a password, too
    return GalleryError(f"{shown}: expected {expected}; a place is milvus://HOST:19530/NAME or milvus:./file.db")


class Connection:
    """pymilvus's client, of its own channel. Calls are safe from many threads; writers hold `writing`."""

    def __init__(self, place: Place, *, make: bool = False) -> None:
        """Raises GalleryError where the server cannot be reached, and for an embedded file that is not there unless it
        is to be made; MissingDependencyError without pymilvus."""
        self.place = place
        pymilvus = require("pymilvus", "milvus")
        # They print a traceback for every error that they raise as well, with the filter and so perhaps a patient's id.
        for name in ("pymilvus", "milvus_lite"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._engine = _Embedded.take(place, make=make) if place.embedded else None
        self.writing = self._engine.writing if self._engine is not None else threading.Lock()
        token = "" if place.embedded else os.environ.get(TOKEN, "")
        self._client: Any = None
        try:
            with _translated(place, "open"):
                # A shared channel outlives its clients, and an embedded engine that is closed and opened again.
                self._client = pymilvus.MilvusClient(place.uri, token=token, timeout=_CONNECT, dedicated=True)
        finally:
            if self._client is None and self._engine is not None:
                self._engine.give_back()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """`method` of pymilvus's MilvusClient. Raises GalleryError for an error of the server, and once closed."""
        client = self._client
        if client is None:
            raise GalleryError(f"{self.place.text}: the gallery is closed; open it again")
        with _translated(self.place, method.replace("_", " ")):
            return getattr(client, method)(*args, **{"timeout": _SECONDS} | options)

    def load(self, name: str) -> None:
        """Let a collection be searched, by as many replicas as the place says: that may take long."""
        self.call("load_collection", name, timeout=None, replica_number=self.place.replicas)

    def close(self) -> None:
        """The last connection to an embedded engine ends it. May be called again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
            if self._engine is not None:
                self._engine.give_back()


class _Embedded:
    """Milvus Lite's engine of one file, which all connections of this process share: threads and a port on loopback."""

    _open: dict[str, _Embedded] = {}  # noqa: RUF012 - one for the process, guarded by the lock
    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self.users = 0
        self.writing = threading.Lock()  # the engine takes one writer at a time, and does not see to it

    @classmethod
    def take(cls, place: Place, *, make: bool) -> _Embedded:
        path = Path(place.uri)
        require("milvus_lite", "milvus")
        if not (path / "LOCK").is_file():
            if not make:
                raise GalleryError(f"{place.text}: expected a Milvus Lite folder, found none; make one with "
                                   f"'cbmir index build MODEL MANIFEST -o {place.text}'")  # fmt: skip
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise GalleryError(f"{place.text}: expected a new or empty folder for the gallery, found something "
                                   f"there")  # fmt: skip
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # else it would be made readable by all
        from milvus_lite.server_manager import server_manager_instance

        with cls._lock:  # two that start it at once would find the file locked by each other
            if server_manager_instance.start_and_get_uri(place.uri) is None:
                raise GalleryError(f"{place.text}: cannot open the embedded file; another process may have it open, or "
                                   f"another version of Milvus Lite wrote it")  # fmt: skip
            engine = cls._open.setdefault(place.uri, cls(place.uri))
            engine.users += 1
        return engine

    def give_back(self) -> None:
        from milvus_lite.server_manager import server_manager_instance

        with self._lock:
            self.users -= 1
            if not self.users:
                del self._open[self.path]
                server_manager_instance.release_server(self.path)


@contextmanager
def _translated(place: Place, verb: str) -> Iterator[None]:
    """Errors of pymilvus and of gRPC become GalleryError, without what stood in quotes: a filter names patients."""
    import grpc
    import pymilvus

    try:
        yield
    except (pymilvus.MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
        text = re.sub(r"(['\"]).*?\1", r"\1…\1", str(getattr(error, "message", "") or type(error).__name__))
        raise GalleryError(f"{place.text}: cannot {verb} ({text[:300]}); check that the server runs and lets you in, "
                           f"and that no other process has an embedded file open") from error  # fmt: skip
