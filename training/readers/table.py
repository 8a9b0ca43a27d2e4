"""Your own table (CSV or Parquet): the caller specifies the meaning of each column; nothing is guessed."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from cbmir.errors import ManifestError
from cbmir.input_file import existing
from cbmir.labels import NIH_14, NO_FINDING, LabelSet, label_key, means_no_finding, resembles_no_finding
from cbmir.manifest import SPLITS, VIEWS, Manifest, Row
from cbmir.text_table import MISSING_WORDS, uncollected
from cbmir.training.readers import common
from cbmir.training.readers.common import CERTAIN_VALUES, Missing

T = TypeVar("T")
LabelsFormat = Literal["text", "list"]
_FLOAT_ID = re.compile(r"-?\d+\.0+")
_ROUNDED_ID = re.compile(r"-?\d+(\.\d+)?e\+\d+", re.IGNORECASE)
_FLOAT_DAY = re.compile(r"(\d{8})\.0+")
#: Possible separators of findings in a cell, in the order in which they are suggested for --separator.
_SEPARATORS = (";", "|", ",", "\t", "\n", "/", "+", "&", " and ")
_MIDNIGHT = re.compile(r"(\d{4}-\d\d-\d\d)[ T]00:00(:00(\.0+)?)?")
logger = logging.getLogger("cbmir")


@dataclass(frozen=True)
class ColumnMapping:
    """Names of the table's columns. With None, the column is empty in the manifest."""

    image: str = "image"
    patient: str = "patient_id"
    study: str | None = None
    view: str | None = None
    split: str | None = None
    report: str | None = None
    source: str | None = None
    date: str | None = None


@dataclass(frozen=True)
class LabelCells:
    """The format of label cells.

    Attributes:
        column: The column that joins findings ("Mass|Nodule"); None if each has its own column.
        separator: The separator in that column.
        format: `text`, or `list` for lists as Python or JSON write them: ['Mass', 'Nodule'].
        values: Words in label columns and their values, besides 1, 0, -1, yes, no, true, false and empty.
    """

    column: str | None = None
    separator: str = "|"
    format: LabelsFormat = "text"
    values: Mapping[str, int | None] | None = None


@uncollected()
def read_own_table(
    table: Path, *, columns: ColumnMapping = ColumnMapping(), labels: Sequence[str] = (),
    cells: LabelCells = LabelCells(), date_format: str | None = None, images: Path | None = None,
    missing: Missing = "error", seed: int = 0, unlabelled: bool = False,
) -> Manifest:  # fmt: skip
    """Read any table with one row per image into a manifest.

    Ids that became floats (10000032.0) are read as integers. Dates may also be YYYYMMDD, or a time at midnight.

    Args:
        labels: Names of label columns, whose cells are 1, 0, -1 (uncertain) or empty (unknown). With `cells.column`,
            the expected findings and their order; by default all that occur, sorted.
        cells: The format of label cells. In a column that joins labels, those in a cell are 1 and all others 0; "No
            Finding" (or "normal") makes all 0; an empty cell or list, or a word such as "nan", makes all unknown.
            Labels that differ only in case, blanks, hyphens or underscores are one; `labels` or the majority decides on
            the spelling.
        date_format: The format of dates, as for `datetime.strptime`.
        images: The folder of relative image paths; by default the table's folder.
        missing: `error`, or `skip` to leave out rows without an image file.
        seed: Seed of the 70:10:20 split by patient, if there is no split column.
        unlabelled: The table has no labels: `labels`, or NIH's, are unknown for every image, and there are no splits.

    Raises:
        ManifestError: A value is not as expected; the message gives row and column.
        SplitError: A patient is in two splits.
    """
    if unlabelled and cells.column is not None:
        raise ManifestError("expected a column of labels or none, found both --labels-column and --unlabelled")
    if not labels and cells.column is None and not unlabelled:
        raise ManifestError(
            "expected labels: name their columns (--labels A,B,C) or the one that joins them (--labels-column); "
            "--unlabelled says that the table has no labels"
        )
    label_columns = [] if unlabelled else list(labels) if cells.column is None else [cells.column]
    used = [name for name in (*astuple(columns), *label_columns) if name is not None]
    required = [name for name in used if name != columns.patient]
    source = common.read_source(table, required, "a table", [columns.patient], even=True)
    if columns.patient not in source.columns:
        raise ManifestError(
            f"{table}: expected the column {columns.patient!r} with each image's patient, found "
            f"{', '.join(source.columns)}. Images of one patient look similar: spread over training and test, or "
            "retrieved for each other, they make every result look too good. Name the column with --patient-column; "
            f"if each image really is of a different patient, say so with --patient-column {columns.image}"
        )
    twice = sorted({name for name in used if source.columns.count(name) > 1})
    if twice:
        raise ManifestError(f"{table}: expected each column name once, found {', '.join(twice)} more than once")
    unused = [name for name in source.columns if name and name not in used]
    if unused:
        logger.info("%s: columns not used: %s", table, ", ".join(unused))

    def column(name: str | None, convert: Callable[[str], T]) -> list[T]:
        """Convert a column's cells, each distinct value only once; an error names the first row with the value."""
        texts = [""] * len(source) if name is None else source.column(name)

        @cache
        def converted(text: str) -> T:
            try:
                return convert(text.strip())
            except ManifestError as error:
                raise ManifestError(f"{table}, row {texts.index(text) + 2}, column {name!r}: {error}") from None

        return list(map(converted, texts))

    values: list[tuple[int | None, ...]]
    if unlabelled:
        names, read_as = LabelSet(tuple(labels or NIH_14)), dict[str, str]()
        values = [(None,) * len(names)] * len(source)
    elif cells.column is None:
        names, read_as = LabelSet(tuple(labels)), dict[str, str]()
        value = cache(_value_of(cells.values or {}))
        places = [source.kept.index(name) for name in labels]
        try:  # by rows, which takes half as long as by columns
            values = [tuple([value(row[place]) for place in places]) for row in source.rows]
        except (ManifestError, IndexError):  # again by columns, so that the error names the row
            values = list(zip(*(column(name, value) for name in labels), strict=True))
    else:
        found = column(cells.column, lambda text: _names_in(text, cells, labels))
        names, read_as = _spelling(found, labels)
        values = column(cells.column, lambda text: _presence(_names_in(text, cells, labels), names, read_as))
        empty = sum(None in value for value in values)
        if empty:
            logger.warning(
                "empty %r in %d of %d rows: all their labels are unknown (write %r for none)",
                cells.column, empty, len(values), NO_FINDING,
            )  # fmt: skip
        for word in sorted(
            {text for text in map(str.strip, source.column(cells.column)) if text.lower() in MISSING_WORDS}
        ):
            logger.warning("%s: %r in column %r is read as an empty cell", table, word, cells.column)
        for spelled, name in read_as.items():
            logger.warning("%s: %r in column %r is read as %r", table, spelled, cells.column, name)
    base = (images or table.parent).resolve()
    rows = [
        Row(base / image, patient, labels_, study, view, split, report, hospital, date)
        for image, patient, labels_, study, view, split, report, hospital, date in zip(
            column(columns.image, _required),
            _ids(column(columns.patient, _required), table, columns.patient),
            values,
            _ids(column(columns.study, _present), table, columns.study),
            column(columns.view, lambda text: _one_of(text.upper(), VIEWS, "PA, AP, LATERAL or empty")),
            column(columns.split, lambda text: _one_of(text, SPLITS, "train, val, test or empty")),
            column(columns.report, str),
            column(columns.source, _present),
            column(columns.date, lambda text: _date(text, date_format)),
            strict=True,
        )
    ]
    rows, located = common.locate(rows, lambda row: existing(row.image), missing, base)
    splits = "not assigned: nothing to train on" if unlabelled else None  # None: assigned by `finish`
    if columns.split is not None:
        splits = f"column {columns.split}"
    return common.finish(
        Manifest(names, tuple(rows)), "table", [table], seed, splits=splits, policies={
            "columns": {name: value for name, value in vars(columns).items() if value is not None},
            "labels": "all unknown" if unlabelled else label_columns if cells.column is None else _in_words(cells),
            "labels_read_as": read_as,
            "columns_not_used": unused,
            "each_image_its_own_patient": columns.patient == columns.image, **located,
        }
    )  # fmt: skip


def _in_words(cells: LabelCells) -> str:
    return f"{'a list' if cells.format == 'list' else f'joined by {cells.separator!r}'} in {cells.column}"


def _required(text: str) -> str:
    if not text:
        raise ManifestError("expected a value, found it empty")
    return _present(text)


def _present(text: str) -> str:
    if text.lower() in MISSING_WORDS:
        raise ManifestError(
            f"expected a value, found {text!r}, a word for a missing one; correct the cell, or leave the row out"
        )
    return text


def _one_of(text: str, allowed: Sequence[str], words: str) -> str:
    if text not in allowed:
        raise ManifestError(f"expected {words}, found {text!r}")
    return text


def _ids(ids: list[str], table: Path, column: str | None) -> list[str]:
    """Convert ids that became floats back to integers, if all ids in the column are such floats."""
    for number, text in enumerate(ids, start=2):
        if _ROUNDED_ID.fullmatch(text):
            raise ManifestError(
                f"{table}, row {number}, column {column!r}: expected an id, found {text!r}, a rounded number: write "
                f"ids as text or integers where the table is made"
            )
    given = [text for text in ids if text]
    floats = list(filter(_FLOAT_ID.fullmatch, given))
    if len(floats) < len(given) or not given:
        if both := {text.partition(".")[0] for text in floats} & set(given):
            raise ManifestError(f"{table}, column {column!r}: expected each id in one form, found {min(both)} also "
                                f"as {min(both)}.0; write ids as text where the table is made")  # fmt: skip
        return ids
    logger.info("%s: column %r holds integers as floats (%s), which are read as integers", table, column, given[0])
    return [text.partition(".")[0] for text in ids]


def _date(text: str, date_format: str | None) -> str:
    if not text:
        return ""
    if whole := _FLOAT_DAY.fullmatch(text):
        text = whole[1]
    if date_format is not None:
        try:
            return datetime.strptime(text, date_format).date().isoformat()
        except ValueError as error:
            raise ManifestError(f"expected a date in the format of --date-format, found {text!r} ({error})") from error
    midnight = _MIDNIGHT.fullmatch(text)
    day = common.read_day(midnight[1] if midnight else text)
    if day is None:
        raise ManifestError(
            f"expected YYYY-MM-DD or nothing, found {text!r}; give their format with --date-format, such as %d.%m.%Y"
        )
    return day


def _value_of(values: Mapping[str, int | None]) -> Callable[[str], int | None]:
    known = CERTAIN_VALUES | {word.lower(): value for word, value in values.items()}
    unknown = MISSING_WORDS - known.keys() - {"-"}  # which may also mean that a finding is absent

    def value(cell: str) -> int | None:
        text = cell.strip()
        if text.lower() in unknown:
            logger.warning("%r in a label column is read as an empty cell: unknown", text)
            return None
        if text.lower() not in known:
            raise ManifestError(
                f"expected 1, 0, -1 (uncertain), yes, no, true, false or nothing (unknown), found {text!r}; say what "
                f"it means with --label-values, such as {text.replace(',', '')}=1"
            )
        return known[text.lower()]

    return value


def _names_in(text: str, cells: LabelCells, labels: Sequence[str]) -> frozenset[str]:
    """Return the findings in a cell. Raises ManifestError if they seem to be joined in another way."""
    if text.lower() in MISSING_WORDS:
        return frozenset()
    expected = {label_key(label) for label in labels}
    if cells.format == "list":
        listed = common.listed_labels(text)
        if listed is None:
            raise ManifestError(f"expected a list such as ['Mass', 'Nodule'], found {text!r}; see --labels-format")
        for name in listed:
            _check_finding(name, expected)
        return frozenset(listed)
    names = {name for part in text.split(cells.separator) if (name := part.strip())}
    for name in names:
        if label_key(name) in expected:
            continue
        if set("[]{}") & set(name) or name[0] in "'\"" or name[-1] in "'\"":
            raise ManifestError(
                f"expected findings joined by {cells.separator!r}, found {text!r}, a list; read lists with "
                "--labels-format list"
            )
        _check_finding(name, expected)
        other = next((mark for mark in _SEPARATORS if mark in name), None)
        if other:
            raise ManifestError(
                f"expected findings joined by {cells.separator!r}, found {text!r}; join them with --separator "
                f"{other!r}, or name all findings with --labels if {name!r} is one"
            )
    return frozenset(names)


def _check_finding(name: str, expected: Collection[str]) -> None:
    """Raise ManifestError for a word that means a missing value, or that seems to mean the absence of findings."""
    if label_key(name) in expected or means_no_finding(name):
        return
    if name.lower() in MISSING_WORDS or resembles_no_finding(name):
        raise ManifestError(
            f"expected findings, found {name!r}: write {NO_FINDING!r} if all are absent, leave the cell empty if "
            f"nothing is known, or name all findings with --labels if {name!r} is one"
        )


def _spelling(found: Sequence[frozenset[str]], labels: Sequence[str]) -> tuple[LabelSet, dict[str, str]]:
    """Return the label set, and other spellings -> their labels: "no_finding" -> No Finding, "mass" -> Mass."""
    counts = Counter(name for names in found for name in names)
    spelled = {label_key(label): label for label in labels}
    for name, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        if not labels and not means_no_finding(name):
            spelled.setdefault(label_key(name), name)
    read_as = {name: NO_FINDING if means_no_finding(name) else spelled.get(label_key(name), name) for name in counts}
    names = LabelSet(tuple(labels or sorted(spelled.values())))
    return names, {name: other for name, other in sorted(read_as.items()) if other != name}


def _presence(found: frozenset[str], labels: LabelSet, read_as: Mapping[str, str]) -> tuple[int | None, ...]:
    present = {read_as.get(name, name) for name in found}
    if present - {NO_FINDING, *labels.names} or (NO_FINDING in present and len(present) > 1):
        raise ManifestError(
            f"expected {NO_FINDING}, or some of {', '.join(labels.names)}, found {', '.join(sorted(found))}"
        )
    return tuple(int(name in present) if present else None for name in labels.names)
