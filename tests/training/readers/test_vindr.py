from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cbmir.errors import ManifestError
from cbmir.manifest import Box
from cbmir.text_table import read_table
from cbmir.training.readers.vindr import joined, overlap, read_vindr
from dicom_files import make_dicom
from published_tables import copy_tables

HEADER = "image_id,class_name,class_id,rad_id,x_min,y_min,x_max,y_max"
#: Boxes of three radiologists: two drew nearly the same mass, one drew another mass, one an effusion.
BOXES = (
    "a,Nodule/Mass,4,R1,10,20,30,40",
    "a,Nodule/Mass,4,R2,12,20,32,40",
    "a,Nodule/Mass,4,R3,60,10,90,30",
    "a,Pleural effusion,5,R1,0,50,40,60",
    "b,No finding,14,R1,,,,",
    "b,No finding,14,R2,,,,",
    "b,No finding,14,R3,,,,",
    "c,Cardiomegaly,3,R1,0,0,50,80",
    "c,Cardiomegaly,3,R2,0,0,50,80",
    "c,No finding,14,R3,,,,",
)


def _write(folder: Path, name: str, *lines: str, suffix: str = ".dicom") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([HEADER, *lines]) + "\n", "utf-8")
    pixels = np.arange(80 * 100, dtype=np.uint16).reshape(80, 100)  # 100 wide, 80 high
    for image in {line.split(",")[0] for line in lines}:
        (folder / f"{image}{suffix}").write_bytes(make_dicom(pixels) if suffix == ".dicom" else b"")
    return path


def test_two_of_three_votes_make_a_label_and_one_an_uncertain_label(tmp_path: Path) -> None:
    _write(tmp_path, "train.csv", *BOXES)
    manifest = read_vindr(tmp_path)
    assert manifest.labels.names == ("Cardiomegaly", "Nodule/Mass", "Pleural effusion")
    assert [row.labels for row in manifest] == [(0, 1, -1), (0, 0, 0), (1, 0, 0)]
    assert {row.view for row in manifest} == {"PA"}
    # (10, 20, 20, 20) and (12, 20, 20, 20) share 18 of 22 columns, so their mean is taken; the third stays
    assert manifest.rows[0].boxes == (
        Box("Nodule/Mass", 0.11, 0.25, 0.2, 0.25),
        Box("Nodule/Mass", 0.6, 0.125, 0.3, 0.25),
    )
    assert manifest.rows[2].boxes == (Box("Cardiomegaly", 0, 0, 0.5, 1),)
    assert manifest.about["policies"]["boxes"] == 3


@pytest.mark.parametrize(("agree", "labels"), [(1, (0, 1, 1)), (3, (0, 1, -1))])
def test_how_many_must_agree(tmp_path: Path, agree: int, labels: tuple[int, ...]) -> None:
    _write(tmp_path, "train.csv", *BOXES)
    manifest = read_vindr(tmp_path, agree=agree)
    assert manifest.rows[0].labels == labels
    assert manifest.rows[2].labels[0] == (1 if agree == 1 else -1)


def test_overlap_by_counting_pixels() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        first, second = (tuple(map(float, (*random.integers(0, 20, 2), *random.integers(1, 20, 2)))) for _ in range(2))
        masks = np.zeros((2, 40, 40), bool)
        for mask, (left, top, width, height) in zip(masks, (first, second), strict=True):
            mask[int(top) : int(top + height), int(left) : int(left + width)] = True
        expected = masks.all(axis=0).sum() / masks.any(axis=0).sum()
        assert overlap(first, second) == pytest.approx(expected)  # type: ignore[arg-type]


def test_boxes_are_merged_with_the_first_of_their_group() -> None:
    assert joined([(0, 0, 10, 10), (2, 0, 10, 10), (50, 0, 4, 4)]) == [(1, 0, 10, 10), (50, 0, 4, 4)]
    assert joined([]) == []


def test_the_synthetic_table_against_votes_counted_independently(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "vindr", tmp_path)
    records = [record for _, record in read_table(folder / "train.csv").records()]
    images = sorted({record["image_id"] for record in records})
    sizes = folder / "sizes.csv"
    sizes.write_text("image_id,dim0,dim1\n" + "".join(f"{image},1100,1200\n" for image in images), "utf-8")
    for image in images:
        (folder / f"{image}.png").touch()
    manifest = read_vindr(folder, sizes=sizes)
    assert len(manifest) == len(images)
    for row in manifest:
        said = [record for record in records if record["image_id"] == row.patient_id]
        for name, value in zip(manifest.labels.names, row.labels, strict=True):
            votes = len({record["rad_id"] for record in said if record["class_name"] == name})
            assert value == (1 if votes >= 2 else -1 if votes else 0)
        drawn = {box.label for box in row.boxes}
        assert drawn == {n for n, value in zip(manifest.labels.names, row.labels, strict=True) if value == 1}


def test_the_test_set_of_physionet_is_kept(tmp_path: Path) -> None:
    _write(tmp_path, "annotations_train.csv", *BOXES, *(f"t{n},No finding,14,R1,,,," for n in range(20)))
    test = _write(tmp_path, "annotations_test.csv", "x,Cardiomegaly,3,,0,0,50,80", "y,No finding,14,,,,,")
    test.write_text("\n".join(",".join(p for i, p in enumerate(line.split(",")) if i != 3)
                              for line in test.read_text("utf-8").splitlines()), "utf-8")  # fmt: skip
    manifest = read_vindr(tmp_path, seed=1)
    splits = {row.patient_id: row.split for row in manifest}
    assert {image for image, split in splits.items() if split == "test"} == {"x", "y"}
    assert list(splits.values()).count("val") == 3  # of 23
    assert next(row for row in manifest if row.patient_id == "x").labels[0] == 1, "the one reading of the test set"


@pytest.mark.parametrize(
    ("lines", "suffix", "message"),
    [
        (BOXES, ".png", r"a\.png: expected a DICOM file.*--sizes"),
        (("a,Mass,4,R1,30,20,10,40", *BOXES), ".dicom", "row 2: expected a box, found one without"),
        (("a,Mass,4,R1,,20,10,40", *BOXES), ".dicom", "row 2: expected a number in column 'x_min', found ''"),
        (("a,,4,R1,1,20,10,40", *BOXES), ".dicom", "row 2: expected an image and a finding"),
        (("d,Mass,4,R1,200,20,210,40", *BOXES), ".dicom", "row 2: expected a box inside an image of 100 by 80 pixels"),
    ],
)
def test_inconsistent_rows_are_refused(tmp_path: Path, lines: tuple[str, ...], suffix: str, message: str) -> None:
    _write(tmp_path, "train.csv", *lines, suffix=suffix)
    with pytest.raises(ManifestError, match=message):
        read_vindr(tmp_path)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "train.csv", *BOXES)
    (tmp_path / "a.dicom").write_bytes(b"\0" * 200)
    with pytest.raises(ManifestError, match=r"a\.dicom: expected a DICOM file with an image"):
        read_vindr(tmp_path)


def test_an_image_in_both_tables_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "annotations_train.csv", *BOXES)
    _write(tmp_path, "annotations_test.csv", "x,No finding,14,R1,,,,", BOXES[-1])
    with pytest.raises(ManifestError, match=r"annotations_test\.csv, row 3: .*c in train too"):
        read_vindr(tmp_path)


def test_image_level_labels(tmp_path: Path) -> None:
    """Tuberculosis never has boxes. A finding with boxes also has image labels, and counts each radiologist once."""
    _write(tmp_path, "annotations_train.csv", *BOXES)
    labels = tmp_path / "image_labels_train.csv"
    rows = ["a,R1,1,0,0", "a,R2,1,0,0", "a,R3,1,0,0", "b,R1,0,0,1", "b,R2,0,1,0", "b,R3,0,1,0", "c,R1,1,1,0"]
    labels.write_text("\n".join(["image_id,rad_id,Nodule/Mass,Tuberculosis,No finding", *rows]), "utf-8")
    manifest = read_vindr(tmp_path)
    assert manifest.labels.names == ("Cardiomegaly", "Nodule/Mass", "Pleural effusion", "Tuberculosis")
    assert [row.labels for row in manifest] == [(0, 1, -1, 0), (0, 0, 0, 1), (1, -1, 0, -1)]
    assert [len(row.boxes) for row in manifest] == [2, 0, 1]
    assert labels.name in manifest.about["sources"]
    labels.write_text("image_id,rad_id,Pleural effusion\na,R1,1\na,R2,0\na,R3,0", "utf-8")
    _write(tmp_path, "annotations_train.csv", *BOXES[3:])
    row = next(row for row in read_vindr(tmp_path) if row.patient_id == "a")
    assert (row.labels, row.boxes) == ((0, -1), ()), "one of three, two of whom drew no box"
    labels.write_text("image_id,Tuberculosis\nelsewhere,1", "utf-8")
    with pytest.raises(ManifestError, match=r"image_labels_train\.csv, row 2: expected an image of VinDr's tables"):
        read_vindr(tmp_path)
