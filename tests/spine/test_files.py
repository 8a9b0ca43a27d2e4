"""Files that only their owner can read, and cells that spreadsheets do not run."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from cbmir.files import defused, undefused, write_csv, write_json

FORMULAS = [
    '=HYPERLINK("http://evil.example","chest.png")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1",
    "'=already", "''=twice",
]  # fmt: skip


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_becomes_text_and_is_restored_when_read(cell: str) -> None:
    assert defused(cell) == f"'{cell}"
    assert undefused(defused(cell)) == cell


@pytest.mark.parametrize(
    "cell", ["", "chest.png", "/data/=x.png", "a=b", "-1", "+0.5", "-1e-5", "'quoted'", "'", "O'Neil"]
)
def test_other_cells_are_unchanged(cell: str) -> None:
    assert defused(cell) == cell
    assert undefused(cell) == cell


def test_a_table_is_defused(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", [("image", "cosine"), (Path("=x.png"), -0.5), ("-0.5", None)])
    with (tmp_path / "table.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["image", "cosine"], ["'=x.png", "-0.5"], ["-0.5", ""]]


def test_a_private_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_csv(tmp_path / "private.csv", [("patient",)], private=True)
        write_json(tmp_path / "private.json", {}, private=True)
        write_json(tmp_path / "public.json", {})
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())] == [0o600, 0o600, 0o666]
