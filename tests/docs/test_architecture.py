"""docs/architecture.svg is what the imports say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("grimp")
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "architecture.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["architecture"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_of_this_code(script: ModuleType) -> None:
    drawn = script.draw(script.imports())
    assert drawn == script.SVG.read_text("utf-8"), "run: python docs/architecture.py"


def test_arrows_are_found_and_those_that_others_imply_left_out(script: ModuleType) -> None:
    pairs = {
        ("cbmir.cli", "cbmir.export"), ("cbmir.cli", "cbmir.training"), ("cbmir.export", "cbmir.training"),
        ("cbmir.training.comparison", "cbmir.training.losses"), ("cbmir.training.readers", "cbmir.runtime"),
    }  # fmt: skip
    box, frame = script.BOXES, script.FRAMES
    assert script.arrows(pairs) == [
        (box["cbmir.cli"], box["cbmir.export"]),
        (box["cbmir.export"], frame["cbmir.training"]),
        (frame["cbmir.training"], frame["cbmir.runtime"]),
        (box["cbmir.training.comparison"], box["cbmir.training.losses"]),
    ]


def test_a_new_package_needs_a_place(script: ModuleType) -> None:
    with pytest.raises(KeyError, match=r"cbmir\.new"):
        script.place_of("cbmir.new.module")
