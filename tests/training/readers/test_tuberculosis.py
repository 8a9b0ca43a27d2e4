from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.manifest import Box
from cbmir.training.readers.tuberculosis import read_nlm_tuberculosis, read_tbx11k
from published_tables import draw_images


@pytest.fixture
def nlm(tmp_path: Path) -> Path:
    montgomery = "MontgomerySet/CXR_png/MCUCXR_0001_0.png"
    masks = "MontgomerySet/ManualMask/leftMask/MCUCXR_0001_0.png"  # the same name again
    draw_images(tmp_path, [montgomery, masks, *(f"ChinaSet_AllFiles/CXR_png/CHNCXR_000{n}_1.png" for n in (3, 4))])
    readings = tmp_path / "ChinaSet_AllFiles" / "ClinicalReadings"
    readings.mkdir()
    (readings / "CHNCXR_0003_1.txt").write_text("male 40yrs\nright PTB\n", "utf-8")
    return tmp_path


def test_both_sets_together(nlm: Path) -> None:
    manifest = read_nlm_tuberculosis(nlm)
    assert [(row.patient_id, row.labels, row.source) for row in manifest] == [
        ("CHNCXR_0003_1", (1,), "Shenzhen"), ("CHNCXR_0004_1", (1,), "Shenzhen"), ("MCUCXR_0001_0", (0,), "Montgomery"),
    ]  # fmt: skip
    assert [row.report for row in manifest] == ["male 40yrs\nright PTB", "", ""]


def test_other_names_and_folders_are_refused(nlm: Path) -> None:
    with pytest.raises(ManifestError, match="expected images in a folder CXR_png"):
        read_nlm_tuberculosis(nlm / "MontgomerySet" / "ManualMask")
    draw_images(nlm, ["MontgomerySet/CXR_png/other.png"])
    with pytest.raises(ManifestError, match=r"other\.png: expected a name such as CHNCXR_0001_0"):
        read_nlm_tuberculosis(nlm)


COCO = {
    "categories": [
        {"id": 1, "name": "ActiveTuberculosis"}, {"id": 2, "name": "ObsoletePulmonaryTuberculosis"},
        {"id": 3, "name": "PulmonaryTuberculosis"},
    ],
    "images": [{"id": 7, "file_name": "tb/tb1.png", "width": 512, "height": 256},
               {"id": 8, "file_name": "tb/tb2.png", "width": 512, "height": 512}],
    "annotations": [{"image_id": 7, "category_id": 1, "bbox": [128, 64, 256, 128]},
                    {"image_id": 8, "category_id": 3, "bbox": [0, 0, 512, 512]}],
}  # fmt: skip


@pytest.fixture
def tbx11k(tmp_path: Path) -> Path:
    lists = {"train": ["tb/tb1.png", "tb/tb2.png", "health/h1.png"], "val": ["sick/s1.png"]}
    for split, names in lists.items():
        for path, text in (
            (tmp_path / "lists" / f"TBX11K_{split}.txt", "\n".join(names)),
            (tmp_path / "annotations" / "json" / f"TBX11K_{split}.json", json.dumps(COCO if split == "train" else
             COCO | {"annotations": []})),
        ):  # fmt: skip
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        draw_images(tmp_path / "imgs", names)
    return tmp_path


def test_tbx11k(tbx11k: Path) -> None:
    manifest = read_tbx11k(tbx11k)
    assert [(row.image.name, row.split, row.labels) for row in manifest] == [
        ("tb1.png", "train", (1, 1, 0, None)), ("tb2.png", "train", (1, None, None, None)),
        ("h1.png", "train", (0, 0, 0, 0)), ("s1.png", "val", (0, 0, 0, 1)),
    ]  # fmt: skip
    assert manifest.rows[0].boxes == (Box("Active Tuberculosis", 0.25, 0.25, 0.5, 0.5),)
    assert manifest.rows[1].boxes == (Box("Tuberculosis", 0, 0, 1, 1),)


def test_inconsistent_tbx11k_files_are_refused(tbx11k: Path) -> None:
    path = tbx11k / "annotations" / "json" / "TBX11K_train.json"
    endless = [one | {"width": float("inf")} for one in COCO["images"]]
    for text in (json.dumps(COCO | {"categories": []}), json.dumps(COCO | {"images": endless}), "[" * 5000):
        path.write_text(text, "utf-8")
        with pytest.raises(ManifestError, match="expected TBX11K's boxes in COCO's form"):
            read_tbx11k(tbx11k)
    path.write_text(json.dumps(COCO), "utf-8")
    (tbx11k / "lists" / "TBX11K_val.txt").write_text("extra/da/1.png", "utf-8")
    with pytest.raises(ManifestError, match="line 1: expected a path in health, sick, tb"):
        read_tbx11k(tbx11k)
