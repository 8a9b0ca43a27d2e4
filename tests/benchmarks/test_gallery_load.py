"""A short load test: a fixed number of writes during searches, with every answer checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gallery_load.py"


def test_every_answer_is_that_of_its_generation(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--operations", "12", "--readers", "4", "-o", str(tmp_path / "load.json")]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "load.json").read_text("utf-8"))
    assert figures["generations"] == 12 and figures["wrong"] == 0
    assert len(figures["generations_seen"]) == 4 and figures["answers"] > figures["exact"] > 0
    assert figures["recall_by_index"] > 0.9
