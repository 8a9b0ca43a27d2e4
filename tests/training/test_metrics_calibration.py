"""Thresholds, probabilities and calibration errors: by hand, by brute force, and against another implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from cbmir.card import Calibration, OperatingPoint
from cbmir.choices import OPERATING_POINTS
from cbmir.training.metrics import (
    calibration_error,
    operating_points,
    platt_calibration,
    probabilities,
)

NAN = float("nan")


def youden_threshold(scores: np.ndarray, labels: np.ndarray) -> float | None:
    point = operating_points(scores, labels)["balanced"]
    return point and point.threshold


def test_threshold_by_hand() -> None:
    """Between 0.3 and 0.6, sensitivity is 1 and specificity 2/3; between 0.7 and 0.8, they are 1/2 and 1."""
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


def test_operating_points_by_hand() -> None:
    """Both positives must be above, or all three negatives below; uncertain and unknown labels are left out."""
    scores = np.array([0.1, 0.3, 0.7, 0.6, 0.8, 0.99, 0.5])
    labels = np.array([0, 0, 0, 1, 1, NAN, -1])
    points = operating_points(scores, labels)
    assert points["sensitive"] == OperatingPoint(pytest.approx(0.45), 1.0, 2 / 3, 2 / 3, 1.0)
    assert points["balanced"] == points["sensitive"]
    assert points["specific"] == OperatingPoint(pytest.approx(0.75), 0.5, 1.0, 1.0, 3 / 4)
    useless = operating_points(np.full(4, 0.5), np.array([0, 0, 1, 1]))
    assert useless["sensitive"] == OperatingPoint(0.25, 1.0, 0.0, 0.5, None)
    assert useless["specific"] == OperatingPoint(0.75, 0.0, 1.0, None, 0.5)


@pytest.mark.parametrize("seed", range(30))
def test_operating_points_by_brute_force(seed: int) -> None:
    """Compare with counts at all thresholds of a grid finer than the scores; the last seeds have scores of 1."""
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(1, 11, 60) / 10, rng.choice([0.0, 1.0, -1.0, NAN], 60)
    if seed < 25:
        scores -= 0.05 + 0.01 * rng.random(60)

    def shares(t: float) -> tuple[float, float]:
        return float((scores[labels == 1] > t).mean()), float((scores[labels == 0] <= t).mean())

    grid = np.unique(np.r_[0.0, scores, 1.0])
    grid = np.sort(np.r_[grid, (grid[1:] + grid[:-1]) / 2])
    points = {name: point for name, point in operating_points(scores, labels).items() if point is not None}
    assert tuple(points) == OPERATING_POINTS
    for point in points.values():
        assert (point.sensitivity, point.specificity) == pytest.approx(shares(point.threshold))
        predicted, truth = scores > point.threshold, labels == 1
        for value, side in (
            (point.positive_predictive_value, truth[predicted & (abs(labels) < 1.5) & (labels != -1)]),
            (point.negative_predictive_value, ~truth[~predicted & (abs(labels) < 1.5) & (labels != -1)]),
        ):
            assert value == (pytest.approx(side.mean()) if len(side) else None)
    balance = [sum(shares(t)) for t in grid]
    assert sum(shares(points["balanced"].threshold)) == pytest.approx(max(balance))
    sensitive, specific = points["sensitive"], points["specific"]
    assert sensitive.sensitivity >= 0.9 and specific.specificity >= 0.9
    # No threshold that meets the condition has more of the other share.
    assert sensitive.specificity == pytest.approx(max(shares(t)[1] for t in grid if shares(t)[0] >= 0.9))
    assert specific.sensitivity == pytest.approx(max(shares(t)[0] for t in grid if shares(t)[1] >= 0.9))


@pytest.mark.parametrize("labels", [[1.0, 1.0], [0.0, 0.0], [NAN, -1.0]])
def test_labels_of_one_class_give_no_threshold_and_no_calibration(labels: list[float]) -> None:
    scores = np.array([0.2, 0.4])
    assert youden_threshold(scores, np.array(labels)) is None
    assert operating_points(scores, np.array(labels)) == dict.fromkeys(OPERATING_POINTS)
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


def test_calibration_error_by_hand() -> None:
    """The lower bin has 0.1 and 0.3, one of them positive: off by 0.3. The upper has 0.8, positive: off by 0.2."""
    found, labels = np.array([0.1, 0.3, 0.8, 0.6, 0.9]), np.array([0, 1, 1, NAN, -1])
    assert calibration_error(found, labels, bins=2) == pytest.approx(2 / 3 * 0.3 + 1 / 3 * 0.2)
    assert calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0
    assert np.isnan(calibration_error(np.array([NAN, 0.5]), np.array([1, 0])))
    assert np.isnan(calibration_error(np.array([0.5]), np.array([NAN])))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calibration_error_agrees_with_torchmetrics(seed: int) -> None:
    rng = np.random.default_rng(seed)
    found, labels = rng.random(200).astype(np.float32), rng.integers(0, 2, 200)
    peer = binary_calibration_error(torch.from_numpy(found), torch.from_numpy(labels), n_bins=15, norm="l1")
    assert calibration_error(found.astype(np.float64), labels) == pytest.approx(peer.item(), abs=1e-6)


def test_probabilities_follow_the_calibration_of_the_card() -> None:
    calibration = [Calibration(2.0, -1.0), None]
    found = probabilities(np.array([[0.25, 0.5], [NAN, 0.5]], np.float32), calibration)
    assert found.ravel().tolist() == pytest.approx([calibration[0].probability(0.25), NAN, NAN, NAN], nan_ok=True)
