"""Figures of whole rankings: agreement beyond chance, and which images the lists show.

nDCG alone rewards lists that are the same for every query: ten images with many labels share some with most queries. So
each query is also scored with the lists of the other queries, and only agreement beyond that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbmir.training import metrics
from cbmir.training.metrics import Floats, Gain, Similarity

#: Ranks beyond k, to replace images of a query's own patient in the lists of other queries.
SPARE = 10
#: The gain of each nDCG that is corrected for chance.
CORRECTED: dict[str, Gain] = {
    "corrected_ndcg": metrics.exponential_gain,
    "corrected_jaccard_ndcg": metrics.jaccard_gain,
}


@dataclass(frozen=True, eq=False)
class Rankings:
    """The nearest gallery images of each query, and the labels of both sides.

    Attributes:
        neighbours: int [Q, n], positions in the gallery, nearest first, padded with -1. Images of the query's own
            patient are skipped.
        query: float32 [Q, L] in {0, 1}, from `metrics.positives` or `metrics.add_negative_class`.
        gallery: float32 [G, L], as for the queries.
    """

    neighbours: NDArray[np.integer]
    query: NDArray[np.float32]
    gallery: NDArray[np.float32]
    query_patients: Sequence[str]
    gallery_patients: Sequence[str]
    k: int

    @property
    def first(self) -> NDArray[np.integer]:
        return self.neighbours[:, : self.k]


@dataclass(frozen=True, eq=False)
class ChanceValues:
    """nDCG of each query for its own list, and its mean for the lists of the other queries: float64 [Q], NaN for a
    query without an ideal."""

    own: Floats
    shuffled: Floats

    def corrected(self, weights: Floats | None = None) -> Floats:
        """Return (own - shuffled) / (1 - shuffled), from means: 0 for lists that ignore the query, 1 for the ideal.

        Args:
            weights: float64 [B, Q], how often each query is in each bootstrap resample. None means once.

        Returns:
            float64 [B]; [1] without weights. NaN if the lists of the other queries are perfect already.
        """
        weights = np.ones((1, len(self.own))) if weights is None else weights
        own, shuffled = metrics.weighted_means(self.own, weights), metrics.weighted_means(self.shuffled, weights)
        room = np.where(1 - shuffled > 1e-9, 1 - shuffled, np.nan)
        return np.asarray((own - shuffled) / room)


def nearest(
    similarity: Similarity, query_patients: Sequence[str], gallery_patients: Sequence[str], count: int
) -> NDArray[np.intp]:
    """Return the gallery positions nearest to each query, without its own patient: [Q, count], padded with -1.

    Images at the same distance keep the order of the gallery.
    """
    own, others = metrics.patient_codes(query_patients, gallery_patients)
    found = np.full((len(query_patients), count), -1, dtype=np.intp)
    for row in range(len(query_patients)):
        allowed = np.flatnonzero(others != own[row])
        if len(allowed):
            ranked = allowed[metrics.nearest_and_ties(similarity(row)[allowed], count)[0][:count]]
            found[row, : len(ranked)] = ranked
    return found


def chance_values(rankings: Rankings, gain: Gain) -> ChanceValues:
    """Return nDCG@k of each query for its own list and for the lists of the other queries that have labels.

    Images of the query's own patient do not count in any list or in the ideal: the ranks after them move up. The lists
    of the same patient's other queries are left out.
    """
    patient, gallery_patient = metrics.patient_codes(rankings.query_patients, rankings.gallery_patients)
    asking = np.flatnonzero(rankings.query.any(axis=1))
    sizes, nothing = rankings.gallery.sum(axis=1), len(rankings.gallery)
    lists = np.where(rankings.neighbours < 0, nothing, rankings.neighbours)
    first = lists[:, : rankings.k]
    weights = metrics.discounts(first.shape[1])
    # The total weight of each image in the DCGs of all lists.
    shown = np.bincount(first[asking].ravel(), np.tile(weights, len(asking)), minlength=nothing + 1)
    own, shuffled = np.full((2, len(rankings.query)), np.nan)
    for row in asking:
        usable = np.append(gallery_patient != patient[row], False)
        labels = rankings.query[row]
        gains = np.append(gain(rankings.gallery @ labels, float(labels.sum()), sizes), 0.0) * usable
        best = metrics.ideal_dcg(gains[usable], rankings.k)
        same = patient[asking] == patient[row]
        if best == 0 or same.all():
            continue
        others = float(gains @ shown) - _dcg(first[asking[same]], gains, weights)
        if not usable[:-1].all():
            held = asking[~same & ~usable[first[asking]].all(axis=1)]
            others += _dcg(_moved_up(lists[held], usable), gains, weights) - _dcg(first[held], gains, weights)
        own[row] = _dcg(_moved_up(lists[[row]], usable), gains, weights) / best
        shuffled[row] = others / best / np.count_nonzero(~same)
    return ChanceValues(own, shuffled)


def _dcg(lists: NDArray[np.integer], gains: Floats, weights: Floats) -> float:
    """Return the DCG, summed over several lists."""
    return float((gains[lists[:, : len(weights)]] @ weights).sum())


def _moved_up(lists: NDArray[np.integer], usable: NDArray[np.bool_]) -> NDArray[np.integer]:
    """Move unusable entries to the end; the others keep their order."""
    return np.take_along_axis(lists, np.argsort(~usable[lists], axis=1, kind="stable"), axis=1)


def label_shares(rankings: Rankings) -> Floats:
    """Return, for each label of a query, the share of its first k that also have it: float64 [Q, L], else NaN."""
    held = np.vstack([rankings.gallery, np.zeros_like(rankings.gallery[:1])])[rankings.first].sum(axis=1)
    count = np.maximum((rankings.first >= 0).sum(axis=1, keepdims=True), 1)
    return np.where(rankings.query == 1, held / count, np.nan)


def labels_per_hit(rankings: Rankings) -> Floats:
    """Return the mean number of labels of each query's first k, float64 [Q]; NaN for an empty list."""
    labels = np.append(rankings.gallery.sum(axis=1), 0.0)[rankings.first].sum(axis=1)
    count = (rankings.first >= 0).sum(axis=1)
    return np.where(count > 0, labels / np.maximum(count, 1), np.nan)


def times_shown(rankings: Rankings) -> NDArray[np.intp]:
    """Count how often each gallery image is among the first k, int [G]."""
    return np.bincount(rankings.first[rankings.first >= 0], minlength=len(rankings.gallery))


def skewness(counts: NDArray[np.integer]) -> float:
    """Return the third standardised moment of `times_shown`: far above 0 if many queries get the same few (hubs)."""
    centred = counts - counts.mean()
    deviation = float(centred.std())
    return float((centred**3).mean() / deviation**3) if deviation > 0 else 0.0
