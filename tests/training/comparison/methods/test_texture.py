"""Texture descriptors: filters against their formulas, filtering and patches against loops, planted gratings."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest
from scipy import ndimage

from cbmir.errors import RunError
from cbmir.training.comparison.methods.texture import (
    RADIUS,
    TextureDescriptor,
    filter_bank,
    gabor,
    magnitudes,
    schmid,
    texture_similarity,
)


def noise(n: int, side: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, side, side), dtype=np.uint8)


def gratings(n: int, angle: float, wavelength: float, seed: int) -> np.ndarray:
    """Waves along `angle` with random phases and slight noise, uint8 [n, 48, 48]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:48, :48]
    phase = rng.uniform(0, 2 * np.pi, (n, 1, 1))
    wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / wavelength + phase)
    return (128 + 60 * wave + 10 * rng.standard_normal((n, 48, 48))).clip(0, 255).astype(np.uint8)


def standard(image: np.ndarray) -> np.ndarray:
    return (image - image.mean()) / image.std()


@pytest.mark.parametrize("kernel", filter_bank())
def test_every_filter_sums_to_zero_and_has_norm_one(kernel: np.ndarray) -> None:
    assert kernel.shape == (2 * RADIUS + 1, 2 * RADIUS + 1)
    assert abs(kernel.sum()) < 1e-5
    assert np.abs(kernel).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("wavelength", "angle"), [(8.0, 0.0), (4.0, math.pi / 4), (8.0, 3 * math.pi / 4)])
def test_gabor_follows_its_formula(wavelength: float, angle: float) -> None:
    def at(x: int, y: int) -> tuple[float, complex]:
        along = x * math.cos(angle) + y * math.sin(angle)
        across = -x * math.sin(angle) + y * math.cos(angle)
        sigma = 0.56 * wavelength
        envelope = math.exp(-(along**2 + across**2 / 4) / (2 * sigma**2))
        return envelope, cmath.exp(2j * math.pi * along / wavelength)

    values = {(x, y): at(x, y) for x in range(-RADIUS, RADIUS + 1) for y in range(-RADIUS, RADIUS + 1)}
    c = sum(envelope * wave for envelope, wave in values.values()) / sum(envelope for envelope, _ in values.values())
    size = sum(abs(envelope * (wave - c)) for envelope, wave in values.values())
    kernel = gabor(wavelength, angle)
    for x, y in ((0, 0), (1, 0), (0, 1), (2, -3), (-5, 4), (RADIUS, RADIUS)):
        envelope, wave = values[x, y]
        assert kernel[RADIUS + y, RADIUS + x] == pytest.approx(envelope * (wave - c) / size, abs=1e-8)


def test_schmid_follows_its_formula() -> None:
    def at(r: float) -> float:
        return math.cos(math.pi * 2 * r / 6) * math.exp(-(r**2) / 72)

    # Offset and scale cancel in a ratio of differences.
    kernel = schmid(6, 2).astype(np.float64)
    a, b, c, d = (kernel[RADIUS, RADIUS + r] for r in (0, 2, 3, 7))
    assert (a - b) / (c - d) == pytest.approx((at(0) - at(2)) / (at(3) - at(7)), rel=1e-4)


@pytest.mark.parametrize(("sigma", "tau"), [(2, 1), (6, 3), (10, 4)])
def test_schmid_is_invariant_to_rotation(sigma: float, tau: float) -> None:
    kernel = schmid(sigma, tau)
    by_radius: dict[int, set[float]] = {}
    for y in range(-RADIUS, RADIUS + 1):
        for x in range(-RADIUS, RADIUS + 1):
            by_radius.setdefault(x * x + y * y, set()).add(float(kernel[RADIUS + y, RADIUS + x]))
    # 25 = 5^2 + 0 = 3^2 + 4^2, and so on.
    assert all(max(values) - min(values) < 1e-8 for values in by_radius.values())
    image = noise(1, 40)
    plain, turned = (next(magnitudes(view, [kernel])) for view in (image, np.rot90(image, axes=(1, 2))))
    assert np.allclose(np.rot90(plain, axes=(1, 2)), turned, atol=1e-4)


@pytest.mark.parametrize("side", [30, 41])
def test_filtering_is_convolution_with_mirrored_borders(side: int) -> None:
    images = noise(2, side)
    bank = filter_bank()
    chosen = [bank[1], bank[6], bank[10], bank[-1]]
    for kernel, found in zip(chosen, magnitudes(images, chosen), strict=True):
        assert found.dtype == np.float32
        for image, magnitude in zip(images, found, strict=True):
            real, imaginary = (
                ndimage.convolve(standard(image.astype(np.float64)), part.astype(np.float64), mode="reflect")
                for part in (kernel.real, kernel.imag)
            )
            assert np.allclose(magnitude, np.hypot(real, imaginary), atol=1e-4)


def test_gabor_responds_to_its_own_wave() -> None:
    angles = np.pi * np.arange(4) / 4
    for own, angle in enumerate(angles):
        strength = [m.mean() for m in magnitudes(gratings(1, angle, 8, 0), [gabor(8, a) for a in angles])]
        assert np.argmax(strength) == own
        assert strength[own] > 2 * sorted(strength)[-2]


def test_patches_have_mean_and_deviation_of_each_filter() -> None:
    # 20 px have 2 patches across; 4 px are not used.
    images = noise(40, 20)
    descriptor = TextureDescriptor(images, seed=0, words=5)
    patches = descriptor._patches(images[:3])
    responses = list(magnitudes(images[:3], filter_bank()))
    assert patches.shape == (3, 4, 2 * len(responses))
    for i in range(3):
        for row in range(2):
            for column in range(2):
                for f, response in enumerate(responses):
                    tile = response[i, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].astype(np.float64)
                    found = patches[i, 2 * row + column, 2 * f : 2 * f + 2]
                    assert found == pytest.approx([tile.mean(), tile.std()], abs=1e-4)


def test_histograms_count_the_patches_of_each_image() -> None:
    images = noise(40, 32)
    descriptor = TextureDescriptor(images, seed=0, words=10)
    histograms = descriptor.describe(images)
    assert histograms.shape == (40, 10)
    assert histograms.dtype == np.float32
    assert np.allclose(histograms.sum(axis=1), 1)
    # 4 x 4 patches give sixteenths; 40 images are more than one batch.
    assert np.allclose(histograms * 16, np.round(histograms * 16), atol=1e-5)
    alone = np.concatenate([descriptor.describe(image[None]) for image in images])
    # Rounding may move a patch that is between two words.
    assert np.abs(alone - histograms).sum() <= 4 / 16


def test_planted_gratings_are_distinguished_by_direction_and_wavelength() -> None:
    kinds = [(0.0, 8.0), (np.pi / 2, 8.0), (np.pi / 4, 8.0), (0.0, 4.0)]
    kind = np.repeat(np.arange(4), 12)
    gallery = np.concatenate([gratings(12, *k, seed=i) for i, k in enumerate(kinds)])
    descriptor = TextureDescriptor(gallery, seed=0, words=10)
    described = descriptor.describe(gallery)
    for i, k in enumerate(kinds):
        for query in descriptor.describe(gratings(3, *k, seed=100 + i)):
            nearest = np.argsort(-texture_similarity(query, described), kind="stable")[:8]
            assert set(kind[nearest]) == {i}


def test_similarity_by_hand() -> None:
    query = np.array([0.5, 0.5, 0, 0], np.float32)
    gallery = np.array([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0.25, 0.75], [1, 0, 0, 0]], np.float32)
    # The last one is (0.25 / 1.5 + 0.25 / 0.5) / 2 = 1/3.
    assert texture_similarity(query, gallery) == pytest.approx([0, -0.5, -1, -1 / 3])


def test_brightness_and_contrast_do_not_count_and_blank_images_are_described() -> None:
    images = noise(30, 32) // 4
    descriptor = TextureDescriptor(images, seed=0, words=10)
    assert np.array_equal(descriptor.describe(images * 3 + 20), descriptor.describe(images))
    assert descriptor.describe(np.full((1, 32, 32), 7, np.uint8)).max() == 1


def test_the_seed_decides() -> None:
    images = noise(30, 32)
    first, again, other = (TextureDescriptor(images, seed=seed, words=10).describe(images) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_too_few_patches_for_the_words_is_an_error() -> None:
    with pytest.raises(RunError, match=r"200 texture words .* found 64 in 4 images of 32 px"):
        TextureDescriptor(noise(4, 32), seed=0)
