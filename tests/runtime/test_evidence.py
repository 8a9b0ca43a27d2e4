"""Evidence maps are exact: the cells sum to the cosine of the image and a vector."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import evidence_map
from cbmir.runtime.evidence import contrasts, finding_vectors, scoring_vectors


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
    """Mass is [1, 0], and the mean of the others is [0, 0.5]."""
    vectors = {
        name: np.array(one, np.float32) for name, one in (("Effusion", [0, 1]), ("Mass", [1, 0]), ("Nodule", [0, 0]))
    }
    found = contrasts(vectors)
    assert {name: one.tolist() for name, one in found.items()} == {
        "Effusion": [-0.5, 1], "Mass": [1, -0.5], "Nodule": [-0.5, -0.5]
    }  # fmt: skip
    assert found["Mass"].dtype == np.float32
    assert contrasts({"Mass": vectors["Mass"]})["Mass"].tolist() == [1, 0], "there are no others"
    assert contrasts({}) == {}


@pytest.mark.parametrize(("counts", "negative"), [((1, 1, 1), False), ((3, 1, 2, 2), True), ((4,), False)])
def test_the_map_for_a_proxy_head_contrasts_the_findings(counts: tuple[int, ...], negative: bool) -> None:
    """Compare with loops in float64 over cells and all findings; the negative class is not a finding."""
    rng = np.random.default_rng(len(counts))
    labels = len(counts) - negative
    feature_map = np.maximum(rng.normal(size=(16, 3, 4)), 0).astype(np.float32)
    rows = rng.normal(size=(sum(counts), 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    about = card("proxy", counts, negative, names=("A", "B", "C")[:labels])
    mean = feature_map.astype(np.float64).mean(axis=(1, 2))
    vectors = finding_vectors(about, rows.astype(np.float32), unit(mean).astype(np.float32))

    starts = np.cumsum([0, *counts])
    best = [max(rows[starts[j] : starts[j + 1]], key=lambda row: row @ mean) for j in range(labels)]
    for j, name in enumerate(about.labels.names):
        others = [best[i] for i in range(labels) if i != j]
        contrast = best[j] - (sum(others) / len(others) if others else 0)
        shares = evidence_map(feature_map, vectors[name])
        for y, x in np.ndindex(3, 4):
            expected = feature_map[:, y, x] @ contrast / (12 * np.linalg.norm(mean) * np.linalg.norm(contrast))
            assert shares[y, x] == pytest.approx(expected, abs=1e-6)


def test_the_map_for_a_linear_head_sums_to_the_logit_without_bias() -> None:
    rng = np.random.default_rng(0)
    feature_map, rows = rng.normal(size=(2, 3, 4)).astype(np.float32), 5 * rng.normal(size=(2, 2)).astype(np.float32)
    mean = feature_map.mean(axis=(1, 2))
    vectors = finding_vectors(card("linear", (), negative=False), rows, unit(mean))
    for row, vector in zip(rows, vectors.values(), strict=True):
        factor = np.linalg.norm(mean) * np.linalg.norm(row)
        assert evidence_map(feature_map, vector).sum() * factor == pytest.approx(row @ mean, abs=1e-5)


def card(
    head: str, proxies: tuple[int, ...], negative: bool, names: tuple[str, ...] = ("Effusion", "Mass")
) -> ModelCard:
    return ModelCard(
        labels=LabelSet(names), preprocess=PreprocessSpec(), encoder="tiny", embedding_dim=2, head=head,
        sigma=0.7, proxies_per_class=proxies, negative_proxies=negative, thresholds=(None,) * len(names),
        calibration=(None,) * len(names), fingerprint="f",
    )  # fmt: skip


def test_a_score_comes_from_the_best_proxy() -> None:
    """The first class has one proxy, the second three; the negative class's proxy is nearest, but never used."""
    head = np.array([[1, 0], [0, -1], [0.6, 0.8], [-1, 0], [0, 1]], np.float32)
    vectors = scoring_vectors(card("proxy", (1, 3, 1), negative=True), head, np.array([0, 1], np.float32))
    assert {name: vector.tolist() for name, vector in vectors.items()} == {
        "Effusion": [1, 0],
        "Mass": pytest.approx([0.6, 0.8]),
    }


def test_a_linear_finding_is_explained_by_its_weights() -> None:
    head = np.array([[3, 4], [0, -2]], np.float32)
    vectors = finding_vectors(card("linear", (), negative=False), head, np.array([0, 1], np.float32))
    assert {name: vector.tolist() for name, vector in vectors.items()} == {"Effusion": [3, 4], "Mass": [0, -2]}
