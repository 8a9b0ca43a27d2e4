"""The address of a Milvus collection, a connection that translates errors into GalleryError, and the rows.

::

    milvus://HOST:19530/NAME          a server or cluster; milvus+https://… with TLS
    milvus:./file.db                  Milvus Lite, embedded in this process: one process at a time

`?consistency=`, `?shards=` and `?replicas=` may follow (docs/milvus.md). The server's credentials, a token or
`user:password`, come from the environment variable CBMIR_MILVUS_TOKEN, never from the address, which is logged.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError, require
from cbmir.runtime.gallery.milvus import records as rows
from cbmir.runtime.gallery.schema import are_unit
from cbmir.runtime.gallery.search import compared

TOKEN = "CBMIR_MILVUS_TOKEN"
#: Consistency levels of reads. The first is the default and sees all earlier writes of every client.
CONSISTENCY = ("strong", "session", "bounded", "eventually")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")  # Milvus allows 255 characters; we add a suffix
_EMBEDDED_NAME = "gallery"
_CONNECT, _SECONDS = 10.0, 30.0  # to connect; for one call, except loading a collection, which has no limit


@dataclass(frozen=True)
class MilvusAddress:
    """The address of a collection. `uri` is for pymilvus, `shards` for creating it, and `replicas` for loading it."""

    text: str
    uri: str
    name: str
    consistency: str = CONSISTENCY[0]
    shards: int = 1
    replicas: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a place. Raises GalleryError if it is not one; the message never contains a password."""
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
    shown = re.sub(r":.*@", ":…@", text.partition("?")[0])  # hides a password even if the two slashes are missing
    return GalleryError(f"{shown}: expected {expected}; a place is milvus://HOST:19530/NAME or milvus:./file.db")


class Connection:
    """A pymilvus client with its own channel. Calls are thread-safe; writers hold the lock `writing`."""

    def __init__(self, address: MilvusAddress, *, make: bool = False) -> None:
        """Raises GalleryError if the server cannot be reached, or if an embedded file is missing and not `make`;
        MissingDependencyError without pymilvus."""
        self.address = address
        pymilvus = require("pymilvus", "milvus")
        # They also log a traceback of every error that they raise, with the filter, which may hold a patient's id.
        for name in ("pymilvus", "milvus_lite"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._engine = _Embedded.take(address, make=make) if address.embedded else None
        self.writing = self._engine.writing if self._engine is not None else threading.Lock()
        token = "" if address.embedded else os.environ.get(TOKEN, "")
        self._client: Any = None
        try:
            with _translated(address, "open"):
                # dedicated: a shared channel would outlive its clients, and an embedded engine that is reopened.
                self._client = pymilvus.MilvusClient(address.uri, token=token, timeout=_CONNECT, dedicated=True)
        finally:
            if self._client is None and self._engine is not None:
                self._engine.give_back()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call `method` of pymilvus's MilvusClient. Raises GalleryError for server errors and after `close`."""
        client = self._client
        if client is None:
            raise GalleryError(f"{self.address.text}: the gallery is closed; open it again")
        with _translated(self.address, method.replace("_", " ")):
            return getattr(client, method)(*args, **{"timeout": _SECONDS} | options)

    def load(self, name: str) -> None:
        """Load a collection for searching, with as many replicas as the address says. This may take long."""
        self.call("load_collection", name, timeout=None, replica_number=self.address.replicas)

    def close(self) -> None:
        """Close the connection; the last one to an embedded engine stops it. May be called more than once."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
            if self._engine is not None:
                self._engine.give_back()


class _Embedded:
    """Milvus Lite's engine for one file (threads and a port on loopback), shared by all connections of this process."""

    _open: dict[str, _Embedded] = {}  # noqa: RUF012 - one for the process, guarded by the lock
    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self.users = 0
        self.writing = threading.Lock()  # the engine supports one writer at a time, but does not enforce it

    @classmethod
    def take(cls, address: MilvusAddress, *, make: bool) -> _Embedded:
        path = Path(address.uri)
        require("milvus_lite", "milvus")
        if not (path / "LOCK").is_file():
            if not make:
                raise GalleryError(f"{address.text}: expected a Milvus Lite folder, found none; make one with "
                                   f"'cbmir index build MODEL MANIFEST -o {address.text}'")  # fmt: skip
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise GalleryError(f"{address.text}: expected a new or empty folder for the gallery, found something "
                                   f"there")  # fmt: skip
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # otherwise it would be readable by all
        from milvus_lite.server_manager import server_manager_instance

        with cls._lock:  # two threads that start it at the same time would each find the file locked
            if server_manager_instance.start_and_get_uri(address.uri) is None:
                raise GalleryError(f"{address.text}: cannot open the embedded file; another process may have it open, "
                                   f"or another version of Milvus Lite wrote it")  # fmt: skip
            engine = cls._open.setdefault(address.uri, cls(address.uri))
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
def _translated(address: MilvusAddress, verb: str) -> Iterator[None]:
    """Translate errors of pymilvus and gRPC into GalleryError without quoted text: a filter may name patients."""
    import grpc
    import pymilvus

    try:
        yield
    except (pymilvus.MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
        text = re.sub(r"(['\"]).*?\1", r"\1…\1", str(getattr(error, "message", "") or type(error).__name__))
        raise GalleryError(f"{address.text}: cannot {verb} ({text[:300]}); check that the server runs and lets you in, "
                           f"and that no other process has an embedded file open") from error  # fmt: skip


#: Milvus returns at most this many neighbours, or rows of a query.
MOST = 16_384
#: Number of complete rows requested at a time: 7 MB at most.
HEAVY = 100
_AT_ONCE = 1000  # ids in one expression
_MORE = 8  # candidates beyond k: they show that no tie is cut off, and let float64 decide the order
_TIMES, _AND = 4, 24  # with coarse codes (HNSW_SQ), _TIMES * k + _AND candidates are requested
_SLACK = 1e-6  # largest difference of two float32 cosines of the same pair
_BYTES = 16 * 2**20  # of one request or answer: a server allows 64 MB, and an entry with its report is 4 KB or more


class Collection:
    """The rows of a gallery, one per entry, as in `records`; `index` is the gallery's setting. Every method raises
    GalleryError if the server fails."""

    def __init__(self, connection: Connection, index: str) -> None:
        self._connection = connection
        self._address = connection.address
        self.index_type = rows.INDEXES[index][0]
        self._consistency = {"consistency_level": self._address.consistency.capitalize()}

    @staticmethod
    def make(connection: Connection, dim: int, index: str) -> None:
        """Create and load a collection for embeddings of `dim` values."""
        _make(connection, connection.address.name, *rows.collection(dim, index))

    def query(self, expression: str, fields: Sequence[str], **options: int | str) -> list[dict[str, Any]]:
        """Return the rows that pass, at most `MOST`."""
        found: list[dict[str, Any]] = self._connection.call(
            "query", self._address.name, filter=expression, output_fields=list(fields), **self._consistency, **options
        )
        return found

    def by(self, field: str, values: Sequence[str], *fields: str) -> Iterator[dict[str, Any]]:
        """Yield the rows whose field has one of these values."""
        for some in parts(sorted(set(values)), _AT_ONCE if set(fields) <= {"id", "sha256"} else HEAVY):
            yield from self.query(f"{field} in {rows.texts(some)}", fields)

    def scan(self, expression: str, *fields: str) -> Iterator[dict[str, Any]]:
        """Yield all rows that pass, without a limit, ordered by id; `id` must be among the fields.

        Pages are requested as by pymilvus's own iterator, which does not escape ids: a backslash in one would make it
        loop forever.
        """
        size = 10_000 if set(fields) <= {"id"} else HEAVY
        paged = f"({expression})" if expression else 'id != ""'
        while page := self.query(paged, fields, limit=size, iterator="True", reduce_stop_for_best="True"):
            yield from page
            after = f"id > {rows.text(page[-1]['id'])}"
            paged = f"{after} and ({expression})" if expression else after

    def count(self, expression: str) -> int:
        """Count the rows that pass."""
        return int(self.query(expression, ["count(*)"])[0]["count(*)"])

    def nearest(
        self, queries: NDArray[np.float32], k: int, expression: str, *fields: str
    ) -> list[list[dict[str, Any]]]:
        """Find, for each of float32 [M, D], the k nearest rows that pass, or all if fewer pass, with `distance` and
        `cosine` computed in float64. Ties are ordered by id."""
        if k == 0 or not len(queries):
            return [[] for _ in queries]
        limit = min(k + _MORE if self.index_type != "HNSW_SQ" else _TIMES * k + _AND, MOST)
        answers = []
        for query, found in zip(queries, self.candidates(queries, expression, limit, *fields), strict=True):
            hits, fetched = found, limit
            if len(hits) < limit and (count := self.count(expression)) > len(hits):  # a graph may not reach all rows
                if count > MOST and len(hits) < k:
                    raise GalleryError(f"{self._address.text}: the index found {len(hits)} of {k} neighbours under "
                                       f"this filter; build the gallery with --index exact")  # fmt: skip
                if count <= MOST:
                    hits = self._ranked(query, list(self.scan(expression, "id", "vector", *fields)))
            while len(hits) == fetched > k and hits[k - 1]["cosine"] - hits[-1]["cosine"] < _SLACK and fetched < MOST:
                fetched = min(2 * fetched, MOST)  # more ties may follow the last hit
                (hits,) = self.candidates(query[None], expression, fetched, *fields)
            answers.append(hits[:k])
        return answers

    def candidates(
        self, queries: NDArray[np.float32], expression: str, limit: int, *fields: str
    ) -> list[list[dict[str, Any]]]:
        """Return, for each query, about the `limit` nearest rows with distance and cosine, in their final order."""
        size = limit * (4 * queries.shape[1] + 4096 * len(fields))
        found = []
        for some in parts(queries, max(1, _BYTES // size)):
            answers = self._connection.call(
                "search", self._address.name, list(some), filter=expression, limit=limit,
                search_params={"params": self._parameters(limit)}, output_fields=["id", "vector", *fields],
                anns_field="vector", **self._consistency,
            )  # fmt: skip
            for query, answer in zip(some, answers, strict=True):
                found.append(self._ranked(query, [dict(hit["entity"]) | {"id": hit["id"]} for hit in answer]))
        return found

    def _parameters(self, limit: int) -> dict[str, int]:
        if self.index_type == "FLAT":
            return {}
        return {"ef": max(64, 2 * limit)}

    def _ranked(self, query: NDArray[np.float32], hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not hits:
            return []
        vectors = np.array([hit["vector"] for hit in hits], np.float32)
        if not are_unit(vectors).all():
            raise GalleryError(f"{self._address.text}: expected embeddings of norm 1, found others; build it again")
        distances, cosines = compared(vectors, query)
        order = np.lexsort((np.array([hit["id"] for hit in hits]), distances))
        return [hits[at] | {"distance": float(distances[at]), "cosine": float(cosines[at])} for at in order]

    def upsert(self, made: Sequence[dict[str, Any]]) -> None:
        """Write rows. They are not inserted, because Milvus would keep two copies of a row that is sent twice."""
        batch: list[dict[str, Any]] = []
        size = 0
        for row in made:
            own = 4 * len(row["vector"]) + len(row["entry"]) + 1000
            if batch and size + own > _BYTES:
                self._connection.call("upsert", self._address.name, batch)
                batch, size = [], 0
            batch.append(row)
            size += own
        if batch:
            self._connection.call("upsert", self._address.name, batch)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete the rows with these ids."""
        for some in parts(ids, _AT_ONCE):
            self._connection.call("delete", self._address.name, filter=f"id in {rows.texts(some)}")


class Texts:
    """Texts by key, in a separate collection: a gallery's description, or its thumbnails, which would reduce the number
    of rows per segment, and so per graph, if they were stored with the rows."""

    def __init__(self, connection: Connection, suffix: str, consistency: str) -> None:
        self._connection = connection
        self._consistency = {"consistency_level": consistency.capitalize()}
        self.name = f"{connection.address.name}_{suffix}"

    def make(self) -> None:
        """Create the collection."""
        _make(self._connection, self.name, *rows.texts_collection())

    def read(self, keys: Sequence[str] | None = None) -> dict[str, str]:
        """Return the texts of some keys, without missing ones, or all texts."""
        which = ['key != ""'] if keys is None else [f"key in {rows.texts(some)}" for some in parts(keys, HEAVY)]
        fields = ["key", "value"]
        found = [self._connection.call("query", self.name, filter=one, output_fields=fields, **self._consistency)
                 for one in which]  # fmt: skip
        return {row["key"]: row["value"] for some in found for row in some}

    def write(self, values: dict[str, str]) -> None:
        """Add or replace texts. Raises GalleryError for one that is too long."""
        for key, value in values.items():
            rows.check_length(key, value, rows.LONGEST)
        for some in parts(list(values.items()), max(1, _BYTES // rows.LONGEST)):
            made = [{"key": key, "value": value, "unused": [1.0, 0.0]} for key, value in some]
            self._connection.call("upsert", self.name, made)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the texts of these keys; missing ones are ignored."""
        for some in parts(keys, _AT_ONCE):
            self._connection.call("delete", self.name, filter=f"key in {rows.texts(some)}")


def _make(connection: Connection, name: str, schema: Any, indexes: Any) -> None:
    address = connection.address
    connection.call(
        "create_collection", name, schema=schema, num_shards=address.shards,
        consistency_level=address.consistency.capitalize(),
    )  # fmt: skip
    connection.call("create_index", name, indexes, sync=False)  # empty, so do not poll until it is done
    connection.load(name)


def parts(values: Any, size: int) -> Iterator[Any]:
    """Yield a sequence or array in pieces of `size`; the last one may be shorter."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
