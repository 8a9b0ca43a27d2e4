"""The script for docs/novelty.md, on a few small images."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import ModelCard
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.training.picture_check.impostors import KINDS

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run(
    tmp_path: Path,
    tiny_model: Path,
    tiny_card: ModelCard,
    make_xray: Callable[..., NDArray[np.uint8]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The images are bright at the top and dark at the bottom: upside down, each is flagged."""
    ramp = np.linspace(230, 20, 64)[:, None] * np.ones((64, 64))
    rows = []
    for n in range(130):
        image = tmp_path / f"{n}.png"
        Image.fromarray(np.clip(ramp + (make_xray(n) - 128.0) / 12, 0, 255).astype(np.uint8)).save(image)
        rows.append(Row(image, f"p{n // 2}", (1, 0, None), split="train" if n < 120 else "test"))
    write_manifest(Manifest(tiny_card.labels, tuple(rows)), tmp_path / "manifest.csv")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "novelty.py"))
    script["main"](str(tiny_model), str(tmp_path / "manifest.csv"), str(tmp_path))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Gallery: 120 images of 60 patients.")
    table = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in printed[4:])}
    assert set(table) == {*script["QUERIES"], *(f"drawn: {kind.__name__}" for kind in KINDS), "noise"}
    assert table["chests, as they are"][2] == "0.50"
    # Too small for the picture check.
    assert table["chests, turned by 180°"] == ["10", "100.0%", "1.00", "100.0%", "1.00", "0.0%"]
