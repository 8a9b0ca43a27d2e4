"""Evaluate embeddings and scores of a manifest: AUC, and retrieval of the queries from the gallery."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
