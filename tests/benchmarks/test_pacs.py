"""A small run of the node's benchmark: every study is answered, and the figures are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pacs.py"


def test_every_study_is_answered(tiny_model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, str(SCRIPT), "--model", str(tiny_model), "--studies", "8", "--associations", "4",
        "--size", "64", "-o", str(tmp_path / "pacs.json"),
    ]  # fmt: skip
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "pacs.json").read_text("utf-8"))
    assert (figures["studies"], figures["associations"], figures["lost"]) == (8, 4, 0)
    assert 0 < figures["acknowledge_ms"]["p50"] <= figures["acknowledge_ms"]["p99"] <= figures["answer_ms"]["max"]
    assert "p99" in run.stdout
