"""The figures of one method with their intervals, from one evaluation or from several seeds and folds combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cbmir.training import metrics
from cbmir.training.metrics import QUERIES, RETRIEVAL_METRICS, Floats, RetrievalValues
from cbmir.training.rankings import CORRECTED, ChanceValues, label_shares, labels_per_hit, skewness, times_shown

if TYPE_CHECKING:
    from cbmir.training.evaluate import Evaluation

RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Pool:
    """One method's results for the queries of one or more parts, and the seed of each part.

    All methods with the same queries get the same bootstrap resamples, drawn with the seed `draw`.
    """

    parts: Sequence[Evaluation]
    seeds: Sequence[int]
    resamples: int = RESAMPLES
    draw: int = 0

    @cached_property
    def patients(self) -> list[str]:
        return [patient for part in self.parts for patient in part.query.patients]

    @cached_property
    def weights(self) -> Floats:
        """How often each query is in each bootstrap resample, [B, Q]. A patient in several parts is drawn as one."""
        return metrics.patient_weights(self.patients, resamples=self.resamples, seed=self.draw)

    def values(self, column: str, metric: str) -> Floats:
        """Return one value per query, float64 [Q]."""
        sides = (part.retrieval if column in QUERIES else part.references for part in self.parts)
        return np.concatenate([getattr(side[column], metric) for side in sides])

    def chance(self, column: str, metric: str) -> ChanceValues:
        """Return one value per query, for a name in CORRECTED."""
        parts = [part.chance[column, metric] for part in self.parts]
        return ChanceValues(np.concatenate([p.own for p in parts]), np.concatenate([p.shuffled for p in parts]))

    def aucs(self) -> Floats:
        """Return the AUC per label, float64 [C]: the mean over parts, since scores of different models do not compare.

        A part counts for a label only if its queries include both values of it.
        """
        parts = [metrics.class_aucs(part.query.scores, part.query.labels) for part in self.parts]
        return metrics.nanmean(np.stack(parts), axis=0)

    @cached_property
    def resampled_aucs(self) -> Floats:
        """`aucs` for each resample, float64 [B, C]."""
        ends = np.cumsum([len(part.query.patients) for part in self.parts])[:-1]
        parts = [
            metrics.resampled_class_aucs(part.query.scores, part.query.labels, weights)
            for part, weights in zip(self.parts, np.split(self.weights, ends, axis=1), strict=True)
        ]
        return metrics.nanmean(np.stack(parts), axis=0)

    def mean(self, metric: str, column: str = "") -> float:
        """Return one figure: `auc`, a retrieval metric or a name in CORRECTED."""
        if metric == "auc":
            return metrics.mean_of_known(self.aucs())
        if metric in CORRECTED:
            return float(self.chance(column, metric).corrected()[0])
        return metrics.mean_of_known(self.values(column, metric))

    def samples(self, metric: str, column: str = "") -> Floats:
        """Return `mean` for each resample, float64 [B]."""
        if metric == "auc":
            return metrics.nanmean(self.resampled_aucs[:, ~np.isnan(self.aucs())], axis=1)
        if metric in CORRECTED:
            return self.chance(column, metric).corrected(self.weights)
        return metrics.weighted_means(self.values(column, metric), self.weights)

    def figure(self, metric: str, column: str = "") -> dict[str, float | None]:
        """Return `mean` with its interval: {"value", "low", "high"}."""
        return figure_of(self.mean(metric, column), self.samples(metric, column))

    def figures(self) -> dict[str, Any]:
        """Return every figure, JSON-ready; those of galleries and lists are means over parts, without intervals."""
        labels, errors = self.parts[0].labels, metrics.nanmean(np.stack([p.calibration_errors for p in self.parts]), 0)
        columns = {}
        for column in QUERIES:
            values = RetrievalValues(*(self.values(column, metric) for metric in RETRIEVAL_METRICS))
            corrected = {metric: self.figure(metric, column) for metric in CORRECTED}
            columns[column] = retrieval_figures(values, self.weights) | corrected
        return {
            **auc_figures(self.aucs(), self.resampled_aucs, labels),
            "calibration_error": {"value": or_none(metrics.mean_of_known(errors))},
            "calibration_error_by_label": {n: {"value": or_none(e)} for n, e in zip(labels, errors, strict=True)},
            **columns,
            **self._shares(labels),
            "lists": self._lists(),
        }

    def _shares(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return, for each label, the share of the first k that have it, over the queries that have it."""
        parts = [part.rankings("all queries") for part in self.parts]
        found = np.concatenate([label_shares(part) for part in parts])
        gallery = np.mean([part.gallery.mean(axis=0) for part in parts], axis=0)
        shares = [
            {"queries": int((~np.isnan(own)).sum()), "share": mean_figure(own, self.weights), "gallery": float(there)}
            for own, there in zip(found.T, gallery, strict=True)
        ]
        return {"retrieval_by_label": dict(zip(labels, shares[:-1], strict=True)), "healthy_queries": shares[-1]}

    def _lists(self) -> dict[str, Any]:
        parts = [part.rankings("positive queries") for part in self.parts]
        hits, counts = np.concatenate([labels_per_hit(part) for part in parts]), [times_shown(part) for part in parts]
        chance = [1 - (1 - min(1, p.k / len(p.gallery))) ** len(p.query) for p in parts]
        return {
            "labels_per_hit": mean_figure(hits, self.weights),
            "labels_per_gallery_image": float(np.mean([part.gallery.sum(axis=1).mean() for part in parts])),
            "gallery_shown": float(np.mean([(count > 0).mean() for count in counts])),
            "gallery_shown_at_random": float(np.mean(chance)),
            "hubness_skewness": float(np.mean([skewness(count) for count in counts])),
        }


def figure_of(value: float, samples: Floats) -> dict[str, float | None]:
    """Return a value with the interval of its bootstrap samples, JSON-ready, with None for NaN."""
    low, high = metrics.interval(samples)
    return {name: or_none(v) for name, v in (("value", value), ("low", low), ("high", high))}


def or_none(value: float) -> float | None:
    """Return None for NaN, which JSON lacks."""
    return None if np.isnan(value) else float(value)


def auc_figures(aucs: Floats, samples: Floats, labels: Sequence[str]) -> dict[str, Any]:
    """Return {"value", "low", "high"} of the mean AUC and of each label's, from AUCs [C] and their resamples [B, C]."""
    counted = ~np.isnan(aucs)
    return {
        "auc": figure_of(metrics.mean_of_known(aucs), metrics.nanmean(samples[:, counted], axis=1)),
        "auc_by_label": {name: figure_of(aucs[j], samples[:, j]) for j, name in enumerate(labels)},
        "auc_without_both_values": [name for name, known in zip(labels, counted, strict=True) if not known],
    }


def retrieval_figures(values: RetrievalValues, weights: Floats) -> dict[str, Any]:
    """Return the number of queries with a value, and the mean of each metric with its interval; weights [B, Q]."""
    known = ~np.isnan(values.ndcg)
    figures = {name: mean_figure(getattr(values, name), weights) for name in RETRIEVAL_METRICS}
    return {"queries": int(known.sum()), "queries_left_out": int((~known).sum()), **figures}


def mean_figure(values: Floats, weights: Floats) -> dict[str, float | None]:
    """Return the mean over queries [Q] with its interval over resamples [B, Q] (`patient_weights`), ignoring NaN."""
    return figure_of(metrics.mean_of_known(values), metrics.weighted_means(values, weights))
