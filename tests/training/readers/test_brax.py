from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.training.readers import read_brax
from cbmir.training.readers.chexpert import CHEXPERT_14

HEADER = "DicomPath,PngPath,PatientID,PatientSex,PatientAge,AccessionNumber,StudyDate," + ",".join(CHEXPERT_14)


def _row(number: int, view: str, day: str, labels: str) -> str:
    place = f"id_{number}/Study_{number}/Series_1/image-{number}"
    paths = f"Anonymized_DICOMs/{place}.dcm,images/{place}.png"
    return f"{paths},id_{number},F,50,{number}00,{day},{labels},{view},3000,2500,1"


@pytest.fixture
def brax(tmp_path: Path) -> Path:
    # No Finding, EC, CM, LO, lung lesion, ED, CS, PNA, AT, PTX, PE, pleural other, fracture, support devices
    rows = [
        _row(1, "PA", "2010-05-31", "1" + "," * 13),
        _row(2, "L", "20100601", ",,1,,,,,,,,,,,"),
        _row(3, "AP", "in winter", ",,1,0,,-1,,,,,,,,"),
        _row(4, "RLO", "", ",,,,,,,,,,,,,1"),
        _row(5, "AP", "", ",,,,,,,,,,,,,1"),
    ]
    (tmp_path / "master_spreadsheet_update.csv").write_text("\n".join([HEADER + ",ViewPosition,Rows,Columns,X", *rows]))
    for row in rows:
        dicom, png = row.split(",")[:2]
        path = tmp_path / (dicom if "image-3" in dicom else png)  # PNG, DICOM, or some of each
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path


def test_views_labels_and_either_kind_of_file(brax: Path) -> None:
    manifest = read_brax(brax)
    assert [(row.patient_id, row.study_id, row.view, row.date) for row in manifest] == [
        ("id_1", "100", "PA", "2010-05-31"), ("id_3", "300", "AP", ""), ("id_5", "500", "AP", ""),
    ]  # fmt: skip
    assert [row.image.suffix for row in manifest] == [".png", ".dcm", ".png"]
    # EC, CM, LO, ED, CS, PNA, AT, PTX, PE
    assert manifest.rows[1].labels == (0, 1, 0, -1, 0, 0, 0, 0, 0)
    policies = manifest.about["policies"]
    assert policies["left_out_by_view"] == {"L": 1, "RLO": 1}
    assert policies["dates_not_read"] == 1
    assert manifest.about["left_out"]["images_with_only_these"] == 1


def test_lateral_views_and_blanks_as_unknown(brax: Path) -> None:
    manifest = read_brax(brax, frontal_only=False, blank="unknown")
    assert [row.view for row in manifest] == ["PA", "LATERAL", "AP", "AP"]
    assert manifest.rows[1].labels == (None, 1, *[None] * 7)
    assert manifest.rows[0].labels == (0,) * 9


def test_a_missing_file_is_named(brax: Path) -> None:
    next(brax.rglob("image-1.png")).unlink()
    with pytest.raises(ManifestError, match=r"1 of 3 images .*images/id_1/Study_1/Series_1/image-1\.png"):
        read_brax(brax)
