"""Rankings as wholes: agreement beyond what a list that ignores the query would have, and what the lists show.

nDCG alone rewards lists that are the same for every query: ten images with many labels share some with most. Here each
query is also judged by the lists that were given to the others, and what remains above that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbmir.training.metrics import Floats, Similarity, discounts, mean_of_known, patient_codes, weighted_means

#: Beyond so many, a query is judged by the lists of as many others, drawn at random.
MOST_OTHERS = 10_000
#: Ranks that are kept beyond k, which take the place of images of the query's own patient in the lists of others.
SPARE = 10

#: Shared labels [G], labels of the query, labels of each gallery image [G] -> gain in [0, inf), float64 [G].
Gain = Callable[[NDArray[np.floating], float, NDArray[np.floating]], Floats]


def exponential_gain(shared: NDArray[np.floating], own: float, others: NDArray[np.floating]) -> Floats:
    """2^r - 1, r the number of shared labels: the paper's."""
    return np.exp2(shared.astype(np.float64)) - 1


def jaccard_gain(shared: NDArray[np.floating], own: float, others: NDArray[np.floating]) -> Floats:
    """Shared labels over the labels of either: an image with many labels does not gain by them."""
    union = own + others - shared
    return np.asarray(shared / np.where(union > 0, union, 1), np.float64)


GAINS: dict[str, Gain] = {"paper": exponential_gain, "jaccard": jaccard_gain}


@dataclass(frozen=True, eq=False)
class Rankings:
    """The nearest of the gallery to each query, and the labels of both sides.

    Attributes:
        neighbours: int [Q, n], positions in the gallery, nearest first, the query's own patient left out; -1 where
            there are no more.
        query: float32 [Q, L] in {0, 1}, as `metrics.positives` or `metrics.add_negative_class` gives it.
        gallery: float32 [G, L], the same of the gallery.
    """

    neighbours: NDArray[np.intp]
    query: NDArray[np.float32]
    gallery: NDArray[np.float32]
    query_patients: Sequence[str]
    gallery_patients: Sequence[str]
    k: int


@dataclass(frozen=True, eq=False)
class ChanceValues:
    """nDCG of each query by its own list, and its mean by the lists that were given to the others: float64 [Q], NaN
    for a query without an ideal."""

    own: Floats
    shuffled: Floats

    def corrected(self, weights: Floats | None = None) -> Floats:
        """(own - shuffled) / (1 - shuffled), a ratio of means: 0 for lists that ignore the query, 1 for the ideal.

        Args:
            weights: float64 [B, Q], how often each query counts in each resample (bootstrap). None: each once.

        Returns:
            float64 [B]; [1] without weights.
        """
        weights = np.ones((1, len(self.own))) if weights is None else weights
        own, shuffled = weighted_means(self.own, weights), weighted_means(self.shuffled, weights)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((own - shuffled) / (1 - shuffled))


def nearest(
    similarity: Similarity, query_patients: Sequence[str], gallery_patients: Sequence[str], count: int
) -> NDArray[np.intp]:
    """The nearest gallery positions of each query, its own patient left out: [Q, count], -1 where there are no more.

    Images at the same distance stand in the order of the gallery.
    """
    own, others = patient_codes(query_patients, gallery_patients)
    found = np.full((len(query_patients), count), -1, dtype=np.intp)
    for row in range(len(query_patients)):
        allowed = np.flatnonzero(others != own[row])
        ranked = allowed[np.argsort(-similarity(row)[allowed], kind="stable")[:count]]
        found[row, : len(ranked)] = ranked
    return found


def chance_values(rankings: Rankings, gain: Gain, *, seed: int = 0) -> ChanceValues:
    """nDCG@k of each query by its own list and by those of the other queries that have labels.

    Images of the query's own patient do not count in any list, nor in the ideal: the ranks after them move up. Lists of
    the same patient's other images are left out.
    """
    patient, gallery_patient = patient_codes(rankings.query_patients, rankings.gallery_patients)
    asking = np.flatnonzero(rankings.query.sum(axis=1) > 0)
    sizes = rankings.gallery.sum(axis=1)
    draw = np.random.default_rng(seed)
    own, shuffled = np.full((2, len(rankings.query)), np.nan)
    for row in asking:
        allowed = gallery_patient != patient[row]
        shared = rankings.gallery @ rankings.query[row]
        gains = gain(shared, float(rankings.query[row].sum()), sizes)
        ideal = np.sort(gains[allowed])[::-1][: rankings.k]
        weights = discounts(len(ideal))
        best = (ideal * weights).sum()
        others = asking[patient[asking] != patient[row]]
        if best == 0 or len(others) == 0:
            continue
        if len(others) > MOST_OTHERS:
            others = draw.choice(others, MOST_OTHERS, replace=False)
        lists = rankings.neighbours[np.r_[row, others]]
        usable = (lists >= 0) & allowed[lists]
        found = np.where(usable, gains[lists], 0.0)
        moved = ~usable[:, : rankings.k].all(axis=1)
        if moved.any():  # a stable sort of what cannot be used to the end
            order = np.argsort(~usable[moved], axis=1, kind="stable")
            found[moved] = np.take_along_axis(found[moved], order, axis=1)
        values = found[:, : len(weights)] @ weights[: found.shape[1]] / best
        own[row], shuffled[row] = values[0], values[1:].mean()
    return ChanceValues(own, shuffled)


def corrected_mean(values: Sequence[ChanceValues]) -> float:
    """The mean of corrected nDCGs, such as those with both gains; NaN where none has a value."""
    return mean_of_known(np.array([float(one.corrected()[0]) for one in values]))


def labels_per_hit(rankings: Rankings) -> Floats:
    """The mean number of labels of each query's first k, float64 [Q]; NaN for an empty list."""
    first = rankings.neighbours[:, : rankings.k]
    labels = np.where(first >= 0, rankings.gallery.sum(axis=1)[first], np.nan)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(labels, axis=1) / (first >= 0).sum(axis=1))


def times_shown(rankings: Rankings) -> NDArray[np.intp]:
    """How often each gallery image is among the first k of a query, int [G]."""
    first = rankings.neighbours[:, : rankings.k]
    return np.bincount(first[first >= 0], minlength=len(rankings.gallery))


def skewness(counts: NDArray[np.integer]) -> float:
    """Of `times_shown`: the third standardised moment. Far above 0 where few images are shown to many (hubs)."""
    centred = counts - counts.mean()
    deviation = float(centred.std())
    return float((centred**3).mean() / deviation**3) if deviation > 0 else 0.0
