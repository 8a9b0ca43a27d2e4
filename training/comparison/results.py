"""results.json: everything that the report says, from the answers of the finished cells; and which rows are shown.

Queries of several seeds and folds are pooled; a patient who asks in several of them is drawn or flipped as one. The
intervals are over patients: they hold for these training runs, and `sd` (over the seeds' means) says how far another
run would be off.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cbmir
from cbmir.machine import describe_machine
from cbmir.manifest import Manifest, read_manifest
from cbmir.training import metrics
from cbmir.training.comparison.cells import FAILED, CellAnswers, cell_folder, is_finished, read_answers
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Part, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.evaluate import auc_figures, figure_of, mean_figure, retrieval_figures

#: The two columns of METHOD.md.
QUERIES = ("positive queries", "all queries")
RESAMPLES = 1000
#: A view or source with queries of fewer patients is not broken out: its interval would say nothing.
LEAST = 20

Results = dict[str, Any]
Row = dict[str, Any]
Figure = dict[str, float | None]

METRICS = ("auc", *metrics.RETRIEVAL_METRICS)
_LIBRARIES = ("torch", "torchvision", "lightning", "timm", "scikit-learn", "numpy")


@dataclass(frozen=True, eq=False)
class Pool:
    """One method's answers to the queries of all its parts, and the seed of each part."""

    parts: Sequence[CellAnswers]
    seeds: Sequence[int]

    @cached_property
    def patients(self) -> list[str]:
        return [patient for part in self.parts for patient in part.patients]

    @cached_property
    def weights(self) -> metrics.Floats:
        """Bootstrap over patients, [B, Q]; the same draws for every method that answers the same queries."""
        return metrics.patient_weights(self.patients, resamples=RESAMPLES)

    def values(self, column: str, metric: str) -> metrics.Floats:
        """Of every query, float64 [Q]."""
        return np.concatenate([getattr(part.retrieval[column], metric) for part in self.parts])

    def aucs(self) -> metrics.Floats:
        """AUC by label, float64 [C]: the mean over parts, since scores of different models are not ranked together.

        A part whose queries do not hold both values of a label has none there.
        """
        return metrics.nanmean(np.stack([metrics.class_aucs(part.scores, part.labels) for part in self.parts]), axis=0)

    @cached_property
    def resampled_aucs(self) -> metrics.Floats:
        """`aucs` of each resample, float64 [B, C]."""
        ends = np.cumsum([len(part.patients) for part in self.parts])[:-1]
        weights = np.split(self.weights, ends, axis=1)
        parts = [metrics.resampled_class_aucs(p.scores, p.labels, w) for p, w in zip(self.parts, weights, strict=True)]
        return metrics.nanmean(np.stack(parts), axis=0)

    def of_seed(self, seed: int) -> Pool:
        """The parts of one seed."""
        chosen = [i for i, own in enumerate(self.seeds) if own == seed]
        return Pool([self.parts[i] for i in chosen], [seed] * len(chosen))


def figures(pool: Pool, labels: Sequence[str]) -> dict[str, Any]:
    """Every figure of one method, JSON-ready: {"value", "low", "high", "sd"} each; `sd` is None for a single seed."""
    result = auc_figures(pool.aucs(), pool.resampled_aucs, labels)
    result["auc"] = _with_sd(pool, result["auc"], "auc")
    for column in QUERIES:
        values = metrics.RetrievalValues(*(pool.values(column, metric) for metric in metrics.RETRIEVAL_METRICS))
        result[column] = retrieval_figures(values, pool.weights)
        for metric in metrics.RETRIEVAL_METRICS:
            result[column][metric] = _with_sd(pool, result[column][metric], metric, column)
    return result | {attribute: _breakdown(pool, attribute) for attribute in ("views", "sources")}


def differences(pool: Pool, reference: Pool) -> dict[str, Any]:
    """What `pool` has more than `reference` (BCE), query by query: interval, and p by flipping the patients' signs.

    AUC has no value a query; its p is that of the bootstrap. Raises ValueError unless both answered the same queries.
    """
    if pool.patients != reference.patients:
        raise ValueError("expected both methods to have answered the same queries")
    aucs = pool.resampled_aucs - reference.resampled_aucs
    own, other = metrics.mean_of_known(pool.aucs()), metrics.mean_of_known(reference.aucs())
    samples = metrics.nanmean(aucs, axis=1)
    result: dict[str, Any] = {"auc": figure_of(own - other, samples) | {"p": _json(metrics.bootstrap_p(samples))}}
    for column in QUERIES:
        result[column] = {}
        for metric in metrics.RETRIEVAL_METRICS:
            gain = pool.values(column, metric) - reference.values(column, metric)
            p = _json(metrics.sign_flip_p(gain, pool.patients))
            result[column][metric] = mean_figure(gain, pool.weights) | {"p": p}
    return result


def random_ranking(pool: Pool) -> dict[str, Any]:
    """What a random order of the same galleries would get."""
    return {
        column: {m: _json(metrics.mean_of_known(pool.values(f"random, {column}", m))) for m in METRICS[1:]}
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
    means = [metrics.mean_of_known(one.aucs() if metric == "auc" else one.values(column, metric)) for one in pools]
    return figure | {"sd": _json(float(np.std(means, ddof=1))) if len(means) > 1 else None}


def _json(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def make_results(report: Path, plan: Plan) -> dict[str, Any]:
    """The figures of all finished cells, and the errors of those that failed; JSON-ready.

    `minus_bce` compares a row with BCE on the parts that both have finished. p values are corrected (Holm) over the
    rows of one size.
    """
    parts = plan.parts()
    labels = read_manifest(selection_path(report, parts[0])).labels.names
    answers = {cell: read_answers(cell_folder(report, cell)) for cell in plan.cells() if is_finished(report, cell)}
    failures = {cell: cell_folder(report, cell) / FAILED for cell in plan.cells() if cell not in answers}
    failed = {cell: json.loads(path.read_text("utf-8")) for cell, path in failures.items() if path.exists()}
    protocol, machine = PROTOCOLS[plan.protocol], describe_machine()
    return {
        "schema": 1,
        "protocol": {"name": protocol.name, "title": protocol.title, "k": protocol.k, "labels": list(labels)},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "plan": asdict(plan)
        | {
            "manifest": Path(plan.manifest).name,
            # of a file of weights its name, not where it lies
            "training": plan.training | {"weights": Path(str(plan.training["weights"])).name},
        },
        "shown": {"size": plan.shown_size, "proxies": plan.shown_proxies},
        "versions": {"cbmir": cbmir.__version__, "python": platform.python_version()}
        | {name: version(name) for name in _LIBRARIES},
        "hardware": {name: machine[name] for name in ("processor", "processors", "memory_gib")}
        | {"gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]},
        "selections": [selection_facts(part, read_manifest(selection_path(report, part))) for part in parts],
        "methods": {
            name: {"title": m.title, "source": m.source, "chosen": m.chosen, "paper": m.paper.get(protocol.name, {})}
            for name, m in METHODS.items()
            if any(cell.method == name for cell in plan.cells())
        },
        "random": _random(plan, answers),
        "rows": _rows(plan, answers, labels),
        "failed": [{"cell": cell.name, "method": cell.method, **error} for cell, error in failed.items()],
        "unfinished": [cell.name for cell in failures if cell not in failed],
    }


def _rows(plan: Plan, answers: dict[Cell, CellAnswers], labels: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for method, size, proxies in dict.fromkeys((c.method, c.part.size, c.proxies) for c in plan.cells()):
        cells = [c for c in plan.cells() if (c.method, c.part.size, c.proxies) == (method, size, proxies)]
        finished = [cell for cell in cells if cell in answers]
        row: Row = {"method": method, "size": size, "proxies": proxies, "cells": len(cells), "finished": len(finished)}
        if finished:
            facts = [answers[cell].facts for cell in finished]
            row |= {
                "training_images": round(sum(f["training_images"] for f in facts) / len(facts)),
                "seconds": sum(f["seconds"] for f in facts),
                "proxies_per_class": facts[0].get("proxies_per_class", []),
                "negative_proxies": facts[0].get("negative_proxies", False),
                **figures(_pool(finished, answers), labels),
                "minus_bce": None if method == "bce" else _minus_bce(finished, answers),
            }
        rows.append(row)
    for size in plan.sizes:
        compared = [row["minus_bce"] for row in rows if row["size"] == size and row.get("minus_bce")]
        _correct([one["auc"] for one in compared])
        for column in QUERIES:
            for metric in metrics.RETRIEVAL_METRICS:
                _correct([one[column][metric] for one in compared])
    return rows


def _pool(cells: Sequence[Cell], answers: dict[Cell, CellAnswers]) -> Pool:
    return Pool([answers[cell] for cell in cells], [cell.part.seed for cell in cells])


def _minus_bce(cells: list[Cell], answers: dict[Cell, CellAnswers]) -> dict[str, Any] | None:
    both = [cell for cell in cells if Cell(cell.part, "bce") in answers]
    if not both:
        return None
    reference = _pool([Cell(cell.part, "bce") for cell in both], answers)
    return differences(_pool(both, answers), reference) | {"parts": len(both)}


def _correct(compared: list[dict[str, Any]]) -> None:
    """Add the corrected p to the differences of one metric."""
    raw = [float("nan") if one["p"] is None else one["p"] for one in compared]
    for one, p in zip(compared, metrics.holm(raw), strict=True):
        one["p_holm"] = None if math.isnan(p) else p


def _random(plan: Plan, answers: dict[Cell, CellAnswers]) -> dict[str, Any]:
    """By size, from the method with most finished parts: all of them answer the same queries."""
    found = {}
    for size in plan.sizes:
        of_size = [cell for cell in answers if cell.part.size == size]
        if of_size:
            (method, proxies), _ = Counter((cell.method, cell.proxies) for cell in of_size).most_common(1)[0]
            pool = _pool([c for c in of_size if (c.method, c.proxies) == (method, proxies)], answers)
            found[str(size)] = random_ranking(pool)
    return found


def selection_facts(part: Part, selection: Manifest) -> dict[str, Any]:
    """Images and patients of each split, and the file that repeats the selection."""
    splits = {name: selection.split(name) for name in ("train", "val", "test")}
    return {
        "part": part.name,
        "file": f"selections/{part.name}.csv",
        "fingerprint": selection.fingerprint,
        "images": {name: len(rows) for name, rows in splits.items()},
        "patients": {name: len({row.patient_id for row in rows}) for name, rows in splits.items()},
    }


def headline(results: Results) -> list[Row]:
    """The rows that compare the methods, in their order; of a sweep, those of the size and number of proxies shown."""
    size, proxies = results["shown"]["size"], results["shown"]["proxies"]
    return [row for row in ordered(results) if row["size"] == size and row["proxies"] in ("", proxies)]


def ordered(results: Results) -> list[Row]:
    """All rows in the order of their methods: that of the paper's Table 1, then those that go past it."""
    order = list(results["methods"])
    return sorted(results["rows"], key=lambda row: order.index(row["method"]))


def metric_title(results: Results, metric: str) -> str:
    """`nDCG@100`."""
    names = {"auc": "AUC", "ndcg": "nDCG@{}", "acg": "ACG@{}", "precision": "precision@{}"}
    return names[metric].format(results["protocol"]["k"])
