"""The contenders of `gallery_growth.py`: ways to find the nearest of N vectors, each in its own process.

They share no thread pools or memory, and each is idle while the others have their turn. All read the vectors from one
mapped file of the gallery. cbmir's indexes search in it directly, the others copy the vectors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cbmir.export.perf.process import memory

THREADS = 2

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


class Contender(Protocol):
    """A way to search. `settings` are tried in turn; the first one is shown if there is room for only one."""

    settings: Sequence[int]

    def build(self, vectors: Floats) -> int:
        """Index mapped vectors float32 [N, D]; return the bytes of the index, without vectors that it does not copy."""

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        """Return the rows of the nearest vectors, int64 [M, k], nearest first."""


class Cbmir:
    """The search of `Gallery.search` in its snapshot, without SQLite, so that it compares with bare indexes."""

    settings = (0,)

    def __init__(self, codes: str, gallery: Path) -> None:
        from cbmir.runtime import Gallery

        self.codes = codes
        self.path = gallery
        with Gallery.open(gallery) as opened:
            self.uuid = opened.uuid

    def build(self, vectors: Floats) -> int:
        from cbmir.runtime.gallery import index_files
        from cbmir.runtime.gallery.hnsw import HnswIndex

        stamp = index_files.find(self.path, self.uuid)
        assert stamp is not None
        snapshot = index_files.load(self.path, stamp.gallery)
        assert snapshot is not None
        if self.codes == "exact":
            self.snapshot = replace(snapshot, index=None)
            return 0
        index = HnswIndex.build("int8" if self.codes == "int8" else "bf16", vectors, threads=THREADS)
        self.snapshot = replace(snapshot, index=index)
        return int(index._index.serialized_length)

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        from cbmir.runtime.gallery.search import nearest

        found = nearest(self.snapshot, queries, k, [None] * len(queries), exact=self.codes == "exact")
        return np.stack([one.rows[:k] for one in found])


class Faiss:
    """An index of faiss. `kind` is Flat, HNSW or IVF-PQ; settings are efSearch or nprobe."""

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
            # "np": without polysemous training, which takes minutes and is for another kind of search.
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
    """An index of hnswlib. Settings are ef."""

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
    """`Gallery.search`, which reads and verifies entries in SQLite. Settings are filters: how many per mille pass."""

    settings = (1000, 1, 10, 100, 500)

    def __init__(self, gallery: Path) -> None:
        self.path = gallery

    def build(self, vectors: Floats) -> int:
        from cbmir.runtime import Gallery
        from cbmir.runtime.gallery.filters import Filter

        self.gallery = Gallery.open(self.path)
        self.filters = {1000: Filter()} | {rate: Filter(where=f"Rate{rate}") for rate in self.settings[1:]}
        self.gallery.search(vectors[0].copy(), 10)  # the first search opens and verifies
        return sum(file.stat().st_size for file in self.path.rglob("index.usearch"))

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        own = self.filters[setting]
        if len(queries) == 1:
            answers = [self.gallery.search(queries[0], k, filter=own)]
        else:
            answers = self.gallery.search_many(queries, k, filters=[own] * len(queries))
        rows = [[int(hit.entry.id) for hit in found.hits] for found in answers]
        return np.array([one + [-1] * (k - len(one)) for one in rows], np.int64)


class TimedContender:
    """The contender `name` (see `names`), in its own process."""

    def __init__(self, name: str, gallery: Path) -> None:
        os.environ["OMP_WAIT_POLICY"] = "passive"  # or faiss's threads spin, for minutes on a busy machine
        kind, _, rest = name.partition(" ")
        self._gallery = gallery
        self._contender: Contender
        if kind == "faiss":
            self._contender = Faiss(rest)
        elif kind == "hnswlib":
            self._contender = Hnswlib()
        else:
            self._contender = WholeGallery(gallery) if rest == "gallery" else Cbmir(rest, gallery)

    def settings(self) -> Sequence[int]:
        """Return the contender's settings."""
        return self._contender.settings

    def build(self) -> dict[str, float]:
        """Build the index; return seconds, MB of the index, and MB added to the process's private memory."""
        (file,) = self._gallery.glob("derived-*/vectors.npy")
        vectors = np.load(file, mmap_mode="r").view(np.ndarray)
        before = memory()["RssAnon"]
        start = time.perf_counter()
        size = self._contender.build(vectors)
        seconds = time.perf_counter() - start
        return {"build_s": seconds, "index_mb": size / 1e6, "own_mb": (memory()["RssAnon"] - before) / 1e6}

    def search(self, queries: Floats, k: int, setting: int) -> Rows:
        """Return the nearest rows, int64 [M, k], one query at a time."""
        return np.concatenate([self._contender.search(query[None], k, setting) for query in queries])

    def singles(self, queries: Floats, k: int, setting: int) -> list[float]:
        """Return the seconds of each query, one at a time."""
        self._contender.search(queries[:1], k, setting)  # refill the caches after the others' turn
        return [self.batch(query[None], k, setting) for query in queries]

    def batch(self, queries: Floats, k: int, setting: int) -> float:
        """Return the seconds of all queries in one batch."""
        start = time.perf_counter()
        self._contender.search(queries, k, setting)
        return time.perf_counter() - start

    def mapped_mb(self) -> float:
        """Return the MB of mapped files in the memory of the process."""
        return memory()["RssFile"] / 1e6


def names(count: int) -> list[str]:
    """Return the contenders at a size: at a million faiss Flat does not fit beside the others; IVF-PQ is for many."""
    flat = ["faiss Flat"] if count <= 100_000 else []
    quantised = ["faiss IVF-PQ"] if count >= 100_000 else []
    return ["cbmir gallery", "cbmir exact", "cbmir bf16", "cbmir int8", *flat, "faiss HNSW", *quantised, "hnswlib"]
