"""Novelty: does anything in the gallery look like this image?

The measure is the distance from an image's embedding to the nearest mixture of its `NEAREST` nearest images of other
patients. The neighbours of a chest X-ray surround it; those of anything else all lie to one side of it. docs/novelty.md
compares this measure with the mean distance to the neighbours.

The gallery's own images, each measured against the others in the same way, give the reference distances. An image is
flagged if it is farther out than 99 in 100 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEAREST = 50  # images in the mixture
QUANTILE = 0.99  # the share of the gallery's own images that are not flagged
FEWEST = 100  # reference distances that are needed to judge novelty
#: The mixture's ridge, as a share of the neighbours' variance. Without it, the mixture would also fit random variation.
_RIDGE = 0.1
_BLOCK = 4096  # rows compared at once: 16 MB of cosines for 1,000 samples


@dataclass(frozen=True)
class Novelty:
    """The measured `distance`, in [0, 2]; the `percentile` in [0, 100], the percentage of the gallery's images that are
    nearer to the rest of it; and `flagged`, True from `QUANTILE` on: nothing in the gallery looks like this image."""

    distance: float
    percentile: float
    flagged: bool


def score_novelty(
    embedding: NDArray[np.float32], nearest: NDArray[np.float32], reference: NDArray[np.float32]
) -> Novelty | None:
    """Measure the novelty of an embedding [D], given those of the nearest images of other patients [n, D], nearest
    first, and the gallery's `reference_distances`. None if n < `NEAREST` or the gallery is small."""
    if len(nearest) < NEAREST or not len(reference):
        return None
    distance = mixture_distance(embedding, nearest[:NEAREST])
    below = float(np.searchsorted(reference, np.float32(distance), side="left")) / len(reference)
    return Novelty(distance, 100 * below, below >= QUANTILE)


def mixture_distance(embedding: NDArray[np.float32], nearest: NDArray[np.float32]) -> float:
    """Return the Euclidean distance of float32 [D] to a mixture of the rows of float32 [n, D]: their mean, plus their
    differences from it with the weights of a ridge regression."""
    rows = nearest.astype(np.float64)
    mean = rows.mean(axis=0)
    differences, rest = rows - mean, embedding - mean
    products = differences @ differences.T
    ridge = max(_RIDGE * float(np.trace(products)) / len(rows), 1e-12)  # all rows may be equal
    weights = np.linalg.solve(products + ridge * np.eye(len(rows)), differences @ rest)
    return float(np.linalg.norm(rest - weights @ differences))


def reference_distances(
    vectors: NDArray[np.float32], patients: NDArray[np.int64], *, sample: int = 1000, seed: int = 0
) -> NDArray[np.float32]:
    """Measure how far a random `sample` of the gallery's images is from those of other patients (`as_reference`).

    `vectors` are float32 [N, D], unit norm; `patients` int64 [N], 0 if unknown (then only the image itself is left
    out). Images with fewer than `NEAREST` images of other patients are not measured.
    """
    if len(vectors) < FEWEST:
        return np.empty(0, np.float32)
    chosen = np.sort(np.random.default_rng(seed).choice(len(vectors), min(sample, len(vectors)), replace=False))
    at, complete = _nearest_of_others(vectors, patients, chosen)
    pairs = zip(chosen[complete], at, strict=True)
    return as_reference([mixture_distance(vectors[row], vectors[near]) for row, near in pairs])


def as_reference(distances: Sequence[float]) -> NDArray[np.float32]:
    """Return measured distances as galleries keep them: float32 [m], sorted; empty if there are fewer than `FEWEST`."""
    return np.sort(np.array(distances if len(distances) >= FEWEST else (), np.float32))


def _nearest_of_others(
    vectors: NDArray[np.float32], patients: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the `NEAREST` rows of other patients for each chosen row that has as many, int64 [m, NEAREST], unordered,
    and which of the c chosen rows these are, bool [c]."""
    queries, owners = vectors[chosen], patients[chosen]
    best = np.full((len(chosen), NEAREST), -np.inf, np.float32)
    at = np.zeros((len(chosen), NEAREST), np.int64)
    for start in range(0, len(vectors), _BLOCK):
        stop = min(start + _BLOCK, len(vectors))
        cosines = queries @ vectors[start:stop].T
        cosines[(owners[:, None] == patients[start:stop]) & (owners[:, None] != 0)] = -np.inf
        inside = np.flatnonzero((chosen >= start) & (chosen < stop))
        cosines[inside, chosen[inside] - start] = -np.inf
        better = np.flatnonzero((cosines > best.min(axis=1)[:, None]).any(axis=1))  # soon only a few
        merged = np.concatenate((best[better], cosines[better]), axis=1)
        rows = np.concatenate(
            (at[better], np.broadcast_to(np.arange(start, stop), (len(better), stop - start))), axis=1
        )
        kept = np.argpartition(merged, -NEAREST, axis=1)[:, -NEAREST:]
        best[better] = np.take_along_axis(merged, kept, axis=1)
        at[better] = np.take_along_axis(rows, kept, axis=1)
    complete: NDArray[np.bool_] = np.asarray(np.isfinite(best).all(axis=1))
    return at[complete], complete
