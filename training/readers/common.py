"""What the readers share: source tables, missing images, leaving findings out, splits and the sidecar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cbmir.errors import ManifestError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import LABEL_VALUES, Manifest, Row, read_table
from cbmir.training.manifest_check import summarise
from cbmir.training.splits import assign_splits, check_splits

Missing = Literal["error", "skip"]
logger = logging.getLogger("cbmir")


def read_source(path: Path, required: Iterable[str], what: str) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and records of a dataset's table. Raises ManifestError if it is absent, empty or lacks a column."""
    if not path.is_file():
        raise ManifestError(f"{path}: expected {what}, found {'a folder' if path.is_dir() else 'no such file'}")
    columns, records = read_table(path)
    absent = [name for name in required if name not in columns]
    if absent:
        raise ManifestError(
            f"{path}: expected {what} with the column{'s' * (len(absent) > 1)} {', '.join(absent)}; "
            f"found {', '.join(columns) or 'no columns'}"
        )
    if not records:
        raise ManifestError(f"{path}: expected {what} with a row for each image, found only the header")
    return columns, records


def check_folder(folder: Path, what: str) -> None:
    """Raise ManifestError where `folder` is no folder."""
    if not folder.is_dir():
        raise ManifestError(f"{folder}: expected {what}, found {'a file' if folder.exists() else 'nothing'}")


def cell(record: dict[str, str], column: str, where: str) -> str:
    """A record's value without outer blanks. Raises ManifestError where the row ends before the column."""
    value: str | None = record[column]
    if value is None:
        raise ManifestError(f"{where}: the row ends before column {column!r}")
    return value.strip()


def label_value(record: dict[str, str], column: str, where: str) -> int | None:
    """1, 0, -1 (uncertain) or None (empty). Raises ManifestError that names the row and the column."""
    text = cell(record, column, where)
    if text.lower() not in LABEL_VALUES:
        raise ManifestError(
            f"{where}: expected 1, 0, -1 (uncertain) or empty (unknown) in label column {column!r}, found {text!r}"
        )
    return LABEL_VALUES[text.lower()]


def keep_labels(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """The manifest with only the named labels, in the order of `names`.

    An image that shows nothing but findings left out now has every label 0, and so counts as the negative class
    although it is no healthy image. `about["left_out"]` states the findings and how many such images there are.
    """
    places = [manifest.labels.index(name) for name in names]
    out = [place for place in range(len(manifest.labels)) if place not in places]
    rows = tuple(replace(row, labels=tuple(row.labels[place] for place in places)) for row in manifest)
    only = sum(
        not any(new.labels) and None not in new.labels and any(old.labels[place] for place in out)
        for old, new in zip(manifest, rows, strict=True)
    )
    left_out = {"findings": [manifest.labels.names[place] for place in out], "images_with_only_these": only}
    about = manifest.about | ({"left_out": left_out} if out else {})
    return Manifest(LabelSet(tuple(names)), rows, about)


def locate(
    rows: Iterable[Row], find: Callable[[Row], Path | None], missing: Missing, where: Path
) -> tuple[list[Row], int]:
    """Give each row its image file; returns the rows that have one and the number that do not.

    `missing` says what happens to the others: `error` raises ManifestError, `skip` leaves them out, counted in the log.
    """
    located, absent = [], []
    for row in rows:
        found = find(row)
        if found is None:
            absent.append(row.image.as_posix())
        else:
            located.append(replace(row, image=found))
    if absent:
        named = ", ".join(absent[:3]) + (", …" if len(absent) > 3 else "")
        message = f"{len(absent):,} of {len(absent) + len(located):,} images of the table are not in {where}: {named}"
        if missing == "error" or not located:
            raise ManifestError(f"{message}; correct the folder" + (", or use --missing skip" if located else ""))
        logger.warning("%s; left out", message)
    return located, len(absent)


def finish(
    manifest: Manifest, *, reader: str, sources: Collection[Path], policies: dict[str, Any], seed: int,
    splits: str | None,
) -> Manifest:  # fmt: skip
    """Splits and sidecar, the same for every reader.

    `splits` says where the rows' splits came from; None has them assigned by patient and `seed`.
    Raises ManifestError for an image listed twice, SplitError for a patient in two splits.
    """
    seen: set[Path] = set()
    for row in manifest:
        if row.image in seen:
            raise ManifestError(f"expected each image once, found {row.image} in two rows of the table")
        seen.add(row.image)
    if splits is None:
        try:
            manifest = manifest.with_splits(assign_splits([row.patient_id for row in manifest], seed=seed))
        except SplitError as error:
            raise SplitError(f"{reader}: {error}") from error
    check_splits(manifest)
    about = {
        "reader": reader,
        "sources": [path.name for path in sources],
        "policies": policies,
        "splits": splits or "assigned by patient, 70:10:20",
        "seed": seed if splits is None else None,
        **manifest.about,
        "counts": summarise(manifest),
    }
    return replace(manifest, about=about)
