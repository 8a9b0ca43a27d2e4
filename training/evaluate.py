"""AUC, and retrieval of queries from a gallery: of vectors, of a model, and `cbmir evaluate` of a run or model file."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from cbmir.training import metrics
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, label_array, split_rows
from cbmir.training.model import RetrievalModel
from cbmir.training.run import load_model
from cbmir.training.splits import with_fold

log = logging.getLogger("cbmir")

#: Batches uint8 [B, 1, S, S] -> embeddings float32 [N, D] and scores float32 [N, C].
Embedder = Callable[[Iterable[NDArray[np.uint8]]], tuple[NDArray[np.float32], NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class Vectors:
    """What a model says of N images: embedding float32 [N, D], scores float32 [N, C]; what the table says of them:
    labels float32 [N, C] (1, 0, -1, NaN) and a patient each. Scores are NaN where a method has no classifier."""

    embedding: NDArray[np.float32]
    scores: NDArray[np.float32]
    labels: NDArray[np.float32]
    patients: Sequence[str]

    @classmethod
    def of_split(
        cls, manifest: Manifest, split: str, embedding: NDArray[np.float32], scores: NDArray[np.float32] | None = None
    ) -> Vectors:
        """Those of one split's images, in the order of the manifest; a gallery needs no scores."""
        rows = manifest.split(split)
        none = np.empty((len(rows), 0), np.float32)
        patients = [row.patient_id for row in rows]
        return cls(embedding, none if scores is None else scores, label_array(rows), patients)


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
    retrieval: dict[str, metrics.RetrievalValues]

    def summary(self, *, resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
        """Means with 95% bootstrap intervals over the queries' patients; JSON-ready, NaN as None."""
        weights = metrics.patient_weights(self.query.patients, resamples=resamples, seed=seed)
        aucs = metrics.class_aucs(self.query.scores, self.query.labels)
        samples = metrics.resampled_class_aucs(self.query.scores, self.query.labels, weights)
        return {
            "k": self.k,
            "queries": len(self.query.embedding),
            "gallery": self.gallery,
            "patients": len(set(self.query.patients)),
            **auc_figures(aucs, samples, self.labels),
            **{column: retrieval_figures(values, weights) for column, values in self.retrieval.items()},
        }


def evaluate(
    query: Vectors, gallery: Vectors, labels: tuple[str, ...], *, k: int, similarity: metrics.Similarity | None = None
) -> Evaluation:
    """Retrieval of every query from the gallery, its own patient left out, and what a random ranking would get.

    Neighbours are those of least Euclidean distance, or of another `similarity`.
    """
    similarity = similarity or metrics.inner_products(query.embedding, gallery.embedding)
    retrieval = {}
    for column, counted in (("positive queries", metrics.positives), ("all queries", metrics.add_negative_class)):
        sides = (counted(query.labels), counted(gallery.labels), query.patients, gallery.patients)
        retrieval[column] = metrics.retrieval_values(similarity, *sides, k=k)
        retrieval[f"random, {column}"] = metrics.random_ranking_values(*sides, k=k)
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


def figure_of(value: float, samples: metrics.Floats) -> dict[str, float | None]:
    """A value with the interval of its bootstrap samples, JSON-ready: NaN is None."""
    low, high = metrics.interval(samples)
    return {name: None if np.isnan(v) else float(v) for name, v in (("value", value), ("low", low), ("high", high))}


def auc_figures(aucs: metrics.Floats, samples: metrics.Floats, labels: Sequence[str]) -> dict[str, Any]:
    """AUC by label [C], with its resamples [B, C], and their mean: {"value", "low", "high"} each."""
    counted = ~np.isnan(aucs)
    return {
        "auc": figure_of(metrics.mean_of_known(aucs), metrics.nanmean(samples[:, counted], axis=1)),
        "auc_by_label": {name: figure_of(aucs[j], samples[:, j]) for j, name in enumerate(labels)},
        "auc_without_both_values": [name for name, known in zip(labels, counted, strict=True) if not known],
    }


def retrieval_figures(values: metrics.RetrievalValues, weights: metrics.Floats) -> dict[str, Any]:
    """How many queries have a value, and the mean of each metric with its interval; weights [B, Q] (bootstrap)."""
    known = ~np.isnan(values.ndcg)
    figures = {name: mean_figure(getattr(values, name), weights) for name in metrics.RETRIEVAL_METRICS}
    return {"queries": int(known.sum()), "queries_left_out": int((~known).sum()), **figures}


def mean_figure(values: metrics.Floats, weights: metrics.Floats) -> dict[str, float | None]:
    """The mean over queries [Q] with its interval over the resamples [B, Q] (`patient_weights`); NaN is left out."""
    return figure_of(metrics.mean_of_known(values), metrics.weighted_means(values, weights))


def evaluate_model(
    model: Path, manifest_path: Path, *, k: int = 10, queries: str = "test", gallery_model: Path | None = None
) -> Evaluation:
    """Evaluate a RUN folder or an exported model: the split `queries` against the train split as the gallery.

    A model of a cross-validation fold is judged on that fold's queries when the manifest is the one of its training.

    Args:
        gallery_model: Embeds the gallery in place of `model`, such as the teacher of a distilled model.

    Raises:
        SplitError: A split is empty, or a patient is in two.
        ManifestError: A label is missing.
        ModelError: The two models do not share one embedding space.
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
            return replace(Vectors.of_split(manifest, split, *embedder(batches)), labels=labels[rows])

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
            shown = " | ".join(figure(row[metric]) for metric in metrics.RETRIEVAL_METRICS)
            lines.append(f"| {name} | {row['queries']} | {row['queries_left_out']} | {shown} |")
    lines += ["", f"AUC, mean over labels: {figure(summary['auc'])}", "", "| label | AUC |", "|---|---|"]
    lines += [f"| {name} | {figure(value)} |" for name, value in summary["auc_by_label"].items()]
    if summary["auc_without_both_values"]:
        lost = ", ".join(summary["auc_without_both_values"])
        lines += ["", f"Not in the mean, since the queries do not hold both values: {lost}."]
    return "\n".join(lines) + "\n"


def write_report(evaluation: Evaluation, summary: dict[str, Any], folder: Path, title: str) -> None:
    """Write metrics.json, report.md and per_query.csv (one row per query, in the order of the manifest)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", summary)
    write_text(folder / "report.md", text_report(summary, title))
    columns = {f"{name}, {side}": getattr(evaluation.retrieval[side], name)
               for side in ("positive queries", "all queries") for name in metrics.RETRIEVAL_METRICS}  # fmt: skip
    with replacing(folder / "per_query.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        queries = zip(evaluation.query.patients, *columns.values(), strict=True)
        rows = ([patient, *("" if np.isnan(v) else f"{v:.6f}" for v in values)] for patient, *values in queries)
        csv.writer(stream).writerows([("patient_id", *columns), *rows])


def figure(value: dict[str, float | None]) -> str:
    """`.219 [.201, .236]`, or n/a where there is no value."""
    if value["value"] is None:
        return "n/a"
    shown = f"{value['value']:.3f}"
    return shown if value.get("low") is None else f"{shown} [{value['low']:.3f}, {value['high']:.3f}]"


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
    if manifest.fingerprint != card.training.get("manifest_fingerprint"):
        log.warning("This is not the table that the model was trained on: its patients may be among the queries.")
        fold = ""
    elif fold:
        log.info("Fold %s, as in training.", fold)
    return with_fold(manifest, fold)


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
