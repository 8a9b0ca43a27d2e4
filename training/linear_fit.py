"""The last step of the recipe: two linear maps from the network's features to the findings, fitted in closed form.

A network's own last layer is trained with all the rest, on images that are never twice the same, and is no better than
the rest when training stops. Ridge regression of the labels on the finished features (A. Hoerl and R. Kennard, 1970)
is better at both jobs: strongly regularised it classifies images that it has not seen, weakly regularised it puts each
image of the gallery where its labels say. Both are linear and stand before the mean over the cells, so that evidence
maps stay exact sums. docs/method.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbmir.errors import RunError
from cbmir.training.encoder import with_projection
from cbmir.training.losses.targets import with_negative_class
from cbmir.training.metrics import Floats
from cbmir.training.model import LinearHead, RetrievalModel

#: Strength of the ridge, in mean eigenvalues of the features' scatter: for neighbours, and for scores.
_NEIGHBOURS, _SCORES = 3.0, 100.0
#: Root mean square length of the parts of the embedding over the training images: where its labels put an image, what
#: its scores are, and how it looks (principal components of the features), whatever the findings.
_PARTS = (1.0, 0.5, 0.6)


@dataclass(frozen=True, eq=False)
class LinearFit:
    """From pooled features f [D] to z = weight f + bias [d], whose direction is the embedding, and from there to the
    logits head_weight z + head_bias [C]. float32 all."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    head_weight: NDArray[np.float32]
    head_bias: NDArray[np.float32]

    def apply(self, pooled: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Embeddings [N, d] of unit length and scores [N, C] of pooled features [N, D], as the fitted model's."""
        z = pooled.astype(np.float32) @ self.weight.T + self.bias
        logits = z @ self.head_weight.T + self.head_bias
        length = np.linalg.norm(z, axis=1, keepdims=True).clip(1e-12)
        return z / length, torch.from_numpy(logits).sigmoid().numpy()

    def model(self, trained: RetrievalModel) -> RetrievalModel:
        """The trained network with these maps: a projection of its feature map, and a linear head."""
        dim, features = self.weight.shape
        encoder = with_projection(trained.encoder, features, dim)
        head = LinearHead(dim, len(self.head_weight))
        for layer, weight, bias in (
            (encoder[1], self.weight[:, :, None, None], self.bias),
            (head.linear, self.head_weight, self.head_bias),
        ):
            layer.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)})
        return RetrievalModel(encoder, head).train(trained.training)


def fit_linear(pooled: NDArray[np.floating], targets: Tensor, dim: int) -> LinearFit:
    """Fit both maps to the training images.

    Args:
        pooled: [N, D], the trained network's features of each image, in evaluation mode.
        targets: [N, C] in {0, 1, NaN}. An unknown label counts as the mean of the known ones: it pulls nowhere.
        dim: Of the embedding; fewer where the features have fewer.

    Raises:
        RunError: `dim` has no room for the findings.
    """
    labels = targets.shape[1]
    if dim <= 2 * labels + 1:
        raise RunError(f"expected --projection above {2 * labels + 1}, twice the {labels} findings and one more, found "
                       f"{dim}")  # fmt: skip
    classes = with_negative_class(targets).numpy().astype(np.float64)
    known = ~np.isnan(classes)
    prior = np.where(known, classes, 0).sum(axis=0) / known.sum(axis=0).clip(1)
    wanted = np.where(known, classes - prior, 0)
    mean = pooled.mean(axis=0, dtype=np.float64)
    features = pooled - mean
    values, vectors = np.linalg.eigh(features.T @ features)
    turned = vectors.T @ (features.T @ wanted)

    def ridge(strength: float) -> Floats:
        found: Floats = vectors @ (turned / (values + strength * values.mean())[:, None])
        return found

    neighbours, scores = ridge(_NEIGHBOURS), ridge(_SCORES)[:, :labels]
    scores /= _spread(features @ scores)
    # The last eigenvectors are those of the largest values.
    looks = vectors[:, ::-1][:, : dim - 2 * labels - 1]
    factors = [
        share / _length(features @ part) for share, part in zip(_PARTS, (neighbours, scores, looks), strict=True)
    ]
    weight = np.hstack([factor * part for factor, part in zip(factors, (neighbours, scores, looks), strict=True)])
    head = np.zeros((labels, weight.shape[1]))
    head[range(labels), range(labels + 1, 2 * labels + 1)] = 1 / factors[1]
    rare = prior[:labels].clip(1e-3, 1 - 1e-3)
    maps = (weight.T, -mean @ weight, head, np.log(rare / (1 - rare)))
    return LinearFit(*(np.ascontiguousarray(one, np.float32) for one in maps))


def _spread(values: Floats) -> Floats:
    """Standard deviation of each column; 1 where it is 0, as for a finding that no image has."""
    deviation: Floats = values.std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)


def _length(values: Floats) -> float:
    return float(np.sqrt((values**2).sum(axis=1).mean())) or 1.0
