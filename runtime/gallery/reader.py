"""A gallery at one moment, as a read transaction sees it. Each row's digest is verified before it is returned."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.manifest import parse_boxes
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.columns import Columns
from cbmir.runtime.gallery.database import SEE_VERIFY, Connections
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.hnsw import Codes
from cbmir.runtime.gallery.schema import Meta, read_meta
from cbmir.runtime.imaging.image_warning import count_kinds

Row = Sequence[Any]
Numbers = Iterable[int] | NDArray[np.int64]

#: Position of each column in a row; the digest follows.
COLUMN = {name: position for position, name in enumerate(schema.COLUMNS)}
_DIGEST = len(COLUMN)
_OF_ENTRY = [name for name in Entry.__dataclass_fields__ if name not in ("labels", "boxes")]
_SELECT = f"SELECT {', '.join(f'e.{column}' for column in (*schema.COLUMNS, 'digest'))}"
_ONE, _ALL = f"{_SELECT} FROM entry e WHERE e.number = ?", f"{_SELECT} FROM entry e ORDER BY e.number"
_WITH_VECTOR = f"{_SELECT}, v.vector, v.digest FROM {{}} LEFT JOIN embedding v ON v.number = e.number ORDER BY e.number"
# CROSS JOIN makes SQLite keep this order, instead of scanning all entries for a few numbers.
_GIVEN = "json_each(?) AS given CROSS JOIN entry e ON e.number = given.value"
# The plus keeps SQLite from replacing sha256 by ?1 in the other condition, which would scan all entries.
_BY_SHA256 = "SELECT number FROM entry INDEXED BY {} WHERE {} AND +sha256 = ?1 AND sha256 != ''"

#: A gallery with the setting "auto" is searched exactly up to this many entries.
EXACT_LIMIT = 20_000


class Reader:
    """A gallery at one moment, with `count` entries, at generation `generation`. Valid within its `with` block.

    `pruned` is the last generation whose changes are no longer recorded, and `database` the connection. Every method
    raises GalleryError for damaged data, and after the transaction has ended (`close`).
    """

    def __init__(self, meta: Meta, database: sqlite3.Connection) -> None:
        self.meta = meta
        self.database = database
        self._cursors: list[sqlite3.Cursor] = []
        self._ended = False
        values = read_meta(database, meta.path, "gallery", "generation", "count", "pruned", "index")
        if values["gallery"] != meta.uuid:
            raise GalleryError(f"{meta.path}: the gallery was replaced; open it again")
        self.generation = int(values["generation"])
        self.count = int(values["count"])
        self.index_setting = values["index"]
        self.pruned = int(values["pruned"])

    @classmethod
    @contextmanager
    def begin(cls, meta: Meta, connections: Connections) -> Iterator[Self]:
        """Begin a read transaction. Raises GalleryError if the gallery is closed."""
        with connections.use("read") as database:
            database.execute("BEGIN").close()
            reader = cls(meta, database)
            try:
                yield reader
            finally:
                reader.close()

    def close(self) -> None:
        """End all iterations, since an open cursor would keep the transaction open."""
        self._ended = True
        for cursor in self._cursors:
            cursor.close()

    @property
    def codes(self) -> Codes | None:
        """The codes in an index of these entries, according to the gallery's setting; None for no index."""
        return codes_for(self.index_setting, self.count)

    def query(self, sql: str, *values: object) -> list[Any]:
        """Execute a statement and return all its rows, leaving no cursor open."""
        if self._ended:  # another thread may use the connection now
            raise GalleryError(f"{self.meta.path}: expected a read within the 'with' block, found one after its end")
        return self.database.execute(sql, values).fetchall()

    def changes_since(self, generation: int) -> NDArray[np.int64] | None:
        """Return the numbers of entries added, updated or removed since a generation: int64 [n], sorted, distinct.

        If the generation is in the future, or its record is pruned or damaged, return None: all entries must be read.
        """
        if not self.pruned <= generation <= self.generation:
            return None
        rows = self.query("SELECT generation, numbers, digest FROM change WHERE generation > ? ORDER BY generation",
                         generation)  # fmt: skip
        if [row[0] for row in rows] != list(range(generation + 1, self.generation + 1)):
            return None
        if any(schema.digest_bytes(numbers, number) != found for number, numbers, found in rows):
            return None
        return np.unique(np.frombuffer(b"".join(numbers for _, numbers, _ in rows), "<i8").astype(np.int64))

    def columns(self, numbers: NDArray[np.int64] | None = None, size: int = 4096) -> Iterator[Columns]:
        """Read all entries, or those of `numbers` that exist, ordered by number.

        Yields:
            Blocks of up to `size` entries.

        Raises:
            GalleryError: An entry is damaged.
        """
        if numbers is None:
            for rows in self._every_row(_WITH_VECTOR.format("entry e"), size):
                yield self._columns(rows)
            return
        wanted = np.unique(numbers)
        for start in range(0, len(wanted), size):
            given = json.dumps(wanted[start : start + size].tolist())
            for rows in self._blocks(_WITH_VECTOR.format(_GIVEN), size, given):
                yield self._columns(rows)

    def entries(self, numbers: Numbers) -> list[Entry]:
        """Return the entries with these numbers, in the same order. Raises GalleryError for a missing one."""
        return [self.entry_of(row) for row in self.rows(numbers)]

    def every_entry(self) -> Iterator[Entry]:
        """Iterate over all entries in the order in which they were added, reading them lazily."""
        for rows in self._every_row():
            yield from map(self.entry_of, rows)

    def ids(self) -> list[str]:
        """Return every id, in the order in which they were added."""
        return [str(row[COLUMN["id"]]) for rows in self._every_row() for row in rows]

    def vectors(self, numbers: Numbers) -> NDArray[np.float32]:
        """Return the vectors float32 [n, D] of these numbers, in order. Raises GalleryError for a missing one."""
        rows = []
        for number in map(int, numbers):
            found = self.query("SELECT vector, digest FROM embedding WHERE number = ?", number)
            rows.append((number, *(found[0] if found else (None, None))))
        return self._checked_vectors(rows)

    def cells(self, numbers: Numbers) -> NDArray[np.int8]:
        """Return the cells' codes int8 [n, h, w, d] of these numbers, in order. Raises GalleryError for a missing one,
        and if the gallery stores no cells."""
        if self.meta.cells is None:
            raise GalleryError(f"{self.meta.path}: expected a gallery that keeps cells, found one without; build it "
                               f"again with 'cbmir index build --cells'")  # fmt: skip
        wanted = [int(number) for number in numbers]
        sql = "SELECT number, codes, digest FROM cells WHERE number IN (SELECT value FROM json_each(?))"
        found = {number: (codes, stamp) for number, codes, stamp in self.query(sql, json.dumps(wanted))}
        shape = self.meta.cells.shape
        for number in wanted:
            codes, stamp = found.get(number, (None, None))
            if codes is None or schema.digest_bytes(codes, number) != stamp or len(codes) != math.prod(shape):
                raise self._damaged(f"the cells of the entry {self._name(number)} are damaged")
        return np.frombuffer(b"".join(found[number][0] for number in wanted), np.int8).reshape(len(wanted), *shape)

    def thumbnails(self, numbers: Numbers) -> list[bytes | None]:
        """Return a JPEG per number, None if none was stored. Raises GalleryError for a missing number."""
        return [self._checked_thumbnail(row) for row in self.rows(numbers)]

    def number(self, id: str) -> int:
        """Return an entry's number. Raises GalleryError for an unknown id."""
        found = self._found_by("id", id)
        if not found:
            raise GalleryError(f"{self.meta.path}: expected the id of an entry of this gallery, found {id!r}")
        return int(found[0][0])

    def find_case(self, case: str) -> Entry | None:
        """Return the entry with this case id, or None."""
        found = self._found_by("case_id", case)
        return self.entry_of(found[0]) if found else None

    def find(self, sha256: str) -> list[int]:
        """Return the numbers of entries made from a file with this digest, in the order in which they were added."""
        if not sha256:
            return []
        found = [
            sorted(int(number) for (number,) in self.query(sql, sha256))
            for sql in (_BY_SHA256.format("entry_sha256", "sha256 = ?1"),
                        _BY_SHA256.format("entry_content", "substr(sha256, 1, 16) = substr(?1, 1, 16)"))
        ]  # fmt: skip
        if found[0] != found[1] or any(row[COLUMN["sha256"]] != sha256 for row in self.rows(found[0])):
            raise self._damaged("expected the same entries of a file in both indexes of files, found others")
        return found[0]

    def ids_of(self, numbers: NDArray[np.int64]) -> dict[int, str]:
        """Return the ids of entries by number, without verifying the rows."""
        sql = "SELECT number, id FROM entry WHERE number IN (SELECT value FROM json_each(?))"
        return {number: str(name) for number, name in self.query(sql, json.dumps(numbers.tolist()))}

    def counts(self) -> dict[str, Any]:
        """Count patients, studies, images per split, view and source, images in which each label is positive or
        uncertain, and images with each kind of warning. `days` are the first and the last date, YYYY-MM-DD, or empty
        if no date is known."""
        values: dict[str, Counter[str]] = {name: Counter() for name in ("split", "view", "source", "date", "warnings")}
        patients, studies = set[int](), set[tuple[int, int]]()
        codes = np.zeros(len(self.meta.labels), np.int64)
        for block in self._every_row():
            for name, counter in values.items():
                counter.update(row[COLUMN[name]] for row in block)
            keys = [(schema.patient_number(row[COLUMN["patient_id"]]), schema.study_number(row[COLUMN["study_id"]]))
                    for row in block]  # fmt: skip
            patients.update(patient for patient, _ in keys if patient)
            studies.update(key for key in keys if key[1])
            labels = self.meta.codec.decode_many([row[COLUMN["labels"]] for row in block])
            codes += ((labels == 1) | (labels == -1)).sum(axis=0)
        days = values["date"].keys() - {""}
        return {
            "patients": len(patients),
            "studies": len(studies),
            **{f"{name}s": dict(sorted(values[name].items())) for name in ("split", "view", "source")},
            "labels": dict(zip(self.meta.labels.names, codes.tolist(), strict=True)),
            "days": [min(days, default=""), max(days, default="")],
            "warnings": count_kinds(values["warnings"].elements()),
        }

    def copy(self, target: sqlite3.Connection) -> None:
        """Copy the gallery at this moment to `target`, a connection to an empty database."""
        self.database.backup(target)

    def rows(self, numbers: Numbers) -> list[Row]:
        """Return the rows with these numbers, in the same order. Raises GalleryError for a missing one."""
        rows = []
        for number in map(int, numbers):
            found = self.query(_ONE, number)
            if len(found) != 1:
                raise self._damaged(f"expected the entry number {number}, found none")
            rows += self._checked(found)
        return rows

    def entry_of(self, row: Row) -> Entry:
        values = {name: row[COLUMN[name]] for name in _OF_ENTRY}
        labels, boxes = self.meta.codec.decode(row[COLUMN["labels"]]), parse_boxes(row[COLUMN["boxes"]])
        return Entry(**values, labels=labels, boxes=boxes)

    def _found_by(self, column: str, value: str) -> list[Row]:
        """Return the rows with this value in an indexed column, checking the value, since the index may be damaged."""
        rows = self.rows(number for (number,) in self.query(f"SELECT number FROM entry WHERE {column} = ?", value))
        if any(row[COLUMN[column]] != value for row in rows):
            raise self._damaged(f"expected the entry {value!r} under its {column}, found another")
        return rows

    def _every_row(self, sql: str = _ALL, size: int = 4096) -> Iterator[list[Row]]:
        """Yield all rows, verified, in blocks."""
        seen = 0
        for rows in self._blocks(sql, size):
            yield self._checked(rows)
            seen += len(rows)
        if seen != self.count:
            raise self._damaged(f"expected {self.count} entries, found {seen}")

    def _blocks(self, sql: str, size: int, *values: object) -> Iterator[list[Row]]:
        """Yield the rows of a statement in blocks of `size`, as long as the transaction is open."""
        with closing(self.database.execute(sql, values)) as cursor:
            self._cursors.append(cursor)
            while rows := [] if self._ended else cursor.fetchmany(size):
                yield rows
            self.query("SELECT 1")  # raises if the transaction ended before the rows did
            self._cursors.remove(cursor)

    def _checked(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            if schema.digest(row[:_DIGEST]) != row[_DIGEST]:
                raise self._damaged(f"the entry {row[1]!r} (number {row[0]}) is damaged")
        return rows

    def _checked_vectors(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Verify rows (number, vector, digest) and return their vectors."""
        dim = self.meta.card.embedding_dim
        for number, vector, found in rows:
            if vector is None or schema.digest_bytes(vector, number) != found:
                raise self._damaged(f"the embedding of the entry {self._name(number)} is damaged")
            if len(vector) != 4 * dim:
                raise self._damaged(f"expected embeddings of {dim} values in float32, found others")
        data = b"".join(vector for _, vector, _ in rows)
        vectors = np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(len(rows), dim)
        wrong = np.flatnonzero(~schema.are_unit(vectors))
        if len(wrong):  # a NaN would compare as both nearest and farthest, and hide its own image and others
            name = self._name(rows[int(wrong[0])][0])
            raise self._damaged(f"expected finite embeddings of norm 1, found another in the entry {name} "
                                f"({len(wrong)} in all)")  # fmt: skip
        return vectors

    def _checked_thumbnail(self, row: Row) -> bytes | None:
        expected = row[COLUMN["thumbnail"]]
        found = self.query("SELECT jpeg FROM thumbnail WHERE number = ?", row[0])
        if expected is None and not found:
            return None
        if len(found) != 1 or schema.digest_bytes(found[0][0]) != expected:
            raise self._damaged(f"the thumbnail of the entry {row[1]!r} is damaged")
        return bytes(found[0][0])

    def _columns(self, rows: Sequence[Row]) -> Columns:
        column = dict(zip(schema.COLUMNS, zip(*rows, strict=True), strict=False))
        codes = {name: code for code, name in enumerate(sorted({*column["view"], *column["source"]}))}
        return Columns(
            numbers=np.array(column["number"], np.int64),
            patients=np.array([schema.patient_number(key) for key in column["patient_id"]], np.int64),
            studies=np.array([schema.study_number(key) for key in column["study_id"]], np.int64),
            views=np.array([codes[name] for name in column["view"]], np.int32), names=tuple(codes),
            sources=np.array([codes[name] for name in column["source"]], np.int32),
            dates=np.array([schema.day_number(day) for day in column["date"]], np.int32),
            labels=np.ascontiguousarray(self.meta.codec.decode_many(column["labels"]).T),
            vectors=self._checked_vectors([(row[0], *row[-2:]) for row in rows]),
        )  # fmt: skip

    def _name(self, number: int) -> str:
        found = self.query("SELECT id FROM entry WHERE number = ?", number)
        return repr(found[0][0]) if found else f"number {number}"

    def _damaged(self, what: str) -> GalleryError:
        return GalleryError(f"{self.meta.path}: {what}{SEE_VERIFY}: restore a copy of the gallery, or build it "
                            f"again")  # fmt: skip


def codes_for(setting: str, count: int) -> Codes | None:
    """Return the codes in an index of `count` entries, according to the gallery's setting; None for no index."""
    if setting == "bf16":
        return "bf16"
    return "int8" if setting == "int8" or (setting == "auto" and count > EXACT_LIMIT) else None
