"""docs/performance.md matches the script that fills it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from cbmir.export.perf.bench import BenchReport, Entrant, summarise
from cbmir.export.perf.contenders import peer_health
from script_files import imported_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"


@pytest.fixture(scope="module")
def performance() -> Iterator[ModuleType]:
    with imported_script(ROOT / "benchmarks/performance.py") as script:
        yield script


@pytest.fixture
def report() -> BenchReport:
    """A made-up report: in both rounds the bfloat16 file takes a tenth of PyTorch's time, the float32 file half."""
    rounds = {"peer torch": (100, 200), "model.onnx": (50, 100), "model.openvino-bf16.xml": (10, 20),
              "model.int8.onnx": (20, 50), "peak bfloat16": (5, 10)}  # fmt: skip
    times = {(1, name): [[one / 1000, one / 1000] for one in values] for name, values in rounds.items()}
    entrants = tuple(Entrant(name, peer_health("library", "1.2", 1, ""), 0.5, 100.4, None) for name in rounds)
    return BenchReport("peer torch", True, 1.0, entrants, summarise(times, "peer torch"))


def test_aims(performance: ModuleType, report: BenchReport) -> None:
    assert performance.aims_table(report).splitlines()[2:] == [
        "| fastest file / PyTorch eager (`model.openvino-bf16.xml`) | 1 | 10.00 [10.00, 10.00] | 9 | reached |",
        "| model.onnx / PyTorch eager | 1 | 2.00 [2.00, 2.00] | 2.2 | not reached |",
        "| model.int8.onnx / model.onnx | 1 | 2.25 [2.05, 2.45] | 2.2 | reached |",
        "| model.openvino-bf16.xml, share of the bfloat16 peak | 1 | 0.50 [0.50, 0.50] | 0.6 | not reached |",
    ]


def test_a_file_beyond_its_limits_is_never_the_fastest(performance: ModuleType, report: BenchReport) -> None:
    first = performance.aims_table(report, {"model.openvino-bf16.xml"}).splitlines()[2]
    assert first.startswith("| fastest file / PyTorch eager (`model.int8.onnx`) | 1 | 4.50 ")


def test_tables_and_chart(performance: ModuleType, report: BenchReport, tmp_path: Path) -> None:
    speeds = performance.speed_table(report).splitlines()
    assert speeds[2] == "| 1 | `peak bfloat16` | 7.5 | - | 133.3 | 20.00 [20.00, 20.00] |"
    assert len(speeds) == 7 and {line.count("|") for line in speeds} == {7}
    entrants = performance.entrants_table(report).splitlines()
    assert entrants[2] == "| `peer torch` | library 1.2 | float32 | 0.50 | 100 | - |"
    performance.draw(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "speed.svg", "speed.csv"}
    assert "model.openvino-bf16.xml" in (tmp_path / "speed.svg").read_text("utf-8")


def test_sections_go_between_their_marks(performance: ModuleType) -> None:
    page = "a\n<!-- performance:x -->\nold\n\\1\n<!-- /performance:x -->\nb\n"
    filled = performance.filled(page, "performance", {"x": r"new \1"})
    assert filled == "a\n<!-- performance:x -->\nnew \\1\n<!-- /performance:x -->\nb\n"
    assert performance.filled(filled, "performance", {"x": r"new \1"}) == filled
    with pytest.raises(click.UsageError, match="performance:y"):
        performance.filled(page, "performance", {"y": ""})


def test_the_page_has_a_place_for_every_section() -> None:
    text = PAGE.read_text("utf-8")
    opened = re.findall(r"^<!-- performance:([\w-]+) -->$", text, re.MULTILINE)
    assert re.findall(r"^<!-- /performance:([\w-]+) -->$", text, re.MULTILINE) == opened
    assert {"machine", "speed", "aims", "contenders", "modes", "file-to-answer"} <= set(opened)
