"""Evaluation of vectors, a run or a model file: AUC, and retrieval from a gallery.

An `Evaluation` holds the results for one set of queries; a `Pool` with this single part computes its figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.card import Calibration, ModelCard
from cbmir.errors import ManifestError, ModelError, RunError, SplitError
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.engines.registry import open_engine
from cbmir.training import metrics
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, label_array, split_rows
from cbmir.training.metrics import COUNTED, QUERIES, Floats, RetrievalValues
from cbmir.training.model import RetrievalModel
from cbmir.training.pool import Pool, mean_figure, or_none, retrieval_figures
from cbmir.training.rankings import CORRECTED, SPARE, ChanceValues, Rankings, chance_values, nearest
from cbmir.training.run import load_model
from cbmir.training.splits import EVERY_IMAGE, with_fold

log = logging.getLogger("cbmir")

#: Batches uint8 [B, 1, S, S] -> embeddings float32 [N, D] and scores float32 [N, C].
Embedder = Callable[[Iterable[NDArray[np.uint8]]], tuple[NDArray[np.float32], NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class Vectors:
    """Embeddings float32 [N, D] and scores float32 [N, C] (NaN without a classifier) of N images, and their labels
    float32 [N, C] (1, 0, -1, NaN) and patients from the manifest."""

    embedding: NDArray[np.float32]
    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    patients: Sequence[str]

    @classmethod
    def of_split(
        cls, manifest: Manifest, split: str, embedding: NDArray[np.float32], scores: NDArray[np.float32] | None = None
    ) -> Vectors:
        """Build the vectors of a split, in the order of the manifest; a gallery needs no scores."""
        rows = manifest.split(split)
        none = np.empty((len(rows), 0), np.float32)
        patients = [row.patient_id for row in rows]
        return cls(embedding, none if scores is None else scores, label_array(rows), patients)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One model's results for one set of queries.

    Attributes:
        gallery: Only its labels and patients are used.
        neighbours: int [Q, k + SPARE], as in `Rankings`.
        retrieval: One value per query, for `positive queries` (with a positive label) and `all queries` (the
            negative class counts as a label).
        thresholds: One per label, from the model's card; empty without a card.
        calibration: One per label, also from the card.
        notes: Sentences that the card requires in every result.
    """

    labels: tuple[str, ...]
    k: int
    query: Vectors
    gallery: Vectors
    neighbours: NDArray[np.integer]
    retrieval: dict[str, RetrievalValues]
    thresholds: Sequence[float | None] = ()
    calibration: Sequence[Calibration | None] = ()
    notes: Sequence[str] = ()

    def rankings(self, column: str) -> Rankings:
        """Return the lists of neighbours with the labels that count in a column."""
        query, gallery = COUNTED[column](self.query.labels), COUNTED[column](self.gallery.labels)
        return Rankings(self.neighbours, query, gallery, self.query.patients, self.gallery.patients, self.k)

    @cached_property
    def chance(self) -> dict[tuple[str, str], ChanceValues]:
        """Chance values by column and name in CORRECTED."""
        return {
            (column, name): chance_values(self.rankings(column), gain)
            for column in QUERIES for name, gain in CORRECTED.items()
        }  # fmt: skip

    @cached_property
    def references(self) -> dict[str, RetrievalValues]:
        """Values of the six rankings that ignore the query: `random, all queries` and so on."""
        every = metrics.add_negative_class(self.gallery.labels).astype(np.int16)  # sorting tied floats is slow
        scores = {"most labels": every[:, :-1].sum(axis=1, dtype=np.int16), "no finding": every[:, -1]}

        def alike(score: NDArray[np.int16]) -> metrics.Similarity:
            return lambda row: score

        found = {}
        for column in QUERIES:
            one = self.rankings(column)
            sides = (one.query, one.gallery, one.query_patients, one.gallery_patients)
            found[f"random, {column}"] = metrics.random_ranking_values(*sides, k=self.k)
            for name, score in scores.items():
                found[f"{name}, {column}"] = metrics.retrieval_values(alike(score), *sides, k=self.k)
        return found

    @property
    def scores_findings(self) -> bool:
        """Whether the method scores findings."""
        return not np.isnan(self.query.scores).all()

    @cached_property
    def calibration_errors(self) -> Floats:
        """Calibration error per label, float64 [C]; NaN without calibration or scores."""
        calibration = self.calibration or [None] * len(self.labels)
        found = metrics.probabilities(self.query.scores, calibration)
        return np.array([metrics.calibration_error(*pair) for pair in zip(found.T, self.query.labels.T, strict=True)])

    def summary(self, *, resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """Return means with 95% bootstrap intervals over the queries' patients; JSON-ready, with None for NaN."""
        pool = Pool([self], [0], resamples, seed)
        references = {name: retrieval_figures(values, pool.weights) for name, values in self.references.items()}
        counts = {"k": self.k, "queries": len(self.query.patients), "gallery": len(self.gallery.patients)}
        counts["patients"] = len(set(self.query.patients))
        counts["scores_findings"] = self.scores_findings
        notes = {"notes": list(self.notes)}
        return notes | counts | pool.figures() | references | self._decisions(pool.weights)

    def _decisions(self, weights: Floats) -> dict[str, Any]:
        """Return the figures at the thresholds. Unknown and uncertain labels do not count."""
        labels, scores = self.query.labels, self.query.scores
        known = (labels == 0) | (labels == 1)
        present = np.where(known, labels, np.nan)
        cuts = np.array([np.nan if t is None else t for t in self.thresholds or [None] * len(self.labels)])
        judged = known & ~np.isnan(scores) & ~np.isnan(cuts)
        called = np.where(judged, scores > cuts, np.nan)
        shares = {
            "sensitivity": np.where(present == 1, called, np.nan),
            "specificity": np.where(present == 0, 1 - called, np.nan),
            "positive_predictive_value": np.where(called == 1, present, np.nan),
            "negative_predictive_value": np.where(called == 0, 1 - present, np.nan),
        }
        by_label = {
            name: {"threshold": or_none(cuts[j])}
            | {share: mean_figure(values[:, j], weights) for share, values in shares.items()}
            for j, name in enumerate(self.labels)
        }
        any_judged = judged.any(axis=1)
        sums = {"predicted": np.nansum(called, axis=1), "true": np.where(judged, labels, 0).sum(axis=1)}
        counts = {name: mean_figure(np.where(any_judged, one, np.nan), weights) for name, one in sums.items()}
        return {"at_thresholds": by_label, "findings_per_image": counts}


def evaluate(
    query: Vectors, gallery: Vectors, labels: tuple[str, ...], *, k: int, similarity: metrics.Similarity | None = None,
    card: ModelCard | None = None,
) -> Evaluation:  # fmt: skip
    """Rank the gallery for every query, without the images of the query's patient.

    Args:
        similarity: Orders the gallery; None means Euclidean distance.
        card: The model's card, for its thresholds, calibration and notes.
    """
    similarity = similarity or metrics.inner_products(query.embedding, gallery.embedding)
    neighbours = nearest(similarity, query.patients, gallery.patients, k + SPARE)
    retrieval = {}
    for column, counted in COUNTED.items():
        sides = (counted(query.labels), counted(gallery.labels), query.patients, gallery.patients)
        retrieval[column] = metrics.retrieval_values(similarity, *sides, k=k)
    decisions = (card.thresholds, card.calibration, card.notes) if card else ()
    return Evaluation(labels, k, query, gallery, neighbours, retrieval, *decisions)


@torch.inference_mode()
def embed(
    model: RetrievalModel, batches: Iterable[NDArray[np.uint8]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return embeddings [N, D] and scores [N, C], float32, of batches uint8 [B, 1, S, S]. The model keeps its mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    parts = [model(torch.from_numpy(batch).to(device))[:2] for batch in batches]
    model.train(training)
    embedding, scores = (torch.cat(side).cpu().numpy() for side in zip(*parts, strict=True))
    return embedding, scores


def on_fastest_device(model: RetrievalModel) -> None:
    """Move a trained model to the GPU, if there is one, in the fastest memory layout."""
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.to(memory_format=torch.channels_last)


def evaluate_model(
    model: Path, manifest_path: Path, *, k: int = 10, queries: str = "test", gallery_model: Path | None = None
) -> Evaluation:
    """Evaluate a RUN folder or an exported model: the split `queries` searches the train split.

    If the model was trained on a cross-validation fold of this manifest, that fold's splits are used.

    Args:
        gallery_model: Embeds the gallery instead of `model`, e.g. the teacher of a distilled model.

    Raises:
        SplitError: A split is empty, or a patient is in two.
        ManifestError: The manifest lacks a label of the model.
        ModelError: The two models have different embedding spaces.
        RunError: `k` is less than 1.
    """
    if k < 1:
        raise RunError(f"expected k of 1 or more, found {k}")
    with (
        opened_model(model) as (card, embedder),
        opened_model(gallery_model) if gallery_model else nullcontext((card, embedder)) as (other, gallery_embedder),
    ):
        if other.fingerprint != card.fingerprint:
            raise ModelError(
                f"{gallery_model}: expected a model of the embedding space of {model} ({card.fingerprint}), found "
                f"{other.fingerprint}; their distances mean nothing"
            )
        table = read_manifest(manifest_path)
        if card.training.get("fold") == EVERY_IMAGE and card.training.get("manifest_fingerprint") == table.fingerprint:
            raise SplitError(f"{manifest_path}: expected images that the model has not seen, but it was trained on "
                             f"every image of this table; its card has the figures of its folds")  # fmt: skip
        manifest = splits_of(card, table)
        names, labels = card.labels.names or manifest.labels.names, labels_of(card, manifest)
        images = cached_images(manifest, card.preprocess, cache_folder(manifest_path))

        def vectors(split: str, embedder: Embedder) -> Vectors:
            rows = split_rows(manifest, split)
            if not rows:
                raise SplitError(f"{manifest_path}: expected images in split {split!r}, found none")
            batches = _progress(evaluation_batches(images, rows, card.preprocess), len(rows), split)
            embedding, scores = embedder(batches)
            if not card.has_findings:
                scores = np.full((len(rows), len(names)), np.nan, np.float32)
            return replace(Vectors.of_split(manifest, split, embedding, scores), labels=labels[rows])

        sides = vectors(queries, embedder), vectors("train", gallery_embedder)
        return evaluate(*sides, names, k=k, card=card)


@contextmanager
def opened_model(model: Path) -> Iterator[tuple[ModelCard, Embedder]]:
    """Open a RUN folder or an exported model; yield its card and a function that embeds batches."""
    if model.is_dir():
        network, card, _ = load_model(model)
        on_fastest_device(network)
        yield card, partial(embed, network)
    else:
        with open_engine(model) as engine:
            yield engine.card, partial(_run_engine, engine)


def splits_of(card: ModelCard, manifest: Manifest) -> Manifest:
    """Return the manifest with the splits of the model's fold, if the model was trained on this table.

    Logs a warning for another table, except for embedding models. Raises SplitError for a patient in two splits.
    """
    fold = card.training.get("fold", "")
    if card.has_findings and manifest.fingerprint != card.training.get("manifest_fingerprint"):
        log.warning("This is not the table that the model was trained on: its patients may be among the queries.")
        fold = ""
    elif fold:
        log.info("Fold %s, as in training.", fold)
    return with_fold(manifest, fold)


def labels_of(card: ModelCard, manifest: Manifest) -> NDArray[np.float32]:
    """Return the manifest's labels in the model's order, float32 [N, C]; all of them for a model without findings."""
    if not card.has_findings:
        return label_array(manifest)
    try:
        order = [manifest.labels.index(name) for name in card.labels.names]
    except ManifestError as error:
        raise ManifestError(f"the manifest lacks a label of the model: {error}") from error
    return label_array(manifest)[:, order]


def _run_engine(
    engine: Engine, batches: Iterable[NDArray[np.uint8]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    outputs = [engine.run(batch) for batch in batches]
    return np.concatenate([o.embedding for o in outputs]), np.concatenate([o.scores for o in outputs])


def _progress(batches: Iterator[NDArray[np.uint8]], total: int, name: str) -> Iterator[NDArray[np.uint8]]:
    with tqdm(total=total, desc=f"embedding {name}", unit="image", disable=None) as bar:
        for batch in batches:
            yield batch
            bar.update(len(batch))
