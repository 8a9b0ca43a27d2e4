"""The approximate index of a large gallery: usearch's HNSW graph over bfloat16 or int8 codes of the vectors.

What it answers are candidates, to be ranked by the vectors themselves: a code of two bytes, or of one, tells the
neighbourhood well and the order within it less so. int8 codes use the whole range, 127 at the largest value of all
vectors; usearch's own conversion, which scales by 1, keeps 87% of the neighbours where this keeps 99%. Codes are
compared by their Euclidean distance: an inner product would be led astray by what rounding does to their lengths, which
between near neighbours is more than the distance itself.

Several threads that add at once leave some vectors, 3 to 10 of 20,000, to which no way through the graph leads: a bug of
usearch (2.26; https://github.com/unum-cloud/USearch/issues/735). What a walk over the whole graph does not meet is added
once more, by one thread, which leaves none.

Keys are the vectors' positions. A saved index must be verified by its digest before usearch sees it (`derived`): a
flipped bit would crash the process, not raise.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.engine import available_threads

Codes = Literal["bf16", "int8"]

_DTYPES: dict[Codes, str] = {"bf16": "bf16", "int8": "i8"}
_PASSES = 8  # one does, nearly always
_BLOCK = 8192  # vectors that are coded and added at once: what is mapped from a file never is in memory as a whole


class VectorIndex:
    """Made by `build` or `view`. Searching is safe from many threads."""

    def __init__(self, codes: Codes, scale: float, index: Any) -> None:
        """`scale` is what values are multiplied by before they are rounded to int8; 1 for bf16."""
        self.codes = codes
        self.scale = scale
        self._index = index
        self._index.expansion_search = 1  # what is asked for decides how far the graph is walked
        self._lock = threading.Lock()  # usearch hands out its thread contexts by number: two callers would share one

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """What it takes on the disk, and in memory where all of it is used."""
        return int(self._index.serialized_length)

    @classmethod
    def build(cls, codes: Codes, vectors: NDArray[np.float32], *, threads: int | None = None) -> VectorIndex:
        """Index unit vectors float32 [N, D]. Only a build with one thread repeats to the bit."""
        largest = max((float(np.abs(block).max()) for _, block in _blocks(vectors, 0)), default=1.0)
        index = cls(
            codes,
            127 / largest if codes == "int8" else 1.0,
            _usearch().Index(ndim=vectors.shape[1], metric="l2sq", dtype=_DTYPES[codes]),
        )
        index._add(vectors, 0, threads)
        return index

    def extended(self, vectors: NDArray[np.float32], *, threads: int | None = None) -> VectorIndex | None:
        """An index in memory of float32 [N, D], the first of which this one holds; or None where it cannot be had by
        adding, since a new vector exceeds the range of the int8 codes."""
        start = len(self)
        if self.codes == "int8" and any(
            float(np.abs(block).max()) * self.scale > 127.5 for _, block in _blocks(vectors, start)
        ):
            return None
        with self._lock:
            index = VectorIndex(self.codes, self.scale, self._index.copy())
        index._add(vectors, start, threads)
        return index

    @classmethod
    def view(cls, path: Path, codes: Codes, scale: float) -> VectorIndex:
        """Map a saved index, whose bytes have been verified and must never change.

        Raises GalleryError where this version of usearch cannot read it.
        """
        try:
            index = _usearch().Index.restore(path, view=True)
        except (ValueError, RuntimeError) as error:
            raise GalleryError(
                f"{path}: expected an index of this version of usearch, found another ({error})"
            ) from error
        if index is None:
            raise GalleryError(f"{path}: expected an index of usearch, found none")
        return cls(codes, scale, index)

    def save(self, path: Path) -> None:
        """Write to a new file. Raises OSError where it cannot be written."""
        try:
            with self._lock:
                self._index.save(path)
        except RuntimeError as error:
            raise OSError(f"{path}: usearch cannot write the index ({error})") from error
        expected, found = self._index.serialized_length, path.stat().st_size
        if expected != found:  # it does not tell of every write that failed
            raise OSError(f"{path}: expected an index of {expected} bytes, found {found}: the disk may be full")

    def search(self, queries: NDArray[np.float32], count: int) -> list[NDArray[np.int64]]:
        """For each of float32 [M, D], the positions of about the `count` nearest; fewer where the index is smaller."""
        count = min(count, len(self))
        if not count or not len(queries):
            return [np.empty(0, np.int64) for _ in queries]
        with self._lock:
            matches = self._index.search(self._coded(queries), count, threads=min(len(queries), available_threads()))
        keys = np.asarray(matches.keys, np.int64).reshape(len(queries), -1)
        if len(queries) == 1:  # then usearch answers with as many as it found
            return [keys[0]]
        return [row[:found] for row, found in zip(keys, matches.counts, strict=True)]

    def _add(self, vectors: NDArray[np.float32], start: int, threads: int | None) -> None:
        threads = threads or available_threads()
        for at, block in _blocks(vectors, start):
            self._index.add(np.arange(at, at + len(block), dtype=np.uint64), self._coded(block), threads=threads)
        for _ in range(_PASSES):
            (found,) = self.search(vectors[:1], len(self))  # which walks the whole graph
            lost = np.setdiff1d(np.arange(len(self)), found)
            if not len(lost):
                return
            keys = lost.astype(np.uint64)
            self._index.remove(keys)
            self._index.add(keys, self._coded(vectors[lost]), threads=1)

    def _coded(self, vectors: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.int8]:
        """What usearch is given: float32, which it rounds to bfloat16, or int8."""
        if self.codes == "bf16":
            return vectors
        codes: NDArray[np.int8] = np.clip(np.rint(vectors * np.float32(self.scale)), -127, 127).astype(np.int8)
        return codes


def _usearch() -> ModuleType:
    """The module `usearch.index`.

    ONNX Runtime is imported before it where it is installed: the other way round its import crashes the process (met
    with usearch 2.26 and onnxruntime 1.32), and a gallery may well be searched before an engine is opened.
    """
    if "usearch.index" not in sys.modules:
        with suppress(ImportError):  # not installed; where it is broken, the engine that needs it says so
            importlib.import_module("onnxruntime")
    return importlib.import_module("usearch.index")


def _blocks(vectors: NDArray[np.float32], start: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    for at in range(start, len(vectors), _BLOCK):
        yield at, vectors[at : at + _BLOCK]
