"""Distillation: a light encoder that answers in the embedding space of a trained model, its teacher.

The gallery stays the teacher's: what it has indexed, the student queries. The student is an encoder, a 1x1 projection
to the teacher's embedding dimension, and the teacher's head, copied and frozen; its card has the teacher's fingerprint.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbmir.card import ModelCard
from cbmir.errors import RunError
from cbmir.manifest import Manifest
from cbmir.training.config import TrainConfig
from cbmir.training.encoder import build_encoder, with_projection
from cbmir.training.losses.distill import DistillationLoss
from cbmir.training.model import RetrievalModel
from cbmir.training.run import RunFolder, load_model

log = logging.getLogger("cbmir")


@dataclass(frozen=True, eq=False)
class Teacher:
    """The model of a finished run. It is no part of the student's: never trained, saved, or put in training mode."""

    model: RetrievalModel
    card: ModelCard

    @torch.no_grad()
    def pooled(self, image: Tensor) -> Tensor:
        """Pooled features, float32 [N, D], of uint8 images [N, 1, S, S]: what the student is taught.

        Always in float32, as the gallery that it is to query.
        """
        with torch.autocast(image.device.type, enabled=False):
            _, pooled, _ = self.model.features(image)
        return pooled


def teacher_options(run: Path, manifest_fingerprint: str) -> dict[str, Any]:
    """The options of TrainConfig that the teacher in `run` decides: its folder, head, image size, and the fold.

    The fold is the teacher's where the student learns on the same table, so that no query was seen by the teacher.
    Raises RunError for a run that is not finished.
    """
    folder = RunFolder(run)
    config, card = folder.read_config(), folder.read_card()
    return {
        "distill": str(run.resolve()), "teacher_fingerprint": card.weights, "loss": "distill", "sigma": card.sigma,
        "negative_proxies": card.negative_proxies, "image_size": card.preprocess.crop,
        "intensity": card.preprocess.intensity,
        "fold": config.fold if config.manifest_fingerprint == manifest_fingerprint else "",
    }  # fmt: skip


def load_teacher(config: TrainConfig, manifest: Manifest) -> Teacher:
    """The teacher of a student's run. Raises RunError for an unfinished run or a hashing model, for a teacher that is
    not the one the run began with, and for labels, image size or fold that are not the teacher's.

    Logs a warning where the teacher was trained on another table."""
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
    """An untrained student and its loss: encoder from `weights`, a random projection, the teacher's head, frozen."""
    encoder, dim = build_encoder(config.encoder, weights)
    head = copy.deepcopy(teacher.model.head).train().requires_grad_(False)
    return RetrievalModel(with_projection(encoder, dim, teacher.card.embedding_dim), head), DistillationLoss()
