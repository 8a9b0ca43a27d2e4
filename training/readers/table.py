"""Your own table (CSV or Parquet): the caller says which column means what; nothing is guessed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from cbmir.errors import ManifestError
from cbmir.labels import NO_FINDING, LabelSet
from cbmir.manifest import SPLITS, VIEWS, Manifest, Row, is_date
from cbmir.training.readers.common import Missing, cell, finish, label_value, locate, read_source

logger = logging.getLogger("cbmir")


@dataclass(frozen=True)
class ColumnMapping:
    """Names of the table's columns; one that is None is left empty in the manifest."""

    image: str = "image"
    patient: str = "patient_id"
    study: str | None = None
    view: str | None = None
    split: str | None = None
    report: str | None = None
    source: str | None = None
    date: str | None = None


def read_own_table(
    table: Path, *, columns: ColumnMapping = ColumnMapping(), labels: Sequence[str] = (),
    labels_column: str | None = None, separator: str = "|", images: Path | None = None, missing: Missing = "error",
    seed: int = 0,
) -> Manifest:  # fmt: skip
    """A manifest of any table with one row per image.

    Args:
        labels: Names of label columns, whose cells hold 1, 0, -1 (uncertain) or nothing (unknown).
        labels_column: The column that joins findings instead ("Mass|Nodule"). Those named are 1 and all others 0, "No
            Finding" makes all 0, an empty cell all unknown. `labels` may then fix names and order; else they are all
            that occur, sorted.
        images: Where relative image paths start; by default the table's folder.
        missing: `error`, or `skip` to leave rows without an image file out.
        seed: Of the 70:10:20 split by patient, where there is no split column.

    Raises:
        ManifestError: Names row and column of what does not fit.
        SplitError: A patient is in two splits.
    """
    if not labels and labels_column is None:
        raise ManifestError(
            "expected labels: name their columns (--labels A,B,C) or the one that joins them (--labels-column)"
        )
    label_columns = list(labels) if labels_column is None else [labels_column]
    used = [name for name in (*astuple(columns), *label_columns) if name is not None]
    present, records = read_source(table, [name for name in used if name != columns.patient], "a table")
    if columns.patient not in present:
        raise ManifestError(
            f"{table}: expected the column {columns.patient!r} with each image's patient, found {', '.join(present)}. "
            f"Images of one patient look alike: spread over training and test, or retrieved for each other, they make "
            f"every figure too good. Name the column with --patient-column; if each image truly is another patient, "
            f"say so with --patient-column {columns.image}"
        )
    twice = sorted({name for name in used if present.count(name) > 1})
    if twice:
        raise ManifestError(f"{table}: expected each column name once, found {', '.join(twice)} more than once")
    unused = [name for name in present if name and name not in used]
    if unused:
        logger.info("%s: columns not used: %s", table, ", ".join(unused))

    where = [f"{table}, row {number}" for number in range(2, len(records) + 2)]
    if labels_column is None:
        names = LabelSet(tuple(labels))
        values = [tuple(label_value(r, name, w) for name in names.names) for r, w in zip(records, where, strict=True)]
    else:
        cells = [cell(r, labels_column, w) for r, w in zip(records, where, strict=True)]
        names, values = _joined_labels(cells, where, labels_column, separator, labels)
    rows = [_row(r, columns, v, w) for r, v, w in zip(records, values, where, strict=True)]
    base = (images or table.parent).resolve()
    rows, absent = locate(rows, lambda row: path if (path := base / row.image).is_file() else None, missing, base)
    return finish(
        Manifest(names, tuple(rows)),
        reader="table",
        sources=[table],
        policies={
            "columns": {name: value for name, value in vars(columns).items() if value is not None},
            "labels": label_columns if labels_column is None else f"joined by {separator!r} in {labels_column}",
            "columns_not_used": unused,
            "each_image_its_own_patient": columns.patient == columns.image,
            "missing": missing,
            "missing_images": absent,
        },
        seed=seed,
        splits=None if columns.split is None else f"column {columns.split}",
    )


def _row(record: dict[str, str], columns: ColumnMapping, labels: tuple[int | None, ...], where: str) -> Row:
    def value(column: str | None) -> str:
        return "" if column is None else cell(record, column, where)

    for column in (columns.image, columns.patient):
        if not value(column):
            raise ManifestError(f"{where}: expected a value in column {column!r}, found it empty")
    view, split = value(columns.view).upper(), value(columns.split)
    if view not in VIEWS:
        raise ManifestError(f"{where}: expected PA, AP, LATERAL or empty in column {columns.view!r}, found {view!r}")
    if split not in SPLITS:
        raise ManifestError(f"{where}: expected train, val, test or empty in column {columns.split!r}, found {split!r}")
    date = value(columns.date)
    if not is_date(date):
        raise ManifestError(f"{where}: expected YYYY-MM-DD or nothing in column {columns.date!r}, found {date!r}")
    return Row(
        Path(value(columns.image)), value(columns.patient), labels, study_id=value(columns.study), view=view,
        split=split, report=value(columns.report), source=value(columns.source), date=date,
    )  # fmt: skip


def _joined_labels(
    cells: list[str], where: list[str], column: str, separator: str, names: Sequence[str]
) -> tuple[LabelSet, list[tuple[int | None, ...]]]:
    found = [{name for part in text.split(separator) if (name := part.strip())} for text in cells]
    labels = LabelSet(tuple(names or sorted(set().union(*found) - {NO_FINDING})))
    for present, text, place in zip(found, cells, where, strict=True):
        unknown = sorted(present - {NO_FINDING, *labels.names})
        if unknown or (NO_FINDING in present and len(present) > 1):
            raise ManifestError(
                f"{place}: expected {NO_FINDING}, or some of {', '.join(labels.names)} joined by {separator!r} "
                f"in column {column!r}; found {text!r}"
            )
    empty = sum(not present for present in found)
    if empty:
        logger.warning(
            "%d rows have an empty %r: all their labels are unknown (write %r for none)", empty, column, NO_FINDING
        )
    return labels, [tuple(int(name in present) if present else None for name in labels.names) for present in found]
