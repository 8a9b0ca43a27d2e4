"""What `gallery_growth.py` compares: ways to find the nearest of N vectors, each in a process of its own.

The processes wait idle while the others have their turn, so that neither thread pools nor memory mix. Every one reads
the vectors from one mapped file of the gallery; cbmir's indexes answer from there, the others take the vectors in.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

THREADS = 2

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


class Contender(Protocol):
    """`settings` are those that it is searched with in turn; the first is used where only one is shown."""

    settings: Sequence[int]

    def build(self, vectors: Floats) -> int:
        """Take in float32 [N, D], mapped; bytes of the index, without vectors that it does not copy."""

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        """int64 [M, k], rows nearest first."""


class Cbmir:
    """The rows as `Gallery.search` finds them in its snapshot, without SQLite: comparable with bare indexes."""

    settings = (0,)

    def __init__(self, codes: str, gallery: Path) -> None:
        self.codes = codes
        self.gallery = gallery

    def build(self, vectors: Floats) -> int:
        from cbmir.runtime.gallery import index_files
        from cbmir.runtime.gallery.hnsw import HnswIndex

        stamp = index_files.find(self.gallery, _uuid(self.gallery))
        assert stamp is not None
        snapshot = index_files.load(self.gallery, stamp.gallery)
        assert snapshot is not None
        if self.codes == "exact":
            self.snapshot = replace(snapshot, index=None)
            return 0
        index = HnswIndex.build("int8" if self.codes == "int8" else "bf16", vectors, threads=THREADS)
        self.snapshot = replace(snapshot, index=index)
        return index.bytes

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        from cbmir.runtime.gallery.search import nearest

        found = nearest(self.snapshot, queries, k, [None] * len(queries), exact=self.codes == "exact")
        return np.stack([one.rows[:k] for one in found])


class Faiss:
    """`kind` is Flat, HNSW or IVF-PQ; settings are efSearch, or nprobe."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.settings = {"Flat": (0,), "HNSW": (64, 16, 24, 32, 48, 128, 256), "IVF-PQ": (64, 16)}[kind]

    def build(self, vectors: Floats) -> int:
        import faiss

        faiss.omp_set_num_threads(THREADS)
        count, dim = vectors.shape
        if self.kind == "Flat":
            self.index = faiss.IndexFlatIP(dim)
        elif self.kind == "HNSW":
            self.index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
        else:
            lists = int(4 * np.sqrt(count))
            # "np": without polysemous training, which takes minutes and serves another kind of search.
            self.index = faiss.index_factory(dim, f"IVF{lists},PQ128np", faiss.METRIC_INNER_PRODUCT)
            rng = np.random.default_rng(0)
            self.index.train(vectors[np.sort(rng.choice(count, min(count, 40 * lists, 100_000), replace=False))])
        for start in range(0, count, 8192):
            self.index.add(np.ascontiguousarray(vectors[start : start + 8192]))
        graph = 0 if self.kind != "HNSW" else 4 * faiss.vector_to_array(self.index.hnsw.neighbors).size
        return graph + count * (128 + 8 if self.kind == "IVF-PQ" else 4 * dim)

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        if self.kind == "HNSW":
            self.index.hnsw.efSearch = setting
        elif self.kind == "IVF-PQ":
            self.index.nprobe = setting
        rows: Rows = self.index.search(queries, k)[1]
        return rows


class Hnswlib:
    """Settings are ef."""

    settings = (64, 16, 24, 32, 48, 128, 256)

    def build(self, vectors: Floats) -> int:
        import hnswlib

        count, dim = vectors.shape
        self.index = hnswlib.Index("ip", dim)
        self.index.init_index(max_elements=count, ef_construction=200, M=16)
        for start in range(0, count, 8192):
            block = vectors[start : start + 8192]
            self.index.add_items(block, np.arange(start, start + len(block)), num_threads=THREADS)
        return int(self.index.index_file_size())

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        self.index.set_ef(setting)
        labels, _ = self.index.knn_query(queries, k, num_threads=THREADS if len(queries) > 1 else 1)
        return np.asarray(labels, np.int64)


class WholeGallery:
    """`Gallery.search`, with entries read from SQLite and verified. Settings are filters: so many per mille pass."""

    settings = (1000, 1, 10, 100, 500)

    def __init__(self, gallery: Path) -> None:
        self.path = gallery

    def build(self, vectors: Floats) -> int:
        from cbmir.runtime import Gallery
        from cbmir.runtime.gallery.filters import Filter

        self.gallery = Gallery.open(self.path)
        self.filters = {1000: Filter()} | {rate: Filter(where=f"Rate{rate}") for rate in self.settings[1:]}
        self.gallery.search(vectors[0].copy(), 10)  # what opens and verifies
        return sum(file.stat().st_size for file in self.path.rglob("index.usearch"))

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        own = self.filters[setting]
        if len(queries) == 1:
            answers = [self.gallery.search(queries[0], k, filter=own)]
        else:
            answers = self.gallery.search_many(queries, k, filters=[own] * len(queries))
        rows = [[int(hit.entry.id) for hit in found.hits] for found in answers]
        return np.array([one + [-1] * (k - len(one)) for one in rows], np.int64)


def make(name: str, gallery: Path) -> Contender:
    """The contender of a name among `names`."""
    kind, _, rest = name.partition(" ")
    if kind == "faiss":
        return Faiss(rest)
    if kind == "hnswlib":
        return Hnswlib()
    return WholeGallery(gallery) if rest == "gallery" else Cbmir(rest, gallery)


def names(count: int) -> list[str]:
    """Who takes part at a size: faiss Flat would not fit beside the others at a million, IVF-PQ is for many."""
    flat = ["faiss Flat"] if count <= 100_000 else []
    quantised = ["faiss IVF-PQ"] if count >= 100_000 else []
    return ["cbmir gallery", "cbmir exact", "cbmir bf16", "cbmir int8", *flat, "faiss HNSW", *quantised, "hnswlib"]


@dataclass(frozen=True)
class Built:
    """`seconds` to build; `index_mb`; memory of the process that the build added: its own, and mapped from files."""

    seconds: float
    index_mb: float
    own_mb: float


class ContenderProcess:
    """Starts the process at once, by spawn."""

    def __init__(self, name: str, gallery: Path) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, gallery), daemon=True)
        self._process.start()
        theirs.close()
        self.name = name
        self.settings: Sequence[int] = self._ask("settings")

    def build(self) -> Built:
        """Build the index."""
        built: Built = self._ask("build")
        return built

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        """int64 [M, k], a query at a time."""
        rows: Rows = self._ask("search", queries, k, setting)
        return rows

    def singles(self, queries: Floats, k: int, setting: int) -> list[float]:
        """Seconds of each query, asked one by one."""
        seconds: list[float] = self._ask("singles", queries, k, setting)
        return seconds

    def batch(self, queries: Floats, k: int, setting: int) -> float:
        """Seconds of all queries, asked together."""
        return float(self._ask("batch", queries, k, setting))

    def memory(self) -> dict[str, float]:
        """MB of the process: its own, and mapped from files."""
        memory: dict[str, float] = self._ask("memory")
        return memory

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        self._connection.send(request)
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(connection: Connection, name: str, gallery: Path) -> None:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # faiss's threads spin otherwise, and on a busy machine for minutes
    contender = make(name, gallery)

    def answer(request: str, *values: Any) -> Any:
        if request == "settings":
            return contender.settings
        if request == "memory":
            return _memory()
        if request == "build":
            return _build(contender, gallery)
        queries, k, setting = values
        if request == "search":
            return np.concatenate([contender.search(query[None], k, setting) for query in queries])
        if request == "batch":
            return _timed(contender, queries, k, setting)
        contender.search(queries[:1], k, setting)  # what the others' turn has driven out of the caches
        return [_timed(contender, query[None], k, setting) for query in queries]

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(answer(*request))
        except Exception as error:  # noqa: BLE001 - the other process raises it
            connection.send(RuntimeError(f"{name}: {type(error).__name__}: {error}"))


def _build(contender: Contender, gallery: Path) -> Built:
    (file,) = gallery.glob("derived-*/vectors.npy")
    vectors = np.load(file, mmap_mode="r").view(np.ndarray)
    before = _memory()["own"]
    start = time.perf_counter()
    size = contender.build(vectors)
    return Built(time.perf_counter() - start, size / 1e6, _memory()["own"] - before)


def _timed(contender: Contender, queries: Floats, k: int, setting: int) -> float:
    start = time.perf_counter()
    contender.search(queries, k, setting)
    return time.perf_counter() - start


def _memory() -> dict[str, float]:
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    own, mapped = (int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1000 for name in ("RssAnon", "RssFile"))
    return {"own": own, "mapped": mapped}


def _uuid(gallery: Path) -> str:
    from cbmir.runtime.gallery.gallery import Gallery

    with Gallery.open(gallery) as store:
        return store.uuid
