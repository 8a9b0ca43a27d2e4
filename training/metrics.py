"""Metrics of METHOD.md, numpy only. Per-query values first; means and intervals are taken from them.

Labels are float [N, C]: 1, 0, -1 (uncertain), NaN (unknown). For retrieval -1 counts as positive and NaN does not; for
AUC both are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RETRIEVAL_METRICS = ("ndcg", "acg", "precision")


@dataclass(frozen=True, eq=False)
class RetrievalValues:
    """One value a query, float64 [Q]; NaN for a query without a positive label, which has no ideal DCG (0/0)."""

    ndcg: Floats
    acg: Floats
    precision: Floats


def positives(labels: NDArray[np.floating]) -> NDArray[np.float32]:
    """What counts as positive in retrieval: 1 and -1 (uncertain). float [N, C] -> float32 [N, C] in {0, 1}."""
    return np.asarray(np.abs(np.nan_to_num(labels)) == 1, dtype=np.float32)


def add_negative_class(labels: NDArray[np.floating]) -> NDArray[np.float32]:
    """`positives` and the negative class as one more label: 1 where every label is known and 0 (METHOD, "Loss").

    float [N, C] -> float32 [N, C + 1]. A row with no positive and some unknown label belongs to no class at all.
    """
    negative = (labels == 0).all(axis=1, keepdims=True)
    return np.hstack([positives(labels), negative.astype(np.float32)])


def discounts(k: int) -> Floats:
    """1 / log(n + 1) for ranks n = 1..k. The base of the logarithm cancels in nDCG."""
    return 1 / np.log(np.arange(1, k + 1) + 1)


def retrieval_values(
    query: NDArray[np.floating],
    gallery: NDArray[np.floating],
    query_positive: NDArray[np.float32],
    gallery_positive: NDArray[np.float32],
    query_patients: Sequence[str],
    gallery_patients: Sequence[str],
    *,
    k: int,
) -> RetrievalValues:
    """nDCG@k, ACG@k and precision@k of each query, its own patient left out of the gallery and of the ideal.

    `query` [Q, D] and `gallery` [G, D] are unit vectors; neighbours by Euclidean distance, ties by gallery order.
    nDCG: gain 2^r - 1 with r the number of shared labels, ideal = the best ordering of the whole allowed gallery.
    ACG: r over the query's number of labels. precision: share with r > 0. All over min(k, allowed gallery) ranks.
    A query whose labels no gallery image shares has ACG and precision 0, and no nDCG.
    """
    own, others = _patient_codes(query_patients, gallery_patients)
    values = np.full((3, len(query)), np.nan)
    for row in range(len(query)):
        allowed = np.flatnonzero(others != own[row])
        labels = query_positive[row].sum()
        if labels == 0 or len(allowed) == 0:
            continue
        cosine = (gallery @ query[row])[allowed]
        ranked = allowed[np.argsort(-cosine, kind="stable")[:k]]
        relevance = gallery_positive @ query_positive[row]
        values[:, row] = _values(relevance[ranked], relevance[allowed], labels, k)
    return RetrievalValues(*values)


def random_ranking_values(
    query_positive: NDArray[np.float32],
    gallery_positive: NDArray[np.float32],
    query_patients: Sequence[str],
    gallery_patients: Sequence[str],
    *,
    k: int,
) -> RetrievalValues:
    """The exact expectation of `retrieval_values` under a random ranking of the gallery."""
    patient, others = _patient_codes(query_patients, gallery_patients)
    values = np.full((3, len(query_positive)), np.nan)
    for row, own in enumerate(query_positive):
        relevance = (gallery_positive @ own)[others != patient[row]]
        if own.sum() == 0 or len(relevance) == 0:
            continue
        gain = np.exp2(relevance) - 1
        top, weights = _ideal(relevance, k)
        ideal = (top * weights).sum()
        ndcg = gain.mean() * weights.sum() / ideal if ideal > 0 else np.nan
        values[:, row] = ndcg, relevance.mean() / own.sum(), (relevance > 0).mean()
    return RetrievalValues(*values)


def _patient_codes(query: Sequence[str], gallery: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A number for each patient, the same on both sides: [Q] and [G]."""
    _, codes = np.unique(np.array([*query, *gallery]), return_inverse=True)
    return codes[: len(query)], codes[len(query) :]


def _ideal(relevance: NDArray[np.floating], k: int) -> tuple[Floats, Floats]:
    top = np.sort(np.exp2(relevance) - 1)[::-1][:k]
    return top, discounts(len(top))


def _values(
    ranked: NDArray[np.floating], everything: NDArray[np.floating], labels: float, k: int
) -> tuple[float, float, float]:
    top, weights = _ideal(everything, k)
    ideal = (top * weights).sum()
    # No image in the gallery shares a label: there is no ordering to judge, only 0/0.
    ndcg = ((np.exp2(ranked) - 1) * weights).sum() / ideal if ideal > 0 else np.nan
    return ndcg, ranked.mean() / labels, (ranked > 0).mean()


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating], weights: Floats | None = None) -> float:
    """Area under the ROC curve: P(score of a positive > of a negative) + half the ties. scores, labels [N].

    Labels other than 0 and 1 are left out. `weights` [N] count an image more than once or not at all (bootstrap).
    NaN when a class is missing among the known labels.
    """
    known = (labels == 0) | (labels == 1)
    w = np.ones(int(known.sum())) if weights is None else weights[known]
    order = np.argsort(scores[known], kind="stable")
    score, w = scores[known][order], w[order]
    positive = w * (labels[known][order] == 1)
    negative = w - positive
    if positive.sum() == 0 or negative.sum() == 0:
        return float("nan")
    start = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    group_positive, group_negative = np.add.reduceat(positive, start), np.add.reduceat(negative, start)
    below = np.cumsum(group_negative) - group_negative
    return float((group_positive * (below + group_negative / 2)).sum() / (positive.sum() * negative.sum()))


def class_aucs(scores: NDArray[np.floating], labels: NDArray[np.floating], weights: Floats | None = None) -> Floats:
    """AUC of each class: [N, C], [N, C] -> float64 [C], NaN where the known labels do not hold both values."""
    return np.array([auc(scores[:, j], labels[:, j], weights) for j in range(labels.shape[1])])


def patient_weights(patients: Sequence[str], *, resamples: int = 1000, seed: int = 0) -> Floats:
    """Bootstrap over patients: how often each image counts in each resample, float64 [resamples, N]."""
    _, patient_of = np.unique(np.asarray(patients), return_inverse=True)
    count = int(patient_of.max()) + 1 if len(patient_of) else 0
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / max(count, 1)), size=resamples)
    return drawn[:, patient_of].astype(np.float64)


def weighted_means(values: Floats, weights: Floats) -> Floats:
    """Mean over the queries that have a value, in each resample: values [Q], weights [B, Q] -> [B]."""
    known = ~np.isnan(values)
    total = weights[:, known].sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(weights[:, known] @ values[known] / total)


def mean_of_known(values: NDArray[np.floating], otherwise: float = float("nan")) -> float:
    """Mean of the values that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else otherwise


def interval(samples: Floats, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of bootstrap samples [B]; (NaN, NaN) when no resample has a value."""
    known = samples[~np.isnan(samples)]
    if len(known) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
