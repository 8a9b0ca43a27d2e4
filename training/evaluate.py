"""Evaluate embeddings and scores of a manifest: AUC, and retrieval of the queries from the gallery.

`cbmir evaluate`: a run or an exported model on a manifest, as figures, a text and a folder.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.card import ModelCard
from cbmir.errors import ManifestError, ModelError, RunError, SplitError
from cbmir.files import replacing, write_json, write_text
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.engines.registry import open_engine
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, label_array
from cbmir.training.metrics import (
    RETRIEVAL_METRICS,
    RetrievalValues,
    Similarity,
    add_negative_class,
    class_aucs,
    inner_products,
    interval,
    mean_of_known,
    nanmean,
    patient_weights,
    positives,
    random_ranking_values,
    resampled_class_aucs,
    retrieval_values,
    weighted_means,
)
from cbmir.training.model import RetrievalModel
from cbmir.training.run import load_model, split_rows, with_fold
from cbmir.training.splits import check_splits


@dataclass(frozen=True, eq=False)
class Vectors:
    """What a model says of N images: embedding float32 [N, D], scores float32 [N, C]; what the table says of them:
    labels float32 [N, C] (1, 0, -1, NaN) and a patient each. Scores are NaN where a method has no classifier."""

    embedding: NDArray[np.float32]
    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    patients: Sequence[str]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Per-query values and scores of one model on one set of queries.

    `retrieval` has the columns `positive queries` (queries without a positive label left out), `all queries` (the
    negative class counted as a label) and the same two of a random ranking, prefixed `random, `.
    """

    labels: tuple[str, ...]
    k: int
    gallery: int
    query: Vectors
    retrieval: dict[str, RetrievalValues]

    def summary(self, *, resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """Means with 95% bootstrap intervals over the queries' patients; JSON-ready, NaN as None."""
        weights = patient_weights(self.query.patients, resamples=resamples, seed=seed)
        aucs = class_aucs(self.query.scores, self.query.labels)
        samples = resampled_class_aucs(self.query.scores, self.query.labels, weights)
        counted = ~np.isnan(aucs)
        macro = nanmean(samples[:, counted], axis=1)
        result: dict[str, Any] = {
            "k": self.k,
            "queries": len(self.query.embedding),
            "gallery": self.gallery,
            "patients": len(set(self.query.patients)),
            "auc": figure_of(float(aucs[counted].mean()) if counted.any() else float("nan"), macro),
            "auc_by_label": {name: figure_of(aucs[j], samples[:, j]) for j, name in enumerate(self.labels)},
            "auc_without_both_values": [n for n, known in zip(self.labels, counted, strict=True) if not known],
        }
        for column, values in self.retrieval.items():
            known = ~np.isnan(values.ndcg)
            result[column] = {"queries": int(known.sum()), "queries_left_out": int((~known).sum())} | {
                name: figure_of(mean_of_known(getattr(values, name)), weighted_means(getattr(values, name), weights))
                for name in RETRIEVAL_METRICS
            }
        return result


def evaluate(
    query: Vectors, gallery: Vectors, labels: tuple[str, ...], *, k: int, similarity: Similarity | None = None
) -> Evaluation:
    """Retrieval of every query from the gallery, its own patient left out, and what a random ranking would get.

    Neighbours are those of least Euclidean distance, or of another `similarity`.
    """
    similarity = similarity or inner_products(query.embedding, gallery.embedding)
    own, theirs = positives(query.labels), positives(gallery.labels)
    retrieval = {}
    for column, q, g in (
        ("positive queries", own, theirs),
        ("all queries", add_negative_class(query.labels), add_negative_class(gallery.labels)),
    ):
        sides = (q, g, query.patients, gallery.patients)
        retrieval[column] = retrieval_values(similarity, *sides, k=k)
        retrieval[f"random, {column}"] = random_ranking_values(*sides, k=k)
    return Evaluation(labels, k, len(gallery.embedding), query, retrieval)


@torch.inference_mode()
def embed(
    model: RetrievalModel, batches: Iterable[NDArray[np.uint8]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Embeddings [N, D] and scores [N, C], float32, of batches uint8 [B, 1, S, S]; the model's mode is kept."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    parts = [model(torch.from_numpy(batch).to(device))[:2] for batch in batches]
    model.train(training)
    embedding, scores = (torch.cat(side).cpu().numpy() for side in zip(*parts, strict=True))
    return embedding, scores


def on_fastest_device(model: RetrievalModel) -> None:
    """Move a model that is done with training to the GPU where there is one, in the layout that is fastest."""
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.to(memory_format=torch.channels_last)


def figure_of(value: float, samples: NDArray[np.float64]) -> dict[str, float | None]:
    """A value with the interval of its bootstrap samples, JSON-ready: NaN is None."""
    low, high = interval(samples)
    return {name: None if np.isnan(v) else float(v) for name, v in (("value", value), ("low", low), ("high", high))}


log = logging.getLogger("cbmir")

#: Batches uint8 [B, 1, S, S] -> embeddings float32 [N, D] and scores float32 [N, C].
Embedder = Callable[[Iterable[NDArray[np.uint8]]], tuple[NDArray[np.float32], NDArray[np.float32]]]


def evaluate_model(
    model: Path, manifest_path: Path, *, k: int = 10, queries: str = "test", gallery_model: Path | None = None
) -> Evaluation:
    """Evaluate a RUN folder or an exported model: `queries` split against the train split as the gallery.

    `gallery_model`, such as the teacher of a distilled model, embeds the gallery where one is given. A model of a
    cross-validation fold is judged on that fold's queries when the manifest is the one that it was trained on. Raises
    SplitError (a split is empty, or a patient is in two), ManifestError (a label is missing), ModelError (the two
    models have not one embedding space).
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
        manifest = splits_of(card, read_manifest(manifest_path))
        labels = labels_of(card, manifest)
        images = cached_images(manifest, card.preprocess, cache_folder(manifest_path))

        def vectors(split: str, embedder: Embedder) -> Vectors:
            rows = split_rows(manifest, split)
            if not rows:
                raise SplitError(f"{manifest_path}: expected images in split {split!r}, found none")
            batches = _progress(evaluation_batches(images, rows, card.preprocess), len(rows), split)
            embedding, scores = embedder(batches)
            return Vectors(embedding, scores, labels[rows], [manifest.rows[row].patient_id for row in rows])

        return evaluate(vectors(queries, embedder), vectors("train", gallery_embedder), card.labels.names, k=k)


def text_report(summary: dict[str, Any], title: str) -> str:
    """The figures as Markdown: both columns of METHOD.md, the random ranking beside them, and AUC by label."""
    k = summary["k"]
    lines = [
        f"# {title}",
        "",
        f"{summary['queries']} queries of {summary['patients']} patients against a gallery of {summary['gallery']} "
        f"images, k = {k}, each query's own patient left out. In brackets: 95% bootstrap interval over patients.",
        "",
        f"| queries | n with nDCG | left out | nDCG@{k} | ACG@{k} | precision@{k} |",
        "|---|---|---|---|---|---|",
    ]
    for column in ("positive queries", "all queries"):
        for name in (column, f"random, {column}"):
            row = summary[name]
            shown = " | ".join(figure(row[metric]) for metric in RETRIEVAL_METRICS)
            lines.append(f"| {name} | {row['queries']} | {row['queries_left_out']} | {shown} |")
    lines += ["", f"AUC, mean over labels: {figure(summary['auc'])}", "", "| label | AUC |", "|---|---|"]
    lines += [f"| {name} | {figure(value)} |" for name, value in summary["auc_by_label"].items()]
    if summary["auc_without_both_values"]:
        lost = ", ".join(summary["auc_without_both_values"])
        lines += ["", f"Not in the mean, since the queries do not hold both values: {lost}."]
    return "\n".join(lines) + "\n"


def write_report(evaluation: Evaluation, summary: dict[str, Any], folder: Path, title: str) -> None:
    """Write metrics.json, report.md and per_query.csv (a row a query, in the order of the manifest)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", summary)
    write_text(folder / "report.md", text_report(summary, title))
    positive, every = evaluation.retrieval["positive queries"], evaluation.retrieval["all queries"]
    columns = [(f"{name}, {side}", getattr(values, name)) for side, values in
               (("positive queries", positive), ("all queries", every)) for name in RETRIEVAL_METRICS]  # fmt: skip
    with replacing(folder / "per_query.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["patient_id", *(name for name, _ in columns)])
        for row, patient in enumerate(evaluation.query.patients):
            values = [v[row] for _, v in columns]
            writer.writerow([patient, *("" if np.isnan(v) else f"{v:.6f}" for v in values)])


def figure(value: dict[str, float | None]) -> str:
    """`.219 [.201, .236]`, or n/a where there is no value."""
    if value["value"] is None:
        return "n/a"
    shown = f"{value['value']:.3f}"
    return shown if value["low"] is None else f"{shown} [{value['low']:.3f}, {value['high']:.3f}]"


@contextmanager
def opened_model(model: Path) -> Iterator[tuple[ModelCard, Embedder]]:
    """A RUN folder or an exported model: its card, and what embeds batches by it."""
    if model.is_dir():
        network, card, _ = load_model(model)
        on_fastest_device(network)
        yield card, partial(embed, network)
    else:
        with open_engine(model) as engine:
            yield engine.card, partial(_run_engine, engine)


def splits_of(card: ModelCard, manifest: Manifest) -> Manifest:
    """The manifest with the splits that the model was trained on: those of its fold, where this is its own table.

    Logs a warning where it is another. Raises SplitError for a patient in two splits.
    """
    fold = card.training.get("fold", "")
    if fold and manifest.fingerprint == card.training.get("manifest_fingerprint"):
        log.info("Fold %s, as in training.", fold)
        return with_fold(manifest, fold)
    if manifest.fingerprint != card.training.get("manifest_fingerprint"):
        log.warning("This is not the table that the model was trained on: its patients may be among the queries.")
    check_splits(manifest)
    return manifest


def labels_of(card: ModelCard, manifest: Manifest) -> NDArray[np.float32]:
    """The manifest's labels in the model's order, float32 [N, C]."""
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
