"""Does an exported file answer as PyTorch does? Pure comparison of two sets of answers to the same images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.engine import Outputs

NEIGHBOURS = 10


@dataclass(frozen=True)
class Limits:
    """The least cosine of an image's two embeddings, the largest difference of a score, the least neighbour overlap."""

    cosine: float
    score_difference: float
    overlap: float = 0.0


#: By the precision of the file.
LIMITS = {"float32": Limits(0.999999, 1e-5), "float16": Limits(0.9999, 5e-3, 0.98)}


@dataclass(frozen=True)
class Parity:
    """How far an exported file is from its source: `overlap` is the mean share of a query's ten nearest neighbours
    that both find; the other figures are over all images. A figure that is not a number counts as beyond its limit."""

    images: int
    queries: int
    cosine_min: float
    cosine_mean: float
    score_difference: float
    overlap: float
    limits: Limits

    @property
    def failures(self) -> tuple[str, ...]:
        """What is beyond its limit, in words; empty when the file may be used."""
        checks = {
            f"cosine of the embeddings at least {self.limits.cosine}, found {self.cosine_min:.7f}":
                self.cosine_min >= self.limits.cosine,
            f"score difference at most {self.limits.score_difference:g}, found {self.score_difference:.2g}":
                self.score_difference <= self.limits.score_difference,
            f"unchanged top-{NEIGHBOURS} neighbours at least {self.limits.overlap:.0%}, found {self.overlap:.1%}":
                self.overlap >= self.limits.overlap,
        }  # fmt: skip
        return tuple(text for text, holds in checks.items() if not holds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"on {self.images} images cosine min {self.cosine_min:.8f}, mean {self.cosine_mean:.8f}; score difference "
            f"max {self.score_difference:.1e}; top-{NEIGHBOURS} neighbours unchanged {self.overlap:.1%}"
        )


def compare(reference: Outputs, found: Outputs, *, queries: int, limits: Limits) -> Parity:
    """Compare answers to the same M images: embedding float32 [M, D], scores float32 [M, C].

    The first `queries` images search all the others, each side by its own embeddings. Computed in float64, since the
    limits are finer than a cosine in float32.
    """
    cosines = _cosines(reference.embedding, found.embedding)
    difference = np.abs(reference.scores.astype(np.float64) - found.scores)
    own, theirs = (_nearest(side.embedding, queries) for side in (reference, found))
    return Parity(
        images=len(cosines),
        queries=queries,
        cosine_min=float(cosines.min()),
        cosine_mean=float(cosines.mean()),
        score_difference=float(difference.max()),
        overlap=float((own[:, :, None] == theirs[:, None, :]).any(axis=2).mean()),
        limits=limits,
    )


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    a64, b64 = _unit(a), _unit(b)
    return np.asarray((a64 * b64).sum(axis=1))


def _nearest(embedding: NDArray[np.float32], queries: int) -> NDArray[np.intp]:
    """Positions of the ten nearest images of each query, itself left out: [Q, min(10, M - 1)]."""
    unit = _unit(embedding)
    cosine = unit[:queries] @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    return np.argsort(-cosine, axis=1, kind="stable")[:, : min(NEIGHBOURS, len(unit) - 1)]


def _unit(embedding: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = embedding.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # a zero vector becomes NaN, and so a failure
        return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))
