"""The manifest, a table that data set readers write and all later steps read.

It has one row per image, with these columns and then one per label:

==========  ==========================================================================
image       path; a relative one is relative to the manifest's own folder
patient_id  required: splits and retrieval keep patients apart
study_id    may be empty
view        PA, AP, LATERAL or empty (unknown)
split       train, val, test or empty (not assigned)
report      free text, may be empty
source      optional: hospital or data set; benchmarks report figures for each source, and
            galleries filter by it
date        optional: date of the study, YYYY-MM-DD or empty
boxes       optional: boxes of findings, as JSON [["Mass", 0.21, 0.33, 0.08, 0.09], …]:
            label, left, top, width and height, as fractions of the image's width and
            height, so that they are also valid for a resized copy
<label>     1, 0, -1 (uncertain) or empty (unknown)
==========  ==========================================================================

CSV (`.csv`, `.csv.gz`) is read and written by the standard library; `.parquet` needs pyarrow.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import Any

from cbmir.errors import ManifestError, require
from cbmir.files import defused, replacing, undefused, write_json
from cbmir.input_file import parse_json, read_json
from cbmir.labels import LabelSet
from cbmir.text_table import read_table, uncollected

FIXED_COLUMNS = ("image", "patient_id", "study_id", "view", "split", "report")
#: Columns that are only written if a row has a value.
OPTIONAL_COLUMNS = ("source", "date", "boxes")
_TEXTS = ("image", "patient_id", "study_id", "report", "source")  # `defused` in CSV
SPLITS = ("train", "val", "test", "")
VIEWS = ("PA", "AP", "LATERAL", "")
_ROUNDING = 1e-5  # by which a box may extend beyond the image
#: Texts that a label cell may hold, and their values; CSV, pandas and Parquet write the same number differently.
LABEL_VALUES: dict[str, int | None] = {
    "1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": None, "nan": None,
}  # fmt: skip
_LABEL_TEXTS = {None: "", 0: "0", 1: "1", -1: "-1"}


@dataclass(frozen=True)
class Box:
    """The place of a finding, in fractions of the image's width and height from its upper left corner."""

    label: str
    left: float
    top: float
    width: float
    height: float

    def __post_init__(self) -> None:
        sides = ((self.left, self.width), (self.top, self.height))
        if not all(start >= 0 and length > 0 and start + length <= 1 + _ROUNDING for start, length in sides):
            raise ManifestError(
                f"expected a box inside the image in fractions of its width and height, found {self.label} at "
                f"{self.left}, {self.top}, {self.width} wide and {self.height} high"
            )


@dataclass(frozen=True)
class Row:
    """One image. `image` is an absolute path; `labels` are 1, 0, -1 (uncertain) or None (unknown), in label order."""

    image: Path
    patient_id: str
    labels: tuple[int | None, ...]
    study_id: str = ""
    view: str = ""
    split: str = ""
    report: str = ""
    source: str = ""
    date: str = ""
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Rows, and at least one label.

    Attributes:
        about: The content of the sidecar: the reader that made the manifest, its source files and policies.
        absent: Columns of `FIXED_COLUMNS` that the file lacks; the empty values of the rows mean nothing.
    """

    labels: LabelSet
    rows: tuple[Row, ...]
    about: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise ManifestError("expected at least one label, found none")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def split(self, *names: str) -> Manifest:
        """Return a copy with only the rows of the named splits, in the same order."""
        return replace(self, rows=tuple(row for row in self.rows if row.split in names))

    def with_splits(self, splits: Sequence[str]) -> Manifest:
        """Return a copy with new splits, one per row."""
        rows = tuple(_in_split(row, split) for row, split in zip(self.rows, splits, strict=True))
        return replace(self, rows=rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the data that training uses: the label names, then each row's file name, patient, study, view,
        split and labels. Folders, reports, sources, dates and boxes do not count: a data set may move or get more
        reports."""
        digest = hashlib.sha256("\x1f".join(self.labels.names).encode())
        for row in self.rows:
            values = ",".join("" if v is None else str(v) for v in row.labels)
            cells = (row.image.name, row.patient_id, row.study_id, row.view, row.split, values)
            digest.update(("\x1e" + "\x1f".join(cells)).encode())
        return digest.hexdigest()


def _in_split(row: Row, split: str) -> Row:
    """Do `replace(row, split=split)` five times as fast, for data sets with 400,000 rows."""
    copy = object.__new__(Row)
    copy.__dict__.update(row.__dict__, split=split)
    return copy


@uncollected()
def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest.

    Args:
        path: CSV (`.csv`, `.csv.gz`) in UTF-8, or Parquet.

    Raises:
        ManifestError: The file is missing or damaged, or has an unexpected value. The message names row and column.
    """
    path = Path(path)
    if path.is_dir():
        raise ManifestError(f"{path}: expected a manifest file (.csv or .parquet), found a folder")
    if not path.exists():
        raise ManifestError(f"{path}: no such manifest; make one with 'cbmir data nih|chexpert|table|phantom'")
    table, is_parquet = read_table(path, recognise=False), path.name.lower().endswith(".parquet")
    columns = table.columns if is_parquet else [*map(undefused, table.columns)]
    missing = [name for name in FIXED_COLUMNS[:2] if name not in columns]
    if missing:
        raise ManifestError(
            f"{path}: expected the columns {', '.join(FIXED_COLUMNS[:2])}, found {', '.join(columns) or 'none'}; "
            f"'cbmir data table' makes a manifest of any table"
        )
    if twice := [name for name in (*FIXED_COLUMNS, *OPTIONAL_COLUMNS) if columns.count(name) > 1]:
        raise ManifestError(f"{path}: expected each column once, found {', '.join(twice)} more than once")
    names = tuple(name for name in columns if name not in (*FIXED_COLUMNS, *OPTIONAL_COLUMNS))
    if not names:
        raise ManifestError(f"{path}: expected a column for each label after {', '.join(FIXED_COLUMNS)}, found none")
    try:
        labels = LabelSet(names)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error
    base = path.resolve().parent
    rows = tuple(
        _row(where, record if is_parquet else _undefused(record), names, base)
        if len(cells) == len(columns)
        else _uneven(where)
        for cells, (where, record) in zip(table.rows, replace(table, kept=columns).records(), strict=True)
    )
    if not rows:
        raise ManifestError(f"{path}: expected a row for each image, found only the header")
    sidecar = sidecar_path(path.resolve())
    try:
        about = read_json(sidecar) if sidecar.exists() else {}
        if not isinstance(about, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise ManifestError(
            f"{sidecar}: expected JSON beside the manifest, found {error}; delete it to continue"
        ) from error
    return Manifest(labels, rows, about, tuple(name for name in FIXED_COLUMNS if name not in columns))


def check_name(path: Path) -> Path:
    """Return the path of a manifest to write. Raises ManifestError unless it ends in .csv, .csv.gz or .parquet."""
    if not path.name.lower().endswith((".csv", ".csv.gz", ".parquet")):
        raise ManifestError(f"{path}: expected a name that ends in .csv, .csv.gz or .parquet, found {path.name!r}")
    return path


@uncollected()
def write_manifest(manifest: Manifest, path: str | Path) -> None:
    """Write a manifest and its sidecar, each completely or not at all.

    Raises:
        ManifestError: The name does not end in .csv, .csv.gz or .parquet.
    """
    path = Path(path)
    name = check_name(path).name.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    base = path.parent.resolve().as_posix().removesuffix("/") + "/"  # a link is replaced, not its target
    optional = [name for name in OPTIONAL_COLUMNS if any(map(attrgetter(name), manifest))]
    header = [*FIXED_COLUMNS, *optional, *manifest.labels.names]
    texts = attrgetter(*FIXED_COLUMNS[1:], *optional)
    records = [
        [row.image.as_posix().removeprefix(base), *texts(row), *map(_LABEL_TEXTS.__getitem__, row.labels)]
        for row in manifest
    ]
    if "boxes" in optional:
        place = header.index("boxes")
        for record in records:
            record[place] = boxes_text(record[place])
    with replacing(path, private=True) as temporary:
        if name.endswith(".parquet"):
            _write_parquet(temporary, header, records)
        else:
            text = io.StringIO(newline="")
            for record in records:
                record[: -len(manifest.labels)] = map(defused, record[: -len(manifest.labels)])
            csv.writer(text).writerows([[*map(defused, header)], *records])
            data = text.getvalue().encode()
            temporary.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    write_json(sidecar_path(path), manifest.about, private=True)


def sidecar_path(path: Path) -> Path:
    """Return `manifest.about.json` for `manifest.csv`."""
    return path.with_suffix(".about.json")


def _undefused(record: dict[str, str]) -> dict[str, str]:
    return record | {name: undefused(record[name]) for name in _TEXTS if record.get(name, "").startswith("'")}


def _uneven(where: str) -> Row:
    raise ManifestError(f"{where}: expected as many values as the header has columns")


def _row(where: str, record: dict[str, str], names: tuple[str, ...], base: Path) -> Row:
    image, patient = record["image"].strip(), record["patient_id"].strip()
    if not image or not patient:
        empty = "image" if not image else "patient_id"
        raise ManifestError(f"{where}: expected a value in column {empty}, found it empty")
    split, view = record.get("split", "").strip(), record.get("view", "").strip().upper()
    if split not in SPLITS:
        raise ManifestError(f"{where}: expected split train, val, test or empty, found {split!r}")
    if view not in VIEWS:
        raise ManifestError(f"{where}: expected view PA, AP, LATERAL or empty, found {view!r}")
    day = record.get("date", "").strip()
    if not is_date(day):
        raise ManifestError(f"{where}: expected a date YYYY-MM-DD or nothing, found {day!r}")
    labels = tuple(_label(where, name, record[name]) for name in names)
    boxes = _boxes(where, record.get("boxes", ""), names)
    study, source = record.get("study_id", "").strip(), record.get("source", "").strip()
    return Row(base / image, patient, labels, study, view, split, record.get("report", ""), source, day, boxes)


def parse_boxes(text: str) -> tuple[Box, ...]:
    """Parse a cell of the column `boxes`, which may be empty. Raises ManifestError for other text and boxes outside the
    image."""
    if not text.strip():
        return ()
    try:
        return tuple(Box(str(label), *map(float, edges)) for label, *edges in parse_json(text))
    except (ValueError, TypeError, OverflowError, ManifestError) as error:
        raise ManifestError(
            f'expected boxes as [["LABEL", left, top, width, height], …] in fractions of the image\'s width and '
            f"height, or nothing, in column boxes; found {text[:80]!r} ({error})"
        ) from error


def boxes_text(boxes: Sequence[Box]) -> str:
    """Format boxes as a cell of the column `boxes`; empty without boxes."""
    values = [[box.label, box.left, box.top, box.width, box.height] for box in boxes]
    return json.dumps(values, ensure_ascii=False) if values else ""


def _boxes(where: str, text: str, names: tuple[str, ...]) -> tuple[Box, ...]:
    try:
        boxes = parse_boxes(text)
    except ManifestError as error:
        raise ManifestError(f"{where}: {error}") from error
    unknown = sorted({box.label for box in boxes} - set(names))
    if unknown:
        raise ManifestError(f"{where}: expected boxes of {', '.join(names)}; found {', '.join(unknown)}")
    return boxes


def is_date(text: str) -> bool:
    """Return whether a text is a valid date YYYY-MM-DD, or empty (unknown)."""
    try:
        return not text or date.fromisoformat(text).isoformat() == text  # ISO 8601 has other formats
    except ValueError:
        return False


def _label(where: str, name: str, text: str) -> int | None:
    if text in LABEL_VALUES:
        return LABEL_VALUES[text]
    try:
        return LABEL_VALUES[text.strip().lower()]
    except KeyError:
        raise ManifestError(
            f"{where}: expected 1, 0, -1 (uncertain) or empty (unknown) in label column {name!r}, "
            f"found {text!r}; 'cbmir data table' picks the label columns of a wider table"
        ) from None


def _write_parquet(path: Path, header: list[str], records: list[list[Any]]) -> None:
    arrow, parquet = require("pyarrow", "train"), require("pyarrow.parquet", "train")
    columns: dict[str, Any] = dict(zip(header, map(list, zip(*records, strict=True)), strict=True))
    for name in set(header) - {*FIXED_COLUMNS, *OPTIONAL_COLUMNS}:
        columns[name] = arrow.array([int(value) if value else None for value in columns[name]], type=arrow.int8())
    parquet.write_table(arrow.table(columns), path)
