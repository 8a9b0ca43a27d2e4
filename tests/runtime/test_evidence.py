"""Evidence maps are exact: the cells sum to the cosine, or to its lead over the other findings."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import evidence_map
from cbmir.runtime.evidence import contrast_map, finding_vectors


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_by_hand() -> None:
    """The cells are [3, 0] and [0, 1], with mean [1.5, 0.5]. For [1, 0] only the first one counts."""
    feature_map = np.array([[[3, 0]], [[0, 1]]], np.float32)
    shares = evidence_map(feature_map, np.array([1, 0], np.float32))
    assert shares.dtype == np.float32
    np.testing.assert_allclose(shares, [[1.5 / np.sqrt(2.5), 0]], atol=1e-7)
    # The length of the vector does not matter.
    np.testing.assert_array_equal(evidence_map(feature_map, np.array([4, 0], np.float32)), shares)


@pytest.mark.parametrize("seed", range(5))
def test_cells_sum_to_the_cosine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feature_map = np.maximum(rng.normal(size=(64, 7, 5)), 0).astype(np.float32)
    vector = rng.normal(size=64).astype(np.float32)
    embedding = unit(feature_map.astype(np.float64).mean(axis=(1, 2)))
    cosine = embedding @ unit(vector.astype(np.float64))
    shares = evidence_map(feature_map, vector)
    assert shares.shape == (7, 5)
    assert shares.astype(np.float64).sum() == pytest.approx(cosine, abs=1e-5)
    assert shares.min() < 0 < shares.max()


def test_zero_features_and_directions_give_no_evidence() -> None:
    ones = np.ones(4, np.float32)
    assert not evidence_map(np.zeros((4, 2, 3), np.float32), ones).any()
    assert not evidence_map(np.ones((4, 2, 3), np.float32), 0 * ones).any()


def test_contrast_by_hand() -> None:
    """The mean cell is [1.5, 0.5]; Mass is [1, 0], and the mean of the others is [0, 0.5]."""
    feature_map = np.array([[[3, 0]], [[0, 1]]], np.float32)
    vectors = {"Effusion": [0, 1], "Mass": [1, 0], "Nodule": [0, 0]}
    shares = contrast_map(feature_map, {name: np.array(one, np.float32) for name, one in vectors.items()}, "Mass")
    assert shares.dtype == np.float32
    np.testing.assert_allclose(shares, [[1.5 / np.sqrt(2.5), -0.25 / np.sqrt(2.5)]], atol=1e-7)


@pytest.mark.parametrize("head", ["proxy", "linear"])
@pytest.mark.parametrize(("counts", "negative"), [((1, 1, 1), False), ((3, 1, 2, 2), True), ((4,), False)])
def test_contrast_is_the_map_minus_the_mean_of_the_others(head: str, counts: tuple[int, ...], negative: bool) -> None:
    """Compare with loops in float64 over cells and all findings; the negative class is not a finding."""
    rng = np.random.default_rng(len(counts))
    labels = len(counts) - negative
    feature_map = np.maximum(rng.normal(size=(16, 3, 4)), 0).astype(np.float32)
    linear = head == "linear"
    rows = rng.normal(size=(labels if linear else sum(counts), 16))
    rows = rows * 5 if linear else rows / np.linalg.norm(rows, axis=1, keepdims=True)
    about = card(head, () if linear else counts, negative and not linear, names=("A", "B", "C")[:labels])
    mean = feature_map.astype(np.float64).mean(axis=(1, 2))
    vectors = finding_vectors(about, rows.astype(np.float32), unit(mean).astype(np.float32))

    starts = np.cumsum([0, *counts])
    own = [[rows[j]] if linear else list(rows[starts[j] : starts[j + 1]]) for j in range(labels)]
    best = [max(of_label, key=lambda row: row @ mean) for of_label in own]
    for j, name in enumerate(about.labels.names):
        others = [best[i] for i in range(labels) if i != j]
        shares = contrast_map(feature_map, vectors, name)
        for y, x in np.ndindex(3, 4):
            terms = [feature_map[:, y, x] @ row / (12 * np.linalg.norm(mean)) for row in (best[j], *others)]
            expected = terms[0] - (sum(terms[1:]) / len(others) if others else 0)
            assert shares[y, x] == pytest.approx(expected, abs=1e-6)
        lead = unit(mean) @ best[j] - (np.mean([unit(mean) @ row for row in others]) if others else 0)
        assert shares.astype(np.float64).sum() == pytest.approx(lead, abs=1e-5)


def test_contrasts_of_all_findings_cancel() -> None:
    rng = np.random.default_rng(0)
    feature_map = rng.normal(size=(8, 2, 2)).astype(np.float32)
    vectors = {name: rng.normal(size=8).astype(np.float32) for name in "abcd"}
    np.testing.assert_allclose(sum(contrast_map(feature_map, vectors, name) for name in vectors), 0, atol=1e-6)
    assert not contrast_map(0 * feature_map, vectors, "a").any()


def card(
    head: str, proxies: tuple[int, ...], negative: bool, names: tuple[str, ...] = ("Effusion", "Mass")
) -> ModelCard:
    return ModelCard(
        labels=LabelSet(names), preprocess=PreprocessSpec(), encoder="tiny", embedding_dim=2, head=head,
        sigma=0.7, proxies_per_class=proxies, negative_proxies=negative, thresholds=(None,) * len(names),
        calibration=(None,) * len(names), fingerprint="f",
    )  # fmt: skip


def test_a_finding_is_explained_by_its_best_proxy() -> None:
    """The first class has one proxy, the second three; the negative class's proxy is nearest, but never used."""
    head = np.array([[1, 0], [0, -1], [0.6, 0.8], [-1, 0], [0, 1]], np.float32)
    vectors = finding_vectors(card("proxy", (1, 3, 1), negative=True), head, np.array([0, 1], np.float32))
    assert {name: vector.tolist() for name, vector in vectors.items()} == {
        "Effusion": [1, 0],
        "Mass": pytest.approx([0.6, 0.8]),
    }


def test_a_linear_finding_is_explained_by_its_weights() -> None:
    head = np.array([[3, 4], [0, -2]], np.float32)
    vectors = finding_vectors(card("linear", (), negative=False), head, np.array([0, 1], np.float32))
    assert {name: vector.tolist() for name, vector in vectors.items()} == {"Effusion": [3, 4], "Mass": [0, -2]}
