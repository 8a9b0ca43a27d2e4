"""int8 codes of vectors, for an index: fewer and smaller numbers that tell the neighbourhood.

Embeddings that were trained by proxies differ in few directions: of 1,776 chest radiographs of NIH's by a DenseNet121,
84 of 1,024 hold 99% of the variance. So a code is of the principal components that hold as much, found in the vectors
themselves, where these are no more than half of the dimensions; else of all dimensions. It uses the whole range of
int8, 127 at the largest value: values of 1,024 dimensions are near 1/32, and most of their bits would be lost else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.gallery.products import products

#: The share of the variance that a code holds. What is lost of neighbours by the rest is won back by ranking more.
_KEPT = 0.99
#: Of vectors that are coded no more than this share of the variance may be lost, and no more than so many of them may
#: lose a fifth of theirs: else they are of another kind than those that the code was made for.
_MOST_LOST, _ODD, _MOST_ODD = 0.03, 0.2, 0.005
_STEP = 64  # a code's length is a multiple of this, as processors compare so many values at once
_SAMPLE = 20_000
_LARGEST = 127
_LEAST = 1e-6  # the range of vectors that are all the same


@dataclass(frozen=True, eq=False)
class Coding:
    """`mean` float32 [D] is subtracted; `directions` float32 [d, D], orthonormal, are those that are kept, or None
    where all are; what comes out is multiplied by `scale` and rounded."""

    mean: NDArray[np.float32]
    directions: NDArray[np.float32] | None
    scale: float

    @classmethod
    def fitted(cls, vectors: NDArray[np.float32], size: int) -> Self:
        """For float32 [N, D], which may be mapped from a file; `size` of them are in memory at once, and a sample."""
        if not len(vectors):
            return cls(np.zeros(vectors.shape[1], np.float32), None, _LARGEST / _LEAST)
        rng = np.random.default_rng(0)  # not each so-many-th: kinds may take turns
        sample = vectors[np.sort(rng.choice(len(vectors), min(_SAMPLE, len(vectors)), replace=False))]
        mean = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
        for directions in (_principal(sample - mean), None):
            coding = cls(mean, directions, 1.0)
            blocks = (vectors[at : at + size] for at in range(0, len(vectors), size))
            largest = max(float(np.abs(coding._kept(block)).max()) for block in blocks)
            coding = cls(mean, directions, _LARGEST / max(largest, _LEAST))
            if directions is None or coding.fits(vectors[at : at + size] for at in range(0, len(vectors), size)):
                break
        return coding

    @property
    def dim(self) -> int:
        """Of a code."""
        return len(self.mean if self.directions is None else self.directions)

    def codes(self, vectors: NDArray[np.float32]) -> NDArray[np.int8]:
        """int8 [N, dim] of float32 [N, D]: what is beyond the range is cut."""
        scaled = np.rint(self._kept(vectors) * np.float32(self.scale))
        codes: NDArray[np.int8] = np.clip(scaled, -_LARGEST, _LARGEST).astype(np.int8)
        return codes

    def fits(self, blocks: Iterable[NDArray[np.float32]]) -> bool:
        """Whether vectors, in blocks, lose little by it: by directions that are not kept, and by what is cut."""
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
        """To a new file of numpy's. Raises OSError where it cannot be written."""
        directions = np.empty((0, len(self.mean)), np.float32) if self.directions is None else self.directions
        with path.open("wb") as stream:
            np.savez(stream, mean=self.mean, directions=directions, scale=np.float64(self.scale))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises OSError or ValueError where there is none."""
        try:
            with path.open("rb") as stream, np.load(stream) as saved:
                directions = saved["directions"]
                return cls(saved["mean"], directions if len(directions) else None, float(saved["scale"]))
        except (BadZipFile, KeyError) as error:
            raise ValueError(f"{path}: expected how an index's codes are made, found something else") from error

    def _kept(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        centred = vectors - self.mean
        return centred if self.directions is None else products(centred, self.directions)


def _principal(centred: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """float32 [d, D]; None where no fewer than half of the directions would do."""
    variances, directions = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    variances = np.maximum(variances[::-1], 0)
    held = np.cumsum(variances)
    needed = int(np.searchsorted(held, _KEPT * held[-1])) + 1
    count = -(-needed // _STEP) * _STEP
    if 2 * count > len(variances):
        return None
    kept: NDArray[np.float32] = np.ascontiguousarray(directions[:, ::-1][:, :count].T.astype(np.float32))
    return kept
