"""P values and their correction, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cbmir.training.comparison.results import bootstrap_p, holm, sign_flip_p

NAN = float("nan")


def test_sign_flips_are_by_patient() -> None:
    """Three patients have sums 3, 1, 1: two of the eight sign patterns reach |5|; per image it would be 2 in 32."""
    differences, patients = np.array([1.0, 1, 1, 1, 1, NAN]), list("aaabcd")
    assert sign_flip_p(differences, patients) == pytest.approx(2 / 8, abs=0.02)
    assert sign_flip_p(np.array([1.0, -1, 0.5]), list("abc")) > 0.5
    assert math.isnan(sign_flip_p(np.array([NAN]), ["a"]))


def test_bootstrap_p_by_hand() -> None:
    """Of 99 samples 4 are at or below 0: twice (4 + 1) in 100."""
    assert bootstrap_p(np.arange(99.0) - 3) == pytest.approx(0.1)
    assert bootstrap_p(np.ones(99)) == pytest.approx(0.02)
    assert bootstrap_p(np.zeros(99)) == 1
    assert math.isnan(bootstrap_p(np.array([NAN])))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, NAN, 0.9]) == pytest.approx([1, NAN, 1], nan_ok=True)
