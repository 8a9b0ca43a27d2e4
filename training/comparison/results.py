"""results.json: everything that the report says, from the finished cells; and which of its rows are shown."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import cbmir
from cbmir.manifest import Manifest, read_manifest
from cbmir.training.comparison.cells import FAILED, CellAnswers, cell_folder, is_finished, read_answers
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Part, Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.comparison.statistics import QUERIES, Pool, differences, figures, random_ranking
from cbmir.training.metrics import RETRIEVAL_METRICS, holm

Results = dict[str, Any]
Row = dict[str, Any]

SCHEMA = 1
METRICS = ("auc", *RETRIEVAL_METRICS)
_LIBRARIES = ("torch", "torchvision", "lightning", "timm", "scikit-learn", "numpy")


def make_results(report: Path, plan: Plan) -> dict[str, Any]:
    """The figures of all finished cells, and the errors of those that failed; JSON-ready.

    `rows` has one entry for each method, training-set size and number of proxies. `minus_bce` compares it with BCE on
    the parts that both have finished, and is None for BCE itself. p values are corrected (Holm) over the rows of one
    size.
    """
    parts = plan.parts()
    labels = read_manifest(selection_path(report, parts[0])).labels.names
    answers = {cell: read_answers(cell_folder(report, cell)) for cell in plan.cells() if is_finished(report, cell)}
    failures = {cell: cell_folder(report, cell) / FAILED for cell in plan.cells() if cell not in answers}
    failed = {cell: json.loads(path.read_text("utf-8")) for cell, path in failures.items() if path.exists()}
    protocol = PROTOCOLS[plan.protocol]
    return {
        "schema": SCHEMA,
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
        "hardware": hardware(),
        "selections": [selection_facts(part, read_manifest(selection_path(report, part))) for part in parts],
        "methods": {
            name: {
                "title": m.title,
                "source": m.source,
                "chosen": m.chosen,
                "paper": dict(m.paper.get(protocol.name, {})),
            }
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
            for metric in RETRIEVAL_METRICS:
                _correct([one[column][metric] for one in compared])
    return rows


def _pool(cells: Iterable[Cell], answers: dict[Cell, CellAnswers]) -> Pool:
    cells = list(cells)
    return Pool([answers[cell] for cell in cells], [cell.part.seed for cell in cells])


def _minus_bce(cells: list[Cell], answers: dict[Cell, CellAnswers]) -> dict[str, Any] | None:
    both = [cell for cell in cells if Cell(cell.part, "bce") in answers]
    if not both:
        return None
    reference = _pool((Cell(cell.part, "bce") for cell in both), answers)
    return differences(_pool(both, answers), reference) | {"parts": len(both)}


def _correct(compared: list[dict[str, Any]]) -> None:
    """Add the corrected p to the differences of one metric."""
    raw = [float("nan") if one["p"] is None else one["p"] for one in compared]
    for one, p in zip(compared, holm(raw), strict=True):
        one["p_holm"] = None if math.isnan(p) else p


def _random(plan: Plan, answers: dict[Cell, CellAnswers]) -> dict[str, Any]:
    """By size, from the method with most finished parts: all of them answer the same queries."""
    found = {}
    for size in plan.sizes:
        of_size = [cell for cell in answers if cell.part.size == size]
        if of_size:
            (method, proxies), _ = Counter((cell.method, cell.proxies) for cell in of_size).most_common(1)[0]
            pool = _pool((c for c in of_size if (c.method, c.proxies) == (method, proxies)), answers)
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


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs of the machine that made the report."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if sys.platform == "linux" else None
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "memory_gib": None if memory is None else round(memory, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
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
