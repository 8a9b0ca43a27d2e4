"""A real benchmark that is small enough to run: every method on the squares, with a tiny encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbmir.manifest import read_manifest
from cbmir.training.comparison.cells import run_cell
from cbmir.training.comparison.plan import Cell, Plan, make_plan, prepare
from cbmir.training.comparison.protocols import TABLE
from made_once import made_once

TINY: dict[str, Any] = {
    "encoder": "timm:test_efficientnet", "weights": "none", "epochs": 2, "patience": 10, "batch_size": 12, "lr": 1e-3,
    "weight_decay": 0.0, "sigma": 0.7, "proxies_per_class": "2", "class_weights": None, "image_size": 32,
    "precision": "32", "devices": "1", "code_bits": 8,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_report(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A REPORT folder with all cells finished: every method, the squares' splits, one seed. Read-only."""
    table = read_manifest(squares)
    plan = make_plan(
        TABLE, table, squares,
        methods=(), sweeps=(), seeds=1, folds=0, pairs=(), training=TINY, command="cbmir benchmark table squares.csv",
    )  # fmt: skip

    def run(report: Path) -> None:
        prepare(report, plan, table, resume=False)
        for cell in plan.cells():
            run_cell(report, plan, cell)

    return made_once(tmp_path_factory, "benchmark", run)


@pytest.fixture(scope="session")
def tiny_plan(tiny_report: Path) -> Plan:
    return Plan.read(tiny_report)


@pytest.fixture(scope="session")
def tiny_cells(tiny_plan: Plan) -> dict[str, Cell]:
    """The cell of each method."""
    return {cell.method: cell for cell in tiny_plan.cells()}
