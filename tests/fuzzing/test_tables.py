"""Broken tables in every reader of tables: a manifest or a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest

from broken_tables import broken_tables, read_as_table, whole_tables

HERE = Path(__file__).parent


def test_intact_tables_are_read(tmp_path: Path) -> None:
    assert {name for name, data in whole_tables().items() if not read_as_table(data, tmp_path)} == set()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.release)])
def test_broken_tables(count: int, tmp_path: Path) -> None:
    taken = [read_as_table(data, tmp_path) > 0 for data in broken_tables(count, seed=count)]
    assert count / 20 < sum(taken) < count


def test_earlier_finds(tmp_path: Path) -> None:
    """Tables that once raised other errors; see finds/README.md."""
    for path in (HERE / "finds").glob("table-*"):
        read_as_table(path.read_bytes(), tmp_path)
