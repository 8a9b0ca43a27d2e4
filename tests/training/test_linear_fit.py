"""The linear maps at the end of training, against ridge regression as scikit-learn has it and against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from cbmir.errors import RunError
from cbmir.training.linear_fit import _NEIGHBOURS, _PARTS, _SCORES, LinearFit, fit_linear
from cbmir.training.model import LinearHead, RetrievalModel

LABELS, FEATURES, DIM = 3, 20, 12


def features(count: int = 60, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Features that tell the labels, with noise; some labels are unknown."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, (count, LABELS)).astype(np.float32)
    pooled = targets @ rng.normal(size=(LABELS, FEATURES)) + rng.normal(size=(count, FEATURES)) + 5
    targets[rng.random(targets.shape) < 0.05] = np.nan
    return pooled.astype(np.float32), torch.from_numpy(targets)


def ridge(pooled: np.ndarray, targets: np.ndarray, strength: float) -> np.ndarray:
    """[D, K] by scikit-learn; an unknown target is the mean of the known ones."""
    x = pooled.astype(np.float64) - pooled.mean(axis=0, dtype=np.float64)
    y = np.where(np.isnan(targets), np.nanmean(targets, axis=0), targets)
    alpha = strength * np.trace(x.T @ x) / x.shape[1]
    return np.asarray(Ridge(alpha=alpha, fit_intercept=False).fit(x, y - np.nanmean(targets, axis=0)).coef_.T)


def parts_of(fit: LinearFit, pooled: np.ndarray) -> list[np.ndarray]:
    z = pooled @ fit.weight.T + fit.bias
    return [z[:, : LABELS + 1], z[:, LABELS + 1 : 2 * LABELS + 1], z[:, 2 * LABELS + 1 :]]


def test_the_parts_are_ridge_regressions_and_principal_components() -> None:
    pooled, targets = features()
    fit = fit_linear(pooled, targets, DIM)
    assert (fit.weight.shape, fit.head_weight.shape) == ((DIM, FEATURES), (LABELS, DIM))
    classes = targets.numpy()
    healthy = [1.0 if (row == 0).all() else 0.0 if (row == 1).any() else np.nan for row in classes]
    classes = np.column_stack([classes, healthy])
    neighbours, scores, looks = parts_of(fit, pooled)
    centred = pooled.astype(np.float64) - pooled.mean(axis=0, dtype=np.float64)
    for found, strength, share in ((neighbours, _NEIGHBOURS, _PARTS[0]), (scores, _SCORES, _PARTS[1])):
        expected = centred @ ridge(pooled, classes, strength)[:, : found.shape[1]]
        if strength == _SCORES:
            expected /= expected.std(axis=0)
        expected *= share / np.sqrt((expected**2).sum(axis=1).mean())
        np.testing.assert_allclose(found, expected, atol=2e-5)
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ components[: DIM - 2 * LABELS - 1].T
    expected *= _PARTS[2] / np.sqrt((expected**2).sum(axis=1).mean())
    np.testing.assert_allclose(np.abs(looks), np.abs(expected), atol=2e-5)  # a component has no sign


def test_scores_rank_as_the_strong_ridge_does() -> None:
    pooled, targets = features()
    unseen, _ = features(30, seed=1)
    fit = fit_linear(pooled, targets, DIM)
    _, scores = fit.apply(unseen)
    expected = (unseen - pooled.mean(axis=0)) @ ridge(pooled, targets.numpy(), _SCORES)
    for label in range(LABELS):
        np.testing.assert_array_equal(np.argsort(scores[:, label]), np.argsort(expected[:, label]))
    prior = np.nanmean(targets.numpy(), axis=0)
    _, at_the_mean = fit.apply(pooled.mean(axis=0, keepdims=True))
    np.testing.assert_allclose(at_the_mean[0], prior, atol=1e-4)


def test_the_fitted_model_answers_as_the_fit_does() -> None:
    pooled, targets = features()
    fit = fit_linear(pooled, targets, DIM)
    trained = RetrievalModel(torch.nn.Conv2d(1, FEATURES, 4, stride=4), LinearHead(FEATURES, LABELS)).eval()
    image = torch.randint(0, 256, (5, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        embedding, scores, feature_map = fit.model(trained)(image)
        expected = fit.apply(trained.features(image)[1].numpy())
    np.testing.assert_allclose(embedding.numpy(), expected[0], atol=1e-5)
    np.testing.assert_allclose(scores.numpy(), expected[1], atol=1e-5)
    mean = feature_map.mean(dim=(2, 3))
    np.testing.assert_allclose((mean / mean.norm(dim=1, keepdim=True)).numpy(), expected[0], atol=1e-5)


def test_a_finding_without_images_and_few_features() -> None:
    pooled, targets = features()
    targets[:, 1] = 0
    targets[:, 2] = torch.nan
    fit = fit_linear(pooled[:, :4], targets, DIM)
    assert fit.weight.shape == (2 * LABELS + 1 + 4, 4), "no more components than features"
    embedding, scores = fit.apply(pooled[:, :4])
    assert np.isfinite(embedding).all() and np.isfinite(scores).all()
    assert scores[:, 1].max() < 0.01


def test_a_dimension_without_room_for_the_findings_is_refused() -> None:
    pooled, targets = features()
    with pytest.raises(RunError, match=r"expected --projection above 7, .*found 7"):
        fit_linear(pooled, targets, 7)
