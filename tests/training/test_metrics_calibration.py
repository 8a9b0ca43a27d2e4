"""Thresholds and probabilities, by hand and by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.training.metrics import platt_calibration, youden_threshold

NAN = float("nan")


def test_threshold_by_hand() -> None:
    """Between 0.3 and 0.6: sensitivity 1, specificity 2/3; between 0.7 and 0.8: 1/2 and 1."""
    scores = np.array([0.1, 0.3, 0.7, 0.6, 0.8, 0.99, 0.5])
    labels = np.array([0, 0, 0, 1, 1, NAN, -1])
    assert youden_threshold(scores, labels) == pytest.approx(0.45)


def test_threshold_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = rng.integers(0, 10, 25) / 10, rng.integers(0, 2, 25).astype(float)
        threshold = youden_threshold(scores, labels)
        assert threshold is not None

        def youden(t: float, scores: np.ndarray = scores, labels: np.ndarray = labels) -> float:
            predicted = scores > t
            return float(predicted[labels == 1].mean() - predicted[labels == 0].mean())

        assert youden(threshold) == pytest.approx(max(youden(t) for t in np.arange(-0.05, 1.05, 0.05)))


@pytest.mark.parametrize("labels", [[1.0, 1.0], [0.0, 0.0], [NAN, -1.0]])
def test_one_sided_labels_give_neither(labels: list[float]) -> None:
    scores = np.array([0.2, 0.4])
    assert youden_threshold(scores, np.array(labels)) is None
    assert platt_calibration(scores, np.array(labels)) is None


def test_probabilities_follow_the_frequencies() -> None:
    rng = np.random.default_rng(1)
    scores = rng.random(4000)
    labels = (rng.random(4000) < 1 / (1 + np.exp(-(6 * scores - 4)))).astype(float)
    calibration = platt_calibration(scores, labels)
    assert calibration is not None
    assert (calibration.slope, calibration.intercept) == pytest.approx((6, -4), abs=0.5)


@pytest.mark.parametrize("scores", [np.array([0.9, 0.8, 0.1, 0.2]), np.full(4, 0.5)])
def test_a_ranking_that_is_wrong_or_absent_gives_the_prevalence(scores: np.ndarray) -> None:
    calibration = platt_calibration(scores, np.array([0.0, 0.0, 1.0, 0.0]))
    assert calibration is not None and calibration.slope == 0
    assert calibration.probability(0.9) == pytest.approx(0.25)
