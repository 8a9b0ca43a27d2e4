"""Cells from other machines: files that are not finished cells of this benchmark are reported."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import RunError
from cbmir.training.comparison import cells as module
from cbmir.training.comparison.cells import (
    FACTS,
    VALUES,
    VECTORS,
    cell_folder,
    check_finished,
    read_answers,
    read_vectors,
)
from cbmir.training.comparison.plan import Cell, Plan


@pytest.fixture
def folder(tiny_report: Path, tiny_cells: dict[str, Cell], tmp_path: Path) -> Path:
    """A copy of a cell's folder, in its own report."""
    shutil.copytree(tiny_report / "selections", tmp_path / "selections")
    copy = cell_folder(tmp_path, tiny_cells["proxy"])
    copy.mkdir(parents=True)
    for name in (FACTS, VALUES, VECTORS):
        shutil.copyfile(cell_folder(tiny_report, tiny_cells["proxy"]) / name, copy / name)
    return copy


def refused(path: Path, plan: Plan, cells: dict[str, Cell], match: str) -> None:
    with pytest.raises(RunError, match=match):
        read_answers(path, plan, cells["proxy"])


@pytest.mark.parametrize(
    "facts", ["", "[", "[]", "[" * 100_000, "NaN", '{"seconds": NaN}', '{"options": []}', '{"seconds": "1"}']
)
def test_facts_are_checked(
    folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], facts: str
) -> None:
    (folder / FACTS).write_text(facts)
    refused(tmp_path, tiny_plan, tiny_cells, rf"{FACTS}: expected a file of a finished cell, .*--resume")
    with pytest.raises(RunError, match=FACTS):
        check_finished(tmp_path, tiny_plan)


@pytest.mark.parametrize(
    "facts", [{"thresholds": ["1"]}, {"calibration": [{"slope": "1"}]}, {"calibration": [7]}, {"thresholds": [0.5]}]
)
def test_decisions_are_checked(
    folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], facts: dict[str, Any]
) -> None:
    (folder / FACTS).write_text(json.dumps(json.loads((folder / FACTS).read_text()) | facts))
    refused(tmp_path, tiny_plan, tiny_cells, rf"{FACTS}: .*found (thresholds|calibration).*--resume")


def test_a_pipe_is_refused(folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell]) -> None:
    (folder / VALUES).unlink()
    os.mkfifo(folder / VALUES)
    refused(tmp_path, tiny_plan, tiny_cells, "a device or pipe")
    (folder / FACTS).unlink()
    os.mkfifo(folder / FACTS)
    refused(tmp_path, tiny_plan, tiny_cells, "a device or pipe")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("scores", np.zeros((12, 3), np.float32)),
        ("scores", np.full((12, 2), "x")),
        ("scores", np.full((12, 2), None, object)),
        ("neighbours", np.zeros((12, 4), np.float32)),
        ("neighbours", np.full((12, 4), 9999, np.int16)),
        ("neighbours", np.full((12, 4), -2, np.int16)),
        ("neighbours", np.zeros(12, np.int8)),
        ("positive queries/ndcg", np.zeros(11, np.float32)),
        ("positive queries/ndcg", np.full(12, "x")),
    ],
)
def test_answers_are_checked(
    folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], name: str, array: Any
) -> None:
    with np.load(folder / VALUES) as data:
        arrays = dict(data)
    np.savez(folder / VALUES, **arrays | {name: array})
    refused(tmp_path, tiny_plan, tiny_cells, rf"{VALUES}: expected a file of .*--resume")


def test_damaged_and_oversized_arrays_are_refused(
    folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / VALUES).read_bytes()
    for data in (b"", b"nothing", whole[: len(whole) // 2], np.lib.format.magic(1, 0)):
        (folder / VALUES).write_bytes(data)
        refused(tmp_path, tiny_plan, tiny_cells, f"{VALUES}: expected")
    (folder / VALUES).write_bytes(whole)
    read_answers(tmp_path, tiny_plan, tiny_cells["proxy"])
    monkeypatch.setattr(module, "_MOST_ARRAYS", 1000)
    refused(tmp_path, tiny_plan, tiny_cells, "of more than 1,000 bytes")
    with pytest.raises(RunError, match=rf"{VECTORS}: expected"):
        read_vectors(folder)


def test_only_arrays_that_numpy_can_read_are_accepted(
    folder: Path, tmp_path: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.load(folder / VALUES) as data:
        arrays = dict(data)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 100)  # as for more than 2 GiB
        np.savez(folder / VALUES, **arrays)
    read_answers(tmp_path, tiny_plan, tiny_cells["proxy"])
    with zipfile.ZipFile(folder / VALUES, "a") as members:
        members.writestr("more.npy", b"no array")
    refused(tmp_path, tiny_plan, tiny_cells, "found no array in more")
    with zipfile.ZipFile(folder / VALUES, "w") as members:
        header = b"v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,), }"
        members.writestr("scores.npy", np.lib.format.magic(1, 0) + header.ljust(120))
    refused(tmp_path, tiny_plan, tiny_cells, f"{VALUES}: expected")
    np.savez(folder / VECTORS, query=np.zeros((2, 2)))
    with pytest.raises(RunError, match=f"{VECTORS}: expected .*found arrays query"):
        read_vectors(folder)


def test_facts_of_a_cell_are_unchanged(folder: Path) -> None:
    assert module._read_facts(folder) == json.loads((folder / FACTS).read_text())
