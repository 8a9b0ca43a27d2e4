"""docs/gallery.md matches the script that fills it; the script's arithmetic, and one small run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest

from script_files import imported_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"


@pytest.fixture(scope="module")
def growth() -> Iterator[ModuleType]:
    with imported_script(ROOT / "benchmarks/gallery_growth.py") as script:
        yield script


def row(name: str, setting: int, recall: float, ratio: float, index_mb: float = 100.0) -> dict[str, Any]:
    return {"name": name, "setting": setting, "recall": recall, "ms": ratio / 2, "p99_ms": ratio,
            "ratio": [ratio, ratio - 0.1, ratio + 0.1], "qps": 1000.0, "build_s": 5.0, "index_mb": index_mb,
            "own_mb": 110.0, "mapped_mb": 3.0, "rounds": [ratio, 2 * ratio]}  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    """A made-up report in which int8 reaches its aim, and bf16 and the filter are too slow."""
    rows = [
        row("cbmir gallery", 1000, 0.998, 3.0), row("cbmir gallery", 1, 1.0, 4.0), row("cbmir bf16", 0, 0.992, 1.2),
        row("cbmir int8", 0, 0.996, 0.8), row("faiss HNSW", 64, 0.9945, 1.0, 440.0), row("faiss HNSW", 16, 0.981, 0.5),
        row("faiss HNSW", 256, 1.0, 3.0),
    ]  # fmt: skip
    gallery = {"add_s": 1.0, "write_index_s": 2.0, "open_and_answer_s": 0.05, "add_one_and_find_it_s": 0.004,
               "sqlite_mb": 500.0, "derived_mb": 530.0}  # fmt: skip
    machine = {"processor": "P", "usable": 2, "processors": 2, "features": [], "system": "S", "python": "3",
               "packages": {}}  # fmt: skip
    return {"count": 100_000, "dim": 1024, "threads": 2, "machine": machine, "gallery": gallery, "rows": rows}


def test_the_mixture_repeats_and_differs(growth: ModuleType) -> None:
    one, again = growth.Mixture(), growth.Mixture()
    block = one.block(3, 50)
    np.testing.assert_array_equal(block, again.block(3, 50))
    assert not np.array_equal(block, one.block(4, 50))
    np.testing.assert_allclose(np.linalg.norm(block, axis=1), 1, atol=1e-6)
    assert block.dtype == np.float32 and (block >= 0).all()
    cosines = one.block(0, 400) @ one.block(1, 400).T
    assert 0.7 < cosines.mean() < 0.85  # as for embeddings of chest radiographs


def test_exact_neighbours_match_brute_force(growth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "BLOCK", 64)
    mixture, count = growth.Mixture(), 150
    queries = mixture.block(10**9, 5)
    truth, filtered = growth.exact_neighbours(mixture, count, queries)
    vectors = np.concatenate([mixture.block(0, 64), mixture.block(1, 64), mixture.block(2, 22)])
    assert truth == [set(one[:10].tolist()) for one in np.argsort(-(queries @ vectors.T), axis=1)]
    assert filtered[1] == [set()] * 5 and filtered[10] == [{99}] * 5
    assert all(number % 2 == 1 for number in set().union(*filtered[500]))


def test_recall(growth: ModuleType) -> None:
    assert growth.recall(np.array([[1, 2], [3, -1]]), [{1, 9}, {3}]) == pytest.approx(2 / 3)


def test_aims(growth: ModuleType, report: dict[str, Any]) -> None:
    lines = growth.aims_table([report]).splitlines()[2:]
    assert [line.rsplit("|", 2)[1].strip() for line in lines] == ["not reached", "reached", "reached", "not reached"]
    assert "latency of `faiss HNSW 64` (recall 0.9945) | 0.9920 in 1.20 [1.20, 1.20]" in lines[0]
    assert "0.9960 in 0.80" in lines[1] and "0.9960 in 0.24" in lines[2]
    assert growth.aims_table([report | {"count": 1000}]) == ""
    for one in report["rows"]:
        if one["name"] == "faiss HNSW":
            one["recall"] = 0.9
    assert "latency of `faiss HNSW 64` (recall 0.9000) | 0.9920" in growth.aims_table([report])  # none has this recall


def test_every_table_and_the_chart(growth: ModuleType, report: dict[str, Any], tmp_path: Path) -> None:
    sections = growth.sections([report])
    assert "| `cbmir int8` | 0.9960 | 0.40 | 0.80 | 0.80 [0.70, 0.90] | 1,000 | 5.0 | 100 | 110 |" in sections["search"]
    assert "| 100,000 | 0.1% | 1.0000 | 2.00 | 4.00 [3.90, 4.10] |" in sections["filters"]
    assert "| 100,000 | 1.0 | 2.0 | 50 | 4 | 500 | 530 |" in sections["gallery"]
    growth.draw([report, report | {"count": 1000}], tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["growth.csv", "growth.png", "growth.svg"]
    assert len((tmp_path / "growth.csv").read_text().splitlines()) == 15


def test_the_page_has_a_place_for_each_section(growth: ModuleType, report: dict[str, Any]) -> None:
    page = PAGE.read_text("utf-8")
    sections = growth.sections([report]) | {"load": growth.load_text(PAGE.parent / "gallery" / "load.json")}
    assert set(re.findall(r"<!-- gallery:(\S+) -->", page)) == set(sections)
    filled = growth.filled(page, "gallery", sections)
    assert growth.filled(filled, "gallery", sections) == filled and sections["aims"] in filled
    with pytest.raises(click.UsageError, match="found none"):
        growth.filled("# An empty page", "gallery", sections)


def test_a_small_run(growth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures are present, and the neighbours are right."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(growth, "names", lambda count: ["cbmir gallery", "cbmir int8", "faiss HNSW"])
    monkeypatch.setattr(growth, "ROUNDS", 2)
    report = growth.measure(300, tmp_path)
    assert {one["name"] for one in report["rows"]} == {"cbmir gallery", "cbmir int8", "faiss HNSW"}
    assert all(one["ms"] > 0 for one in report["rows"])
    assert min(one["recall"] for one in report["rows"]) >= 0.99
    assert report["gallery"]["sqlite_mb"] > 1 and growth.search_table(report).count("\n") == 10
