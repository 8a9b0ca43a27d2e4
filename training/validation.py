"""Validation on held-out images, for each epoch and for the finished model and its card."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import cbmir
from cbmir.card import BALANCED, ModelCard
from cbmir.choices import OPERATING_POINTS
from cbmir.files import write_json
from cbmir.manifest import Manifest
from cbmir.training import metrics
from cbmir.training.config import TrainConfig, resolve_precision
from cbmir.training.dataset import evaluation_batches, label_array, split_rows, training_targets
from cbmir.training.distillation import Teacher
from cbmir.training.encoders.encoder import grey_range_of
from cbmir.training.encoders.stages import aligned, finer_stage, stage_maps
from cbmir.training.evaluate import Vectors, embed, evaluate
from cbmir.training.linear_fit import Stages, fit_linear
from cbmir.training.model import ProxyHead, RetrievalModel
from cbmir.training.pool import Pool
from cbmir.training.rankings import CORRECTED, SPARE, Rankings, chance_values, nearest
from cbmir.training.run import RunFolder, embedding_fingerprint, load_checkpoint

log = logging.getLogger("cbmir")

#: Settings of the measurement after each epoch: neighbours that count, and the most queries and gallery images.
SELECTION_K = 10
SELECTION_QUERIES, SELECTION_GALLERY = 2_000, 5_000
#: The figures of an epoch in metrics.csv; the epoch with the highest "choice" is the best.
MEASURED = ("val_auc", "val_corrected_ndcg", "val_choice")


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Results for images that the model has not seen: scores and labels (1, 0, -1, NaN), float32 [Q, C], the figures of
    a `Pool`, and a short name for these images."""

    source: str
    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    figures: dict[str, Any]


class Validation:
    """The validation queries and the training images that they search, drawn once for the whole run.

    If there is a teacher, it embeds the training images, because the student will search its gallery. If every image
    trains, `folds` holds the cross-validation results of such a model, and epochs are not measured.
    """

    def __init__(
        self, config: TrainConfig, manifest: Manifest, images: NDArray[np.uint8], teacher: Teacher | None = None,
        folds: HeldOut | None = None,
    ) -> None:  # fmt: skip
        self.config, self.manifest, self.images, self.teacher = config, manifest, images, teacher
        self.folds = folds
        self.labels = label_array(manifest)
        draw, sides = np.random.default_rng(config.seed), []
        for split, most in (("val", SELECTION_QUERIES), ("train", SELECTION_GALLERY)):
            rows = np.array(split_rows(manifest, split))
            sides.append(np.sort(draw.choice(rows, most, replace=False)) if len(rows) > most else rows)
        self.query, self.gallery = sides
        self._patients = tuple([manifest.rows[row].patient_id for row in side] for side in (self.query, self.gallery))

    def measure(self, model: RetrievalModel) -> dict[str, float]:
        """Return the mean AUC, the nDCG@10 corrected for chance (all queries, mean of both gains), and the figure that
        selects the epoch: the mean of that nDCG and 2 AUC - 1, so that 0 is chance and 1 is perfect for both. Empty
        without held-out images."""
        if self.folds is not None:
            return {}
        if self.config.linear_fit:
            features = self.pooled(model, self.gallery)
            fit = fit_linear(features, training_targets(self.labels[self.gallery]), self.config.projection)
            gallery = fit.apply(features)[0]
            query, scores = fit.apply(self.pooled(model, self.query))
        else:
            query, scores = embed(model, self._batches(self.query))
            gallery = self._gallery_of(model) if self.teacher is None else self._teachers_gallery
        own, others = self._patients
        near = nearest(metrics.inner_products(query, gallery), own, others, SELECTION_K + SPARE)
        asking, asked = (metrics.add_negative_class(self.labels[rows]) for rows in (self.query, self.gallery))
        rankings = Rankings(near, asking, asked, own, others, SELECTION_K)
        corrected = [chance_values(rankings, gain).corrected()[0] for gain in CORRECTED.values()]
        # A missing value counts as chance, since NaN cannot be compared.
        auc = metrics.mean_of_known(metrics.class_aucs(scores, self.labels[self.query]), 0.5)
        ndcg = metrics.mean_of_known(np.array(corrected), 0.0)
        return dict(zip(MEASURED, (auc, ndcg, (2 * auc - 1 + ndcg) / 2), strict=True))

    def fitted(self, model: RetrievalModel) -> RetrievalModel:
        """Return a trained network with linear maps fitted to all training images."""
        rows = np.array(split_rows(self.manifest, "train"))
        fit = fit_linear(self.pooled(model, rows), training_targets(self.labels[rows]), self.config.projection)
        return fit.model(model)

    @torch.inference_mode()
    def pooled(self, model: RetrievalModel, rows: NDArray[np.intp]) -> Stages:
        """Return the mean features of both stages, as in `TwoStageEncoder`."""
        training, device = model.training, next(model.parameters()).device
        encoder = model.eval().encoder
        stage, _, _ = finer_stage(encoder)
        parts = []
        for batch in self._batches(rows):
            last, finer = stage_maps(encoder, stage, model.scaled(torch.from_numpy(batch).to(device)))
            parts.append([stage.float().mean(dim=(2, 3)) for stage in aligned(last, finer)])
        model.train(training)
        first, second = (torch.cat(side).cpu().numpy() for side in zip(*parts, strict=True))
        return first, second

    def _batches(self, rows: NDArray[np.intp]) -> Iterator[NDArray[np.uint8]]:
        return evaluation_batches(self.images, rows, self.config.preprocess)

    @cached_property
    def _teachers_gallery(self) -> NDArray[np.float32]:
        assert self.teacher is not None
        return self._gallery_of(self.teacher.model)

    def _gallery_of(self, model: RetrievalModel) -> NDArray[np.float32]:
        return embed(model, self._batches(self.gallery))[0]

    def held_out(self, model: RetrievalModel) -> HeldOut:
        """Return a finished model's results on the whole validation split, or those of the folds."""
        if self.folds is not None:
            return self.folds

        def vectors(side: RetrievalModel, split: str) -> Vectors:
            rows = np.array(split_rows(self.manifest, split))
            return Vectors.of_split(self.manifest, split, *embed(side, self._batches(rows)))

        val, gallery = vectors(model, "val"), vectors(self.teacher.model if self.teacher else model, "train")
        figures = Pool([evaluate(val, gallery, self.config.labels, k=SELECTION_K)], [0]).figures()
        return HeldOut("val", val.scores, val.labels, figures)


def write_card(folder: RunFolder, validation: Validation, model: RetrievalModel) -> None:
    """Write the card of a finished model, which marks the run as finished. Thresholds, operating points, calibration
    and metrics come from images that the model has not seen."""
    config, manifest, teacher = validation.config, validation.manifest, validation.teacher
    held_out, rows = validation.held_out(model), split_rows(manifest, "train")
    one_image = evaluation_batches(validation.images, rows[:1], config.preprocess)
    pairs = [(held_out.scores[:, j], held_out.labels[:, j]) for j in range(len(config.labels))]
    points = [metrics.operating_points(*pair) for pair in pairs]
    balanced = [point[BALANCED] for point in points]
    lost = [name for name, point in zip(config.labels, balanced, strict=True) if point is None]
    if lost and not np.isnan(held_out.scores).all():  # hashing methods have no scores
        log.warning("No threshold or probability for %s: the held-out images do not show both values.", ", ".join(lost))
    head = model.head
    fingerprint = embedding_fingerprint(model, config.preprocess)
    keep = ("loss", "weights", "epochs", "batch_size", "lr", "weight_decay", "seed", "fold", "manifest_fingerprint")
    facts = {name: getattr(config, name) for name in keep} | {
        "grey_range": grey_range_of(config.encoder, config.grey_range).to_json(),
        "weights": Path(config.weights).name,
        "manifest": Path(config.manifest).name,
        "source": manifest.about.get("reader", "not stated"),
        "class_weights": config.balanced,
        "linear_fit": config.linear_fit,
        "precision": resolve_precision(config.precision),
        "best_epoch": int(load_checkpoint(folder.best)["epoch"]),
        "images": {split: len(manifest.split(split)) for split in ("train", "val", "test")},
        "patients": len({row.patient_id for row in manifest.split("train")}),
        **{
            key: {
                name: {"positive": int((column == 1).sum()), "negative": int((column == 0).sum())}
                for name, column in zip(config.labels, labels.T, strict=True)
            }
            for key, labels in {"labels": validation.labels[rows], "validation_labels": held_out.labels}.items()
        },
        "held_out": held_out.source,
        "seconds": round(sum(float(row["seconds"]) for row in folder.read_epochs())),
    }
    if teacher is not None:
        taught_by = {name: getattr(teacher.card, name) for name in ("fingerprint", "encoder", "metrics")}
        facts |= {"distilled_from": taught_by, "weights_fingerprint": fingerprint}
    card = ModelCard(
        labels=manifest.labels,
        preprocess=config.preprocess,
        encoder=config.encoder,
        embedding_dim=embed(model, one_image)[0].shape[1],
        head=head.kind,
        sigma=config.sigma,
        proxies_per_class=head.counts if isinstance(head, ProxyHead) else (),
        negative_proxies=config.negative_proxies and isinstance(head, ProxyHead),
        thresholds=tuple(None if own is None else own.threshold for own in balanced),
        calibration=tuple(metrics.platt_calibration(*pair) for pair in pairs),
        fingerprint=fingerprint if teacher is None else teacher.card.fingerprint,
        training=facts,
        metrics={f"{held_out.source} {name}": held_out.figures[name] for name in ("auc", *metrics.QUERIES)},
        operating_points={name: tuple(point[name] for point in points) for name in OPERATING_POINTS},
        versions={"cbmir": cbmir.__version__} | {name: version(name) for name in ("torch", "torchvision", "lightning")},
    )
    write_json(folder.card, card.to_json())
    log.info("Finished: best epoch %s, %s.", card.training["best_epoch"], folder.path)
