"""The bundled model: found by its name, small, with a complete card, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cbmir
from cbmir.manifest import read_manifest
from cbmir.runtime import open_engine
from cbmir.runtime.gallery.build.merge import read_card
from cbmir.runtime.models.catalog import MODELS, find_model, model_file
from command_line import run


def test_a_name_means_a_catalog_model_unless_a_path_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("starter") == find_model(Path("starter")) == model_file("starter")
    assert find_model("other.onnx") == Path("other.onnx")
    assert find_model("./models/starter") == Path("models/starter")
    (tmp_path / "starter").mkdir()
    assert find_model("starter") == Path("starter")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_small_and_described_by_its_card(name: str) -> None:
    assert model_file(name).stat().st_size < 15e6
    with open_engine(name, engine="onnxruntime") as engine:
        card = engine.card
    assert read_card(name) == card
    assert card.licence == "Apache-2.0"
    for words in ("not a medical device", "small model to start with", "small public set", "cross-validation", "Cite"):
        assert words in card.intended_use
    assert card.training["images"] == {"train": 1776, "val": 0, "test": 0}
    assert card.training["held_out"] == "5 folds" and card.training["weights"] == "lite0.pt"
    assert {"5 folds auc", "5 folds positive queries", "5 folds all queries"} == card.metrics.keys()
    assert None not in card.thresholds and None not in card.calibration
    assert "/" not in json.dumps([card.training["manifest"], card.training["weights"]])


def test_similar_images_are_found_without_torch(tiny_manifest: Path, tmp_path: Path) -> None:
    script = f"""
import sys
from cbmir.cli import main
for words in (["index", "build", "starter", {str(tiny_manifest)!r}, "-o", "gallery"],
              ["query", "starter", "gallery", {str(read_manifest(tiny_manifest).rows[0].image)!r}, "-k", "3"]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, end.code
assert not {{"torch", "torchvision", "lightning", "pandas"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Neighbours, nearest first" in done.stdout


def test_its_answers_have_not_changed() -> None:
    """The input is a grey ramp: a different file or preprocessing would change the answers."""
    ramp = np.linspace(0, 255, 200 * 200).reshape(200, 200).astype(np.uint8)
    with cbmir.load("starter", engine="onnxruntime") as finder:
        scores = {one.label: one.score for one in finder.analyze(ramp, 0).findings}
    assert [scores[name] for name in ("Effusion", "Edema", "Hernia")] == pytest.approx([0.367, 0.290, 0.014], abs=2e-3)


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, check in ((["models"], str), (["models", "--json"], json.loads)):
        assert run(*words) == 0
        shown = check(capsys.readouterr().out)
        assert "starter" in shown
    assert shown["starter"]["card"]["licence"] == "Apache-2.0"
