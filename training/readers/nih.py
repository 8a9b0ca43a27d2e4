"""NIH ChestX-ray14 (Wang et al., CVPR 2017): its published tables and lists, and images in one folder or in twelve.

Also Google's labels, on which radiologists agreed (Majkowska et al., Radiology 2020).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbmir.errors import ManifestError, SplitError
from cbmir.labels import NIH_13, NIH_14, NO_FINDING, LabelSet
from cbmir.manifest import Box, Manifest, Row
from cbmir.text_table import uncollected
from cbmir.training.readers import common
from cbmir.training.readers.common import Missing, cell

_COLUMNS = ("Image Index", "Finding Labels", "Follow-up #", "Patient ID", "View Position")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
_FINDINGS = {13: NIH_13, 14: NIH_14}
_BOX_COLUMNS = ("Image Index", "Finding Label", "Bbox [x", "y", "w", "h]")
_BOX_LABELS = {"Infiltrate": "Infiltration"}
_SIZE = (1024, 1024)  # size of the published images; boxes are in their pixels
#: Google's labels, and the values of their cells.
GOOGLE_4 = ("Fracture", "Pneumothorax", "Airspace opacity", "Nodule or mass")
_GOOGLE_VALUES = {"YES": 1, "NO": 0, "HEDGE": -1}
logger = logging.getLogger("cbmir")


@uncollected()
def read_nih(
    images: Path, entries: Path | None = None, *, findings: int | None = None, splits: Path | None = None,
    official: Path | None = None, boxes: Path | None = None, relabelled: Sequence[Path] = (),
    missing: Missing = "error", seed: int = 0,
) -> Manifest:  # fmt: skip
    """Read ChestX-ray14, or a part of it, into a manifest.

    Args:
        images: A folder, searched with its subfolders. Files are matched by name without the extension, so converted
            copies (.jpg) match too.
        entries: The official table; not with `relabelled`.
        findings: 14 (the default), or 13 without Hernia: an image that shows only a hernia then has every label 0,
            although it is not healthy; the sidecar counts these. Not with `relabelled`.
        splits: A CSV `image,split`; without it patients are split 70:10:20 by `seed`.
        official: The folder with train_val_list.txt and test_list.txt (also .gz). Test is the publisher's; one in eight
            of the other patients, drawn by `seed`, is in val.
        boxes: BBox_List_2017.csv.
        relabelled: Google's tables (four findings), to read only these images with these labels.
        missing: `error`, or `skip` to leave out rows without an image file.

    Raises:
        ManifestError: The table or the folder is not as expected.
        SplitError: The split file is not as expected.
    """
    if relabelled and findings is not None:
        raise ManifestError(
            f"expected --findings only with --entries: Google's tables have {len(GOOGLE_4)} of their own"
        )
    findings = findings or 14
    if findings not in _FINDINGS:
        raise ManifestError(f"expected 13 or 14 findings, found {findings}")
    if splits is not None and official is not None:
        raise SplitError("expected one source of splits, found a splits file and the official lists")
    if (entries is None) == (not relabelled):
        raise ManifestError("expected NIH's table of entries or the relabelled tables, one of the two")
    sources = [*relabelled] if entries is None else [entries]
    table = _relabelled(relabelled) if entries is None else read_entries(entries)
    index = common.index_images(images, _IMAGE_SUFFIXES)
    rows, located = common.locate(table, lambda row: index.get(row.image.stem), missing, images)
    logger.info("%s: %d rows, %d of them with an image in %s", sources[0], len(table), len(rows), images)
    if len(index) > len(rows):
        logger.warning("%s: %d images are not in the table; left out", images, len(index) - len(rows))
    read = (
        {"labels": "Google's radiologists: YES 1, NO 0, HEDGE -1 (uncertain)"} if relabelled else {"findings": findings}
    )
    policies: dict[str, Any] = read | located
    said = "Google's own: validation as val, test" if relabelled and rows[0].split else None
    if boxes is not None:
        sources.append(boxes)
        rows = _with_boxes(rows, boxes, table.labels)
    if splits is not None:
        sources.append(splits)
        rows, said = _with_splits(rows, _read_splits(splits), splits), splits.name
    if official is not None:
        rows = common.with_validation(_with_splits(rows, _official_splits(official), official), seed)
        said = "NIH's own test_list.txt; one in eight patients of train_val_list.txt in val"
        policies["val_seed"] = seed
    manifest = replace(table, rows=tuple(rows))
    return common.finish(
        manifest if relabelled else common.keep_labels(manifest, _FINDINGS[findings]), "nih", sources, seed,
        splits=said, policies=policies
    )  # fmt: skip


def read_entries(path: Path) -> Manifest:
    """Read the official table (`Data_Entry_2017*.csv`, also .csv.gz) with all 14 findings; no image file is needed.

    A row's `image` is the bare file name in the table. Study ids are "<patient>_<follow-up>".

    Raises:
        ManifestError: The file is missing or damaged, or is another table.
    """
    # The header's last names contain commas ("OriginalImage[Width,Height]"), and the rows of 2017 end with one. Both
    # only add columns after the five that are read here.
    table = common.read_source(path, _COLUMNS, "NIH's Data_Entry table")
    return Manifest(LabelSet(NIH_14), tuple(_entry(record, where) for where, record in table.records()))


def _entry(record: Mapping[str, str], where: str) -> Row:
    image, joined, follow_up, patient, view = (cell(record, column, where) for column in _COLUMNS)
    if not image or not patient.isdigit() or not follow_up.isdigit() or view not in ("PA", "AP"):
        raise ManifestError(
            f"{where}: expected an image name, whole numbers as follow-up and patient, and view PA or AP; "
            f"found {image!r}, {follow_up!r}, {patient!r}, {view!r}"
        )
    found = {name.strip() for name in joined.split("|")}
    unknown = sorted(found - {NO_FINDING, *NIH_14})
    if unknown or (NO_FINDING in found and len(found) > 1):
        raise ManifestError(
            f"{where}: expected {NO_FINDING}, or some of {', '.join(NIH_14)} joined by '|'; found {joined!r}"
        )
    labels = tuple(int(name in found) for name in NIH_14)
    return Row(Path(image), patient, labels, study_id=f"{patient}_{follow_up}", view=view)


def _relabelled(paths: Sequence[Path]) -> Manifest:
    """Read Google's tables, which have four findings and NIH's columns; the set is in `Set Id` or the file's name."""
    rows = []
    for path in paths:
        table = common.read_source(path, (*_COLUMNS, *GOOGLE_4), "a table of Google's four findings", ("Set Id",))
        for where, record in table.records():
            part = record.get("Set Id", path.name)
            values = {name: cell(record, name, where).upper() for name in GOOGLE_4}
            if unknown := sorted(set(values.values()) - set(_GOOGLE_VALUES)):
                raise ManifestError(f"{where}: expected YES, NO or HEDGE (uncertain), found {', '.join(unknown)}")
            labels = tuple(_GOOGLE_VALUES[value] for value in values.values())
            split = "val" if "validation" in part else "test" if "test" in part else ""
            rows.append(replace(_entry(record, where), labels=labels, split=split))
    if len({bool(row.split) for row in rows}) > 1:
        raise SplitError(f"expected all or none of {', '.join(path.name for path in paths)} to name its set")
    return Manifest(LabelSet(GOOGLE_4), tuple(rows))


def _with_boxes(rows: Sequence[Row], path: Path, labels: LabelSet) -> list[Row]:
    """Return the rows with the boxes of `BBox_List_2017.csv` for findings among the labels."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for where, record in common.read_source(path, _BOX_COLUMNS, "NIH's list of boxes").records():
        name, label = (cell(record, column, where) for column in _BOX_COLUMNS[:2])
        label = _BOX_LABELS.get(label, label)
        if label not in NIH_14:
            raise ManifestError(f"{where}: expected one of {', '.join(NIH_14)}, found {label!r}")
        left, top, width, height = (common.number(record, column, where) for column in _BOX_COLUMNS[2:])
        if label in labels.names:
            boxes[Path(name).stem].append(common.fraction_box(label, (left, top, width, height), _SIZE, where))
    return [replace(row, boxes=tuple(boxes.get(row.image.stem, ()))) for row in rows]


def _with_splits(rows: Sequence[Row], split_of: Mapping[str, str], where: Path) -> list[Row]:
    without = [row.image.name for row in rows if row.image.stem not in split_of]
    if without:
        raise SplitError(
            f"{where}: expected a split for each image, found none for {len(without)}: {', '.join(without[:3])}"
        )
    return [replace(row, split=split_of[row.image.stem]) for row in rows]


def _read_splits(path: Path) -> dict[str, str]:
    """Read a CSV `image,split`: the split of each image, by its name without the extension."""
    split_of: dict[str, str] = {}
    for where, record in common.read_source(path, ("image", "split"), "a splits file").records():
        stem, split = Path(cell(record, "image", where)).stem, cell(record, "split", where)
        if split not in ("train", "val", "test"):
            raise SplitError(f"{where}: expected split train, val or test; found {split!r}")
        if split_of.setdefault(stem, split) != split:
            raise SplitError(f"{where}: expected one split for {stem}, found {split_of[stem]} and {split}")
    return split_of


def _official_splits(folder: Path) -> dict[str, str]:
    """Read the split of each image in the official lists, by its name without the extension."""
    lists = {
        name: {
            Path(line).stem
            for line in common.read_lines(common.find_file(folder, [f"{name}.txt", f"{name}.txt.gz"], "official list"))
        }
        for name in ("train_val_list", "test_list")
    }
    if both := sorted(lists["train_val_list"] & lists["test_list"]):
        raise SplitError(f"{folder}: expected each image in one list, found {both[0]} in both")
    return dict.fromkeys(lists["train_val_list"], "train") | dict.fromkeys(lists["test_list"], "test")
