"""The validation split: what it says of an epoch, and of the finished model, whose card it fills."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

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
from cbmir.training.encoder import aligned, finer_stage, stage_maps
from cbmir.training.evaluate import Vectors, embed, evaluate
from cbmir.training.linear_fit import Stages, fit_linear
from cbmir.training.model import ProxyHead, RetrievalModel
from cbmir.training.pool import Pool
from cbmir.training.rankings import CORRECTED, SPARE, Rankings, chance_values, nearest
from cbmir.training.run import RunFolder, embedding_fingerprint

log = logging.getLogger("cbmir")

#: An epoch is judged by its first k neighbours. At most so many images of each side are looked at after it.
SELECTION_K = 10
SELECTION_QUERIES, SELECTION_GALLERY = 2_000, 5_000
#: What an epoch is judged by, in metrics.csv; the best is that of the highest "choice".
MEASURED = ("val_auc", "val_corrected_ndcg", "val_choice")


class Validation:
    """The validation queries and the training images that they search, drawn once for the whole run.

    With a teacher the training images are embedded by it: that gallery is what the student is for.
    """

    def __init__(
        self, config: TrainConfig, manifest: Manifest, images: NDArray[np.uint8], teacher: Teacher | None = None
    ) -> None:
        self.config, self.manifest, self.images, self.teacher = config, manifest, images, teacher
        self.labels = label_array(manifest)
        draw, sides = np.random.default_rng(config.seed), []
        for split, most in (("val", SELECTION_QUERIES), ("train", SELECTION_GALLERY)):
            rows = np.array(split_rows(manifest, split))
            sides.append(np.sort(draw.choice(rows, most, replace=False)) if len(rows) > most else rows)
        self.query, self.gallery = sides
        self._patients = tuple([manifest.rows[row].patient_id for row in side] for side in (self.query, self.gallery))

    def measure(self, model: RetrievalModel) -> dict[str, float]:
        """The mean AUC, nDCG@10 corrected for chance (all queries, the mean of both gains), and what chooses the epoch:
        their mean, AUC corrected for chance too (2 AUC - 1), so that 0 is chance and 1 perfect in both."""
        if self.config.linear_fit:
            features = self._pooled(model, self.gallery)
            fit = fit_linear(features, training_targets(self.labels[self.gallery]), self.config.projection)
            gallery = fit.apply(features)[0]
            query, scores = fit.apply(self._pooled(model, self.query))
        else:
            query, scores = embed(model, self._batches(self.query))
            gallery = self._gallery_of(model) if self.teacher is None else self._teachers_gallery
        own, others = self._patients
        near = nearest(metrics.inner_products(query, gallery), own, others, SELECTION_K + SPARE)
        asking, asked = (metrics.add_negative_class(self.labels[rows]) for rows in (self.query, self.gallery))
        rankings = Rankings(near, asking, asked, own, others, SELECTION_K)
        corrected = [chance_values(rankings, gain).corrected()[0] for gain in CORRECTED.values()]
        # Without a value there is nothing to prefer: chance, so that every epoch with one is better.
        auc = metrics.mean_of_known(metrics.class_aucs(scores, self.labels[self.query]), 0.5)
        ndcg = metrics.mean_of_known(np.array(corrected), 0.0)
        return dict(zip(MEASURED, (auc, ndcg, (2 * auc - 1 + ndcg) / 2), strict=True))

    def fitted(self, model: RetrievalModel) -> RetrievalModel:
        """A trained network with the linear maps that are fitted to all training images."""
        rows = np.array(split_rows(self.manifest, "train"))
        fit = fit_linear(self._pooled(model, rows), training_targets(self.labels[rows]), self.config.projection)
        return fit.model(model)

    @torch.inference_mode()
    def _pooled(self, model: RetrievalModel, rows: NDArray[np.intp]) -> Stages:
        """The mean features of both stages, as `TwoStageEncoder` has them."""
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


def write_card(folder: RunFolder, validation: Validation, model: RetrievalModel) -> None:
    """Write the card of a finished model, whose presence ends the run; the validation split gives thresholds, operating
    points, calibration and metrics."""
    config, manifest, teacher = validation.config, validation.manifest, validation.teacher

    def vectors(side: RetrievalModel, split: str) -> Vectors:
        batches = evaluation_batches(validation.images, split_rows(manifest, split), config.preprocess)
        return Vectors.of_split(manifest, split, *embed(side, batches))

    val, gallery = vectors(model, "val"), vectors(model if teacher is None else teacher.model, "train")
    figures = Pool([evaluate(val, gallery, config.labels, k=SELECTION_K)], [0]).figures()
    pairs = [(val.scores[:, j], val.labels[:, j]) for j in range(len(config.labels))]
    points = [metrics.operating_points(*pair) for pair in pairs]
    balanced = [point[BALANCED] for point in points]
    lost = [name for name, point in zip(config.labels, balanced, strict=True) if point is None]
    if lost and not np.isnan(val.scores).all():  # hashing methods have no scores, and need no warning
        log.warning("No threshold or probability for %s: the validation split lacks both values.", ", ".join(lost))
    head = model.head
    fingerprint = embedding_fingerprint(model, config.preprocess)
    keep = ("loss", "weights", "epochs", "batch_size", "lr", "weight_decay", "seed", "fold", "manifest_fingerprint")
    facts = {name: getattr(config, name) for name in keep} | {
        "manifest": Path(config.manifest).name,
        "source": manifest.about.get("reader", "not stated"),
        "class_weights": config.balanced,
        "linear_fit": config.linear_fit,
        "precision": resolve_precision(config.precision),
        "best_epoch": int(torch.load(folder.best, map_location="cpu", weights_only=True)["epoch"]),
        "images": {split: len(manifest.split(split)) for split in ("train", "val", "test")},
        "patients": len(set(gallery.patients)),
        **{
            key: {
                name: {"positive": int((column == 1).sum()), "negative": int((column == 0).sum())}
                for name, column in zip(config.labels, labels.T, strict=True)
            }
            for key, labels in {"labels": gallery.labels, "validation_labels": val.labels}.items()
        },
        "seconds": round(sum(float(row["seconds"]) for row in folder.read_epochs())),
    }
    if teacher is not None:
        taught_by = {name: getattr(teacher.card, name) for name in ("fingerprint", "encoder", "metrics")}
        facts |= {"distilled_from": taught_by, "weights_fingerprint": fingerprint}
    card = ModelCard(
        labels=manifest.labels,
        preprocess=config.preprocess,
        encoder=config.encoder,
        embedding_dim=val.embedding.shape[1],
        head=head.kind,
        sigma=config.sigma,
        proxies_per_class=head.counts if isinstance(head, ProxyHead) else (),
        negative_proxies=config.negative_proxies and isinstance(head, ProxyHead),
        thresholds=tuple(None if own is None else own.threshold for own in balanced),
        calibration=tuple(metrics.platt_calibration(*pair) for pair in pairs),
        fingerprint=fingerprint if teacher is None else teacher.card.fingerprint,
        training=facts,
        metrics={f"val {name}": figures[name] for name in ("auc", "positive queries", "all queries")},
        operating_points={name: tuple(point[name] for point in points) for name in OPERATING_POINTS},
        versions={"cbmir": cbmir.__version__} | {name: version(name) for name in ("torch", "torchvision", "lightning")},
    )
    write_json(folder.card, card.to_json())
    log.info("Finished: best epoch %s, %s.", card.training["best_epoch"], folder.path)
