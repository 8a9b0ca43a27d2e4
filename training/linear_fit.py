"""The last step of the recipe `fitted`: linear maps from the network's features to the findings, in closed form.

Usually a network's last layer is trained together with the rest, on augmented images that never repeat exactly. Here
two ridge regressions of the labels on the trained features (A. Hoerl and R. Kennard, 1970) replace it: one with a
strong penalty classifies unseen images, one with a weak penalty places gallery images with the same labels close
together. The features come from the encoder's last two stages. All maps are linear and are applied before the mean over
the cells, so evidence maps remain exact sums. docs/method.md explains each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbmir.training.encoders.stages import TwoStageEncoder
from cbmir.training.losses.targets import with_negative_class
from cbmir.training.metrics import Floats
from cbmir.training.model import LinearHead, RetrievalModel

#: Ridge penalties for neighbours and for scores, as multiples of the mean eigenvalue of the features' scatter matrix.
_NEIGHBOURS, _SCORES = 6.0, 30.0
#: Root mean square length over the training images of the embedding's parts: labels, scores and appearance.
_PARTS = (1.0, 0.5, 1.0)

Stages = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class LinearFit:
    """Maps from the pooled features f_s of both stages to z = sum_s weights[s] f_s + bias [d], and from z to the logits
    head_weight z + head_bias [C]. The embedding is z / |z|. All are float32; weights[s] is [d, D_s]."""

    weights: Stages
    bias: NDArray[np.float32]
    head_weight: NDArray[np.float32]
    head_bias: NDArray[np.float32]

    def apply(self, pooled: Stages) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return unit embeddings [N, d] and scores [N, C] of pooled features [N, D_s], as the fitted model does."""
        z = self.bias + sum(stage @ weight.T for stage, weight in zip(pooled, self.weights, strict=True))
        logits = z @ self.head_weight.T + self.head_bias
        length = np.linalg.norm(z, axis=1, keepdims=True).clip(1e-12)
        return z / length, torch.from_numpy(logits).sigmoid().numpy()

    def model(self, trained: RetrievalModel) -> RetrievalModel:
        """Return the trained network with these maps, on its device: its feature maps projected, and a linear head."""
        dim = len(self.bias)
        encoder = TwoStageEncoder(trained.encoder, dim)
        head = LinearHead(dim, len(self.head_bias))
        for layer, tensors in (
            (encoder.projection, {"weight": self.weights[0][:, :, None, None], "bias": self.bias}),
            (encoder.finer, {"weight": self.weights[1][:, :, None, None]}),
            (head.linear, {"weight": self.head_weight, "bias": self.head_bias}),
        ):
            layer.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
        device = next(trained.parameters()).device
        return RetrievalModel(encoder, head).train(trained.training).to(device)


def fit_linear(pooled: Stages, targets: Tensor, dim: int) -> LinearFit:
    """Fit both maps to the training images.

    Args:
        pooled: [N, D_s] of each stage, the last one first: the trained network's features in evaluation mode.
        targets: [N, C] in {0, 1, NaN}. An unknown label counts as the mean of the known ones, so a finding with few
            known labels has less influence.
        dim: Dimensions of the embedding, above 2 C + 1; there are fewer if the last stage has too few features.
    """
    labels = targets.shape[1]
    classes = with_negative_class(targets).numpy().astype(np.float64)
    known = ~np.isnan(classes)
    prior = np.where(known, classes, 0).sum(axis=0) / known.sum(axis=0).clip(1)
    wanted = np.where(known, classes - prior, 0)

    # Scale both stages to the same total variance.
    scales = [1 / max(float(np.sqrt(stage.var(axis=0, dtype=np.float64).sum())), 1e-12) for stage in pooled]
    joined = np.hstack([scale * stage.astype(np.float64) for scale, stage in zip(scales, pooled, strict=True)])
    mean = joined.mean(axis=0)
    features = joined - mean
    values, vectors = np.linalg.eigh(features.T @ features)
    turned = vectors.T @ (features.T @ wanted)

    def ridge(strength: float) -> Floats:
        found: Floats = vectors @ (turned / (values + strength * values.mean())[:, None])
        return found

    neighbours, scores = ridge(_NEIGHBOURS), ridge(_SCORES)[:, :labels]
    scores /= _spread(features @ scores)
    last = joined[:, : pooled[0].shape[1]]
    # The last eigenvectors have the largest eigenvalues. Without centring, the very last is close to the mean.
    looks = np.zeros((joined.shape[1], min(dim - 2 * labels - 1, last.shape[1])))
    looks[: last.shape[1]] = np.linalg.eigh(last.T @ last)[1][:, ::-1][:, : looks.shape[1]]
    parts, centres = (neighbours, scores, looks), (mean, mean, np.zeros_like(mean))
    factors = [
        share / _length((joined - centre) @ part) for share, part, centre in zip(_PARTS, parts, centres, strict=True)
    ]
    weight = np.hstack([factor * part for factor, part in zip(factors, parts, strict=True)])
    bias = -np.hstack([factor * centre @ part for factor, part, centre in zip(factors, parts, centres, strict=True)])
    head = np.zeros((labels, weight.shape[1]))
    head[range(labels), range(labels + 1, 2 * labels + 1)] = 1 / factors[1]
    rare = prior[:labels].clip(1e-3, 1 - 1e-3)
    stages = np.split(weight.T, [last.shape[1]], axis=1)
    first, second = (_float32(scale * stage) for scale, stage in zip(scales, stages, strict=True))
    return LinearFit((first, second), *map(_float32, (bias, head, np.log(rare / (1 - rare)))))


def _float32(values: Floats) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, np.float32)


def _spread(values: Floats) -> Floats:
    """Return the standard deviation of each column, with 1 instead of 0 (e.g. for a finding that no image has)."""
    deviation: Floats = values.std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)


def _length(values: Floats) -> float:
    return float(np.sqrt((values**2).sum(axis=1).mean())) or 1.0
