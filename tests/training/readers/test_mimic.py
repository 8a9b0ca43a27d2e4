from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import CHEXPERT_9
from cbmir.text_table import read_table
from cbmir.training.readers.mimic import read_mimic
from published_tables import copy_tables


@pytest.fixture
def mimic(shared: Path, tmp_path: Path) -> Path:
    """The invented tables, an empty file per image, and two reports."""
    folder = copy_tables(shared, "mimic", tmp_path)
    for _, record in read_table(folder / "mimic-cxr-2.0.0-metadata.csv").records():
        study = (
            folder / "files" / f"p{record['subject_id'][:2]}" / f"p{record['subject_id']}" / f"s{record['study_id']}"
        )
        study.mkdir(parents=True, exist_ok=True)
        (study / f"{record['dicom_id']}.jpg").touch()
    for number in (1, 2):
        path = folder / f"mimic-cxr-reports/files/p19/p19900001/s5990000{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"  FINDINGS: {number}.\n", "utf-8")
    return folder


def test_paths_splits_views_and_labels(mimic: Path) -> None:
    manifest = read_mimic(mimic, frontal_only=False)
    assert len(manifest) == 18
    assert manifest.labels.names == CHEXPERT_9
    first, second, third = manifest.rows[:3]
    assert first.image == mimic / "files/p19/p19900001/s59900001" / f"{first.image.stem}.jpg"
    assert (first.patient_id, first.study_id, first.view, first.date) == ("19900001", "59900001", "PA", "2180-05-21")
    assert [row.view for row in (first, second, third)] == ["PA", "LATERAL", "AP"]
    # EC, CM, LO, ED, CS, PNA, AT, PTX, PE in 19900001,59900001,,,0.0,-1.0,,,,,,,,,-1.0, and in 59900002
    assert first.labels == second.labels == (0, 0, 0, -1, 0, 0, 0, -1, 0)
    assert third.labels == (0, 0, 0, 1, 0, 0, 0, 0, 0)
    counts = manifest.about["counts"]["splits"]
    assert {name: part["images"] for name, part in counts.items()} == {"train": 12, "val": 3, "test": 3}
    assert manifest.about["splits"] == "MIMIC's own, validate as val"
    assert "shifted" in manifest.about["policies"]["dates"]


def test_frontal_views_are_the_default(mimic: Path) -> None:
    manifest = read_mimic(mimic)
    assert {row.view for row in manifest} == {"PA", "AP"}
    assert manifest.about["policies"]["left_out_by_view"] == {"LATERAL": 6}


def test_a_missing_view_position_is_taken_from_the_view_code(mimic: Path) -> None:
    path = mimic / "mimic-cxr-2.0.0-metadata.csv"
    text = path.read_text("utf-8")
    path.write_text(text.replace(",PA,", ",,", 1).replace(",AP,", ",LAO,", 1), "utf-8")
    manifest = read_mimic(mimic)
    assert manifest.rows[0].view == "PA", "postero-anterior"
    assert manifest.about["policies"]["left_out_by_view"] == {"LATERAL": 6, "LAO": 1}


def test_reports_are_found_beside_the_images_or_in_a_given_folder(mimic: Path, tmp_path: Path) -> None:
    manifest = read_mimic(mimic)
    assert [row.report for row in manifest][:3] == ["FINDINGS: 1.", "FINDINGS: 2.", ""]
    assert manifest.about["policies"]["reports"] == 2
    (mimic / "mimic-cxr-reports").rename(tmp_path / "elsewhere")
    assert read_mimic(mimic).about["policies"]["reports"] == 0
    assert read_mimic(mimic, reports=tmp_path / "elsewhere").rows[0].report == "FINDINGS: 1."
    with pytest.raises(ManifestError, match=r"folder 'files' of mimic-cxr-reports\.zip"):
        read_mimic(mimic, reports=tmp_path)


def test_a_study_without_labels_is_unknown(mimic: Path) -> None:
    path = mimic / "mimic-cxr-2.0.0-chexpert.csv"
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]), "utf-8")
    manifest = read_mimic(mimic)
    assert manifest.rows[0].labels == (None,) * 9
    assert manifest.about["policies"]["images_of_studies_without_labels"] == 1


def test_patients_are_split_if_the_split_file_is_missing(mimic: Path) -> None:
    (mimic / "mimic-cxr-2.0.0-split.csv").unlink()
    manifest = read_mimic(mimic, seed=3)
    assert manifest.about["splits"] == "assigned by patient, 70:10:20"
    assert manifest.about["seed"] == 3


def test_the_other_labeller(mimic: Path) -> None:
    with pytest.raises(ManifestError, match=r"mimic-cxr-2\.\*-negbio\.csv.*found none"):
        read_mimic(mimic, labeller="negbio")
    (mimic / "mimic-cxr-2.0.0-chexpert.csv").rename(mimic / "mimic-cxr-2.0.0-negbio.csv")
    assert read_mimic(mimic, labeller="negbio").about["policies"]["labeller"] == "negbio"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("split", "validate", "valid", r"row 14: expected split train, validate or test, found 'valid'"),
        ("metadata", "21800521", "1.1.2180", r"row 2: expected a date YYYYMMDD in column 'StudyDate'"),
        ("metadata", ",19900001,", ",,", "row 2: expected the ids of image, patient and study"),
        ("chexpert", "-1.0", "2", r"row 2: .*'Edema', found '2'"),
    ],
)
def test_a_bad_cell_is_named(mimic: Path, file: str, old: str, new: str, message: str) -> None:
    path = mimic / f"mimic-cxr-2.0.0-{file}.csv"
    path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(ManifestError, match=message):
        read_mimic(mimic)


def test_two_editions_in_one_folder_are_refused(mimic: Path) -> None:
    (mimic / "mimic-cxr-2.1.0-chexpert.csv").touch()
    with pytest.raises(ManifestError, match=r"expected one file .*found mimic-cxr-2\.0\.0-chexpert\.csv, mimic"):
        read_mimic(mimic)


def test_the_unpacked_file_is_preferred(mimic: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = mimic / "mimic-cxr-2.0.0-split.csv"
    expected = read_mimic(mimic)
    (mimic / f"{path.name}.gz").write_bytes(gzip.compress(b"another table"))
    with caplog.at_level(logging.INFO, "cbmir"):
        assert read_mimic(mimic) == expected
    assert f"{path}.gz: not read, since the unpacked file beside it is" in caplog.text
    (mimic / "mimic-cxr-2.1.0-split.csv.gz").touch()
    with pytest.raises(ManifestError, match="expected one file"):
        read_mimic(mimic)
