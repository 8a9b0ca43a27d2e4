"""Simple texture descriptors: a bag of words over patches of Gabor and Schmid filtered images, without a network.

Lan, Zhong, Liu, Shi and Luo, "A simple texture feature for retrieval of medical images", Multimedia Tools and
Applications 77, 2018: filter with Gabor and Schmid filters, partition the filtered images into non-overlapping patches,
and count words. Schmid's filters: "Constructing models for content-based image retrieval", CVPR 2001, in the bank of 13
by Varma and Zisserman, "A Statistical Approach to Texture Classification from Single Images", IJCV 62, 2005.

The paper does not define a word. Here patches are 8 px wide and described by the mean and standard deviation of each
filter's magnitude, scaled to unit variance; k-means gives 200 words. Gabor filters have 4 orientations, wavelengths of
4 and 8 px, a bandwidth of about one octave and an aspect ratio of 0.5. Images are scaled to mean 0 and variance 1 and
mirrored at their borders. Histograms sum to 1 and are compared by chi-squared distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from sklearn.cluster import MiniBatchKMeans
from sklearn.preprocessing import StandardScaler

from cbmir.errors import RunError

RADIUS = 24
PATCH = 8
ORIENTATIONS = 4
WAVELENGTHS = (4, 8)
SCHMID = ((2, 1), (4, 1), (4, 2), (6, 1), (6, 2), (6, 3), (8, 1), (8, 2), (8, 3), (10, 1), (10, 2), (10, 3), (10, 4))
_BLOCK = 32
_SAMPLED_IMAGES, _SAMPLED_PATCHES = 500, 50_000

Kernel = NDArray[np.complex64] | NDArray[np.float32]


class TextureDescriptor:
    """A bag of words, learned from grey images uint8 [N, S, S], S >= 8. Raises RunError for too few patches."""

    def __init__(self, images: NDArray[np.uint8], *, seed: int, words: int = 200) -> None:
        self._words = words
        self._bank = filter_bank()
        random = np.random.default_rng(seed)
        some = images[np.sort(random.permutation(len(images))[:_SAMPLED_IMAGES])]
        patches = _rows(np.concatenate([self._patches(block) for block in _blocks(some)]))
        if len(patches) < words:
            raise RunError(
                f"{words} texture words need as many patches of {PATCH} px, found {len(patches)} in {len(images)} "
                f"images of {images.shape[1]} px; take more or larger images"
            )
        patches = patches[random.permutation(len(patches))[:_SAMPLED_PATCHES]]
        self._scaler = StandardScaler().fit(patches)
        self._means = MiniBatchKMeans(words, random_state=seed, n_init=3).fit(self._scaler.transform(patches))

    def describe(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return histograms of words: uint8 [M, S, S] -> float32 [M, W]; each row sums to 1."""
        return np.concatenate([self._histograms(block) for block in _blocks(images)])

    def _histograms(self, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        patches = self._patches(block)
        words = self._means.predict(self._scaler.transform(_rows(patches)))
        counts = [np.bincount(row, minlength=self._words) for row in words.reshape(len(block), -1)]
        return np.asarray(np.stack(counts) / patches.shape[1], dtype=np.float32)

    def _patches(self, block: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return mean and deviation of each filter's magnitude per whole patch: [B, S, S] -> float32 [B, P, 2F]."""
        across = block.shape[1] // PATCH
        # [S, across]: multiplying by it averages over patches, many times faster than averaging a tiled view.
        tiles = np.eye(block.shape[1], across * PATCH, dtype=np.float32).reshape(-1, across, PATCH).mean(axis=2)
        statistics = []
        for magnitude in magnitudes(block, self._bank):
            mean, square = tiles.T @ magnitude @ tiles, tiles.T @ np.square(magnitude) @ tiles
            statistics += [mean, np.sqrt(np.maximum(square - np.square(mean), 0))]
        return np.stack(statistics, axis=-1).reshape(len(block), across**2, -1)


def texture_similarity(query: NDArray[np.float32], gallery: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return minus the chi-squared distance, sum (a - b)^2 / (a + b) / 2, in [-1, 0]: [W], [G, W] -> float32 [G]."""
    total = query + gallery
    return np.asarray((np.square(query - gallery) / np.where(total > 0, total, 1)).sum(axis=1) / -2)


def filter_bank() -> list[Kernel]:
    """Return 8 Gabor filters, complex64, and 13 Schmid filters, float32, each [2 RADIUS + 1, 2 RADIUS + 1]."""
    angles = np.pi * np.arange(ORIENTATIONS) / ORIENTATIONS
    gabors: list[Kernel] = [gabor(wavelength, angle) for wavelength in WAVELENGTHS for angle in angles]
    return gabors + [schmid(sigma, tau) for sigma, tau in SCHMID]


def gabor(wavelength: float, angle: float) -> NDArray[np.complex64]:
    """Return exp(-(x'^2 + y'^2 / 4) / 2 s^2) (exp(2 pi i x' / wavelength) - c), where s = 0.56 wavelength.

    x' runs along `angle`, y' across it, both in px. c makes the sum 0. Absolute values sum to 1.
    """
    y, x = np.mgrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    envelope = np.exp(-(along**2 + (0.5 * across) ** 2) / (2 * (0.56 * wavelength) ** 2))
    wave = np.exp(2j * np.pi * along / wavelength)
    kernel = envelope * (wave - (envelope * wave).sum() / envelope.sum())
    return np.asarray(kernel / np.abs(kernel).sum(), dtype=np.complex64)


def schmid(sigma: float, tau: float) -> NDArray[np.float32]:
    """Return F0 + cos(pi tau r / sigma) exp(-r^2 / 2 sigma^2) for r up to RADIUS, all in px.

    F0 makes the sum 0. Absolute values sum to 1.
    """
    y, x = np.mgrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1]
    r = np.hypot(x, y)
    inside = r <= RADIUS
    kernel = np.cos(np.pi * tau * r / sigma) * np.exp(-(r**2) / (2 * sigma**2))
    kernel = np.where(inside, kernel - kernel[inside].mean(), 0)
    return np.asarray(kernel / np.abs(kernel).sum(), dtype=np.float32)


def magnitudes(images: NDArray[np.uint8], bank: Sequence[Kernel]) -> Iterator[NDArray[np.float32]]:
    """Yield the magnitude of each filter's response: uint8 [B, S, S] -> float32 [B, S, S] each."""
    centred = images - images.mean(axis=(1, 2), keepdims=True, dtype=np.float32)
    deviation = centred.std(axis=(1, 2), keepdims=True)
    standard = centred / np.where(deviation > 0, deviation, 1)
    padded = np.pad(standard, ((0, 0), (RADIUS, RADIUS), (RADIUS, RADIUS)), mode="symmetric")
    for kernel in bank:
        yield np.abs(fftconvolve(padded, kernel[None], "valid", axes=(1, 2)))


def _blocks(images: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    return (images[start : start + _BLOCK] for start in range(0, len(images), _BLOCK))


def _rows(patches: NDArray[np.float32]) -> NDArray[np.float32]:
    return patches.reshape(-1, patches.shape[2])
