"""The contenders of `evidence.py`: methods that rate how much each cell of an image supports each finding.

Each returns float64 [C, h, w] for an image: one map per label. The number of cells depends on the method.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_grad_cam import GradCAM, GradCAMPlusPlus
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

from cbmir.card import ModelCard
from cbmir.runtime.evidence import contrasts, evidence_map, scoring_vectors
from cbmir.runtime.imaging.preprocess import centre_crop
from cbmir.training.model import LinearHead, RetrievalModel

Square = NDArray[np.uint8]
Floats = NDArray[np.float32]
Cells = NDArray[np.float64]

PLAIN, CONTRAST = "plain", "contrast"
WITH_NEGATIVE, FINER = "contrast, negative class among the others", "contrast, cells of half the width"
GRAD_CAM, GRAD_CAM_PP = "Grad-CAM", "Grad-CAM++"


class Scores(nn.Module):
    """A model's scores before the final squashing: [N, 1, S, S] -> [N, C]."""

    def __init__(self, model: RetrievalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        embedding, pooled, _ = self.model.features(image)
        head = self.model.head
        if isinstance(head, LinearHead):
            return head.logits(pooled)
        return head.log_similarity(embedding).amax(dim=2)[:, : head.labels]


class _AsCells:
    """A mixin that keeps the library from enlarging its maps."""

    def get_target_width_height(self, input_tensor: Tensor) -> None:
        return None


class _GradCam(_AsCells, GradCAM):
    pass


class _GradCamPlusPlus(_AsCells, GradCAMPlusPlus):
    pass


class Network:
    """A trained model, and its maps of an image, given as the square uint8 [R, R] before the crop."""

    def __init__(self, model: RetrievalModel, card: ModelCard) -> None:
        self.model, self.card = model, card
        self.rows = model.head.rows().numpy()
        self.methods: dict[str, Callable[[Square], Cells]] = {PLAIN: self._plain, CONTRAST: self._contrast}
        if card.negative_proxies:
            self.methods[WITH_NEGATIVE] = self._with_negative
        self.methods |= {FINER: self._finer, GRAD_CAM: self._grad_cam, GRAD_CAM_PP: self._grad_cam_plus_plus}

    def _plain(self, square: Square) -> Cells:
        cells, vectors = self._explained(square)
        return np.array([evidence_map(cells, vector) for vector in vectors.values()], np.float64)

    def _contrast(self, square: Square) -> Cells:
        cells, vectors = self._explained(square)
        return np.array([evidence_map(cells, vector) for vector in contrasts(vectors).values()], np.float64)

    def _with_negative(self, square: Square) -> Cells:
        cells, vectors = self._explained(square)
        negative = self.rows[sum(self.card.proxies_per_class[:-1]) :]
        nearest = negative[np.argmax(negative @ cells.mean(axis=(1, 2)))]
        wider = contrasts({**vectors, "": nearest})
        return np.array([evidence_map(cells, wider[name]) for name in vectors], np.float64)

    def _finer(self, square: Square) -> Cells:
        """Return `_contrast` of four crops, shifted by a quarter of a cell each way, with interleaved cells."""
        cells, vectors = self._explained(square)
        _, h, w = cells.shape
        spec = self.card.preprocess
        start, step = (spec.resize - spec.crop) // 2, round(spec.crop / h / 4)
        finer = np.zeros((len(vectors), 2 * h, 2 * w))
        for down, right in np.ndindex(2, 2):
            top, left = (start + (2 * one - 1) * step for one in (down, right))
            shifted, _ = self._features(square[top : top + spec.crop, left : left + spec.crop])
            finer[:, down::2, right::2] = [evidence_map(shifted, one) / 4 for one in contrasts(vectors).values()]
        return finer

    def _grad_cam(self, square: Square) -> Cells:
        return self._of_library(_GradCam, square)

    def _grad_cam_plus_plus(self, square: Square) -> Cells:
        return self._of_library(_GradCamPlusPlus, square)

    def _of_library(self, method: type[GradCAM], square: Square) -> Cells:
        """Return maps for each finding's score before squashing, at the layer whose mean is the embedding."""
        labels = len(self.card.labels)
        image = torch.from_numpy(centre_crop(square, self.card.preprocess).copy())
        with method(Scores(self.model), [self.model.encoder]) as cam:
            targets = [ClassifierOutputTarget(label) for label in range(labels)]
            cells = cam(image.expand(labels, 1, *image.shape), targets)
        return np.asarray(cells, np.float64)

    def _explained(self, square: Square) -> tuple[Floats, dict[str, Floats]]:
        """Return the feature map [D, h, w], and a vector [D] for each finding."""
        cells, embedding = self._features(centre_crop(square, self.card.preprocess))
        return cells, scoring_vectors(self.card, self.rows, embedding)

    @torch.inference_mode()
    def _features(self, crop: Square) -> tuple[Floats, Floats]:
        embedding, _, cells = self.model.features(torch.from_numpy(crop.copy())[None, None])
        return cells[0].numpy(), embedding[0].numpy()
