from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.manifest import Box
from cbmir.text_table import read_table
from cbmir.training.readers.rsna import read_rsna
from dicom_files import make_dicom
from published_tables import copy_tables

LABELS, CLASSES = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"


@pytest.fixture
def rsna(shared: Path, tmp_path: Path) -> Path:
    """The invented tables; the first image is DICOM with a view, the others are converted."""
    folder = copy_tables(shared, "rsna", tmp_path)
    images = list(dict.fromkeys(record["patientId"] for _, record in read_table(folder / LABELS).records()))
    place = folder / "stage_2_train_images"
    place.mkdir()
    (place / f"{images[0]}.dcm").write_bytes(make_dicom(ViewPosition="AP"))
    for image in images[1:]:
        (place / f"{image}.png").touch()
    return folder


def test_boxes_labels_and_views(rsna: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rsna / CLASSES
    path.write_text(path.read_text("utf-8").replace(",Normal", ",No Lung Opacity / Not Normal", 1), "utf-8")
    with caplog.at_level(logging.WARNING, "cbmir"):
        manifest = read_rsna(rsna)
    assert manifest.labels.names == ("Lung Opacity", "Other Abnormality")
    first, second, third = manifest.rows[:3]
    assert [row.labels for row in (first, second, third)] == [(1, None), (0, 1), (1, None)]
    assert (0, 0) in [row.labels for row in manifest], "a normal image"
    assert first.boxes == (Box("Lung Opacity", 0.097656, 0.195312, 0.175781, 0.292969),)  # 100, 200, 180, 300 of 1024
    assert [len(row.boxes) for row in (first, second, third)] == [1, 0, 3]
    assert (first.view, second.view) == ("AP", "")
    assert manifest.about["policies"]["each_image_its_own_patient"] is True
    assert "each image counts as a patient" in caplog.text


def test_the_mapping_gives_nih_patient_ids(rsna: Path) -> None:
    images = list(dict.fromkeys(record["patientId"] for _, record in read_table(rsna / LABELS).records()))
    mapping = [{"subset_img_id": image, "img_id": f"{7 + n // 2:08}_00{n}.png"} for n, image in enumerate(images)]
    path = rsna / "pneumonia-challenge-dataset-mappings_2018.json"
    path.write_text(json.dumps(mapping), "utf-8")
    manifest = read_rsna(rsna)
    assert [row.patient_id for row in manifest][:4] == ["7", "7", "8", "8"]
    assert manifest.rows[0].split == manifest.rows[1].split
    path.write_text(json.dumps(mapping[1:]), "utf-8")
    with pytest.raises(ManifestError, match=f"found none for {images[0]}"):
        read_rsna(rsna)
    for text in ("[{}]", "[" * 5000):
        path.write_text(text, "utf-8")
        with pytest.raises(ManifestError, match="expected a list of subset_img_id and img_id"):
            read_rsna(rsna)


def test_without_a_table_of_classes_there_is_one_label(rsna: Path) -> None:
    (rsna / CLASSES).unlink()
    manifest = read_rsna(rsna)
    assert manifest.labels.names == ("Lung Opacity",)
    assert "count as healthy" in manifest.about["policies"]["labels"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (LABELS, ",180.0,300.0,1", ",180.0,,1", "row 2: expected a number in column 'height', found ''"),
        (LABELS, "300.0,1", "300.0,2", "row 2: .*'Target', found '2'"),
        (LABELS, "100.0,200.0", "2000.0,200.0", "row 2: expected a box inside an image of 1024 by 1024"),
        (CLASSES, "Lung Opacity", "Opacity", "row 2: expected one of Lung Opacity"),
        (CLASSES, "Lung Opacity", "Normal", "expected the class of .* as in .*, found another"),
    ],
)
def test_inconsistent_tables_are_refused(rsna: Path, file: str, old: str, new: str, message: str) -> None:
    path = rsna / file
    path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(ManifestError, match=message):
        read_rsna(rsna)
