"""Warnings about images: kinds, counts and lists."""

from __future__ import annotations

import copy
import csv
import json
import pickle
import re
from pathlib import Path
from typing import get_args

from cbmir.runtime.imaging.image_warning import ImageWarning, Kind, count_kinds, kinds_text, write_warnings
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

VIEW = ImageWarning("view unknown", "ViewPosition is missing")
PART = ImageWarning("body part unknown", "BodyPartExamined is missing")
LATERAL = ImageWarning("probably not frontal", "SeriesDescription says LAT")


def test_a_warning_is_a_string() -> None:
    """It also keeps its kind when a worker returns it."""
    for warning in (VIEW, pickle.loads(pickle.dumps(VIEW)), copy.deepcopy(VIEW)):
        assert (warning, warning.kind, json.dumps([warning])) == (
            "ViewPosition is missing", "view unknown", '["ViewPosition is missing"]',
        )  # fmt: skip


def test_kinds_are_counted_by_images() -> None:
    texts = [kinds_text(said) for said in ([VIEW, PART], [VIEW, VIEW], [], [LATERAL])]
    assert texts == ["view unknown; body part unknown", "view unknown", "", "probably not frontal"]
    assert list(count_kinds(texts).items()) == [
        ("view unknown", 2), ("body part unknown", 1), ("probably not frontal", 1),
    ]  # fmt: skip


def test_the_list(tmp_path: Path) -> None:
    path = tmp_path / "manifest.warnings.csv"
    assert write_warnings({Path("a"): [VIEW, PART], Path("b"): [VIEW]}, path) == {
        "view unknown": 2,
        "body part unknown": 1,
    }
    with path.open(newline="") as stream:
        assert list(csv.reader(stream)) == [
            ["image", "kind", "warning"], ["a", "view unknown", VIEW], ["a", "body part unknown", PART],
            ["b", "view unknown", VIEW],
        ]  # fmt: skip
    assert write_warnings({}, path) == {}
    assert not path.exists()


def test_a_dental_panorama_gives_warnings() -> None:
    """It has no body part and no view, so nothing says what it is."""
    radiograph = read_image(make_dicom(BodyPartExamined=None, ViewPosition=None, SeriesDescription="OPG"))
    assert [warning.kind for warning in radiograph.warnings] == ["body part unknown", "view unknown"]


def test_the_documentation_has_every_kind() -> None:
    page = (Path(__file__).parents[3] / "docs" / "integration.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([\w ]+)` \|", page, re.MULTILINE)) >= set(get_args(Kind))
