"""VinDr-CXR (Nguyen et al., Scientific Data 2022): boxes of several radiologists, as PhysioNet and Kaggle ship them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet, means_no_finding
from cbmir.manifest import Box, Manifest, Row
from cbmir.training.readers import common
from cbmir.training.readers.common import cell
from cbmir.training.readers.header import is_dicom_file, read_header

Edges = tuple[float, float, float, float]
_COLUMNS = ("image_id", "class_name", "x_min", "y_min", "x_max", "y_max")
_SAME = 0.5  # boxes of one finding with a higher intersection over union are averaged


@dataclass
class ImageReadings:
    """The readings of an image: its radiologists, and for each finding the radiologists who reported it and its boxes
    (left, top, width, height in pixels)."""

    split: str
    where: str
    readers: set[str] = field(default_factory=set)
    said: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    drawn: dict[str, list[Edges]] = field(default_factory=lambda: defaultdict(list))


def read_vindr(
    folder: Path, *, agree: int = 2, sizes: Path | None = None, missing: common.Missing = "error", seed: int = 0
) -> Manifest:
    """Read VinDr-CXR into a manifest.

    A finding is 1 if `agree` of the image's radiologists drew it or reported it for the whole image, -1 (uncertain) if
    fewer did, and 0 if none did. Only findings that are 1 have boxes; boxes of one finding that share more than half of
    their union are averaged. PhysioNet's test set, if its table exists, is the test split; it has a single reading, on
    which five radiologists agreed.

    Args:
        folder: The folder with `train.csv` (Kaggle), or `annotations_train.csv` and `annotations_test.csv` (PhysioNet,
            optionally with `image_labels_train.csv` and `image_labels_test.csv`), and the images, DICOM or PNG.
        agree: Number of radiologists who must agree; all of them if an image has fewer.
        sizes: For converted images, a CSV `image_id,dim0,dim1` with the height and width of the originals; boxes are in
            the originals' pixels.
        missing: `error`, or `skip` to leave out images without a file.

    Raises:
        ManifestError: A table or the folder is not as expected, or the size of an image with boxes is unknown.
    """
    if agree < 1:
        raise ManifestError(f"expected at least one radiologist to agree, found {agree}")
    paths = {"train": common.find_file(folder, ["train.csv", "annotations_train.csv"], "VinDr's boxes")}
    if test := common.find_optional_file(folder, ["annotations_test.csv"], "VinDr's boxes of the test set"):
        paths["test"] = test
    readings: dict[str, ImageReadings] = {}
    for split, path in paths.items():
        for image, one in _readings(path, split).items():
            if (other := readings.setdefault(image, one)) is not one:
                raise ManifestError(
                    f"{one.where}: expected each image in one table, found {image} in {other.split} too"
                )
    whole = [
        found
        for part in paths
        if (found := common.find_optional_file(folder, [f"image_labels_{part}.csv"], "VinDr's labels of whole images"))
    ]
    for path in whole:
        _add_labels(path, readings)
    findings = sorted({name for one in readings.values() for name in one.said})
    size_of = _sizes(sizes) if sizes else {}
    index = common.index_images(folder)
    rows, located = common.locate(
        (Row(Path(image), image, (), view="PA", split=one.split) for image, one in readings.items()),
        lambda row: index.get(row.image.name), missing, folder,
    )  # fmt: skip
    made = []
    for row in tqdm(rows, desc="reading", unit="image", disable=None):
        one = readings[row.patient_id]
        need = min(agree, len(one.readers))
        votes = {name: len(readers) for name, readers in one.said.items()}
        labels = tuple(1 if votes.get(name, 0) >= need else -1 if name in votes else 0 for name in findings)
        agreed = [name for name in one.drawn if votes[name] >= need]
        size = (size_of.get(row.patient_id) or _size(row.image, sizes)) if agreed else (1, 1)
        boxes = [
            common.fraction_box(name, edges, size, one.where)
            for name in sorted(agreed)
            for edges in joined(one.drawn[name])
        ]
        made.append(_row(row, labels, boxes))
    return common.finish(
        Manifest(LabelSet(tuple(findings)), tuple(common.with_validation(made, seed) if test else made)), "vindr",
        [*paths.values(), *whole, *([sizes] if sizes else [])], seed,
        splits="VinDr's own test set; one in eight of the training images in val" if test else None, policies={
            "labels": f"1 if {agree} radiologists drew or reported the finding, -1 if fewer did, 0 if none did",
            "boxes_joined": f"averaged if two of one finding share more than {_SAME:.0%} of their union",
            "view": "PA, according to the data set's paper", "each_image_its_own_patient": True,
            "val_seed": seed if test else None, **located,
        }
    )  # fmt: skip


def joined(boxes: Sequence[Edges]) -> list[Edges]:
    """Return averages of groups of boxes, in table order; a box joins the first group whose first box it overlaps."""
    groups: list[list[Edges]] = []
    for box in boxes:
        group = next((group for group in groups if overlap(group[0], box) > _SAME), None)
        if group is None:
            groups.append([box])
        else:
            group.append(box)
    return [_mean(group) for group in groups]


def overlap(one: Edges, other: Edges) -> float:
    """Return the intersection over union of two boxes."""
    across = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
    down = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
    shared = max(across, 0) * max(down, 0)
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def _mean(boxes: Sequence[Edges]) -> Edges:
    left, top, width, height = (sum(edges) / len(boxes) for edges in zip(*boxes, strict=True))
    return left, top, width, height


def _readings(path: Path, split: str) -> dict[str, ImageReadings]:
    readings: dict[str, ImageReadings] = {}
    for where, record in common.read_source(path, _COLUMNS, "a table of VinDr's boxes", ("rad_id",)).records():
        image, name = cell(record, "image_id", where), cell(record, "class_name", where)
        if not image or not name:
            raise ManifestError(f"{where}: expected an image and a finding, found {image!r} and {name!r}")
        one = readings.setdefault(image, ImageReadings(split, where))
        reader = record.get("rad_id", "").strip()
        one.readers.add(reader)
        if not means_no_finding(name):
            left, top, right, bottom = (common.number(record, column, where) for column in _COLUMNS[2:])
            if right <= left or bottom <= top:
                raise ManifestError(f"{where}: expected a box, found one without a width or height")
            one.said[name].add(reader)
            one.drawn[name].append((left, top, right - left, bottom - top))
    return readings


def _add_labels(path: Path, readings: Mapping[str, ImageReadings]) -> None:
    """Add a table of labels of whole images: 1 or 0 per finding, with a row per image, or per image and radiologist."""
    table = common.read_source(path, ("image_id",), "a table of VinDr's labels of whole images", None)
    findings = [name for name in table.columns if name not in ("image_id", "rad_id") and not means_no_finding(name)]
    for where, record in table.records():
        if (one := readings.get(cell(record, "image_id", where))) is None:
            raise ManifestError(f"{where}: expected an image of VinDr's tables of boxes, found {record['image_id']!r}")
        if reader := record.get("rad_id", "").strip():  # one who drew no box votes too
            one.readers.add(reader)
        for name in findings:
            if common.number(record, name, where):
                one.said[name].add(reader)


def _sizes(path: Path) -> Mapping[str, tuple[int, int]]:
    found = {}
    for where, record in common.read_source(path, ("image_id", "dim0", "dim1"), "a table of sizes").records():
        height, width = (int(common.number(record, column, where)) for column in ("dim0", "dim1"))
        if min(height, width) < 1:
            raise ManifestError(f"{where}: expected a height and a width in pixels, found {height} and {width}")
        found[cell(record, "image_id", where)] = (width, height)
    return found


def _size(image: Path, sizes: Path | None) -> tuple[int, int]:
    if not is_dicom_file(image):
        raise ManifestError(
            f"{image}: expected a DICOM file, since VinDr's boxes are in its pixels, or its size in "
            f"{sizes or 'a table given with --sizes'}"
        )
    header = read_header(image)
    return header.width, header.height


def _row(row: Row, labels: tuple[int, ...], boxes: Sequence[Box]) -> Row:
    return Row(row.image, row.patient_id, labels, view=row.view, split=row.split, boxes=tuple(boxes))
