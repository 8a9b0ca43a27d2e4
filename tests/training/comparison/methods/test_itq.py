"""ITQ: the properties of its two steps, a search over all rotations of the plane, and a planted hypercube."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cbmir.errors import RunError
from cbmir.training.comparison.methods.binary_codes import ITQ, learn_rotation, signs


def quantisation_error(projected: np.ndarray, rotation: np.ndarray) -> float:
    rotated = projected @ rotation
    return float(np.square(np.where(rotated >= 0, 1, -1) - rotated).sum())


def random_rotation(bits: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((bits, bits)))[0]


def test_the_rotation_is_orthogonal_and_the_error_never_grows() -> None:
    projected = np.random.default_rng(0).standard_normal((200, 6)) * [3, 2, 2, 1, 1, 0.5]
    start = random_rotation(6, 1)
    rotations = [learn_rotation(projected, start, turns) for turns in range(30)]
    errors = [quantisation_error(projected, rotation) for rotation in rotations]
    assert np.allclose(rotations[0], start)
    assert all(np.allclose(rotation.T @ rotation, np.eye(6)) for rotation in rotations)
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 0.95 * errors[0]


def test_one_rotation_by_hand() -> None:
    # Starting from the axes, B is (1, 1), (-1, 1), (-1, -1), (1, -1): the points rotated by 45 - 10 degrees.
    angles = np.deg2rad([10, 100, 190, 280])
    projected = np.column_stack([np.cos(angles), np.sin(angles)])
    turned = projected @ learn_rotation(projected, np.eye(2), 1)
    assert np.allclose(turned, np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) / np.sqrt(2))


def test_no_rotation_of_the_plane_is_better() -> None:
    corners = np.random.default_rng(2).choice([-1.0, 1.0], (300, 2))
    noise = 0.2 * np.random.default_rng(3).standard_normal((300, 2))
    projected = (corners + noise) @ random_rotation(2, 4)
    found = quantisation_error(projected, learn_rotation(projected, random_rotation(2, 5)))
    angles = np.linspace(0, np.pi / 2, 500)
    best = min(
        quantisation_error(projected, np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])) for a in angles
    )
    assert found <= best + 1e-9


def test_a_planted_hypercube_is_recovered_from_most_starts() -> None:
    rng = np.random.default_rng(6)
    corners = rng.choice([-1.0, 1.0], (500, 4))
    hidden = corners @ np.linalg.qr(rng.standard_normal((20, 20)))[0][:4] + 0.05 * rng.standard_normal((500, 20)) + 3
    features = hidden.astype(np.float32)
    recovered = 0
    for seed in range(10):
        agreement = np.abs(ITQ(features, bits=4, seed=seed).codes(features).T @ corners) / len(corners)
        # The order and sign of bits are arbitrary; each coordinate is one bit in every image.
        recovered += np.array_equal(np.sort(agreement.max(axis=0)), np.ones(4))
    # Not from all starts: it can get stuck where every point is between corners.
    assert recovered >= 4


def test_codes_are_the_signs_of_the_rotated_components() -> None:
    features = np.random.default_rng(7).standard_normal((60, 9)).astype(np.float32)
    hashing = ITQ(features, bits=5, seed=0)
    codes = hashing.codes(features[:7])
    assert codes.shape == (7, 5)
    assert codes.dtype == np.float32
    centred = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
    basis = np.linalg.svd(centred, full_matrices=False)[2][:5].T
    components = centred @ basis
    assert np.allclose(np.abs(hashing.projected(features)), np.abs(components), atol=1e-6)
    assert np.array_equal(codes, signs(hashing.projected(features[:7]) @ hashing.rotation))
    assert np.array_equal(signs(np.array([-0.5, 0.0, 2.0])), [-1, 1, 1])


def test_the_seed_decides() -> None:
    features = np.random.default_rng(8).standard_normal((100, 16)).astype(np.float32)
    first, again, other = (ITQ(features, bits=8, seed=seed).codes(features) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("images", "dim", "bits"), [(5, 20, 6), (50, 4, 5), (50, 4, 0)])
def test_more_bits_than_components_is_an_error(images: int, dim: int, bits: int) -> None:
    features = np.random.default_rng(9).standard_normal((images, dim))
    with pytest.raises(RunError, match=f"expected 1 to {min(images, dim)} bits .* found {bits}; take fewer"):
        ITQ(features, bits=bits, seed=0)
