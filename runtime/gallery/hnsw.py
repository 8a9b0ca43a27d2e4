"""The approximate index of a large gallery: usearch's HNSW graph over bfloat16 or int8 codes of the vectors.

It proposes candidates, which are then ranked by their vectors: codes are good enough to find the neighbourhood, but not
the order within it. Codes are compared by Euclidean distance, since rounding changes their lengths by more than near
neighbours differ, which would distort an inner product.

When several threads add vectors at the same time, 3 to 10 of 20,000 cannot be reached through the graph, because of a
bug in usearch 2.26 (https://github.com/unum-cloud/USearch/issues/735). So each vector is searched for, and those that
are not found are added again by one thread. Hundreds of equal vectors may still split the graph; the log says how many
remain unreachable.

Keys are the vectors' positions. The digest of a saved index must be verified before usearch reads it (`index_files`): a
flipped bit would crash the process instead of raising an error.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.input_file import open_input
from cbmir.process import available_threads


def products(queries: NDArray[np.float32], rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply float32 [M, D] by the transpose of float32 [n, D]: float32 [M, n].

    A single query is multiplied without BLAS threads, which are slow to wake on a busy machine and then spin for about
    30 ms, taking processors away from the model's next image.
    """
    found: NDArray[np.float32] = queries @ rows.T if len(queries) != 1 else np.vecdot(rows, queries[0])[None]
    return found


#: Share of the variance that a code holds. Ranking more candidates makes up for the loss.
_KEPT = 0.99
#: Vectors may lose at most `_MOST_LOST` of their variance, and at most `_MOST_ODD` of the vectors may lose more than
#: `_ODD` of theirs. Otherwise they are of another kind than those that the codec was fitted to.
_MOST_LOST, _ODD, _MOST_ODD = 0.03, 0.2, 0.005
_STEP = 64  # a code's length is a multiple of this, since processors compare 64 values at a time
_SAMPLE = 20_000
_LARGEST = 127
_LEAST = 1e-6  # smallest range, for vectors that are all equal


@dataclass(frozen=True, eq=False)
class PcaInt8Codec:
    """A codec that subtracts `mean` (float32 [D]) from vectors, projects them onto `directions` (float32 [d, D],
    orthonormal; None keeps all), multiplies by `scale` and rounds to int8.

    Embeddings trained with proxies vary in few directions: for 1,776 chest radiographs of NIH and a DenseNet121, 84 of
    1,024 hold 99% of the variance. So a code keeps the principal components that hold this share, if they are no more
    than half of the dimensions. The largest value becomes 127, because values in 1,024 dimensions are about 1/32, and
    most bits would be lost without scaling.
    """

    mean: NDArray[np.float32]
    directions: NDArray[np.float32] | None
    scale: float

    @classmethod
    def fitted(cls, vectors: NDArray[np.float32], size: int) -> Self:
        """Fit a codec to float32 [N, D], which may be mapped: only a sample and `size` rows are in memory at a time."""
        if not len(vectors):
            return cls(np.zeros(vectors.shape[1], np.float32), None, _LARGEST / _LEAST)
        rng = np.random.default_rng(0)  # not every n-th row, since kinds of images may alternate
        sample = vectors[np.sort(rng.choice(len(vectors), min(_SAMPLE, len(vectors)), replace=False))]
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
        for directions in (_principal(sample - mean), None):
            codec = cls(mean, directions, 1.0)
            blocks = (vectors[at : at + size] for at in range(0, len(vectors), size))
            largest = max(float(np.abs(codec._kept(block)).max()) for block in blocks)
            codec = cls(mean, directions, _LARGEST / max(largest, _LEAST))
            if directions is None or codec.fits(vectors[at : at + size] for at in range(0, len(vectors), size)):
                break
        return codec

    @classmethod
    def of_size(cls, sample: NDArray[np.float32], size: int) -> Self:
        """Fit a codec with the first `size` principal components of float32 [N, D], regardless of their variance.

        One value in a thousand is clipped, so that the others are more precise."""
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
        _, directions = np.linalg.eigh(np.cov(sample, rowvar=False))
        kept = np.ascontiguousarray(directions[:, ::-1][:, :size].T.astype(np.float32))
        largest = float(np.quantile(np.abs(products(sample - mean, kept)), 0.999))
        return cls(mean, kept, _LARGEST / max(largest, _LEAST))

    @property
    def dim(self) -> int:
        """The number of values in a code."""
        return len(self.mean if self.directions is None else self.directions)

    def codes(self, vectors: NDArray[np.float32]) -> NDArray[np.int8]:
        """Encode float32 [N, D] as int8 [N, dim], clipping values outside the range."""
        scaled = np.rint(self._kept(vectors) * np.float32(self.scale))
        codes: NDArray[np.int8] = np.clip(scaled, -_LARGEST, _LARGEST).astype(np.int8)
        return codes

    def decoded(self, codes: NDArray[np.int8]) -> NDArray[np.float32]:
        """Approximate the vectors float32 [N, D] from their codes [N, dim]."""
        kept: NDArray[np.float32] = codes.astype(np.float32) / np.float32(self.scale)
        if self.directions is not None:
            kept = kept @ self.directions
        return self.mean + kept

    def projected(self, vector: NDArray[np.float32]) -> NDArray[np.float64]:
        """Project a vector [D] onto the directions, without subtracting the mean: float64 [dim]."""
        exact = vector.astype(np.float64)
        return exact if self.directions is None else self.directions @ exact

    def fits(self, blocks: Iterable[NDArray[np.float32]]) -> bool:
        """Return whether vectors, given in blocks, lose little variance by projection and clipping."""
        whole = lost = 0.0
        count = odd = 0
        end = np.float32((_LARGEST + 0.5) / self.scale)
        for block in blocks:
            own = np.square(block - self.mean).sum(axis=1, dtype=np.float64)
            missing = own - np.square(np.clip(self._kept(block), -end, end)).sum(axis=1, dtype=np.float64)
            whole, lost = whole + float(own.sum()), lost + float(missing.sum())
            count, odd = count + len(block), odd + int(np.count_nonzero(missing > _ODD * own))
        return lost <= _MOST_LOST * whole + 1e-9 and odd <= _MOST_ODD * count

    def save(self, path: Path) -> None:
        """Save the codec to a new .npz file. Raises OSError if it cannot be written."""
        with path.open("wb") as stream:
            self.write(stream)

    def write(self, stream: IO[bytes]) -> None:
        directions = np.empty((0, len(self.mean)), np.float32) if self.directions is None else self.directions
        np.savez(stream, mean=self.mean, directions=directions, scale=np.float64(self.scale))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the codec from a file. Raises OSError or ValueError if it cannot be read."""
        with open_input(path) as stream:
            return cls.read(stream)

    @classmethod
    def read(cls, stream: IO[bytes]) -> Self:
        """Read the codec from a stream. Raises ValueError if the stream holds no codec."""
        try:
            with np.load(stream, allow_pickle=False) as saved:
                directions = saved["directions"]
                return cls(saved["mean"], directions if len(directions) else None, float(saved["scale"]))
        except (BadZipFile, KeyError) as error:
            raise ValueError("expected a description of the codes, found something else") from error

    def _kept(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        centred = vectors - self.mean
        return centred if self.directions is None else products(centred, self.directions)


def _principal(centred: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return the principal directions that hold `_KEPT`, float32 [d, D], or None if they are more than half of all."""
    variances, directions = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    variances = np.maximum(variances[::-1], 0)
    held = np.cumsum(variances)
    needed = int(np.searchsorted(held, _KEPT * held[-1])) + 1
    count = -(-needed // _STEP) * _STEP
    if 2 * count > len(variances):
        return None
    kept: NDArray[np.float32] = np.ascontiguousarray(directions[:, ::-1][:, :count].T.astype(np.float32))
    return kept


log = logging.getLogger("cbmir")

Codes = Literal["bf16", "int8"]

_DTYPES: dict[Codes, str] = {"bf16": "bf16", "int8": "i8"}
#: Numbers of candidates among which a vector is searched for, one after the other, until it is found.
_LOOKED_AT = (1, 16, 256)
_PASSES = 3  # one is nearly always enough
_BLOCK = 8192  # vectors coded and added at a time, so that a mapped file is never in memory as a whole


class HnswIndex:
    """An index, made by `build` or `view`. Searching is thread-safe."""

    def __init__(self, index: Any, codec: PcaInt8Codec | None) -> None:
        """`codec` makes int8 codes; it is None for bf16."""
        self.codes: Codes = "bf16" if codec is None else "int8"
        self.codec = codec
        self._index = index
        self._index.expansion_search = 1  # the requested count decides how far the graph is searched
        self._lock = threading.Lock()  # usearch numbers its thread contexts, so two callers would share one

    def __len__(self) -> int:
        return len(self._index)

    @classmethod
    def build(cls, codes: Codes, vectors: NDArray[np.float32], *, threads: int | None = None) -> HnswIndex:
        """Index unit vectors, float32 [N, D]. Only a build with one thread is reproducible."""
        codec = PcaInt8Codec.fitted(vectors, _BLOCK) if codes == "int8" else None
        dim = vectors.shape[1] if codec is None else codec.dim
        index = cls(_usearch().Index(ndim=dim, metric="l2sq", dtype=_DTYPES[codes]), codec)
        index._add(vectors, 0, threads)
        return index

    def extended(self, vectors: NDArray[np.float32], *, threads: int | None = None) -> HnswIndex | None:
        """Return an index in memory of float32 [N, D], whose first rows this index holds, by adding the others. Return
        None if these do not fit the codes."""
        start = len(self)
        if self.codec is not None and not self.codec.fits(block for _, block in _blocks(vectors, start)):
            return None
        with self._lock:
            index = HnswIndex(self._index.copy(), self.codec)
        index._add(vectors, start, threads)
        return index

    @classmethod
    def view(cls, path: Path, codec: PcaInt8Codec | None) -> HnswIndex:
        """Map a saved index, whose bytes must have been verified and must never change.

        Raises GalleryError if this version of usearch cannot read it.
        """
        try:
            index = _usearch().Index.restore(path, view=True)
        except (ValueError, RuntimeError) as error:
            raise GalleryError(
                f"{path}: expected an index of this version of usearch, found another ({error})"
            ) from error
        if index is None:
            raise GalleryError(f"{path}: expected an index of usearch, found none")
        if codec is not None and index.ndim != codec.dim:
            raise GalleryError(f"{path}: expected an index of codes of {codec.dim} values, found {index.ndim}")
        return cls(index, codec)

    def save(self, path: Path) -> None:
        """Save the index to a new file. Raises OSError if it cannot be written."""
        try:
            with self._lock:
                self._index.save(path)
        except RuntimeError as error:
            raise OSError(f"{path}: usearch cannot write the index ({error})") from error
        expected, found = self._index.serialized_length, path.stat().st_size
        if expected != found:  # usearch does not report every failed write
            raise OSError(f"{path}: expected an index of {expected} bytes, found {found}: the disk may be full")

    def search(self, queries: NDArray[np.float32], count: int) -> list[NDArray[np.int64]]:
        """Return the positions of about the `count` nearest for each of float32 [M, D]; fewer from a smaller index."""
        count = min(count, len(self))
        if not count or not len(queries):
            return [np.empty(0, np.int64) for _ in queries]
        matches = self._matches(self._coded(queries), count)
        keys = np.asarray(matches.keys, np.int64).reshape(len(queries), -1)
        if len(queries) == 1:  # usearch returns only as many as it found
            return [keys[0]]
        return [row[:found] for row, found in zip(keys, matches.counts, strict=True)]

    def _matches(self, codes: NDArray[np.float32] | NDArray[np.int8], count: int) -> Any:
        with self._lock:
            return self._index.search(codes, count, threads=min(len(codes), available_threads()))

    def _add(self, vectors: NDArray[np.float32], start: int, threads: int | None) -> None:
        threads = threads or available_threads()
        for at, block in _blocks(vectors, start):
            self._index.add(np.arange(at, at + len(block), dtype=np.uint64), self._coded(block), threads=threads)
        lost = np.concatenate([at + self._lost(block) for at, block in _blocks(vectors, start)] or [np.empty(0, int)])
        for _ in range(_PASSES):
            for at in range(0, len(lost), _BLOCK):
                keys = lost[at : at + _BLOCK].astype(np.uint64)
                self._index.remove(keys)
                self._index.add(keys, self._coded(vectors[keys]), threads=1)
            lost = lost[self._lost(vectors[lost])]
        if len(lost):
            log.warning("the index cannot reach %d of %d vectors, since many are equal; after 'cbmir index rebuild "
                        "--index exact' all are found", len(lost), len(self))  # fmt: skip

    def _lost(self, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return which indexed vectors cannot be found by searching for them, neither themselves nor an equal one."""
        lost, codes = np.arange(len(vectors)), self._coded(vectors)
        for count in _LOOKED_AT:
            if len(lost):
                matches = self._matches(codes[lost], count)
                lost = lost[np.asarray(matches.distances).reshape(len(lost), -1)[:, 0] > 0]
        return lost

    def _coded(self, vectors: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.int8]:
        """Return vectors as usearch expects them: int8 codes, or float32, which it rounds to bfloat16."""
        return vectors if self.codec is None else self.codec.codes(vectors)


def _usearch() -> ModuleType:
    """Import `usearch.index`, after ONNX Runtime if that is installed.

    In the opposite order, importing ONNX Runtime crashes the process (seen with usearch 2.26 and onnxruntime 1.32), and
    a gallery may be searched before an engine is opened.
    """
    if "usearch.index" not in sys.modules:
        with suppress(ImportError):  # not installed; if it is broken, the engine that needs it reports that
            importlib.import_module("onnxruntime")
    return importlib.import_module("usearch.index")


def _blocks(vectors: NDArray[np.float32], start: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    for at in range(start, len(vectors), _BLOCK):
        yield at, vectors[at : at + _BLOCK]
