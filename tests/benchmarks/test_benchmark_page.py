"""The tables of docs/benchmark.md are those of the committed results, and each p stands beside its difference."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from cbmir.training.comparison.report.tables import NOTHING, Column, Table, TableCell

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "benchmark_page.py"))


def test_the_page_has_the_figures_of_the_committed_results(script: dict[str, Any]) -> None:
    page = (ROOT / "docs/benchmark.md").read_text("utf-8")
    results = json.loads((ROOT / "docs/benchmark/nih/results.json").read_text("utf-8"))
    sections = script["sections"](results)
    assert script["filled"](page, "nih", sections) == page
    assert set(re.findall("<!-- nih:(.*) -->", page)) == set(sections)


def test_each_p_stands_beside_its_difference(script: dict[str, Any]) -> None:
    columns = (Column("method"), Column("AUC", ("",)), Column("p (Holm)", ("",)), Column("nDCG"), Column("p (Holm)"))
    best = TableCell("+0.2", "[0.1, 0.3]", best=True)
    cells = (
        (TableCell("A"), TableCell("+0.1"), TableCell("< 0.001"), best, TableCell("0.040")),
        (TableCell("B"), TableCell("n/a"), NOTHING, TableCell("reference"), NOTHING),
    )
    assert script["markdown"](Table("t", "T", columns, cells)).splitlines() == [
        "| method | AUC | nDCG |",
        "| --- | --- | --- |",
        "| A | +0.1, p < 0.001 | **+0.2** [0.1, 0.3], p = 0.040 |",
        "| B | n/a | reference |",
    ]
