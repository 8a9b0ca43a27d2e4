"""`cbmir benchmark` as typed: selections, refusals, and complete runs on a tiny table, locally and on Ray."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cbmir.cli.benchmark import benchmark
from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import SWEEPS
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.splits import with_fold
from command_line import run

SMALL = ("--encoder", "timm:test_efficientnet", "--image-size", 32, "--epochs", 1, "--batch-size", 8, "--devices", 1)


@pytest.mark.slow
def test_dry_run_on_the_official_table(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = shared / "nih" / "Data_Entry_2017_v2020.full.csv.gz"
    assert run("benchmark", "nih", table, "--dry-run", "--seeds", 1) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^seed0-12000 +12,000 +1,000 +1,000 +[34],\d{3} +0 +[0-9a-f]{12}$", printed, re.MULTILINE)
    assert "15 cells:" in printed and "proxy-negative" not in printed


def test_dry_run_trains_nothing_and_writes_nothing(
    tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report"
    assert run("benchmark", "table", tiny_manifest, "-o", report, "--folds", 3, "--dry-run") == 0
    assert "144 cells:" in capsys.readouterr().out  # 16 methods, 3 seeds, 3 folds
    assert not report.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table", "{manifest}"], "Missing option '-o'"),
        (["table", "{manifest}", "-o", "{report}", "--methods", "magic"], "found magic"),
        (["nih", "{manifest}", "-o", "{report}"], "expected one of"),
        (["table", "{manifest}", "-o", "{folder}", "--folds", "3"], "new or empty folder"),
        (["table", "{manifest}", "-o", "{report}"], "none in val; use --folds"),
        (["table", "missing.csv", "-o", "{report}"], "no such manifest"),
    ],
)
def test_invalid_benchmarks_are_refused(
    arguments: list[str], message: str, tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"manifest": tiny_manifest, "folder": tiny_manifest.parent, "report": tmp_path / "report"}
    assert run("benchmark", *(argument.format(**places) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_help_names_every_choice() -> None:
    """The choices are literals, since --help must not import torch."""
    parameters = {parameter.name: parameter for parameter in benchmark.params}
    assert list(parameters["protocol"].type.choices) == list(PROTOCOLS)
    assert list(parameters["sweeps"].type.choices) == list(SWEEPS)
    named = parameters["methods"].help or ""
    assert re.search("some of (.*?)\\.", named)[1].split(", ") == list(METHODS)


def call(report: Path, manifest: Path, *more: object) -> subprocess.CompletedProcess[str]:
    """Run `cbmir benchmark table` on one fold of a tiny manifest, two cells at a time."""
    table = report.parent / "table.csv"
    write_manifest(with_fold(read_manifest(manifest), "1/3"), table)
    words = ["benchmark", "table", table, "-o", report, "--seeds", 1, *SMALL, "--jobs", 2, *more]
    command = [sys.executable, "-m", "cbmir", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_from_a_table_to_a_report(tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of three cells fails and is shown; a second call only trains the missing ones; a third only reports."""
    report = tmp_path / "report"
    first = call(report, tiny_manifest, "--methods", "bce,proxy,itq", "--code-bits", 5000)
    assert first.returncode == 1, first.stderr
    assert first.stdout == f"{report / 'index.html'}\n"
    assert "1 cells failed" in first.stderr
    results = json.loads((report / "results.json").read_text())
    assert [(row["method"], row["finished"]) for row in results["rows"]] == [("bce", 1), ("proxy", 1), ("itq", 0)]
    assert "found 5000" in results["failed"][0]["error"]
    assert "seed0/itq" in (report / "report.md").read_text()
    trained = (report / "cells/seed0/proxy-m2/run/card.json").stat().st_mtime_ns

    again = ["benchmark", "table", tmp_path / "table.csv", "-o", report, "--seeds", 1, *SMALL]
    assert run(*again, "--methods", "bce,proxy,texture", "--code-bits", 5000, "--resume") == 1, "ITQ fails again"
    assert (report / "cells/seed0/proxy-m2/run/card.json").stat().st_mtime_ns == trained
    results = json.loads((report / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["texture", "bce", "proxy", "itq"], (
        "what was asked before stays"
    )

    before = (report / "benchmark.json").read_text()
    capsys.readouterr()
    assert run(*again, "--methods", "dsh", "--report-only") == 0
    assert capsys.readouterr().out == f"{report / 'index.html'}\n"
    assert (report / "benchmark.json").read_text() == before


@pytest.mark.release
def test_cells_as_ray_tasks_of_two_local_workers(tiny_manifest: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    found = call(report, tiny_manifest, "--methods", "bce,proxy", "--ray", "auto")
    assert found.returncode == 0, found.stderr
    assert "each cell takes {'num_cpus'" in found.stderr
    rows = json.loads((report / "results.json").read_text())["rows"]
    assert [(row["method"], row["finished"]) for row in rows] == [("bce", 1), ("proxy", 1)]
