"""Metrics in numpy: values per query, and their means and intervals.

Labels are float [N, C]: 1, 0, -1 (uncertain), NaN (unknown). For retrieval -1 counts as positive and NaN does not; AUC
leaves both out. The functions at the end fit a finding's thresholds and calibration on the validation split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from cbmir.card import Calibration, OperatingPoint
from cbmir.choices import OPERATING_POINTS

Floats = NDArray[np.float64]
_BLOCK = 64
_LEAST_SHARE = 0.90  # minimum sensitivity of the operating point `sensitive`, and specificity of `specific`
#: The paper's metrics, as fields of `RetrievalValues`.
PAPER_METRICS = ("ndcg", "acg", "precision")
RETRIEVAL_METRICS = (*PAPER_METRICS, "jaccard_ndcg")

#: Index of a query -> similarity to each gallery image, [G], on any scale; equal values are ties.
Similarity = Callable[[int], NDArray[np.number]]
#: Shared labels with each gallery image [G], labels of the query, labels of each image [G] -> gain >= 0, float64 [G].
Gain = Callable[[NDArray[np.floating], float, NDArray[np.floating]], Floats]


@dataclass(frozen=True, eq=False)
class RetrievalValues:
    """One value per query, float64 [Q]; NaN for a query without a positive label, which has no ideal DCG (0/0)."""

    ndcg: Floats
    acg: Floats
    precision: Floats
    jaccard_ndcg: Floats


def positives(labels: NDArray[np.floating]) -> NDArray[np.float32]:
    """Mark labels that are positive in retrieval, 1 and -1 (uncertain): float [N, C] -> float32 [N, C] in {0, 1}."""
    return np.asarray(np.abs(np.nan_to_num(labels)) == 1, dtype=np.float32)


def add_negative_class(labels: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return `positives` with the negative class as a further label: 1 if every label is known to be 0.

    float [N, C] -> float32 [N, C + 1]. A row with an unknown label and no positive one belongs to no class.
    """
    negative = (labels == 0).all(axis=1, keepdims=True)
    return np.hstack([positives(labels), negative.astype(np.float32)])


#: The two columns of figures, and the function that selects the labels that count in each.
COUNTED = {"positive queries": positives, "all queries": add_negative_class}
QUERIES = tuple(COUNTED)
#: Rankings that ignore the query: random, by number of labels, and images without a finding first.
REFERENCES = ("random", "most labels", "no finding")


def discounts(k: int) -> Floats:
    """Return 1 / log(n + 1) for ranks n = 1..k. The base of the logarithm cancels in nDCG."""
    return 1 / np.log(np.arange(1, k + 1) + 1)


def exponential_gain(shared: NDArray[np.floating], own: float, others: NDArray[np.floating]) -> Floats:
    """Return 2^r - 1, where r is the number of shared labels: the paper's gain."""
    return np.asarray(np.exp2(shared) - 1, np.float64)


def jaccard_gain(shared: NDArray[np.floating], own: float, others: NDArray[np.floating]) -> Floats:
    """Return shared labels / labels of either image (Jaccard index), so labels that the query lacks reduce the gain."""
    return np.asarray(np.divide(shared, np.maximum(own + others - shared, 1), dtype=np.float64))


def ideal_dcg(gains: Floats, k: int) -> float:
    """Return the DCG@k of the best order of all these images."""
    top = np.sort(gains[gains > 0])[::-1][:k]  # np.partition is far slower with many equal values
    return float(top @ discounts(len(top)))


def inner_products(query: NDArray[np.floating], gallery: NDArray[np.floating]) -> Similarity:
    """Return inner products of [Q, D] and [G, D]: they rank unit vectors as Euclidean, ±1 codes as Hamming distance."""

    @lru_cache(maxsize=1)  # queries come in order, and one product per block is many times faster
    def block(number: int) -> NDArray[np.floating]:
        return np.asarray(query[number * _BLOCK : (number + 1) * _BLOCK] @ gallery.T)

    return lambda row: np.asarray(block(row // _BLOCK)[row % _BLOCK])


def retrieval_values(
    similarity: Similarity, query_positive: NDArray[np.float32], gallery_positive: NDArray[np.float32],
    query_patients: Sequence[str], gallery_patients: Sequence[str], *, k: int,
) -> RetrievalValues:  # fmt: skip
    """Return nDCG@k, ACG@k and precision@k of each query. Images of its own patient are not in the allowed gallery.

    nDCG: the gain is 2^r - 1 for r shared labels, and the ideal is the best order of the allowed gallery; also with
    `jaccard_gain`. ACG: r divided by the query's number of labels. Precision: share of images with r > 0. All cover
    min(k, allowed gallery) ranks. Binary codes often tie, so tied images count with their expectation over all orders
    (McSherry and Najork, "Computing information retrieval performance measures efficiently in the presence of tied
    scores", ECIR 2008). A query that shares no label with any gallery image has ACG and precision 0, and no nDCG.

    Args:
        query_positive: float32 [Q, C] in {0, 1}, from `positives` or `add_negative_class`.
        gallery_positive: float32 [G, C], as for the queries.
    """
    return _ranked_values(similarity, query_positive, gallery_positive, query_patients, gallery_patients, k)


def random_ranking_values(
    query_positive: NDArray[np.float32], gallery_positive: NDArray[np.float32], query_patients: Sequence[str],
    gallery_patients: Sequence[str], *, k: int,
) -> RetrievalValues:  # fmt: skip
    """Return the exact expectation of `retrieval_values` (see there) under a random ranking."""
    return _ranked_values(None, query_positive, gallery_positive, query_patients, gallery_patients, k)


def _ranked_values(
    similarity: Similarity | None, query_positive: NDArray[np.float32], gallery_positive: NDArray[np.float32],
    query_patients: Sequence[str], gallery_patients: Sequence[str], k: int,
) -> RetrievalValues:  # fmt: skip
    patient, others = patient_codes(query_patients, gallery_patients)
    sizes = gallery_positive.sum(axis=1)
    values = np.full((len(RETRIEVAL_METRICS), len(query_positive)), np.nan)
    for row, own in enumerate(query_positive):
        allowed = np.flatnonzero(others != patient[row])
        if not own.any() or len(allowed) == 0:
            continue
        expected = _at_random(k) if similarity is None else _in_order(similarity(row)[allowed], k)
        values[:, row] = _values(expected, gallery_positive[allowed] @ own, float(own.sum()), sizes[allowed], k)
    return RetrievalValues(*values)


def patient_codes(query: Sequence[str], gallery: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the number of each image's patient, the same on both sides: [Q] and [G]."""
    _, codes = np.unique(np.array([*query, *gallery]), return_inverse=True)
    return codes[: len(query)], codes[len(query) :]


def nearest_and_ties(similar: NDArray[np.number], k: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of the k nearest and of all that tie with the last one, nearest first, and for each the
    number of its group of ties."""
    last = np.partition(similar, -k)[-k] if k < len(similar) else similar.min()
    near = np.flatnonzero(similar >= last)
    near = near[np.argsort(-similar[near], kind="stable")]
    return near, np.cumsum(np.r_[False, similar[near][1:] != similar[near][:-1]])


#: A value for each gallery image [G] -> its expectation at each rank.
_Expected = Callable[[NDArray[np.floating]], Floats]


def _in_order(similar: NDArray[np.number], k: int) -> _Expected:
    near, tie = nearest_and_ties(similar, k)
    counts = np.bincount(tie)
    return lambda values: np.asarray((np.bincount(tie, values[near]) / counts)[tie][:k])


def _at_random(k: int) -> _Expected:
    return lambda values: np.full(min(k, len(values)), values.mean(dtype=np.float64))


def _values(
    expected: _Expected, relevance: NDArray[np.floating], labels: float, sizes: NDArray[np.floating], k: int
) -> tuple[float, float, float, float]:
    def ndcg(gain: Gain) -> float:
        gains = gain(relevance, labels, sizes)
        ideal, ranked = ideal_dcg(gains, k), expected(gains)
        # No gallery image shares a label: nDCG is 0/0.
        return float(ranked @ discounts(len(ranked))) / ideal if ideal > 0 else float("nan")

    acg, precision = expected(relevance).mean() / labels, expected((relevance > 0).astype(np.float32)).mean()
    return ndcg(exponential_gain), acg, precision, ndcg(jaccard_gain)


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Return the area under the ROC curve: P(a positive scores above a negative) + P(tie) / 2. scores, labels [N].

    Labels other than 0 and 1 are left out. NaN if the known labels do not include both values, or if a score is NaN.
    """
    return float(resampled_auc(scores, labels, np.ones((1, len(scores))))[0])


def resampled_auc(scores: NDArray[np.floating], labels: NDArray[np.floating], weights: Floats) -> Floats:
    """Return `auc` of each bootstrap resample, float64 [B]; weights [B, N] are how often it contains each image."""
    known = (labels == 0) | (labels == 1)
    if not known.any() or np.isnan(scores[known]).any():
        return np.full(len(weights), np.nan)
    order = np.flatnonzero(known)[np.argsort(scores[known], kind="stable")]
    score, positive = scores[order], labels[order] == 1
    start = np.flatnonzero(np.r_[True, score[1:] != score[:-1]])
    w = weights[:, order]
    positives_at, negatives_at = (np.add.reduceat(w * side, start, axis=1) for side in (positive, ~positive))
    below = np.cumsum(negatives_at, axis=1) - negatives_at
    pairs = positives_at.sum(axis=1) * negatives_at.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray((positives_at * (below + negatives_at / 2)).sum(axis=1) / np.where(pairs > 0, pairs, np.nan))


def class_aucs(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> Floats:
    """Return the AUC of each class: [N, C], [N, C] -> float64 [C], NaN unless the known labels include both values."""
    return np.array([auc(scores[:, j], labels[:, j]) for j in range(labels.shape[1])])


def resampled_class_aucs(scores: NDArray[np.floating], labels: NDArray[np.floating], weights: Floats) -> Floats:
    """Return `class_aucs` of each resample: scores, labels [N, C], weights [B, N] -> float64 [B, C]."""
    return np.column_stack([resampled_auc(scores[:, j], labels[:, j], weights) for j in range(labels.shape[1])])


def patient_weights(patients: Sequence[str], *, resamples: int = 1000, seed: int = 0) -> Floats:
    """Resample the patients [N] (bootstrap); return how often each image is in a resample, float64 [resamples, N]."""
    _, patient_of = np.unique(np.asarray(patients), return_inverse=True)
    count = int(patient_of.max()) + 1 if len(patient_of) else 0
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / max(count, 1)), size=resamples)
    return drawn[:, patient_of].astype(np.float64)


def weighted_means(values: Floats, weights: Floats) -> Floats:
    """Return the mean over the queries that have a value, for each resample: values [Q], weights [B, Q] -> [B]."""
    known = ~np.isnan(values)
    total = weights[:, known].sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(weights[:, known] @ values[known] / total)


def mean_of_known(values: NDArray[np.floating], otherwise: float = float("nan")) -> float:
    """Return the mean of the values that are not NaN, or `otherwise` without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else otherwise


def nanmean(values: Floats, axis: int) -> Floats:
    """Return the mean along an axis of the values that are not NaN; NaN without any."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(axis=axis) / known.sum(axis=axis))


def interval(samples: Floats, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of bootstrap samples [B]; (NaN, NaN) if no resample has a value."""
    known = samples[~np.isnan(samples)]
    if len(known) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def operating_points(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> dict[str, OperatingPoint | None]:
    """Choose three thresholds of a finding, each with its figures on these images.

    Args:
        scores: float [N] in [0, 1], or NaN.
        labels: float [N]; those other than 0 and 1 are left out.

    Returns:
        `sensitive`: the highest threshold t (predicted if score > t) with a sensitivity of at least 0.90;
        `balanced`: the lowest with the greatest sensitivity + specificity - 1 (Youden's J), which favours sensitivity;
        `specific`: the lowest with a specificity of at least 0.90. Each is half-way between two scores, or between the
            outermost score and 0 or 1. None if the known labels do not include both values, or a score is NaN.
    """
    known = _two_sided(scores, labels)
    if known is None:
        return dict.fromkeys(OPERATING_POINTS)
    thresholds, caught, spared = _trade_off(*known)
    chosen = {
        "sensitive": np.flatnonzero(caught / caught[0] >= _LEAST_SHARE)[-1],
        "balanced": _youden(caught, spared),
        "specific": np.flatnonzero(spared / spared[-1] >= _LEAST_SHARE)[0],
    }
    return {name: _measured(*known, float(thresholds[chosen[name]])) for name in OPERATING_POINTS}


def _trade_off(score: Floats, truth: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct thresholds, ascending, with the number of positives above and of negatives below each."""
    levels, level = np.unique(score, return_inverse=True)
    below = levels[0] / 2 if levels[0] > 0 else -1.0
    between = np.r_[below, (levels[1:] + levels[:-1]) / 2, (levels[-1] + 1) / 2]
    positive, negative = (np.bincount(level[side], minlength=len(levels)) for side in (truth, ~truth))
    return between, np.r_[np.cumsum(positive[::-1])[::-1], 0], np.r_[0, np.cumsum(negative)]


def _youden(caught: NDArray[np.int64], spared: NDArray[np.int64]) -> int:
    """Return the first index with the greatest sensitivity + specificity, in integers so that ties are exact."""
    return int(np.argmax(caught * spared[-1] + spared * caught[0]))


def _measured(score: Floats, truth: NDArray[np.bool_], threshold: float) -> OperatingPoint:
    predicted = score > threshold
    hits, misses = int((predicted & truth).sum()), int((~predicted & truth).sum())
    alarms, rejections = int((predicted & ~truth).sum()), int((~predicted & ~truth).sum())
    return OperatingPoint(
        threshold=threshold, sensitivity=hits / (hits + misses), specificity=rejections / (rejections + alarms),
        positive_predictive_value=hits / (hits + alarms) if hits + alarms else None,
        negative_predictive_value=rejections / (rejections + misses) if rejections + misses else None,
    )  # fmt: skip


def probabilities(scores: NDArray[np.floating], calibration: Sequence[Calibration | None]) -> Floats:
    """Return the calibrated probabilities of scores [N, C]; NaN for a finding without a calibration."""
    slope, intercept = (
        np.array([np.nan if one is None else getattr(one, name) for one in calibration])
        for name in ("slope", "intercept")
    )
    return np.asarray(1 / (1 + np.exp(-(slope * scores.astype(np.float64) + intercept))))


def calibration_error(probability: Floats, labels: NDArray[np.floating], bins: int = 15) -> float:
    """Return the expected calibration error: |share of positives - mean probability| of each bin, weighted by its
    number of images.

    Args:
        probability: [N] in [0, 1], divided into bins of equal width.
        labels: [N]; those other than 0 and 1 are left out.

    Returns:
        A value in [0, 1]; NaN if no label is known or a probability is NaN.
    """
    known = (labels == 0) | (labels == 1)
    if not known.any() or np.isnan(probability[known]).any():
        return float("nan")
    found, truth = probability[known], labels[known] == 1
    bin_of = np.digitize(found, np.linspace(0, 1, bins + 1)[1:-1])
    return float(np.abs(np.bincount(bin_of, truth - found)).sum() / len(found))


def _two_sided(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> tuple[Floats, NDArray[np.bool_]] | None:
    """Return scores and labels where the label is known; None unless both values occur and no score is NaN."""
    known = (labels == 0) | (labels == 1)
    score, truth = scores[known].astype(np.float64), labels[known] == 1
    return None if truth.all() or not truth.any() or np.isnan(score).any() else (score, truth)


def platt_calibration(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> Calibration | None:
    """Fit a lightly regularised Platt scaling that never reverses the ranking. scores, labels [N].

    If higher scores are not more likely to be positive, the slope is 0 and the probability is the prevalence. None if
    the known labels do not include both values, or a score is NaN.
    """
    known = _two_sided(scores, labels)
    if known is None:
        return None
    score, truth = known
    spread = score.std()
    if spread > 0:
        model = LogisticRegression(C=1.0).fit(score[:, None] / spread, truth)
        slope, intercept = float(model.coef_[0, 0]) / spread, float(model.intercept_[0])
        if slope > 0:
            return Calibration(float(slope), intercept)
    prevalence = truth.mean()
    return Calibration(0.0, float(np.log(prevalence / (1 - prevalence))))
