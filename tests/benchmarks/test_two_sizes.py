"""Two image sizes: features of both, and figures with their differences."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cbmir.training.run import RunFolder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "two_sizes.py"))


def test_features_of_two_sizes_are_joined_stage_by_stage(script: dict[str, Any], tiny_run: Path) -> None:
    config = RunFolder(tiny_run).read_config()
    small, large = (script["features"](tiny_run, replace(config, image_size=size))["train"] for size in (32, 64))
    for stage, (one, other) in zip(script["joined"](small, large), zip(small, large, strict=True), strict=True):
        assert one.shape == other.shape and not np.allclose(one, other)
        np.testing.assert_array_equal(np.split(stage, 2, axis=1), [one, other])


def test_the_differences_are_from_the_own_size(script: dict[str, Any], tiny_run: Path, tiny_manifest: Path) -> None:
    result = CliRunner().invoke(script["main"], [str(tiny_manifest), str(tiny_run), "--size", "64"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if "auc" in line or "corrected" in line]
    assert [row[0] for row in rows] == ["32"] * 3 + ["64"] * 3 + ["both"] * 3
    assert all("[" not in line for line in result.output.splitlines()[:3])
    of_both = rows[6]
    assert float(of_both[3]) == pytest.approx(float(of_both[2]) - float(rows[0][3]), abs=1.1e-3)
