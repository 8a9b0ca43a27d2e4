"""What is fitted on the validation split at the end: a threshold a finding, and a probability for its score."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from cbmir.card import Calibration


def youden_threshold(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float | None:
    """The threshold t (predicted where score > t) with the greatest sensitivity + specificity - 1 (Youden's J).

    scores, labels [N]; labels other than 0 and 1 are left out. It lies half-way between two scores; of equal ones the
    lowest is taken, which favours sensitivity. None where the known labels do not hold both values, or a method has no
    scores (NaN).
    """
    known = (labels == 0) | (labels == 1)
    score, truth = scores[known].astype(np.float64), labels[known] == 1
    if truth.all() or not truth.any() or np.isnan(score).any():
        return None
    levels, level = np.unique(score, return_inverse=True)
    between = np.r_[levels[0] / 2, (levels[1:] + levels[:-1]) / 2]
    positive, negative = (np.bincount(level[side], minlength=len(levels)) for side in (truth, ~truth))
    # At threshold i the levels i and above are predicted: shares of the positives and of the negatives there.
    above = [np.cumsum(count[::-1])[::-1] / count.sum() for count in (positive, negative)]
    return float(between[np.argmax(above[0] - above[1])])


def platt_calibration(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> Calibration | None:
    """Platt scaling, lightly regularised, with a slope that never turns the ranking round. scores, labels [N].

    Where the validation split says that a higher score is not more likely positive, the slope is 0: the probability
    is then the prevalence. None where there is no threshold either.
    """
    known = (labels == 0) | (labels == 1)
    score, truth = scores[known].astype(np.float64), labels[known] == 1
    if truth.all() or not truth.any() or np.isnan(score).any():
        return None
    spread = score.std()
    if spread > 0:
        model = LogisticRegression(C=1.0).fit(score[:, None] / spread, truth)
        slope, intercept = float(model.coef_[0, 0]) / spread, float(model.intercept_[0])
        if slope > 0:
            return Calibration(float(slope), intercept)
    prevalence = truth.mean()
    return Calibration(0.0, float(np.log(prevalence / (1 - prevalence))))
