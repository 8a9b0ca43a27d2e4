"""The script for docs/evidence.md: measures computed by hand, places of findings, and a small run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from cbmir.labels import NIH_14, LabelSet
from cbmir.manifest import Box, Manifest, Row, read_manifest, write_manifest
from cbmir.preprocessing import PreprocessSpec
from script_files import imported_script

pytestmark = pytest.mark.release

pytest.importorskip("pytorch_grad_cam")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"
WHOLE = PreprocessSpec(resize=64, crop=64)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported_script(ROOT / "benchmarks/evidence.py") as script:
        yield script


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cbmir.training.phantom import generate

    return generate(tmp_path_factory.mktemp("phantoms"), count=40, size=96, progress=False)


@pytest.fixture(scope="module")
def run(phantoms: Path, make_tiny_run: Callable[..., Path]) -> Path:
    """An untrained run at 96 pixels, with 3x3 cells."""
    none = (None,) * 10
    return make_tiny_run(
        phantoms.parent / "run", phantoms, card={"thresholds": none, "calibration": none}, image_size=96
    )


def test_the_pointing_game_by_hand(script: ModuleType) -> None:
    """Cells have 10x10 pixels: the centre of the upper right one is at row 5, column 15."""
    region = np.zeros((20, 20), bool)
    region[5, 15] = True
    maps = np.array([[[0, 2], [1, 0]], [[3, 0], [0, 0]]], float)
    assert script.hit(maps[:1], region) == 1
    assert script.hit(maps[1:], region) == 0
    assert script.hit(maps, region) == 0.5
    assert script.hit(np.zeros((1, 2, 2)), region) == 0.25  # all are the largest
    assert script.hit(np.arange(400.0).reshape(1, 20, 20), region) == 0


def test_a_tolerance_is_a_part_of_the_side(script: ModuleType) -> None:
    region = np.zeros((20, 20), bool)
    region[5, 15] = True
    assert script.grown(region, 0).sum() == 1
    assert script.grown(region, 0.05).sum() == 5  # one more pixel on each side
    assert script.grown(region, 0.075).sum() == 9


def test_iou_by_hand(script: ModuleType) -> None:
    """The map has as many cells as pixels; the last of four rows is above the upper quartile."""
    maps = np.arange(16.0).reshape(1, 4, 4)
    region = np.zeros((4, 4), bool)
    region[2:, :2] = True
    assert script.overlap(maps, region, [0.75, 0]) == [pytest.approx(2 / 6), pytest.approx(4 / 16)]
    assert script.overlap(np.concatenate([maps, -maps]), region, [0.75]) == [pytest.approx((2 / 6 + 0) / 2)]


def test_cells_are_enlarged_as_they_are_drawn(script: ModuleType) -> None:
    large = script.enlarged(np.array([[0.0, 4.0]]), (2, 8))
    np.testing.assert_allclose(large, [[0, 0, 0.5, 1.5, 2.5, 3.5, 4, 4]] * 2)


def test_correlations_by_hand(script: ModuleType) -> None:
    maps = np.array([[[0, 1, 2]], [[5, 7, 9]], [[1, 0, 1]], [[3, 3, 3]]], float)
    assert script.correlations(maps) == [pytest.approx(1), pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12)]


def test_boxes_lie_where_the_model_sees_them(script: ModuleType, tmp_path: Path) -> None:
    """The box is the upper right quarter; the model sees the central 64 of 80 pixels."""
    boxes = {"a": (Box("Infiltration", 0.5, 0, 0.5, 0.5),), "b": (Box("Mass", 0, 0, 0.01, 0.01),), "c": ()}
    rows = tuple(
        Row(tmp_path / f"{name}.jpg", name, (0,) * 14, split="test" if name == "a" else "train", boxes=drawn)
        for name, drawn in boxes.items()
    )
    write_manifest(Manifest(LabelSet(NIH_14), rows), tmp_path / "m.csv")
    (place,) = script.box_places(read_manifest(tmp_path / "m.csv"), PreprocessSpec(resize=80, crop=64))
    assert (place.label, place.row.patient_id) == ("Infiltration", "a")
    expected = np.zeros((64, 64), bool)
    expected[:32, 32:] = True
    np.testing.assert_array_equal(place.region, expected)

    done = CliRunner().invoke(script.main, ["hold-out", f"{tmp_path}/m.csv", "-o", f"{tmp_path}/held.csv"])
    assert done.exit_code == 0, done.output
    assert [row.split for row in read_manifest(tmp_path / "held.csv")] == ["test", "test", "train"]


def test_a_phantoms_findings_lie_on_their_side(script: ModuleType, phantoms: Path) -> None:
    from cbmir.training.phantom.files import study_id
    from cbmir.training.phantom.patients import describe

    manifest = read_manifest(phantoms)
    described = {study_id(one): one for one in describe(40, 0)}
    places = [place for split in ("train", "val", "test") for place in script.phantom_places(manifest, WHOLE, split)]
    assert len(places) == sum(sum(row.labels) for row in manifest)
    sides = 0
    for place in places:
        finding = described[place.row.study_id].finding(place.label)
        assert place.region.any() and place.region.mean() < 0.6
        if finding.label in ("Nodule", "Mass", "Consolidation"):
            across = place.region.nonzero()[1].mean()
            assert (across < 32) == (finding.side == "right"), place  # the patient's right is the image's left
            sides += 1
    assert sides > 5


def test_grad_cam_on_mean_features_is_the_map_minus_that_of_the_image(
    script: ModuleType, run: Path, phantoms: Path
) -> None:
    """d cos(e, p) / dF = (p - cos e) / (n |f|) in every cell, so the library's map is known; it is clipped at 0."""
    from cbmir.runtime import evidence_map
    from cbmir.training.run import load_model

    maps = sys.modules["evidence_maps"]
    network = maps.Network(*load_model(run)[:2])
    square = np.array(Image.open(read_manifest(phantoms).rows[0].image).resize((116, 116)))
    cells, vectors = network._explained(square)
    mean = cells.mean(axis=(1, 2))
    found = network.methods[maps.GRAD_CAM](square)
    assert found.shape == (10, 3, 3)
    for of_library, vector in zip(found, vectors.values(), strict=True):
        own = evidence_map(cells, vector)
        expected = np.maximum(own - own.sum() * evidence_map(cells, mean), 0)
        np.testing.assert_allclose(of_library, (expected - expected.min()) / np.ptp(expected), atol=1e-4)
    finer = network.methods[maps.FINER](square)
    assert finer.shape == (10, 6, 6)
    lengths = [np.linalg.norm(one) for one in maps.contrasts(vectors).values()]
    np.testing.assert_allclose(np.tensordot(lengths, finer, 1), 0, atol=1e-6)  # contrasts cancel


def test_a_small_run(script: ModuleType, run: Path, phantoms: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text("utf-8"), "utf-8")
    words = ["measure", "--phantoms", str(run), str(phantoms), "-o", str(tmp_path / "out"), "--write-docs", str(page)]
    done = CliRunner().invoke(script.main, words)
    assert done.exit_code == 0, (done.output, done.exception)
    report: dict[str, Any] = json.loads((tmp_path / "out" / "evidence.json").read_text("utf-8"))["phantoms"]
    assert report["findings"] == sum(sum(row.labels) for row in read_manifest(phantoms).split("test"))
    assert sum(report["by_finding"].values()) == report["findings"]
    for name, one in report["methods"].items():
        for value, low, high in (one["hits"], one["iou"]):
            assert 0 <= low <= value <= high <= 1, name
    assert report["methods"]["Grad-CAM"]["hits_difference"] == [0, 0, 0]
    assert "| contrast | " in page.read_text("utf-8") != PAGE.read_text("utf-8")
    with Image.open(tmp_path / "evidence.jpg") as picture:
        assert picture.size[0] > 600


def test_the_page_has_a_place_for_every_section() -> None:
    text = PAGE.read_text("utf-8")
    opened = re.findall(r"^<!-- evidence:([\w-]+) -->$", text, re.MULTILINE)
    assert re.findall(r"^<!-- /evidence:([\w-]+) -->$", text, re.MULTILINE) == opened
    assert set(opened) == {"machine", "phantoms", "phantoms-findings", "boxes", "boxes-findings"}
