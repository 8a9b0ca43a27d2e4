"""The linear maps at the end of training, against scikit-learn's ridge regression and against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from cbmir.errors import EncoderError
from cbmir.training.encoders.encoder import build_encoder
from cbmir.training.encoders.stages import aligned, finer_stage, stage_maps
from cbmir.training.linear_fit import _NEIGHBOURS, _PARTS, _SCORES, Stages, fit_linear
from cbmir.training.model import LinearHead, RetrievalModel

LABELS, FEATURES, DIM = 3, (14, 6), 12


def features(count: int = 60, seed: int = 0) -> tuple[Stages, torch.Tensor]:
    """Noisy features of two stages that depend on the labels; some labels are unknown."""
    rng = np.random.default_rng(0)
    ways = [rng.normal(size=(LABELS, dim)) for dim in FEATURES]
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, (count, LABELS)).astype(np.float32)
    last, finer = (targets @ way + rng.normal(size=(count, way.shape[1])) + 5 for way in ways)
    targets[rng.random(targets.shape) < 0.05] = np.nan
    return (last.astype(np.float32), (7 * finer).astype(np.float32)), torch.from_numpy(targets)


def joined(stages: Stages, of: Stages) -> np.ndarray:
    """Both stages concatenated, each divided by the length of its deviations in `of`."""
    parts = [stage.astype(np.float64) / np.sqrt(own.var(axis=0, dtype=np.float64).sum())
             for stage, own in zip(stages, of, strict=True)]  # fmt: skip
    return np.hstack(parts)


def ridge(x: np.ndarray, targets: np.ndarray, strength: float) -> np.ndarray:
    """Ridge regression [D, K] by scikit-learn; unknown targets become the mean of the known ones."""
    y = np.where(np.isnan(targets), np.nanmean(targets, axis=0), targets) - np.nanmean(targets, axis=0)
    x = x - x.mean(axis=0)
    alpha = strength * np.trace(x.T @ x) / x.shape[1]
    return np.asarray(Ridge(alpha=alpha, fit_intercept=False).fit(x, y).coef_.T)


def test_the_parts_are_ridge_regressions_and_principal_directions() -> None:
    pooled, targets = features()
    fit = fit_linear(pooled, targets, DIM)
    assert [weight.shape for weight in fit.weights] == [(DIM, dim) for dim in FEATURES]
    assert fit.head_weight.shape == (LABELS, DIM)
    classes = targets.numpy()
    healthy = [1.0 if (row == 0).all() else 0.0 if (row == 1).any() else np.nan for row in classes]
    classes = np.column_stack([classes, healthy])
    z = pooled[0] @ fit.weights[0].T + pooled[1] @ fit.weights[1].T + fit.bias
    neighbours, scores, looks = np.split(z, [LABELS + 1, 2 * LABELS + 1], axis=1)
    x = joined(pooled, pooled)
    for found, strength, share in ((neighbours, _NEIGHBOURS, _PARTS[0]), (scores, _SCORES, _PARTS[1])):
        expected = (x - x.mean(axis=0)) @ ridge(x, classes, strength)[:, : found.shape[1]]
        if found is scores:
            expected /= expected.std(axis=0)
        expected *= share / np.sqrt((expected**2).sum(axis=1).mean())
        np.testing.assert_allclose(found, expected, atol=2e-5)
    last = x[:, : FEATURES[0]]
    _, _, directions = np.linalg.svd(last, full_matrices=False)
    expected = last @ directions[: DIM - 2 * LABELS - 1].T
    expected *= _PARTS[2] / np.sqrt((expected**2).sum(axis=1).mean())
    np.testing.assert_allclose(np.abs(looks), np.abs(expected), atol=2e-5)  # the sign of a direction is arbitrary


def test_scores_rank_as_the_strong_ridge_does() -> None:
    pooled, targets = features()
    unseen, _ = features(30, seed=1)
    fit = fit_linear(pooled, targets, DIM)
    _, scores = fit.apply(unseen)
    expected = joined(unseen, pooled) @ ridge(joined(pooled, pooled), targets.numpy(), _SCORES)
    for label in range(LABELS):
        np.testing.assert_array_equal(np.argsort(scores[:, label]), np.argsort(expected[:, label]))
    _, at_the_mean = fit.apply(tuple(stage.mean(axis=0, keepdims=True) for stage in pooled))  # type: ignore[arg-type]
    np.testing.assert_allclose(at_the_mean[0], np.nanmean(targets.numpy(), axis=0), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    # With 40 pixels, one stage has 3 cells and the last 2; with 48, DenseNet's have 3 and 1.
    [("timm:test_resnet", 64), ("timm:test_resnet", 40), ("densenet121", 48)],
)
def test_the_fitted_model_gives_the_same_answers_as_the_fit(name: str, size: int) -> None:
    encoder, dim = build_encoder(name)
    trained = RetrievalModel(encoder, LinearHead(dim, LABELS)).eval()
    image = torch.randint(0, 256, (50, 1, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stage, _, _ = finer_stage(encoder)
    with torch.inference_mode():
        last, finer = stage_maps(encoder, stage, trained.scaled(image))
        last, finer = aligned(last, finer)
        pooled = tuple(one.mean(dim=(2, 3)).numpy() for one in (last, finer))
        fit = fit_linear(pooled, features(50)[1], 16)  # type: ignore[arg-type]
        embedding, scores, feature_map = fit.model(trained)(image)
    expected = fit.apply(pooled)  # type: ignore[arg-type]
    np.testing.assert_allclose(embedding.numpy(), expected[0], atol=1e-4)
    np.testing.assert_allclose(scores.numpy(), expected[1], atol=1e-4)
    assert feature_map.shape[2:] == finer.shape[2:]
    mean = feature_map.mean(dim=(2, 3))
    np.testing.assert_allclose((mean / mean.norm(dim=1, keepdim=True)).numpy(), expected[0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("resnet18", "layer3"), ("densenet121", "features.denseblock3"), ("timm:tf_efficientnet_lite0", "blocks.4")],
)
def test_the_finer_stage_is_the_last_with_twice_the_resolution(name: str, stage: str) -> None:
    encoder, dim = build_encoder(name)
    found, finer, last = finer_stage(encoder)
    assert (found, last) == (stage, dim) and encoder.training
    maps = stage_maps(encoder.eval(), found, torch.zeros(1, 1, 64, 64))
    assert [one.shape for one in maps] == [(1, dim, 2, 2), (1, finer, 4, 4)]


def test_an_encoder_without_a_finer_stage_is_refused() -> None:
    with pytest.raises(EncoderError, match="twice as many cells"):
        finer_stage(torch.nn.Sequential(torch.nn.Conv2d(1, 4, 4, stride=4)))


def test_a_finding_without_images_and_few_features() -> None:
    (last, finer), targets = features()
    targets[:, 1] = 0
    targets[:, 2] = torch.nan
    fit = fit_linear((last[:, :4], finer), targets, DIM)
    assert len(fit.bias) == 2 * LABELS + 1 + 4, "no more directions than features"
    embedding, scores = fit.apply((last[:, :4], finer))
    assert np.isfinite(embedding).all() and np.isfinite(scores).all()
    assert scores[:, 1].max() < 0.01


def test_the_model_is_on_the_device_of_the_network() -> None:
    encoder, dim = build_encoder("timm:test_resnet")
    trained = RetrievalModel(encoder, LinearHead(dim, LABELS)).eval()
    _, finer, last = finer_stage(encoder)
    rng = np.random.default_rng(0)
    pooled = (rng.random((50, last), np.float32), rng.random((50, finer), np.float32))
    fit = fit_linear(pooled, features(50)[1], 16)
    model = fit.model(trained.to("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
