"""ITQ, iterative quantisation: binary codes from features that a network has already learned, without labels.

Gong, Lazebnik, Gordo and Perronnin, "Iterative Quantization: A Procrustean Approach to Learning Binary Codes for
Large-Scale Image Retrieval", IEEE TPAMI 35(12), 2013 (CVPR 2011). Principal components give one real value a bit; a
rotation R of them makes |B - V R|_F small, with B = sign(V R). It is found by turns: B for a fixed R, then R for a
fixed B, an orthogonal Procrustes problem. 50 turns from a random rotation, as in the paper.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import orthogonal_procrustes
from sklearn.decomposition import PCA

from cbmir.errors import RunError

ITERATIONS = 50


class ITQ:
    """Learns from float features [N, D] a code of `bits` bits. RunError for more bits than min(N, D)."""

    def __init__(self, features: NDArray[np.floating], *, bits: int, seed: int) -> None:
        if not 1 <= bits <= min(features.shape):
            raise RunError(
                f"ITQ has one principal component a bit: expected 1 to {min(features.shape)} bits for "
                f"{features.shape[0]} images with {features.shape[1]} features each, found {bits}; take fewer bits"
            )
        self._pca = PCA(bits, svd_solver="covariance_eigh").fit(features.astype(np.float64))
        start, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((bits, bits)))
        self.rotation = learn_rotation(self.projected(features), start)

    def projected(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Principal components before the rotation: [M, D] -> float64 [M, bits]."""
        components: NDArray[np.float64] = self._pca.transform(features.astype(np.float64))
        return components

    def codes(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Binary codes: [M, D] -> float32 [M, bits] in {-1, 1}."""
        return signs(self.projected(features) @ self.rotation).astype(np.float32)


def learn_rotation(
    projected: NDArray[np.float64], start: NDArray[np.float64], iterations: int = ITERATIONS
) -> NDArray[np.float64]:
    """The rotation [bits, bits] after so many turns: centred values [N, bits], an orthogonal start [bits, bits]."""
    rotation = start
    for _ in range(iterations):
        rotation, _ = orthogonal_procrustes(projected, signs(projected @ rotation))
    return rotation


def signs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 where a value is 0 or more, -1 elsewhere: a code has no third value."""
    return np.where(values >= 0, 1.0, -1.0)
