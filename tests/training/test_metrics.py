"""Metrics against values computed by hand and against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.training.metrics import (
    RETRIEVAL_METRICS,
    add_negative_class,
    auc,
    class_aucs,
    discounts,
    inner_products,
    interval,
    patient_weights,
    positives,
    random_ranking_values,
    resampled_auc,
    resampled_class_aucs,
    retrieval_values,
    weighted_means,
)

NAN = float("nan")


def at_angles(*degrees: float) -> NDArray[np.float64]:
    radians = np.deg2rad(degrees)
    return np.column_stack([np.cos(radians), np.sin(radians)])


def test_by_hand() -> None:
    """The query is {a, b}; its neighbours share 1, 0, 2 labels in order; a fourth image shares 2, outside k = 3.

    DCG = 1/log 2 + 0 + 3/log 4; ideal = 3/log 2 + 3/log 3 + 1/log 4; ACG = (1 + 0 + 2) / 2 / 3; precision 2/3.
    """
    query, gallery = at_angles(0), at_angles(1, 2, 3, 90)
    labels = np.array([[1, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=np.float32)
    own = np.array([[1, 1, 0]], dtype=np.float32)
    values = retrieval_values(inner_products(query, gallery), own, labels, ["q"], list("wxyz"), k=3)
    log = math.log
    assert values.ndcg[0] == pytest.approx((1 / log(2) + 3 / log(4)) / (3 / log(2) + 3 / log(3) + 1 / log(4)))
    assert values.acg[0] == pytest.approx(0.5)
    assert values.precision[0] == pytest.approx(2 / 3)
    # Jaccard gains in order 1/2, 0, 1; outside {a, b, c}: 2/3
    ideal = 1 / log(2) + (2 / 3) / log(3) + (1 / 2) / log(4)
    assert values.jaccard_ndcg[0] == pytest.approx((0.5 / log(2) + 1 / log(4)) / ideal)


def test_the_same_patient_is_excluded_from_the_ranking_and_the_ideal() -> None:
    labels = np.array([[1, 1], [1, 0], [0, 0]], dtype=np.float32)
    own = np.array([[1, 1]], dtype=np.float32)
    values = retrieval_values(
        inner_products(at_angles(0), at_angles(1, 2, 3)), own, labels, ["p"], ["p", "q", "r"], k=2
    )
    assert (values.ndcg[0], values.acg[0], values.precision[0]) == pytest.approx((1, 0.25, 0.5))


def test_queries_without_labels_or_ideal_are_nan_not_zero() -> None:
    own = np.array([[0, 0], [0, 1]], dtype=np.float32)
    labels = np.array([[1, 0]], dtype=np.float32)
    values = retrieval_values(inner_products(at_angles(0, 0), at_angles(1)), own, labels, ["a", "b"], ["c"], k=5)
    assert np.isnan(values.ndcg).all()
    assert np.isnan(values.precision[0]) and values.precision[1] == 0


def test_all_queries_count_the_negative_class() -> None:
    """The negative class as in docs/method.md: unknown labels may hide a finding, uncertain ones count as positive."""
    labels = np.array([[0, 0], [1, NAN], [NAN, NAN], [0, NAN], [-1, 0]], dtype=np.float32)
    assert add_negative_class(labels).tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_uncertain_labels_are_positive_in_retrieval_and_unknown_ones_are_not() -> None:
    assert positives(np.array([[1, 0, -1, NAN]], dtype=np.float32)).tolist() == [[1, 0, 1, 0]]


def test_tied_images_count_by_the_mean_over_their_orders() -> None:
    """With three-bit codes, ranks 1 to 3 tie, and so do the others. Compare with all orders within the ties."""
    gallery = np.array([[1, 1, -1], [1, -1, 1], [-1, 1, 1], [1, -1, -1], [-1, -1, 1]], dtype=np.float32)
    labels = np.array([[1, 1], [0, 0], [1, 0], [1, 1], [0, 1]], dtype=np.float32)
    own, shared = np.ones((1, 2), np.float32), labels.sum(axis=1)
    values = retrieval_values(inner_products(np.ones((1, 3)), gallery), own, labels, ["q"], list("abcde"), k=4)
    ideal = sum((2**r - 1) / math.log(n + 1) for n, r in enumerate(sorted(shared, reverse=True)[:4], 1))
    orders = [(*a, *b) for a in itertools.permutations([0, 1, 2]) for b in itertools.permutations([3, 4])]
    ndcg = [sum((2 ** shared[g] - 1) / math.log(n + 1) for n, g in enumerate(o[:4], 1)) / ideal for o in orders]
    assert values.ndcg[0] == pytest.approx(np.mean(ndcg))
    assert values.acg[0] == pytest.approx((2 + 0 + 1 + (2 + 1) / 2) / 2 / 4)
    assert values.precision[0] == pytest.approx((2 + 1) / 4)


def test_images_that_a_search_did_not_visit_come_last_in_any_order() -> None:
    labels = np.array([[0], [1], [1]], dtype=np.float32)
    similarity = np.array([-np.inf, -np.inf, 0.3])
    values = retrieval_values(lambda row: similarity, np.ones((1, 1), np.float32), labels, ["q"], list("abc"), k=2)
    assert values.precision[0] == pytest.approx((1 + 0.5) / 2)


@pytest.mark.parametrize("k", [1, 3, 50])
def test_against_brute_force(k: int) -> None:
    rng = np.random.default_rng(4)
    query, gallery = (rng.normal(size=(n, 6)) for n in (9, 20))
    query, gallery = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query, gallery))
    own, theirs = (rng.integers(0, 2, (n, 4)).astype(np.float32) for n in (9, 20))
    own[0] = 0
    patients, others = [str(i % 7) for i in range(9)], [str(i % 5) for i in range(20)]
    values = retrieval_values(inner_products(query, gallery), own, theirs, patients, others, k=k)
    for q in range(9):
        allowed = [g for g in range(20) if others[g] != patients[q]]
        allowed.sort(key=lambda g: math.dist(query[q], gallery[g]))
        shared = [sum(int(a and b) for a, b in zip(own[q], theirs[g], strict=True)) for g in allowed]
        if not own[q].any():
            assert np.isnan(values.ndcg[q])
            continue
        gains = [r / ((own[q] + theirs[g]) > 0).sum() for g, r in zip(allowed, shared, strict=True)]
        jaccard, best = (
            sum(one / math.log(n + 1) for n, one in enumerate(order[:k], 1)) for order in (gains, sorted(gains)[::-1])
        )
        assert values.jaccard_ndcg[q] == pytest.approx(jaccard / best)
        dcg = sum((2**r - 1) / math.log(n + 1) for n, r in enumerate(shared[:k], 1))
        ideal = sum((2**r - 1) / math.log(n + 1) for n, r in enumerate(sorted(shared, reverse=True)[:k], 1))
        top = shared[:k]
        assert values.ndcg[q] == pytest.approx(dcg / ideal)
        assert values.acg[q] == pytest.approx(sum(r / own[q].sum() for r in top) / len(top))
        assert values.precision[q] == pytest.approx(sum(r > 0 for r in top) / len(top))


def test_inner_products_in_blocks_match_those_of_each_row() -> None:
    """There are more queries than fit in a block, also in another order."""
    rng = np.random.default_rng(0)
    query, gallery = rng.normal(size=(150, 5)), rng.normal(size=(7, 5))
    similarity = inner_products(query, gallery)
    for row in (0, 63, 64, 149, 3):
        np.testing.assert_allclose(similarity(row), gallery @ query[row])


def test_random_ranking_is_the_mean_over_all_orderings() -> None:
    own = np.array([[1, 1]], dtype=np.float32)
    labels = np.array([[1, 1], [1, 0], [0, 0], [0, 1]], dtype=np.float32)
    expected = random_ranking_values(own, labels, ["q"], list("abcd"), k=2)
    means = np.zeros(4)
    orders = list(itertools.permutations(range(4)))
    for order in orders:
        angles = np.empty(4)
        angles[list(order)] = [1, 2, 3, 4]
        one = retrieval_values(inner_products(at_angles(0), at_angles(*angles)), own, labels, ["q"], list("abcd"), k=2)
        means += [getattr(one, name)[0] for name in RETRIEVAL_METRICS]
    assert means / len(orders) == pytest.approx([getattr(expected, name)[0] for name in RETRIEVAL_METRICS])


def test_discounts_start_at_log_two() -> None:
    assert discounts(2) == pytest.approx([1 / math.log(2), 1 / math.log(3)])


def test_auc_by_hand_with_a_tie_and_unknown_labels() -> None:
    """Pairs (positive, negative): 0.9 beats 0.4 and 0.5; 0.4 ties with 0.4 and loses to 0.5 -> (2 + 0.5) / 4."""
    scores = np.array([0.9, 0.4, 0.4, 0.5, 0.99, 0.0])
    labels = np.array([1, 1, 0, 0, NAN, -1])
    assert auc(scores, labels) == pytest.approx(2.5 / 4)


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(auc(np.array([0.1, 0.2]), np.array([1.0, 1.0])))
    assert math.isnan(auc(np.array([0.1]), np.array([NAN])))


def test_a_method_without_scores_has_no_auc() -> None:
    assert math.isnan(auc(np.array([NAN, NAN]), np.array([1.0, 0.0])))


def test_weighted_auc_is_the_auc_of_repeated_images() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 30) / 5, rng.integers(0, 2, 30).astype(float)
    weights = rng.integers(0, 4, 30).astype(float)
    repeated = np.repeat(np.arange(30), weights.astype(int))
    pairs = [
        (scores[p] > scores[n]) + (scores[p] == scores[n]) / 2
        for p in repeated[labels[repeated] == 1]
        for n in repeated[labels[repeated] == 0]
    ]
    assert resampled_auc(scores, labels, np.stack([weights, 0 * weights]))[0] == pytest.approx(float(np.mean(pairs)))
    assert math.isnan(resampled_auc(scores, labels, np.stack([weights, 0 * weights]))[1])


def test_class_aucs_has_one_value_per_class() -> None:
    scores = np.array([[0.1, 0.9], [0.8, 0.2]])
    labels = np.array([[0.0, 1], [1, 1]])
    assert class_aucs(scores, labels).tolist() == pytest.approx([1, NAN], nan_ok=True)
    samples = resampled_class_aucs(scores, labels, np.array([[1.0, 1], [2, 0]]))
    assert samples.ravel().tolist() == pytest.approx([1, NAN, NAN, NAN], nan_ok=True)


def test_bootstrap_draws_patients_not_images() -> None:
    weights = patient_weights(["a", "a", "b", "c"], resamples=200, seed=1)
    assert (weights[:, 0] == weights[:, 1]).all()
    assert (weights[:, 0] + weights[:, 2] + weights[:, 3] == 3).all()
    assert np.unique(weights[:, 0]).size > 2
    assert (weights == patient_weights(["a", "a", "b", "c"], resamples=200, seed=1)).all()


def test_weighted_means_and_interval() -> None:
    values, weights = np.array([1.0, NAN, 3.0]), np.array([[1.0, 5, 1], [2, 0, 0], [0, 3, 0]])
    means = weighted_means(values, weights)
    assert means[:2].tolist() == [2, 1] and math.isnan(means[2])
    assert interval(np.array([*range(101), NAN], dtype=float)) == pytest.approx((2.5, 97.5))
    assert all(math.isnan(v) for v in interval(np.array([NAN])))
