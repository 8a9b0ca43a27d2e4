"""NIH ChestX-ray14 (Wang et al., CVPR 2017): the official table as it comes, images in one folder or in twelve."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cbmir.errors import ManifestError, SplitError
from cbmir.labels import NIH_13, NIH_14, NO_FINDING, LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.training.readers.common import Missing, cell, check_folder, finish, keep_labels, locate, read_source

_COLUMNS = ("Image Index", "Finding Labels", "Follow-up #", "Patient ID", "View Position")
_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg"}
_FINDINGS = {13: NIH_13, 14: NIH_14}
logger = logging.getLogger("cbmir")


def read_nih(
    images: Path, entries: Path, *, findings: int = 14, splits: Path | None = None, missing: Missing = "error",
    seed: int = 0,
) -> Manifest:  # fmt: skip
    """A manifest of ChestX-ray14, or of a part of it.

    Args:
        images: Searched with its subfolders; files are matched by their name without the ending, so that converted
            copies (.jpg) fit too.
        entries: The official table.
        findings: 14, or 13 without Hernia: an image that shows only a hernia then has every label 0 and is not a
            healthy image; the sidecar counts these.
        splits: A CSV `image,split`; without it patients are split 70:10:20 by `seed`.
        missing: `error`, or `skip` to leave rows without an image file out.

    Raises:
        ManifestError: Table or folder do not fit.
        SplitError: The split file does not fit.
    """
    if findings not in _FINDINGS:
        raise ManifestError(f"expected 13 or 14 findings, found {findings}")
    table = read_entries(entries)
    index = _index_images(images)
    rows, absent = locate(table, lambda row: index.get(row.image.stem), missing, images)
    logger.info("%s: %d rows, %d of them with an image in %s", entries, len(table), len(rows), images)
    if len(index) > len(rows):
        logger.warning("%s: %d images are not in the table; left out", images, len(index) - len(rows))
    if splits is not None:
        split_of = _read_splits(splits)
        without = [row.image.name for row in rows if row.image.stem not in split_of]
        if without:
            raise SplitError(
                f"{splits}: expected a split for each image, found none for {len(without)}: {', '.join(without[:3])}"
            )
        rows = [replace(row, split=split_of[row.image.stem]) for row in rows]
    return finish(
        keep_labels(replace(table, rows=tuple(rows)), _FINDINGS[findings]),
        reader="nih",
        sources=[entries] if splits is None else [entries, splits],
        policies={"findings": findings, "missing": missing, "missing_images": absent},
        seed=seed,
        splits=None if splits is None else splits.name,
    )


def read_entries(path: Path) -> Manifest:
    """The official table (`Data_Entry_2017*.csv`, also .csv.gz) with all 14 findings; no image file is needed.

    A row's `image` is the bare file name of the table. Study ids are "<patient>_<follow-up>".

    Raises:
        ManifestError: The file is missing or damaged, or is another table.
    """
    # The header's last names hold commas ("OriginalImage[Width,Height]") and 2017's rows end in one. Both make columns
    # after the five that are read here, so these stand where the header says.
    _, records = read_source(path, _COLUMNS, "NIH's Data_Entry table")
    rows = tuple(_entry(record, f"{path}, row {number}") for number, record in enumerate(records, start=2))
    return Manifest(LabelSet(NIH_14), rows)


def _entry(record: dict[str, str], where: str) -> Row:
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


def _index_images(folder: Path) -> dict[str, Path]:
    """Every image below `folder`, by its name without the ending."""
    check_folder(folder, "the folder of the X-rays")
    index: dict[str, Path] = {}
    for path in folder.resolve().rglob("*"):
        if path.suffix.lower() not in _IMAGE_SUFFIXES:
            continue
        if path.stem in index:
            raise ManifestError(
                f"{folder}: expected each image once, found {path.stem} twice: "
                f"{index[path.stem]} and {path}; remove one"
            )
        index[path.stem] = path
    if not index:
        raise ManifestError(f"{folder}: expected X-rays (.png, .jpg) here or in subfolders, found none")
    return index


def _read_splits(path: Path) -> dict[str, str]:
    """A CSV `image,split`: the split of each image, by its name without the ending."""
    _, records = read_source(path, ("image", "split"), "a splits file")
    split_of: dict[str, str] = {}
    for number, record in enumerate(records, start=2):
        where = f"{path}, row {number}"
        stem, split = Path(cell(record, "image", where)).stem, cell(record, "split", where)
        if split not in ("train", "val", "test"):
            raise SplitError(f"{where}: expected split train, val or test; found {split!r}")
        if split_of.setdefault(stem, split) != split:
            raise SplitError(f"{where}: expected one split for {stem}, found {split_of[stem]} and {split}")
    return split_of
