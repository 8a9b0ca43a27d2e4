"""The manifest: the one table that every reader of a data set writes and that everything after it reads.

It has one row per image, with these columns and then one per label:

==========  ==========================================================================
image       path; a relative one is relative to the manifest's own folder
patient_id  required: splits and retrieval keep patients apart
study_id    may be empty
view        PA, AP, LATERAL or empty (unknown)
split       train, val, test or empty (not assigned)
report      free text, may be empty
source      optional: hospital or data set, by which the benchmark breaks its figures down
date        optional: date of the study, YYYY-MM-DD or empty
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
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from cbmir.errors import ManifestError, require
from cbmir.files import replacing, write_json
from cbmir.labels import LabelSet

# A report may be longer than the 131,072 characters at which Python's csv module stops; this holds for the process.
csv.field_size_limit(2**31 - 1)

FIXED_COLUMNS = ("image", "patient_id", "study_id", "view", "split", "report")
#: Columns that a manifest has only if a row has a value there.
OPTIONAL_COLUMNS = ("source", "date")
SPLITS = ("train", "val", "test", "")
VIEWS = ("PA", "AP", "LATERAL", "")
#: What a label cell may hold, and what it means; CSV, pandas and Parquet write the same number in several ways.
LABEL_VALUES: dict[str, int | None] = {
    "1": 1, "1.0": 1, "0": 0, "0.0": 0, "-1": -1, "-1.0": -1, "": None, "nan": None,
}  # fmt: skip


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


@dataclass(frozen=True)
class Manifest:
    """Rows and their labels.

    Attributes:
        about: The sidecar: which reader made the manifest, from what, by which policies.
        absent: Columns of `FIXED_COLUMNS` that the file lacks; their empty values mean nothing.
    """

    labels: LabelSet
    rows: tuple[Row, ...]
    about: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def split(self, *names: str) -> Manifest:
        """Only the rows of the named splits, in the same order."""
        return replace(self, rows=tuple(row for row in self.rows if row.split in names))

    def with_splits(self, splits: Sequence[str]) -> Manifest:
        """The same rows with other splits, one per row."""
        rows = tuple(replace(row, split=split) for row, split in zip(self.rows, splits, strict=True))
        return replace(self, rows=rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the table as training sees it: the label names, then each row's file name, patient, study, view,
        split and labels. A data set may move or get more reports: folders, reports, sources and dates do not count."""
        digest = hashlib.sha256("\x1f".join(self.labels.names).encode())
        for row in self.rows:
            values = ",".join("" if v is None else str(v) for v in row.labels)
            cells = (row.image.name, row.patient_id, row.study_id, row.view, row.split, values)
            digest.update(("\x1e" + "\x1f".join(cells)).encode())
        return digest.hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest.

    Args:
        path: CSV (`.csv`, `.csv.gz`) in UTF-8, or Parquet.

    Raises:
        ManifestError: The file is missing or damaged, or a value is not as expected. Names the row and the column.
    """
    path = Path(path)
    if path.is_dir():
        raise ManifestError(f"{path}: expected a manifest file (.csv or .parquet), found a folder")
    if not path.exists():
        raise ManifestError(f"{path}: no such manifest; make one with 'cbmir data nih|chexpert|table|phantom'")
    columns, records = read_table(path)
    missing = [name for name in FIXED_COLUMNS[:2] if name not in columns]
    if missing:
        raise ManifestError(
            f"{path}: expected the columns {', '.join(FIXED_COLUMNS[:2])}, found {', '.join(columns) or 'none'}; "
            f"'cbmir data table' makes a manifest of any table"
        )
    names = tuple(name for name in columns if name not in (*FIXED_COLUMNS, *OPTIONAL_COLUMNS))
    if not names:
        raise ManifestError(f"{path}: expected a column for each label after {', '.join(FIXED_COLUMNS)}, found none")
    try:
        labels = LabelSet(names)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error
    base = path.resolve().parent
    rows = tuple(_row(path, number, record, names, base) for number, record in enumerate(records, start=2))
    if not rows:
        raise ManifestError(f"{path}: expected a row for each image, found only the header")
    sidecar = sidecar_path(path)
    try:
        about = json.loads(sidecar.read_text("utf-8")) if sidecar.exists() else {}
    except (OSError, ValueError) as error:
        raise ManifestError(
            f"{sidecar}: expected JSON beside the manifest, found {error}; delete it to go on"
        ) from error
    return Manifest(labels, rows, about, tuple(name for name in FIXED_COLUMNS if name not in columns))


def write_manifest(manifest: Manifest, path: str | Path) -> None:
    """Write a manifest and its sidecar, each whole or not at all.

    Raises:
        ManifestError: The name does not end in .csv, .csv.gz or .parquet.
    """
    path = Path(path)
    name = path.name.lower()
    if not name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ManifestError(f"{path}: expected a name that ends in .csv, .csv.gz or .parquet, found {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    base = path.resolve().parent
    optional = [name for name in OPTIONAL_COLUMNS if any(getattr(row, name) for row in manifest)]
    header = [*FIXED_COLUMNS, *optional, *manifest.labels.names]
    records = [_record(row, base, optional) for row in manifest.rows]
    with replacing(path) as temporary:
        if name.endswith(".parquet"):
            _write_parquet(temporary, header, records)
        else:
            text = io.StringIO(newline="")
            csv.writer(text).writerows([header, *records])
            data = text.getvalue().encode()
            temporary.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    write_json(sidecar_path(path), manifest.about)


def sidecar_path(path: Path) -> Path:
    """`manifest.csv` -> `manifest.about.json`."""
    return path.with_suffix(".about.json")


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and records of a CSV (.csv, .csv.gz) or Parquet table, with every value as text. Raises ManifestError."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        records = list(reader)
        return list(reader.fieldnames or []), records
    except (UnicodeDecodeError, csv.Error, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ManifestError(f"{path}: expected a CSV file in UTF-8, found {error}") from error


def _read_parquet(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    parquet = require("pyarrow.parquet", "train")
    try:
        table = parquet.read_table(path)
    except ValueError as error:
        raise ManifestError(f"{path}: expected a Parquet file, found {error}") from error
    records = [{k: "" if v is None else str(v) for k, v in row.items()} for row in table.to_pylist()]
    return list(table.column_names), records


def _row(path: Path, number: int, record: dict[str, str], names: tuple[str, ...], base: Path) -> Row:
    if None in record or None in record.values():
        raise ManifestError(f"{path}, row {number}: expected as many values as the header has columns")
    image, patient = record["image"].strip(), record["patient_id"].strip()
    if not image or not patient:
        empty = "image" if not image else "patient_id"
        raise ManifestError(f"{path}, row {number}: expected a value in column {empty}, found it empty")
    split, view = record.get("split", "").strip(), record.get("view", "").strip().upper()
    if split not in SPLITS:
        raise ManifestError(f"{path}, row {number}: expected split train, val, test or empty, found {split!r}")
    if view not in VIEWS:
        raise ManifestError(f"{path}, row {number}: expected view PA, AP, LATERAL or empty, found {view!r}")
    day = record.get("date", "").strip()
    if not is_date(day):
        raise ManifestError(f"{path}, row {number}: expected a date YYYY-MM-DD or nothing, found {day!r}")
    labels = tuple(_label(path, number, name, record[name]) for name in names)
    study, source = record.get("study_id", "").strip(), record.get("source", "").strip()
    return Row(base / image, patient, labels, study, view, split, record.get("report", ""), source, day)


def is_date(text: str) -> bool:
    """Whether a text is a day of the calendar as YYYY-MM-DD, or empty (unknown)."""
    try:
        return not text or date.fromisoformat(text).isoformat() == text  # ISO 8601 has other ways to write a day
    except ValueError:
        return False


def _label(path: Path, number: int, name: str, text: str) -> int | None:
    try:
        return LABEL_VALUES[text.strip().lower()]
    except KeyError:
        raise ManifestError(
            f"{path}, row {number}: expected 1, 0, -1 (uncertain) or empty (unknown) in label column {name!r}, "
            f"found {text!r}; 'cbmir data table' picks the label columns of a wider table"
        ) from None


def _record(row: Row, base: Path, optional: Sequence[str]) -> list[str]:
    image = row.image.relative_to(base) if row.image.is_relative_to(base) else row.image
    values = ["" if value is None else str(value) for value in row.labels]
    fixed = [image.as_posix(), row.patient_id, row.study_id, row.view, row.split, row.report]
    return [*fixed, *(getattr(row, name) for name in optional), *values]


def _write_parquet(path: Path, header: list[str], records: list[list[str]]) -> None:
    arrow, parquet = require("pyarrow", "train"), require("pyarrow.parquet", "train")
    columns: dict[str, Any] = dict(zip(header, map(list, zip(*records, strict=True)), strict=True))
    for name in set(header) - {*FIXED_COLUMNS, *OPTIONAL_COLUMNS}:
        columns[name] = arrow.array([int(value) if value else None for value in columns[name]], type=arrow.int8())
    parquet.write_table(arrow.table(columns), path)
