"""Binary codes from features that a network has already learned: ITQ without labels, SSH with labels.

Gong, Lazebnik, Gordo and Perronnin, "Iterative Quantization: A Procrustean Approach to Learning Binary Codes for
Large-Scale Image Retrieval", IEEE TPAMI 35(12), 2013 (CVPR 2011). Principal components V give one real value per bit,
and a rotation R makes |B - V R|_F small, with B = sign(V R). B for a fixed R and R for a fixed B, an orthogonal
Procrustes problem, are computed alternately: 50 times from a random rotation, as in the paper.

Wang, Kumar and Chang, "Semi-Supervised Hashing for Large-Scale Search", IEEE TPAMI 34(12), 2012 (CVPR 2010). Bits
should agree for pairs of images that share a label (S_ij = 1), differ for pairs that share no label (S_ij = -1), and
have a large variance over all images. Projections are leading eigenvectors of the adjusted covariance
X_l S X_l' + eta X X', where X_l are the labelled images. Of the paper's three variants this is the sequential one,
which its abstract prefers: X_l S X_l' has hardly more independent directions than there are labels, so without the
sequence later bits would be principal components. Each bit gives more weight to the pairs that the previous bit got
wrong: S becomes S - alpha T, where T_ij = p_i p_j if its sign differs from that of S_ij, else 0, and p are the
projections. The direction just used is removed from X, but not from X_l.

As we read the paper, it leaves eta, alpha and the scale of p open. Here eta and alpha are 1, and p has a mean square of
1 over X_l, so that they mean the same in every feature space. S_ii is 1, since an image shares its labels with itself.
S_ij is 0 if an unknown label leaves open whether two images share one. S has an entry for each pair, so X_l has at most
`labelled` random images; the variance is over all images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, orthogonal_procrustes
from sklearn.decomposition import PCA

from cbmir.errors import RunError


class ITQ:
    """A code of `bits` bits, learned from float features [N, D]. Raises RunError for more bits than min(N, D)."""

    def __init__(self, features: NDArray[np.floating], *, bits: int, seed: int) -> None:
        if not 1 <= bits <= min(features.shape):
            raise RunError(
                f"ITQ has one principal component per bit: expected 1 to {min(features.shape)} bits for "
                f"{features.shape[0]} images with {features.shape[1]} features each, found {bits}; take fewer bits"
            )
        self._pca = PCA(bits, svd_solver="covariance_eigh").fit(features.astype(np.float64))
        start, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((bits, bits)))
        self.rotation = learn_rotation(self.projected(features), start)

    def projected(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the principal components before the rotation: [M, D] -> float64 [M, bits]."""
        return np.asarray(self._pca.transform(features.astype(np.float64)))

    def codes(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return binary codes: [M, D] -> float32 [M, bits] in {-1, 1}."""
        return signs(self.projected(features) @ self.rotation).astype(np.float32)


def learn_rotation(
    projected: NDArray[np.float64], start: NDArray[np.float64], iterations: int = 50
) -> NDArray[np.float64]:
    """Return the rotation [bits, bits] after `iterations` steps, from centred values [N, bits] and an orthogonal
    start [bits, bits]."""
    rotation = start
    for _ in range(iterations):
        rotation, _ = orthogonal_procrustes(projected, signs(projected @ rotation))
    return rotation


def signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 for values of at least 0, else -1: a code has no third value."""
    return np.where(values >= 0, 1.0, -1.0)


class SemiSupervisedHashing:
    """A code learned from float features [N, D] and targets [N, C] in {0, 1, NaN}, with or without a negative class.

    Raises RunError if no image has a positive label.
    """

    def __init__(
        self, features: NDArray[np.floating], targets: NDArray[np.floating], *, bits: int, seed: int = 0,
        labelled: int = 5000,
    ) -> None:  # fmt: skip
        candidates = np.flatnonzero((targets == 1).any(axis=1))
        if len(candidates) == 0:
            raise RunError(f"semi-supervised hashing needs images with a label, found none in {len(targets)}")
        rows = np.sort(np.random.default_rng(seed).permutation(candidates)[:labelled])
        self._mean = features.mean(axis=0, dtype=np.float64)
        centred = (features - self._mean).astype(np.float32)
        self.directions = _sequence(centred, centred[rows], pair_similarity(targets[rows]), bits)

    def codes(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return binary codes: [M, D] -> float32 [M, bits] in {-1, 1}."""
        return signs((features - self._mean) @ self.directions).astype(np.float32)


def pair_similarity(targets: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return S: 1 for pairs that share a label, -1 for those that certainly do not, else 0: [l, C] -> f32 [l, l]."""
    positive, possible = (targets == 1).astype(np.float32), (targets != 0).astype(np.float32)
    similar, dissimilar = positive @ positive.T > 0, possible @ possible.T == 0
    return np.where(similar, np.float32(1), np.where(dissimilar, np.float32(-1), np.float32(0)))


def adjusted_covariance(
    features: NDArray[np.float32], labelled: NDArray[np.float32], similarity: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return X_l S X_l' + X X' from images in rows: features [N, D], labelled [l, D], similarity [l, l] -> [D, D]."""
    return np.asarray(labelled.T @ (similarity @ labelled) + features.T @ features)


def reweighted(similarity: NDArray[np.float32], projection: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return S - T, in which pairs that this bit gets wrong count more: similarity [l, l], projection [l] -> [l, l]."""
    scale = np.square(projection).mean() or np.float32(1)
    agreement = np.outer(projection, projection / scale)
    return similarity - np.where(agreement * similarity < 0, agreement, np.float32(0))


def _sequence(
    features: NDArray[np.float32], labelled: NDArray[np.float32], similarity: NDArray[np.float32], bits: int
) -> NDArray[np.float32]:
    """Return unit vectors [D, bits] for centred features [N, D], labelled ones [l, D] and their similarity [l, l]."""
    last = features.shape[1] - 1
    directions = []
    for _ in range(bits):
        matrix = adjusted_covariance(features, labelled, similarity).astype(np.float64)
        _, vectors = eigh(matrix, subset_by_index=[last, last])
        direction = vectors[:, 0].astype(np.float32)
        similarity = reweighted(similarity, labelled @ direction)
        features = features - np.outer(features @ direction, direction)
        directions.append(direction)
    return np.stack(directions, axis=1)
