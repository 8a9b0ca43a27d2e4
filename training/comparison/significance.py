"""Whether methods differ by more than chance: p values, and their correction for multiple comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cbmir.training.metrics import Floats


def sign_flip_p(differences: Floats, patients: Sequence[str], *, flips: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of a paired difference: how often it is as large with a random sign for each patient.

    Args:
        differences: float64 [Q]; queries without a value (NaN) are left out. The p is NaN when none is left.
        patients: The patient of each query; all queries of a patient flip together.
    """
    known = ~np.isnan(differences)
    if not known.any():
        return float("nan")
    _, patient_of = np.unique(np.asarray(patients)[known], return_inverse=True)
    sums = np.bincount(patient_of, differences[known])
    draw = np.random.default_rng(seed)
    observed, extreme = abs(sums.sum()) * (1 - 1e-9), 0
    for _ in range(0, flips, 1000):  # in blocks, since there may be many patients
        signs = draw.integers(0, 2, (1000, len(sums)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ sums) >= observed).sum())
    return (1 + extreme) / (1 + flips)


def bootstrap_p(samples: Floats) -> float:
    """Two-sided p of a difference from its bootstrap samples [B]: twice the share on the rarer side of 0, at least 2 /
    (B + 1). NaN if no resample has a value."""
    known = samples[~np.isnan(samples)]
    if len(known) == 0:
        return float("nan")
    rarer = min(int((known <= 0).sum()), int((known >= 0).sum()))
    return min(1.0, 2 * (1 + rarer) / (1 + len(known)))


def holm(p: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm, 1979), in their order; NaN is not counted and stays."""
    order = sorted((i for i, value in enumerate(p) if not np.isnan(value)), key=lambda i: p[i])
    corrected, least = list(map(float, p)), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, p[i] * (len(order) - rank)))
        corrected[i] = least
    return corrected
