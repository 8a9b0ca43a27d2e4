"""nDCG corrected for chance against loops, against values computed by hand, and for lists that ignore the query."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.training.metrics import Gain, exponential_gain, inner_products, jaccard_gain
from cbmir.training.rankings import (
    CORRECTED,
    ChanceValues,
    Rankings,
    chance_values,
    label_shares,
    labels_per_hit,
    nearest,
    skewness,
    times_shown,
)

NAN = float("nan")


def problem(seed: int, queries: int = 30, gallery: int = 60, k: int = 5, kept: int = 15, shared: int = 0) -> Rankings:
    """Random labels and lists, three images per patient; the first `shared` patients of the gallery are queries too."""
    rng = np.random.default_rng(seed)
    own, theirs = ((rng.random((n, 4)) < [0.5, 0.3, 0.2, 0.1]).astype(np.float32) for n in (queries, gallery))
    lists = np.array([rng.permutation(gallery)[:kept] for _ in range(queries)])
    asking = [f"{'g' if i // 3 < shared else 'q'}{i // 3}" for i in range(queries)]
    return Rankings(lists, own, theirs, asking, [f"g{i // 3}" for i in range(gallery)], k)


def brute_force(rankings: Rankings, jaccard: bool) -> tuple[list[float], list[float]]:
    """Own and shuffled nDCG of each query, computed by loops over sets."""
    k, asking = rankings.k, [q for q in range(len(rankings.query)) if rankings.query[q].any()]
    sets = [[{j for j, v in enumerate(row) if v} for row in side] for side in (rankings.query, rankings.gallery)]

    def gain(q: int, g: int) -> float:
        own, theirs = sets[0][q], sets[1][g]
        shared = len(own & theirs)
        return (shared / len(own | theirs) if own | theirs else 0) if jaccard else 2**shared - 1

    def dcg(gains: list[float]) -> float:
        return sum(one / math.log2(rank + 1) for rank, one in enumerate(gains[:k], 1))

    own_values, shuffled_values = [], []
    for q in range(len(rankings.query)):
        patient = rankings.query_patients[q]
        allowed = [g for g, theirs in enumerate(rankings.gallery_patients) if theirs != patient]
        ideal = dcg(sorted((gain(q, g) for g in allowed), reverse=True))
        others = [other for other in asking if rankings.query_patients[other] != patient]
        if q not in asking or ideal == 0 or not others:
            own_values.append(NAN)
            shuffled_values.append(NAN)
            continue

        def judged(other: int, q: int = q, allowed: list[int] = allowed, ideal: float = ideal) -> float:
            return dcg([gain(q, g) for g in rankings.neighbours[other] if g in allowed]) / ideal

        own_values.append(judged(q))
        shuffled_values.append(sum(map(judged, others)) / len(others))
    return own_values, shuffled_values


@pytest.mark.parametrize("gain", [exponential_gain, jaccard_gain])
@pytest.mark.parametrize("changes", [
    {}, {"shared": 6}, {"shared": 20, "k": 12}, {"gallery": 9, "kept": 9, "k": 20}, {"queries": 200, "gallery": 20},
])  # fmt: skip
def test_against_brute_force(changes: dict[str, Any], gain: Gain) -> None:
    """This includes queries whose patient is in their own and other lists, and galleries smaller than k."""
    rankings = problem(1, **changes)
    values = chance_values(rankings, gain)
    own, shuffled = brute_force(rankings, gain is jaccard_gain)
    np.testing.assert_allclose(values.own, own, rtol=1e-12)
    np.testing.assert_allclose(values.shuffled, shuffled, rtol=1e-12)
    means = np.nanmean(own), np.nanmean(shuffled)
    assert values.corrected()[0] == pytest.approx((means[0] - means[1]) / (1 - means[1]))


def test_by_hand() -> None:
    """Queries are {a} and {a, b}, the gallery {a}, {a, b} and {}; k = 1, Jaccard gain. Each query has an ideal image.

    With each other's ideal: own 1/2, with the other's list 1, so (1/2 - 1) / (1 - 1) is undefined. With {a} for both:
    own (1 + 1/2) / 2, shuffled the same, so 0. With their own ideal: own 1, shuffled 1/2, (1 - 1/2) / (1 - 1/2) = 1.
    With the paper's gain, {a, b} is as good as {a} for the first query, and {a} has 1 of 3 for the second.
    """
    query, gallery = np.array([[1, 0], [1, 1]], np.float32), np.array([[1, 0], [1, 1], [0, 0]], np.float32)

    def found(first: int, second: int, gain: Gain = jaccard_gain) -> list[float]:
        lists = np.array([[first], [second]])
        values = chance_values(Rankings(lists, query, gallery, ["p", "q"], ["x", "y", "z"], 1), gain)
        return [*values.own, *values.shuffled, *values.corrected()]

    assert found(1, 0) == pytest.approx([1 / 2, 1 / 2, 1, 1, NAN], nan_ok=True)
    assert found(0, 0) == pytest.approx([1, 1 / 2, 1, 1 / 2, 0])
    assert found(0, 1) == pytest.approx([1, 1, 1 / 2, 1 / 2, 1])
    assert found(0, 1, exponential_gain) == pytest.approx([1, 1, 1, 1 / 3, 1])


def test_gains_by_hand() -> None:
    shared, sizes = np.array([2, 1, 0, 0], np.float32), np.array([3, 1, 0, 2], np.float32)
    assert exponential_gain(shared, 2, sizes).tolist() == [3, 1, 0, 0]
    assert jaccard_gain(shared, 2, sizes) == pytest.approx([2 / 3, 1 / 2, 0, 0])
    assert jaccard_gain(np.zeros(1, np.float32), 0, np.zeros(1, np.float32)).tolist() == [0], "no label at all: no 0/0"


@pytest.mark.parametrize("shared", [0, 20])
@pytest.mark.parametrize("gain", CORRECTED.values())
def test_lists_that_ignore_the_query_have_zero(gain: Gain, shared: int) -> None:
    """This holds for most labels first and any other fixed list; the query's own patient is masked in both."""
    rankings = problem(2, shared=shared)
    blind = [np.argsort(-rankings.gallery.sum(axis=1), kind="stable")[:15], np.arange(15)]
    for order in blind:
        lists = np.tile(order, (len(rankings.query), 1))
        assert chance_values(replace(rankings, neighbours=lists), gain).corrected()[0] == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("gain", CORRECTED.values())
def test_random_lists_have_about_zero_and_the_best_have_one(gain: Gain) -> None:
    found = [chance_values(problem(seed, queries=100), gain).corrected()[0] for seed in range(30)]
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found)) < 4 * error < 0.02
    rankings = problem(3)
    sizes = rankings.gallery.sum(axis=1)
    gains = [gain(rankings.gallery @ own, float(own.sum()), sizes) for own in rankings.query]
    best = np.argsort(-np.array(gains), axis=1, kind="stable")[:, :15]
    values = chance_values(replace(rankings, neighbours=best), gain)
    assert values.corrected()[0] == pytest.approx(1)
    for seed in range(5):  # it matters which query gets which list
        mixed = np.random.default_rng(seed).permutation(best)
        assert chance_values(replace(rankings, neighbours=mixed), gain).corrected()[0] < 0.5


def test_without_other_queries_there_is_no_value() -> None:
    rankings = problem(4)
    alone = replace(rankings, query_patients=["one"] * len(rankings.query))
    assert np.isnan(chance_values(alone, jaccard_gain).corrected()).all()


def test_a_ratio_of_means_in_each_resample() -> None:
    values = ChanceValues(np.array([0.9, 0.3, NAN]), np.array([0.5, 0.1, NAN]))
    weights = np.array([[1.0, 1, 1], [2, 0, 0], [0, 0, 3]])
    assert values.corrected(weights).tolist() == pytest.approx(
        [(0.6 - 0.3) / (1 - 0.3), (0.9 - 0.5) / (1 - 0.5), NAN], nan_ok=True
    )


def test_nearest_excludes_the_same_patient_and_fills_with_minus_one() -> None:
    similarity = np.array([0.1, 0.9, 0.5, 0.5])
    patients = ["a", "p", "b", "c"]
    assert nearest(lambda row: similarity, ["p"], patients, 5).tolist() == [[2, 3, 0, -1, -1]]
    assert nearest(lambda row: similarity, ["p"], patients, 1).tolist() == [[2]], "equal ones as they stand"
    assert nearest(lambda row: similarity, ["p"], ["p"] * 4, 2).tolist() == [[-1, -1]]


def test_nearest_is_the_order_of_the_whole_gallery() -> None:
    rng = np.random.default_rng(0)
    query, gallery = np.sign(rng.normal(size=(6, 4))), np.sign(rng.normal(size=(50, 4)))
    found = nearest(inner_products(query, gallery), list("abcdef"), ["x"] * 50, 20)
    for row, own in enumerate(query):
        order = sorted(range(50), key=lambda g, own=own: (-float(gallery[g] @ own), g))  # type: ignore[misc]
        assert found[row].tolist() == order[:20]


def lists_of(*lists: list[int]) -> Rankings:
    """Rankings with two labels and images {a}, {a, b}, {}."""
    gallery: NDArray[np.float32] = np.array([[1, 0], [1, 1], [0, 0]], np.float32)
    query = np.array([[1, 0], [1, 1], [0, 0]], np.float32)[: len(lists)]
    return Rankings(np.array(lists), query, gallery, list("pqr")[: len(lists)], list("xyz"), 2)


def test_properties_of_lists_by_hand() -> None:
    rankings = lists_of([0, 1, 2], [1, -1, -1], [-1, -1, -1])
    assert labels_per_hit(rankings).tolist() == pytest.approx([1.5, 2, NAN], nan_ok=True)
    assert label_shares(rankings).tolist() == [
        pytest.approx([1, NAN], nan_ok=True), [1, 1], pytest.approx([NAN, NAN], nan_ok=True),
    ]  # fmt: skip
    assert times_shown(rankings).tolist() == [1, 2, 0], "beyond k it is not shown"
    # deviations 0, 1, -1 have no skew; for 0, 0, 3 they are -1, -1, 2: (−1 − 1 + 8) / 3 over (6 / 3)^1.5
    assert skewness(np.array([1, 2, 0])) == 0
    assert skewness(np.array([0, 0, 3])) == pytest.approx(2 / 2**1.5)
    assert skewness(np.array([2, 2])) == 0
