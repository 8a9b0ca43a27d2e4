"""Distillation: train a light encoder, the student, to embed images into the space of a trained model, its teacher.

The student searches the teacher's gallery. It consists of an encoder, a 1x1 projection to the teacher's embedding
dimension, and a frozen copy of the teacher's head. Its card has the teacher's fingerprint.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.card import ModelCard
from cbmir.errors import RunError
from cbmir.manifest import Manifest
from cbmir.training.config import TrainConfig
from cbmir.training.encoders.stages import with_projection
from cbmir.training.model import LinearHead, ProxyHead, RetrievalModel
from cbmir.training.run import RunFolder, encoder_for, load_model
from cbmir.training.splits import EVERY_IMAGE

log = logging.getLogger("cbmir")

#: Temperature of the softmax over the cosines with the other images of a batch.
TEMPERATURE = 0.05
# Keeps log(score) and log(1 - score) finite.
_EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Teacher:
    """The model of a finished run. It is not part of the student, and is never trained, saved or in training mode."""

    model: RetrievalModel
    card: ModelCard

    @torch.no_grad()
    def pooled(self, image: Tensor) -> Tensor:
        """Return the pooled features that the student learns, float32 [N, D], for uint8 images [N, 1, S, S].

        They are always computed in float32, like the gallery that the student will search.
        """
        with torch.autocast(image.device.type, enabled=False):
            _, pooled, _ = self.model.features(image)
        return pooled


def teacher_options(run: Path, manifest_fingerprint: str) -> dict[str, Any]:
    """Return the options of TrainConfig that the teacher in `run` determines: its folder, head, image size and fold.

    On the same table the student uses the teacher's fold, so that the teacher has not seen the queries. Raises RunError
    for an unfinished run, and for a teacher that was trained on every image of the table.
    """
    folder = RunFolder(run)
    config, card = folder.read_config(), folder.read_card()
    fold = config.fold if config.manifest_fingerprint == manifest_fingerprint else ""
    if fold == EVERY_IMAGE:
        raise RunError(f"{run}: expected a teacher that left out images, which choose the student's epoch; found one "
                       f"that was trained on every image of this table; use the run of a fold")  # fmt: skip
    return {
        "distill": str(run.resolve()), "teacher_fingerprint": card.weights, "loss": "distill", "sigma": card.sigma,
        "negative_proxies": card.negative_proxies, "linear_fit": False, "image_size": card.preprocess.crop,
        "intensity": card.preprocess.intensity,
        "fold": fold,
    }  # fmt: skip


def load_teacher(config: TrainConfig, manifest: Manifest) -> Teacher:
    """Load the teacher of a student's run.

    Logs a warning if the teacher was trained on another table. Raises RunError if the teacher's run is unfinished, if
    it is a hashing model or not the teacher that the run began with, or if labels, image size or fold differ.
    """
    model, card, own = load_model(Path(config.distill))
    if card.weights != config.teacher_fingerprint:
        raise RunError(
            f"{config.distill}: expected the teacher that this run began with (fingerprint "
            f"{config.teacher_fingerprint}), found another ({card.weights}); restore it or start another run"
        )
    wanted: dict[str, tuple[object, object]] = {
        "labels": (card.labels.names, manifest.labels.names),
        "image size or intensity": (card.preprocess, config.preprocess),
    }
    if own.manifest_fingerprint == config.manifest_fingerprint:
        wanted["fold"] = (own.fold, config.fold)
    else:
        log.warning("This is not the table that the teacher was trained on: patients that it was trained on may be "
                    "among this run's val and test queries.")  # fmt: skip
    for name, (teachers, students) in wanted.items():
        if teachers != students:
            raise RunError(f"{config.distill}: expected the teacher's {name}, {teachers}, found {students}")
    return Teacher(model, card)


def build_student(config: TrainConfig, teacher: Teacher, *, weights: str) -> tuple[RetrievalModel, DistillationLoss]:
    """Build an untrained student (an encoder with `weights`, a random projection and the teacher's frozen head) and its
    loss."""
    encoder, dim = encoder_for(config, weights)
    head = copy.deepcopy(teacher.model.head).train().requires_grad_(False)
    return RetrievalModel(with_projection(encoder, dim, teacher.card.embedding_dim), head), DistillationLoss()


class DistillationLoss(nn.Module):
    """The sum of three terms, each zero if the student matches the teacher. Labels are not used.

    s_i and t_i are the unit embeddings of image i by student and teacher. Both use the teacher's head.

    - Regression: 1 - s_i . t_i = |s_i - t_i|^2 / 2. For a student that searches the teacher's gallery, plain regression
      is hard to beat (M. Budnik and Y. Avrithis, "Asymmetric metric learning for knowledge transfer", CVPR 2021).
    - Neighbours: T KL(softmax_j(t_i . t_j / T) || softmax_j(s_i . t_j / T)) over the other images j of the batch. The
      student's query must rank the teacher's gallery as the teacher's query does (H. Wu et al., "Contextual similarity
      distillation for asymmetric image retrieval", CVPR 2022, who use each image's neighbours in a gallery). With the
      factor T, its gradient in a cosine is a difference of probabilities, about as large as the regression's.
    - Scores: the mean over labels of the KL between the Bernoulli distributions that the head returns for both
      (G. Hinton et al., "Distilling the knowledge in a neural network", 2015). A linear head depends on the length of
      the features, which the other two terms ignore.
    """

    def forward(self, head: ProxyHead | LinearHead, pooled: Tensor, embedding: Tensor, taught: Tensor) -> Tensor:
        """Return the loss. `taught`, float32 [N, D], holds the teacher's pooled features of the images in `pooled`."""
        teacher = functional.normalize(taught, dim=1)
        regression = 1 - (embedding * teacher).sum(dim=1).mean()
        scores = bernoulli_divergence(head(taught, teacher), head(pooled, embedding))
        return regression + neighbour_divergence(teacher, embedding) + scores


def neighbour_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return T times the mean KL between the models' distributions over an image's neighbours: two [N, D] -> scalar.

    It is 0 for fewer than three images: a distribution over a single neighbour is constant.
    """
    if len(teacher) < 3:
        return student.new_zeros(())
    own = torch.eye(len(teacher), dtype=torch.bool, device=teacher.device)
    wanted, found = (
        (side @ teacher.T / TEMPERATURE)[~own].view(len(teacher), -1).log_softmax(dim=1) for side in (teacher, student)
    )
    return TEMPERATURE * functional.kl_div(found, wanted, reduction="batchmean", log_target=True)


def bernoulli_divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the mean KL between probabilities: two [N, C] in [0, 1] -> scalar."""
    p, q = (side.clamp(_EPSILON, 1 - _EPSILON) for side in (wanted, found))
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
