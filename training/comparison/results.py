"""results.json: all figures of the report, from the answers of the finished cells; and the rows to show.

Queries of several seeds and folds are pooled; a patient in several of them is drawn or flipped as one. The intervals
are over patients, for these training runs; `sd`, over the seeds' means, shows how much another run would differ.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cbmir
from cbmir.input_file import read_json
from cbmir.machine import describe_machine
from cbmir.manifest import Manifest, read_manifest
from cbmir.training.comparison.cells import FAILED, CellAnswers, cell_folder, is_finished, read_answers
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Part, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.evaluation_report import metric_title as title_of
from cbmir.training.metrics import QUERIES, REFERENCES, RETRIEVAL_METRICS, Floats
from cbmir.training.pool import Pool, figure_of, mean_figure, or_none
from cbmir.training.rankings import CORRECTED

OF_DRAWINGS = "All images of this benchmark are drawings (phantoms): it says nothing about real images."
#: Fewest patients for which a view or source gets its own row; with fewer, the interval would be useless.
LEAST = 20

Results = dict[str, Any]
Row = dict[str, Any]
Figure = dict[str, float | None]

#: Metric -> column. The best method must lead in all of these, with every interval of a difference above 0.
YARDSTICK = {"auc": "", **dict.fromkeys(CORRECTED, "all queries")}
#: All metrics with a value in each column.
BY_COLUMN = (*RETRIEVAL_METRICS, *CORRECTED)
_LIBRARIES = ("torch", "torchvision", "lightning", "timm", "scikit-learn", "numpy")


def figures(pool: Pool) -> dict[str, Any]:
    """Return every figure of one method, JSON-ready: {"value", "low", "high", "sd"}; `sd` is None for a single seed."""
    result = pool.figures()
    result["auc"] = _with_sd(pool, result["auc"], "auc")
    for column in QUERIES:
        for metric in BY_COLUMN:
            result[column][metric] = _with_sd(pool, result[column][metric], metric, column)
    return result | {attribute: _breakdown(pool, attribute) for attribute in ("views", "sources")}


def difference(pool: Pool, reference: Pool, metric: str, column: str = "") -> Figure:
    """Return `pool` minus `reference`, with an interval from common resamples, and p from flipping the patients' signs
    (`sign_flip_p`). AUC and corrected nDCG have no value per query, so their p comes from the bootstrap.

    Raises ValueError unless both have the same queries.
    """
    if pool.patients != reference.patients:
        raise ValueError("expected both methods to have answered the same queries")
    samples = pool.samples(metric, column) - reference.samples(metric, column)
    if metric in RETRIEVAL_METRICS:
        p = sign_flip_p(pool.values(column, metric) - reference.values(column, metric), pool.patients)
    else:
        p = bootstrap_p(samples)
    return figure_of(pool.mean(metric, column) - reference.mean(metric, column), samples) | {"p": or_none(p)}


def differences(pool: Pool, reference: Pool, *, auc: bool, metrics: Sequence[str] = BY_COLUMN) -> dict[str, Any]:
    """Return each `difference`, in AUC if wanted and by column and metric; and the number of parts."""
    columns = {column: {m: difference(pool, reference, m, column) for m in metrics} for column in QUERIES}
    first = {"auc": difference(pool, reference, "auc")} if auc else {}
    return first | columns | {"parts": len(pool.parts)}


def figure_in(figures: dict[str, Any], metric: str, column: str) -> Figure:
    """Return a figure of a row or of `differences`; AUC is the same in both columns, and may be missing."""
    figure: Figure = figures.get("auc", {"value": None}) if metric == "auc" else figures[column][metric]
    return figure


def best_method(
    pools: dict[str, Pool], borrowed: Collection[str] = (), pair: Callable[[str, str], Sequence[Pool]] | None = None
) -> dict[str, Any]:
    """Determine whether one method clearly leads all others in AUC and both corrected nDCGs (YARDSTICK).

    Args:
        pools: By method, all for the same queries.
        borrowed: Methods that use another method's scores, so that their AUC does not count.
        pair: Returns two methods' pools for a difference, if those in `pools` lack parts that both have.

    Returns:
        `leaders`: metric -> the method with the highest value. `differences`: if one method leads in all metrics, its
            lead over each other method (`differences`, with p corrected for their number); without AUC for methods
            that lack it. `method`: its name if no lead is `unclear`, else None.
    """
    means = {metric: {name: pool.mean(metric, column) for name, pool in pools.items()}
             for metric, column in YARDSTICK.items()}  # fmt: skip
    known = {
        metric: {
            name: one for name, one in own.items() if not (np.isnan(one) or (metric == "auc" and name in borrowed))
        }
        for metric, own in means.items()
    }
    leaders = {metric: max(own, key=own.__getitem__) for metric, own in known.items() if own}
    found: dict[str, Any] = {"method": None, "leaders": leaders, "differences": {}}
    if len(leaders) == len(YARDSTICK) and len(set(leaders.values())) == 1 and len(pools) > 1:
        first = next(iter(leaders.values()))
        for other in [name for name in pools if name != first]:
            own, reference = pair(first, other) if pair else (pools[first], pools[other])
            has_auc = other in known["auc"]
            found["differences"][other] = differences(own, reference, auc=has_auc, metrics=list(CORRECTED))
        _correct(list(found["differences"].values()))
        found["method"] = None if any(map(unclear, found["differences"].values())) else first
    return found


def unclear(lead: dict[str, Any]) -> list[str]:
    """Return the yardstick's metrics in which a lead's interval is not above 0: all must be, so none is corrected."""
    own = {metric: figure_in(lead, metric, column) for metric, column in YARDSTICK.items() if metric in lead or column}
    return [metric for metric, gain in own.items() if (gain["low"] or 0) <= 0]


def reference_rankings(pool: Pool) -> dict[str, Any]:
    """Return figures of rankings that ignore the query: `random, all queries` and so on -> metric -> value."""
    names = [f"{reference}, {column}" for column in QUERIES for reference in REFERENCES]
    return {name: {metric: or_none(pool.mean(metric, name)) for metric in RETRIEVAL_METRICS} for name in names}


def _breakdown(pool: Pool, attribute: str) -> dict[str, Any]:
    """Return nDCG of both columns by view or source of the query; empty if the manifest does not have it."""
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
    """Add the standard deviation over the seeds that have the most finished parts."""
    most = max(pool.seeds.count(seed) for seed in pool.seeds)
    whole = (seed for seed in sorted(set(pool.seeds)) if pool.seeds.count(seed) == most)
    pools = [Pool([part for part, own in zip(pool.parts, pool.seeds, strict=True) if own == seed], [seed] * most)
             for seed in whole]  # fmt: skip
    means = [one.mean(metric, column) for one in pools]
    return figure | {"sd": or_none(float(np.std(means, ddof=1))) if len(means) > 1 else None}


def make_results(report: Path, plan: Plan) -> dict[str, Any]:
    """Return the figures of all finished cells, and the errors of failed ones; JSON-ready.

    `minus_bce` compares a row with BCE on the parts that both have finished. Holm's correction of p covers the rows of
    one size.
    """
    parts = plan.parts()
    selection = read_manifest(selection_path(report, parts[0]))
    labels = list(selection.labels.names)
    answers = {cell: read_answers(report, plan, cell) for cell in plan.cells() if is_finished(report, cell)}
    failures = {cell: cell_folder(report, cell) / FAILED for cell in plan.cells() if cell not in answers}
    failed = {cell: read_json(path) for cell, path in failures.items() if path.exists()}
    protocol, machine = PROTOCOLS[plan.protocol], describe_machine()
    return {
        "schema": 2,
        "protocol": {"name": protocol.name, "title": protocol.title, "k": protocol.k, "labels": labels},
        "notes": [OF_DRAWINGS] if selection.about.get("reader") == "phantom" else [],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "plan": asdict(plan)
        | {
            "manifest": Path(plan.manifest).name,
            # the name of a weights file, without its path
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
        "references": _references(plan, answers),
        "best": _best(plan, answers),
        "rows": _rows(plan, answers),
        "failed": [{"cell": cell.name, "method": cell.method, **error} for cell, error in failed.items()],
        "unfinished": [cell.name for cell in failures if cell not in failed],
    }


def _rows(plan: Plan, answers: dict[Cell, CellAnswers]) -> list[dict[str, Any]]:
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
                **figures(_pool(finished, answers)),
                "minus_bce": None if method == "bce" else _minus_bce(finished, answers),
            }
        rows.append(row)
    for size in plan.sizes:
        _correct([row["minus_bce"] for row in rows if row["size"] == size and row.get("minus_bce")])
    return rows


def _pool(cells: Sequence[Cell], answers: dict[Cell, CellAnswers]) -> Pool:
    return Pool([answers[cell] for cell in cells], [cell.part.seed for cell in cells])


def _minus_bce(cells: list[Cell], answers: dict[Cell, CellAnswers]) -> dict[str, Any] | None:
    both = [cell for cell in cells if Cell(cell.part, "bce") in answers]
    if not both:
        return None
    reference = _pool([Cell(cell.part, "bce") for cell in both], answers)
    # a method that needs BCE has BCE's scores
    return differences(_pool(both, answers), reference, auc=not METHODS[cells[0].method].needs_bce)


def _correct(compared: Sequence[dict[str, Any]]) -> None:
    """Add the Holm-corrected p to `differences` of several methods, separately for each metric."""
    for column, metric in (("", "auc"), *product(QUERIES, BY_COLUMN)):
        gains = [own[metric] for own in (one[column] if column else one for one in compared) if metric in own]
        raw = [float("nan") if gain["p"] is None else gain["p"] for gain in gains]
        for gain, p in zip(gains, holm(raw), strict=True):
            gain["p_holm"] = or_none(p)


def _references(plan: Plan, answers: dict[Cell, CellAnswers]) -> dict[str, Any]:
    """Return `reference_rankings` by size, from the method with most finished parts: all have the same queries."""
    found = {}
    for size in plan.sizes:
        of_size = [cell for cell in answers if cell.part.size == size]
        if of_size:
            (method, proxies), _ = Counter((cell.method, cell.proxies) for cell in of_size).most_common(1)[0]
            pool = _pool([c for c in of_size if (c.method, c.proxies) == (method, proxies)], answers)
            found[str(size)] = reference_rankings(pool)
    return found


def _best(plan: Plan, answers: dict[Cell, CellAnswers]) -> dict[str, Any]:
    """Return `best_method` of the shown methods that have finished all of their parts: the leaders on the parts that
    all have, each difference on all parts that both have."""
    cells: dict[str, dict[Part, Cell]] = {}
    for cell in plan.cells():
        if cell.part.size == plan.shown_size and cell.proxies in ("", plan.shown_proxies):
            cells.setdefault(cell.method, {})[cell.part] = cell
    finished = {m: own for m, own in cells.items() if all(cell in answers for cell in own.values())}

    def shared(*methods: str) -> list[Pool]:
        parts = [part for part in plan.parts() if all(part in finished[method] for method in methods)]
        return [_pool([finished[method][part] for part in parts], answers) for method in methods if parts]

    pools = dict(zip(finished, shared(*finished), strict=False))  # empty if no part is shared
    return best_method(pools, [method for method in pools if METHODS[method].needs_bce], shared)


def selection_facts(part: Part, selection: Manifest) -> dict[str, Any]:
    """Return the numbers of images and patients of each split, and the file of the selection."""
    splits = {name: selection.split(name) for name in ("train", "val", "test")}
    return {
        "part": part.name,
        "file": f"selections/{part.name}.csv",
        "fingerprint": selection.fingerprint,
        "images": {name: len(rows) for name, rows in splits.items()},
        "patients": {name: len({row.patient_id for row in rows}) for name, rows in splits.items()},
    }


def headline(results: Results) -> list[Row]:
    """Return the rows that compare the methods, in order; in a sweep, those with the shown size and proxies."""
    size, proxies = results["shown"]["size"], results["shown"]["proxies"]
    return [row for row in ordered(results) if row["size"] == size and row["proxies"] in ("", proxies)]


def ordered(results: Results) -> list[Row]:
    """Return all rows in the order of their methods: those of the paper's Table 1, then others."""
    order = list(results["methods"])
    return sorted(results["rows"], key=lambda row: order.index(row["method"]))


def metric_title(results: Results, metric: str) -> str:
    """Return a title such as `nDCG@100`."""
    return title_of(metric, results["protocol"]["k"])


def sign_flip_p(differences: Floats, patients: Sequence[str], *, flips: int = 10_000, seed: int = 0) -> float:
    """Return the two-sided p of a paired difference: how often it is as large with a random sign for each patient.

    Args:
        differences: float64 [Q]; queries without a value (NaN) are left out. p is NaN if no query is left.
        patients: The patient of each query; all queries of a patient flip together.
    """
    known = ~np.isnan(differences)
    if not known.any():
        return float("nan")
    _, patient_of = np.unique(np.asarray(patients)[known], return_inverse=True)
    sums = np.bincount(patient_of, differences[known])
    draw = np.random.default_rng(seed)
    observed, extreme = abs(sums.sum()) * (1 - 1e-9), 0
    for _ in range(0, flips, 1000):  # in blocks, to save memory with many patients
        signs = draw.integers(0, 2, (1000, len(sums)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs @ sums) >= observed).sum())
    return (1 + extreme) / (1 + flips)


def bootstrap_p(samples: Floats) -> float:
    """Return the two-sided p of a difference from its bootstrap samples [B]: twice the share on the rarer side of 0, at
    least 2 / (B + 1). NaN if no resample has a value."""
    known = samples[~np.isnan(samples)]
    if len(known) == 0:
        return float("nan")
    rarer = min(int((known <= 0).sum()), int((known >= 0).sum()))
    return min(1.0, 2 * (1 + rarer) / (1 + len(known)))


def holm(p: Sequence[float]) -> list[float]:
    """Correct p values for their number (Holm, 1979), keeping their order; NaN does not count and stays."""
    order = sorted((i for i, value in enumerate(p) if not np.isnan(value)), key=lambda i: p[i])
    corrected, least = list(map(float, p)), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, p[i] * (len(order) - rank)))
        corrected[i] = least
    return corrected
