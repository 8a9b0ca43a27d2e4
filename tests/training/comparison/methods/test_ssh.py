"""Semi-supervised hashing against sums over pairs in plain Python, values computed by hand, and planted classes."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.errors import RunError
from cbmir.training.comparison.methods.binary_codes import (
    SemiSupervisedHashing,
    adjusted_covariance,
    pair_similarity,
    reweighted,
)


def share(a: np.ndarray, b: np.ndarray) -> bool:
    return any(x == 1 and y == 1 for x, y in zip(a, b, strict=True))


def brute_directions(features: np.ndarray, labels: np.ndarray, bits: int) -> np.ndarray:
    """The sequence of directions in float64, computed pair by pair."""
    x = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
    rows = [i for i in range(len(x)) if labels[i].sum() > 0]
    weight = {(i, j): 1.0 if share(labels[i], labels[j]) else -1.0 for i in rows for j in rows}
    residual, directions = x.copy(), []
    for _ in range(bits):
        matrix = sum(np.outer(v, v) for v in residual)
        for (i, j), s in weight.items():
            matrix = matrix + s * np.outer(x[i], x[j])
        values, vectors = np.linalg.eigh(matrix)
        w = vectors[:, values.argmax()]
        p = {i: float(x[i] @ w) for i in rows}
        mean_square = sum(v * v for v in p.values()) / len(p)
        for (i, j), s in weight.items():
            t = p[i] * p[j] / mean_square
            weight[i, j] = s - t if s * t < 0 else s
        residual = residual - np.outer(residual @ w, w)
        directions.append(w)
    return np.column_stack(directions)


def planted(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three labels, each a small shift along its own axis, and two larger axes of noise."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, 3)) < 0.4).astype(np.float32)
    labels[labels.sum(axis=1) == 0, 0] = 1
    features = np.hstack([labels * 2 + 0.1 * rng.standard_normal((n, 3)), 3 * rng.standard_normal((n, 2))])
    return features.astype(np.float32), labels


def test_pairs_by_hand() -> None:
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]])
    assert np.array_equal(pair_similarity(labels), [[1, 1, -1], [1, 1, -1], [-1, -1, 1]])


def test_a_pair_that_may_share_an_unknown_label_is_ignored() -> None:
    """The second image may have the first one's label, and does not have the third one's."""
    labels = np.array([[1, 0], [np.nan, 0], [0, 1]])
    assert np.array_equal(pair_similarity(labels), [[1, 0, -1], [0, 0, -1], [-1, -1, 1]])


def test_the_matrix_is_the_sum_over_pairs() -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((9, 4)), (rng.random((6, 3)) < 0.5).astype(float)
    expected = sum(np.outer(x, x) for x in features)
    for i in range(6):
        for j in range(6):
            expected = expected + (1 if share(labels[i], labels[j]) else -1) * np.outer(features[i], features[j])
    single = features.astype(np.float32)
    assert np.allclose(adjusted_covariance(single, single[:6], pair_similarity(labels)), expected, atol=1e-4)


def test_weights_of_wrong_pairs_by_hand() -> None:
    # Mean square 2 / 2 = 1. Images 0 and 1 should agree, but are projected to opposite sides: 1 - (1 * -1) = 2.
    similar, different = np.ones((2, 2), np.float32), np.array([[1, -1], [-1, 1]], np.float32)
    apart, together = np.array([1, -1], np.float32), np.array([1, 1], np.float32)
    assert np.array_equal(reweighted(similar, apart), [[1, 2], [2, 1]])
    assert np.array_equal(reweighted(different, together), [[1, -2], [-2, 1]])
    assert np.array_equal(reweighted(different, apart), different)
    assert np.array_equal(reweighted(similar, together * 7), similar)
    assert np.array_equal(reweighted(similar, apart * 7), [[1, 2], [2, 1]])
    assert np.array_equal(reweighted(similar, apart * 0), similar)


def test_directions_agree_with_brute_force() -> None:
    rng = np.random.default_rng(1)
    features = (rng.standard_normal((24, 5)) + 2).astype(np.float32)
    labels = (rng.random((24, 3)) < 0.4).astype(np.float32)
    labels[:3] = 0
    found = SemiSupervisedHashing(features, labels, bits=7, seed=0).directions
    cosines = (found * brute_directions(features, labels, 7)).sum(axis=0)
    assert np.allclose(np.abs(cosines), 1, atol=1e-3)


def test_codes_of_new_images_follow_planted_labels_not_large_variance() -> None:
    features, labels = planted(500, 2)
    hashing = SemiSupervisedHashing(features, labels, bits=16, seed=0)
    assert np.abs(hashing.directions[3:, 0]).max() < 0.2
    new, new_labels = planted(100, 3)
    codes = hashing.codes(new)
    assert codes.dtype == np.float32
    assert codes.shape == (100, 16)
    centred = new - features.mean(axis=0, dtype=np.float64)
    assert np.array_equal(codes, np.where(centred @ hashing.directions >= 0, 1, -1))
    # The code contains the labels: the nearest other image has the same ones.
    products = codes @ codes.T - 100 * np.eye(100, dtype=np.float32)
    same = (new_labels[products.argmax(axis=1)] == new_labels).all(axis=1)
    assert same.mean() > 0.8
    loud = new[:, 3:] @ new[:, 3:].T - 1e6 * np.eye(100, dtype=np.float32)
    assert (new_labels[loud.argmax(axis=1)] == new_labels).all(axis=1).mean() < 0.5


def test_the_number_of_images_in_pairs_is_limited_and_drawn_by_the_seed() -> None:
    features, labels = planted(80, 4)
    few = [SemiSupervisedHashing(features, labels, bits=4, seed=seed, labelled=10).directions for seed in (0, 0, 1)]
    assert np.array_equal(few[0], few[1])
    assert not np.allclose(np.abs(few[0]), np.abs(few[2]), atol=1e-3)
    everyone = [SemiSupervisedHashing(features, labels, bits=4, seed=seed).directions for seed in (0, 1)]
    assert np.array_equal(everyone[0], everyone[1])


def test_without_labels_there_is_nothing_to_learn() -> None:
    with pytest.raises(RunError, match="images with a label, found none in 6"):
        SemiSupervisedHashing(np.eye(6), np.zeros((6, 2)), bits=2, seed=0)
