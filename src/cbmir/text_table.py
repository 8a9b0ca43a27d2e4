"""Read tables of any origin: CSV in its dialects, plain or gzipped, and Parquet. Every cell is returned as text."""

from __future__ import annotations

import codecs
import csv
import gc
import io
import json
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

from cbmir.errors import ManifestError, require
from cbmir.input_file import MOST_TABLE, open_input, read_unpacked

_MOST_CELL = 2**24  # characters
# A report may exceed the csv module's default limit of 131,072 characters. This applies to the whole process.
csv.field_size_limit(_MOST_CELL)
_MOST_LINE = 2**26  # characters
_MOST_LINES = 2**24  # even an empty line or row takes 100 bytes of memory
_MOST_CELLS = 2**26
_MOST_COLUMNS = 10_000
_BLOCK = 2**20

#: Delimiters to try for tables that cbmir did not write, and their names in the log.
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
#: Words for a missing value, in lower case, besides the empty cell.
MISSING_WORDS = frozenset({"nan", "nat", "none", "null", "n/a", "na", "<na>", "-"})
logger = logging.getLogger("cbmir")


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable cyclic garbage collection within the block: it takes a third of the time of reading a table, and rows
    have no reference cycles. Also a decorator."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class TextTable:
    """The cells of a table, as text.

    Attributes:
        columns: Names of all columns of the file.
        kept: Names of the columns that were read.
        rows: The cells of each row in the order of `kept`; fewer if the row ends early.
    """

    path: Path
    columns: list[str]
    kept: list[str]
    rows: list[Sequence[str]]

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[str]:
        """Return the cells of a kept column. Raises ManifestError if a row ends before it."""
        place = self.kept.index(name)
        try:
            return list(map(itemgetter(place), self.rows))
        except IndexError:
            number = next(number for number, row in enumerate(self.rows, start=2) if len(row) <= place)
            raise ManifestError(f"{self.path}, row {number}: the row ends before column {name!r}") from None

    def records(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each row's position for messages ("ours.csv, row 2"), and its cells by column, without missing ones."""
        for number, row in enumerate(self.rows, start=2):
            yield f"{self.path}, row {number}", dict(zip(self.kept, row, strict=False))


def read_table(
    path: Path, only: Collection[str] | None = None, *, recognise: bool = True, even: bool = False
) -> TextTable:
    """Read a CSV (`.csv`, `.csv.gz`, `.tsv`, `.txt` …) or Parquet table.

    Args:
        only: Columns to keep, if they exist; all by default.
        recognise: Also accept semicolons and tabs between cells, UTF-16 and Windows-1252 (Latin-1), and report this in
            the log. Otherwise accept only commas and UTF-8.
        even: Refuse a row with more cells than the header, except empty ones.

    Raises:
        ManifestError: The file cannot be read, is damaged, is not a table, or is larger than any data set needs.
    """
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path, only)
    try:
        data = read_unpacked(path, MOST_TABLE)
        encoding = _encoding(path, data, recognise)
        delimiter = _delimiter(path, data, encoding, only or ()) if recognise else ","
        lines = data.count(b"\n") + data.count(b"\r")
        _check_size(path, lines, lines + data.count(delimiter.encode()))
        reader = _reader(data, encoding, delimiter)
        columns = next(reader, [])
        _check_columns(path, columns)
        reader = _even(path, reader, len(columns)) if even else reader
        places = [place for place, name in enumerate(columns) if only is None or name in only]
        rows = list(_rows(reader, None if only is None else places))
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read as a table: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ManifestError(f"{path}: expected a CSV file in UTF-8, found {error}") from error
    return TextTable(path, columns, [columns[place] for place in places], rows)


def _check_size(path: Path, rows: int, cells: int) -> None:
    for count, most, what in ((rows, _MOST_LINES, "lines"), (cells, _MOST_CELLS, "cells")):
        if count > most:
            raise ManifestError(f"{path}: expected a table of at most {most:,} {what}, found {count:,}; split it")


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    if len(columns) > _MOST_COLUMNS:
        raise ManifestError(f"{path}: expected at most {_MOST_COLUMNS:,} columns, found {len(columns):,}")


def _even(path: Path, rows: Iterator[list[str]], most: int) -> Iterator[list[str]]:
    for number, row in enumerate(filter(None, rows), start=2):
        if any(row[most:]):  # an unquoted comma in one cell shifts all that follow it
            raise ManifestError(f"{path}, row {number}: expected at most {most} cells, as in the header, found "
                                f"{len(row)}; write a cell that contains the separator in double quotes")  # fmt: skip
        yield row


def _rows(reader: Iterator[list[str]], places: list[int] | None) -> Iterator[Sequence[str]]:
    """Yield the cells at `places` of each row that is not empty."""
    if places is None:
        yield from filter(None, reader)
        return
    pick = itemgetter(*places) if len(places) > 1 else None  # many times as fast, but fails for short rows
    for row in reader:
        if pick and len(row) > places[-1]:
            yield pick(row)
        elif row:
            yield [row[place] for place in places if place < len(row)]


def _reader(data: bytes, encoding: str, delimiter: str) -> Iterator[list[str]]:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding=encoding, newline="")
    return csv.reader(_lines(stream), delimiter=delimiter, strict=True)


def _lines(stream: io.TextIOWrapper) -> Iterator[str]:
    for line in iter(partial(stream.readline, _MOST_LINE), ""):
        if len(line) == _MOST_LINE:
            raise csv.Error(f"a line of {_MOST_LINE:,} characters or more")
        yield line


def _encoding(path: Path, data: bytes, recognise: bool) -> str:
    """Return the encoding of the bytes. Raises UnicodeError, or ManifestError for a file that is not text."""
    encoding = "utf-8-sig"
    if recognise and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    try:
        zeros = _zeros(data, encoding)
    except UnicodeDecodeError:
        if not recognise or encoding == "utf-16":
            raise
        encoding = "cp1252"
        zeros = _zeros(data, encoding)
    if zeros:
        raise ManifestError(f"{path}: expected a table of text, found a zero byte: it is another kind of file")
    if encoding == "cp1252":
        logger.warning("%s: not UTF-8; read as Windows-1252 (Latin-1). Check accented letters", path)
    elif encoding == "utf-16":
        logger.info("%s: read as UTF-16", path)
    elif recognise and data.startswith(b"\xef\xbb\xbf"):
        logger.info("%s: begins with a byte order mark, which is skipped", path)
    return encoding


def _zeros(data: bytes, encoding: str) -> bool:
    """Return whether the text has a zero byte, decoding in blocks. Raises UnicodeError for bytes that are not text."""
    decoder = codecs.getincrementaldecoder(encoding)()
    starts = range(0, len(data), _BLOCK)
    found = ["\0" in decoder.decode(data[start : start + _BLOCK]) for start in starts]
    decoder.decode(b"", final=True)
    return any(found)


def _delimiter(path: Path, data: bytes, encoding: str, wanted: Collection[str]) -> str:
    """Return the delimiter that gives the most wanted columns, then the most columns; the comma wins a tie."""

    def columns(delimiter: str) -> tuple[int, int]:
        try:
            names = next(_reader(data, encoding, delimiter), [])
        except csv.Error:
            return 0, 0
        return len(set(wanted).intersection(names)), len(names)

    best = max(DELIMITERS, key=columns)
    if best != ",":
        logger.info("%s: cells are separated by %s", path, DELIMITERS[best])
    return best


def _read_parquet(path: Path, only: Collection[str] | None) -> TextTable:
    arrow, parquet = require("pyarrow", "train"), require("pyarrow.parquet", "train")
    try:
        # Keep text dictionary-encoded: a value of a million characters may be repeated in a million rows.
        with open_input(path) as stream, parquet.ParquetFile(stream) as file:
            leaves = [file.schema.column(place) for place in range(len(file.schema))]
            _check_columns(path, leaves)
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        with open_input(path) as stream, parquet.ParquetFile(stream, read_dictionary=texts) as file:
            names = file.schema_arrow.names
            kept = [name for name in names if only is None or name in only]
            if twice := sorted({name for name in kept if kept.count(name) > 1}):
                raise ManifestError(f"{path}: expected each column name once, found {', '.join(twice)} more than once")
            _check_parquet(path, file.metadata, set(kept))
            table = file.read(columns=kept, use_threads=False)
    except (ValueError, OSError, arrow.ArrowException) as error:
        raise ManifestError(f"{path}: expected a Parquet file, found {error}") from error
    columns, letters = [], 0
    for name in kept:
        column = table.column(name)
        if arrow.types.is_timestamp(column.type):  # Python has no nanoseconds
            column = column.cast(arrow.timestamp("us", column.type.tz), safe=False)
        cells: list[str] = []
        try:
            for cell in _cells(arrow, column):
                letters += len(cell)
                if letters > MOST_TABLE:
                    raise ManifestError(f"{path}: expected a table of at most {MOST_TABLE:,} characters, found more")
                cells.append(cell)
        except (ValueError, TypeError) as error:
            raise ManifestError(f"{path}: column {name!r} cannot be read as text: {error}") from error
        columns.append(cells)
    return TextTable(path, names, kept, list(map(list, zip(*columns, strict=True))))


def _check_parquet(path: Path, metadata: Any, kept: Collection[str]) -> None:
    """Raise ManifestError for a table that is too large according to the file's metadata."""
    _check_size(path, metadata.num_rows, metadata.num_rows * len(kept))
    values, size = 0, 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for place in range(metadata.num_columns):
            part, leaf = group.column(place), metadata.schema.column(place)
            if not any(outer in kept for outer in accumulate(leaf.path.split("."), "{}.{}".format)):
                continue
            if part.num_values < 0 or part.total_uncompressed_size < 0:
                raise ValueError(f"a column {leaf.path!r} of negative size")
            values += part.num_values
            size += part.total_uncompressed_size + part.num_values * leaf.length  # length is 0 if lengths vary
    _check_size(path, metadata.num_rows, values)
    if size > MOST_TABLE:
        raise ManifestError(f"{path}: expected a table of at most {MOST_TABLE:,} bytes, unpacked, found {size:,}")


def _cells(arrow: Any, column: Any) -> Iterator[str]:
    """Yield the texts of a Parquet column; equal values of a dictionary share one object."""
    if arrow.types.is_dictionary(column.type):
        for chunk in column.chunks:
            words = [_text(value) for value in chunk.dictionary.to_pylist()]
            yield from ("" if place is None else words[place] for place in chunk.indices.to_pylist())
    elif arrow.types.is_nested(column.type):  # one by one: each may be long
        yield from (_text(value.as_py()) for value in column)
    else:
        yield from map(_text, column.to_pylist())


def _text(value: Any) -> str:
    """Format a Parquet value as it would be written in CSV: a whole float as an integer, midnight as a date."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, datetime):
        midnight = value.tzinfo is None and value.time() == time()
        return value.date().isoformat() if midnight else value.isoformat(sep=" ")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], tuple)):
        raise TypeError("a cell holds names and values (struct or map); write a column for each")
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
