from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.manifest_check import check_manifest
from dicom_files import make_dicom


def _image(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def clean(tmp_path: Path) -> Manifest:
    rows = [
        Row(_image(tmp_path / f"{i}.png", i), f"p{i}", (label,), view="PA", split=split)
        for i, (label, split) in enumerate([(1, "train"), (-1, "train"), (0, "val"), (None, "test")])
    ]
    return Manifest(LabelSet(("Mass",)), tuple(rows))


def _with(manifest: Manifest, *rows: Row) -> Manifest:
    return Manifest(manifest.labels, (*manifest.rows, *rows))


def test_a_clean_manifest(clean: Manifest) -> None:
    report = check_manifest(clean)
    assert report.ok
    assert report.duplicates == ()
    assert report.summary["splits"] == {
        "train": {"images": 2, "patients": 2}, "val": {"images": 1, "patients": 1},
        "test": {"images": 1, "patients": 1},
    }  # fmt: skip
    assert report.summary["labels"]["Mass"]["train"] == {"positive": 1, "negative": 0, "uncertain": 1, "unknown": 0}
    assert report.summary["labels"]["Mass"]["test"] == {"positive": 0, "negative": 0, "uncertain": 0, "unknown": 1}
    text = report.text()
    assert "4 images of 4 patients" in text
    assert "PROBLEM" not in text and "note" not in text
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_missing_file(clean: Manifest, tmp_path: Path) -> None:
    report = check_manifest(_with(clean, Row(tmp_path / "gone.png", "p9", (1,), split="train")))
    assert report.missing == (str(tmp_path / "gone.png"),)
    assert not report.ok
    assert "PROBLEM      missing files: 1" in report.text()


def test_an_impossible_file_name_is_a_missing_file(clean: Manifest, tmp_path: Path) -> None:
    report = check_manifest(_with(clean, Row(tmp_path / f"{'x' * 300}.png", "p9", (1,), split="train")))
    assert len(report.missing) == 1


def test_unreadable_image(clean: Manifest, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes((tmp_path / "0.png").read_bytes()[:200])
    report = check_manifest(_with(clean, Row(bad, "p9", (1,), split="train")), workers=1)
    assert list(report.unreadable) == [str(bad)]
    assert not report.ok
    quick = check_manifest(_with(clean, Row(bad, "p9", (1,), split="train")), quick=True)
    assert quick.ok
    assert "not checked" in quick.text()


def test_images_are_read_with_the_intensity_policy_of_the_manifest(clean: Manifest, tmp_path: Path) -> None:
    """A window outside all values only matters with `header`."""
    file = tmp_path / "window.dcm"
    file.write_bytes(make_dicom(WindowCenter=30000, WindowWidth=2))
    manifest = _with(clean, Row(file, "p9", (1,), split="train"))
    assert list(check_manifest(manifest).unreadable) == [str(file)]
    assert check_manifest(replace(manifest, about={"policies": {"intensity": "minmax"}})).ok


def test_patient_in_two_splits(clean: Manifest, tmp_path: Path) -> None:
    report = check_manifest(_with(clean, Row(_image(tmp_path / "9.png", 9), "p0", (1,), split="test")), quick=True)
    assert report.patients_in_two_splits == {"p0": ("test", "train")}
    assert not report.ok
    assert "p0: test, train" in report.text()


@pytest.mark.parametrize(("split", "ok"), [("train", True), ("", True), ("test", False)])
def test_duplicates_are_a_problem_only_across_splits(clean: Manifest, tmp_path: Path, split: str, ok: bool) -> None:
    copy = _image(tmp_path / "copy.png", 0)
    report = check_manifest(_with(clean, Row(copy, "p9", (1,), split=split)))
    pair = (str(tmp_path / "0.png"), str(copy))
    assert report.duplicates == (pair,)
    assert report.leaking_duplicates == (() if ok else (pair,))
    assert report.ok is ok
    assert " = ".join(pair) in report.text()


def test_rows_without_a_split_are_counted(clean: Manifest, tmp_path: Path) -> None:
    rows = [Row(_image(tmp_path / f"n{i}.png", 50 + i), f"n{i}", (1,)) for i in range(7)]
    report = check_manifest(_with(clean, *rows))
    assert report.ok
    assert report.summary["splits"]["unassigned"] == {"images": 7, "patients": 7}
    assert "images without a split, which training without folds leaves out: 7" in report.text()


def test_only_a_few_examples_are_named(clean: Manifest, tmp_path: Path) -> None:
    gone = [Row(tmp_path / f"gone{i}.png", f"g{i}", (1,), split="train") for i in range(8)]
    text = check_manifest(_with(clean, *gone), quick=True).text()
    assert text.count("gone") == 5
    assert "and 3 more" in text


def test_warnings_are_listed_by_kind(clean: Manifest, tmp_path: Path, inverted_chest: NDArray[np.uint8]) -> None:
    """Low contrast, a probable lateral and a warning of the picture check are different kinds."""
    dim = tmp_path / "dim.png"
    Image.fromarray(np.tile(np.arange(20, dtype=np.uint8) + 100, (40, 2))).save(dim)
    side = tmp_path / "side.dcm"
    side.write_bytes(make_dicom(PatientOrientation=["A", "F"]))
    negative = tmp_path / "negative.png"
    Image.fromarray(inverted_chest).save(negative)
    rows = [Row(image, image.name, (1,), split="train") for image in (dim, side, negative)]
    report = check_manifest(_with(clean, *rows))
    assert report.ok
    assert {image.name: [one.kind for one in said] for image, said in report.warnings.items()} == {
        "dim.png": ["little contrast"], "side.dcm": ["probably not frontal"], "negative.png": ["inverted"],
    }  # fmt: skip
    text = report.text()
    assert "note         images read with a warning: 3" in text
    assert f"note           little contrast: 1\n{'':<13}{dim}: little contrast: nearly all" in text
    assert f"note           probably not frontal: 1\n{'':<13}{side}: PatientOrientation" in text
    value = json.loads(json.dumps(report.to_json()))
    assert value["warning_kinds"] == {"inverted": 1, "little contrast": 1, "probably not frontal": 1}
    assert "nearly all grey values" in value["warnings"][str(dim)][0]
