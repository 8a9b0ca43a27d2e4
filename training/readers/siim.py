"""SIIM-ACR Pneumothorax Segmentation (2019): boxes from Kaggle's run-length masks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet
from cbmir.manifest import Box, Manifest, Row
from cbmir.training.readers import common
from cbmir.training.readers.common import cell
from cbmir.training.readers.header import ImageHeader, is_dicom_file, read_header

LABEL = "Pneumothorax"
_SIDE = 1024  # pixels of the images and their masks
_MASKS = ("EncodedPixels", " EncodedPixels")


def read_siim(folder: Path, *, missing: common.Missing = "error", seed: int = 0) -> Manifest:
    """Read the challenge's training images into a manifest, with the smallest box around each mask.

    Patient and view come from the DICOM headers. Each converted image counts as a patient and has no view.

    Args:
        folder: The folder with `train-rle.csv` (or `stage_2_train.csv`) and the images at any depth, named by ImageId.
        missing: `error`, or `skip` to leave out images without a file.

    Raises:
        ManifestError: The table or the folder is not as expected, or a mask extends beyond its image.
    """
    path = common.find_file(folder, ["train-rle.csv", "stage_2_train.csv"], "SIIM's masks")
    table = common.read_source(path, ("ImageId",), "SIIM's masks", _MASKS)
    column = next((name for name in _MASKS if name in table.columns), None)
    if column is None:
        raise ManifestError(f"{path}: expected the column EncodedPixels, found {', '.join(table.columns)}")
    boxes: dict[str, list[Box]] = defaultdict(list)
    for where, record in table.records():
        image, runs = cell(record, "ImageId", where), cell(record, column, where)
        if not image or not runs:
            raise ManifestError(f"{where}: expected an image and its mask, or -1 for none, found an empty cell")
        boxes[image] += [] if runs == "-1" else [mask_box(runs, where)]
    index = common.index_images(folder)
    rows, located = common.locate(
        (Row(Path(image), image, ()) for image in boxes), lambda row: index.get(row.image.name), missing, folder
    )
    made, headers = [], 0
    for row in tqdm(rows, desc="reading", unit="image", disable=None):
        drawn = boxes[row.patient_id]
        header = read_header(row.image) if is_dicom_file(row.image) else ImageHeader("", "", _SIDE, _SIDE)
        headers += bool(header.patient_id)
        patient = header.patient_id or row.patient_id
        made.append(Row(row.image, patient, (int(bool(drawn)),), view=header.view, boxes=tuple(drawn)))
    return common.finish(
        Manifest(LabelSet((LABEL,)), tuple(made)), "siim", [path], seed, policies={
            "masks": "the smallest box around each", "patients_from_headers": headers, **located,
        }
    )  # fmt: skip


def mask_box(runs: str, where: str) -> Box:
    """Return the smallest box around a mask of 1024 x 1024 pixels.

    Args:
        runs: Pairs of numbers: pixels to skip since the last run, and the run's length. Pixels are counted down the
            columns, from left to right.
        where: File and row, for messages.

    Raises:
        ManifestError: `runs` does not consist of such pairs, or extends beyond the image.
    """
    words = runs.split()
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) % 2 or min(numbers[::2]) < 0 or min(numbers[1::2]) < 1:
        raise ManifestError(f"{where}: expected pairs of start and length, or -1, found {runs[:40]!r}")
    end, columns, rows = 0, [], []
    for skip, length in zip(numbers[::2], numbers[1::2], strict=True):
        start = end + skip
        end = start + length
        columns += [start // _SIDE, (end - 1) // _SIDE]
        whole = start // _SIDE != (end - 1) // _SIDE  # the run continues in the next column
        rows += [0, _SIDE - 1] if whole else [start % _SIDE, (end - 1) % _SIDE]
    if end > _SIDE * _SIDE:
        raise ManifestError(f"{where}: expected a mask of {_SIDE} x {_SIDE} pixels, found one that ends at {end:,}")
    left, top = min(columns), min(rows)
    edges = (left, top, max(columns) - left + 1, max(rows) - top + 1)
    return common.fraction_box(LABEL, edges, (_SIDE, _SIDE), where)
