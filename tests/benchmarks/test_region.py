"""The benchmark of searches by region: gains, boxes and chance, computed by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbmir.preprocessing import PreprocessSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "region.py"))


def test_gains(script: dict[str, Any]) -> None:
    found = SimpleNamespace(neighbours=[SimpleNamespace(labels=("Mass",) * (at in (0, 2))) for at in range(12)])
    all_ten = sum(1 / np.log2(rank + 2) for rank in range(10))
    assert script["gains"](found, "Mass") == pytest.approx((1.5 / all_ten, 0.2))
    assert script["gains"](found, "Nodule") == (0, 0)


def test_a_box_around_a_place(script: dict[str, Any]) -> None:
    """The model sees 8% to 92% of a side: the second and third of 4 columns cover 29% to 71%."""
    seen = np.zeros((4, 4), bool)
    seen[0, 1:3] = True
    spec = PreprocessSpec(resize=100, crop=84)
    assert script["box_around"](seen, spec) == pytest.approx((0.29, 0.08, 0.71, 0.29))


def test_chance(script: dict[str, Any]) -> None:
    """The centre of a window of 0.42 is between 0.29 and 0.71 of each side; a quarter of these are in the true box."""
    spec = PreprocessSpec(resize=100, crop=84)
    place, truth = (0.08, 0.08, 0.5, 0.5), (0.0, 0.5, 0.5, 1.0)
    assert script["_chance"](place, truth, spec) == pytest.approx(0.25)
    assert script["hit"](place, (0.2, 0.2, 0.3, 0.3)) and not script["hit"](place, truth)
