"""Evidence maps are exact: the cells sum to the cosine."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import evidence_map
from cbmir.runtime.evidence import finding_vectors


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_hand_worked() -> None:
    """Two cells in two dimensions: [3, 0] and [0, 1]; the mean is [1.5, 0.5]. Against [1, 0] only the first counts."""
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


def test_nothing_is_evidence_of_nothing() -> None:
    ones = np.ones(4, np.float32)
    assert not evidence_map(np.zeros((4, 2, 3), np.float32), ones).any()
    assert not evidence_map(np.ones((4, 2, 3), np.float32), 0 * ones).any()


def card(head: str, proxies: tuple[int, ...], negative: bool) -> ModelCard:
    return ModelCard(
        labels=LabelSet(("Effusion", "Mass")), preprocess=PreprocessSpec(), encoder="tiny", embedding_dim=2, head=head,
        sigma=0.7, proxies_per_class=proxies, negative_proxies=negative, thresholds=(None, None),
        calibration=(None, None), fingerprint="f",
    )  # fmt: skip


def test_a_finding_is_explained_by_its_best_proxy() -> None:
    """One proxy for the first class, three for the second, then the negative class's, nearest but never asked."""
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
