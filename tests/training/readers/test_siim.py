from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cbmir.errors import ManifestError
from cbmir.text_table import read_table
from cbmir.training.readers.siim import mask_box, read_siim
from dicom_files import make_dicom
from published_tables import copy_tables


@pytest.fixture
def siim(shared: Path, tmp_path: Path) -> Path:
    """The invented table, with folders as at Kaggle; the first two images are one patient's, the last is converted."""
    folder = copy_tables(shared, "siim", tmp_path)
    images = [record["ImageId"] for _, record in read_table(folder / "train-rle.csv").records()]
    for number, image in enumerate(images[:-1]):
        path = folder / "dicom-images-train" / f"{image}.9" / f"{image}.8" / f"{image}.dcm"
        path.parent.mkdir(parents=True)
        path.write_bytes(make_dicom(PatientID=f"p{max(number, 1)}", ViewPosition="AP"))
    (folder / f"{images[-1]}.png").touch()
    return folder


def test_patients_views_and_boxes(siim: Path) -> None:
    manifest = read_siim(siim)
    assert [row.labels for row in manifest] == [(1,), (0,)] * 4
    assert [row.patient_id for row in manifest][:3] == ["p1", "p1", "p2"]
    assert manifest.rows[-1].patient_id == "1.2.276.0.99.7.1"
    assert [row.view for row in manifest] == ["AP"] * 7 + [""]
    assert [len(row.boxes) for row in manifest] == [1, 0] * 4
    assert manifest.about["policies"]["patients_from_headers"] == 7


def test_several_masks_of_an_image_are_several_boxes(siim: Path) -> None:
    path = siim / "train-rle.csv"
    with path.open("a", encoding="utf-8") as stream:
        stream.write("1.2.276.0.99.0.1, 0 5\n")
    boxes = read_siim(siim).rows[0].boxes
    assert len(boxes) == 2
    assert (boxes[1].left, boxes[1].top, boxes[1].width, boxes[1].height) == (0, 0, 0.000977, 0.004883)  # 1 by 5 pixels


def test_round_trip_of_a_mask() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        mask = np.zeros((1024, 1024), bool)
        left, top, width, height = random.integers(1, 500, 4)
        mask[top : top + height, left : left + width] = random.random((height, width)) > 0.7
        if random.random() > 0.5:
            mask[:, left] = True  # runs that continue in the next column
            mask[:3, left + 1] = True
        pixels = np.flatnonzero(np.diff(np.r_[0, mask.T.ravel(), 0]))  # starts and ends, down the columns
        ends = np.r_[0, pixels[1::2][:-1]]
        runs = np.stack([pixels[::2] - ends, pixels[1::2] - pixels[::2]], axis=1)
        box = mask_box(" ".join(map(str, runs.ravel())), "here")
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        expected = (columns[0], rows[0], np.ptp(columns) + 1, np.ptp(rows) + 1)
        assert (box.left, box.top, box.width, box.height) == pytest.approx(np.array(expected) / 1024, abs=1e-6)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("1 2 3", "expected pairs of start and length"),
        ("one two", "expected pairs"),
        ("5 0", "expected pairs"),
        ("1048575 2", "found one that ends at 1,048,577"),
    ],
)
def test_an_invalid_mask(runs: str, message: str) -> None:
    with pytest.raises(ManifestError, match=f"here: .*{message}"):
        mask_box(runs, "here")


def test_a_table_without_masks(siim: Path) -> None:
    path = siim / "train-rle.csv"
    path.write_text(path.read_text("utf-8").replace(" EncodedPixels", "Mask"), "utf-8")
    with pytest.raises(ManifestError, match="the column EncodedPixels, found ImageId, Mask"):
        read_siim(siim)
