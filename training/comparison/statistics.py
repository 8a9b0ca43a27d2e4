"""From answers to figures: means, their spread over seeds, intervals over patients, the paired difference to BCE.

Queries of several seeds and folds are pooled; a patient who asks in several of them is drawn or flipped as one. The
intervals are over patients: they hold for these training runs, and `sd` (over the seeds' means) says how far another
run would be off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cbmir.training.comparison.cells import CellAnswers
from cbmir.training.evaluate import auc_figures, figure_of, mean_figure, retrieval_figures
from cbmir.training.metrics import (
    RETRIEVAL_METRICS,
    Floats,
    RetrievalValues,
    bootstrap_p,
    class_aucs,
    mean_of_known,
    nanmean,
    patient_weights,
    resampled_class_aucs,
    sign_flip_p,
)

#: The two columns of METHOD.md.
QUERIES = ("positive queries", "all queries")
RESAMPLES = 1000
#: A view or source with queries of fewer patients is not broken out: its interval would say nothing.
LEAST = 20

Figure = dict[str, float | None]


@dataclass(frozen=True, eq=False)
class Pool:
    """One method's answers to the queries of all its parts, and the seed of each part."""

    parts: Sequence[CellAnswers]
    seeds: Sequence[int]

    @cached_property
    def patients(self) -> list[str]:
        return [patient for part in self.parts for patient in part.patients]

    @cached_property
    def weights(self) -> Floats:
        """Bootstrap over patients, [B, Q]; the same draws for every method that answers the same queries."""
        return patient_weights(self.patients, resamples=RESAMPLES)

    def values(self, column: str, metric: str) -> Floats:
        """Of every query, float64 [Q]."""
        return np.concatenate([getattr(part.retrieval[column], metric) for part in self.parts])

    def aucs(self) -> Floats:
        """AUC by label, float64 [C]: the mean over parts, since scores of different models are not ranked together.

        A part whose queries do not hold both values of a label has none there.
        """
        return nanmean(np.stack([class_aucs(part.scores, part.labels) for part in self.parts]), axis=0)

    @cached_property
    def resampled_aucs(self) -> Floats:
        """`aucs` of each resample, float64 [B, C]."""
        ends = np.cumsum([len(part.patients) for part in self.parts])[:-1]
        weights = np.split(self.weights, ends, axis=1)
        parts = [resampled_class_aucs(p.scores, p.labels, w) for p, w in zip(self.parts, weights, strict=True)]
        return nanmean(np.stack(parts), axis=0)

    def of_seed(self, seed: int) -> Pool:
        """The parts of one seed."""
        chosen = [i for i, own in enumerate(self.seeds) if own == seed]
        return Pool([self.parts[i] for i in chosen], [seed] * len(chosen))


def figures(pool: Pool, labels: Sequence[str]) -> dict[str, Any]:
    """Every figure of one method, JSON-ready: {"value", "low", "high", "sd"} each; `sd` is None for a single seed."""
    result = auc_figures(pool.aucs(), pool.resampled_aucs, labels)
    result["auc"] = _with_sd(pool, result["auc"], "auc")
    for column in QUERIES:
        values = RetrievalValues(*(pool.values(column, metric) for metric in RETRIEVAL_METRICS))
        result[column] = retrieval_figures(values, pool.weights)
        for metric in RETRIEVAL_METRICS:
            result[column][metric] = _with_sd(pool, result[column][metric], metric, column)
    return result | {attribute: _breakdown(pool, attribute) for attribute in ("views", "sources")}


def differences(pool: Pool, reference: Pool) -> dict[str, Any]:
    """What `pool` has more than `reference` (BCE), query by query: interval, and p by flipping the patients' signs.

    AUC has no value a query; its p is that of the bootstrap. Both must have answered the same queries. Raises
    ValueError otherwise.
    """
    if pool.patients != reference.patients:
        raise ValueError("expected both methods to have answered the same queries")
    aucs = pool.resampled_aucs - reference.resampled_aucs
    own, other = mean_of_known(pool.aucs()), mean_of_known(reference.aucs())
    samples = nanmean(aucs, axis=1)
    result: dict[str, Any] = {"auc": figure_of(own - other, samples) | {"p": _json(bootstrap_p(samples))}}
    for column in QUERIES:
        result[column] = {}
        for metric in RETRIEVAL_METRICS:
            gain = pool.values(column, metric) - reference.values(column, metric)
            result[column][metric] = mean_figure(gain, pool.weights) | {"p": _json(sign_flip_p(gain, pool.patients))}
    return result


def random_ranking(pool: Pool) -> dict[str, Any]:
    """What a random order of the same galleries would get."""
    return {
        column: {m: _json(mean_of_known(pool.values(f"random, {column}", m))) for m in RETRIEVAL_METRICS}
        for column in QUERIES
    }


def _breakdown(pool: Pool, attribute: str) -> dict[str, Any]:
    """nDCG of both columns by view or source of the query; empty where the manifest has none."""
    group = np.array([name for part in pool.parts for name in getattr(part, attribute)])
    result: dict[str, Any] = {}
    for name in sorted(set(group) - {""}):
        for column in QUERIES:
            values = np.where(group == name, pool.values(column, "ndcg"), np.nan)
            known = ~np.isnan(values)
            if len({pool.patients[i] for i in np.flatnonzero(known)}) >= LEAST:
                figure = mean_figure(values, pool.weights)
                result.setdefault(name, {})[column] = {"queries": int(known.sum()), "ndcg": figure}
    return result


def _with_sd(pool: Pool, figure: Figure, metric: str, column: str = "") -> Figure:
    """With the standard deviation over the seeds that have all of their parts finished."""
    most = max(pool.seeds.count(seed) for seed in pool.seeds)
    pools = [pool.of_seed(seed) for seed in sorted(set(pool.seeds)) if pool.seeds.count(seed) == most]
    means = [mean_of_known(one.aucs() if metric == "auc" else one.values(column, metric)) for one in pools]
    return figure | {"sd": _json(float(np.std(means, ddof=1))) if len(means) > 1 else None}


def _json(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
