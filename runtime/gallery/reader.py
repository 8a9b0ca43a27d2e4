"""Rows of a gallery's tables, as one transaction sees them: none leaves here that does not fit its digest.

A gallery at one moment: what a read transaction sees.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.columns import Columns
from cbmir.runtime.gallery.database import SEE_VERIFY, Connections
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.schema import Meta, read_meta

#: An entry with the keys of its patient and study: the columns of `schema.COLUMNS`, the digest, and two keys.
ROW = (
    f"SELECT {', '.join(f'e.{column}' for column in schema.COLUMNS)}, e.digest, p.key, s.key{{more}} FROM {{source}} "
    "LEFT JOIN patient p ON p.number = e.patient LEFT JOIN study s ON s.number = e.study{joined}"
)
#: Position of each column in a row.
COLUMN = {name: position for position, name in enumerate(schema.COLUMNS)}
_DIGEST, _PATIENT, _STUDY = range(len(COLUMN), len(COLUMN) + 3)

Row = Sequence[Any]


class VerifiedRows:
    """What is there at the moment of a transaction: `generation` and `count` of the gallery, and its rows.

    `pruned` is the last generation of which it is not known any more what it changed, `database` the connection.
    Raises GalleryError for whatever is damaged, and once the transaction has ended (`close`).
    """

    def __init__(self, meta: Meta, database: sqlite3.Connection) -> None:
        self.meta = meta
        self.database = database
        self._cursors: list[sqlite3.Cursor] = []
        self._ended = False
        values = read_meta(database, meta.path, "gallery", "generation", "count", "pruned", "index")
        if values["gallery"] != meta.uuid:
            raise GalleryError(f"{meta.path}: the gallery was replaced by another; open it again")
        self.generation = int(values["generation"])
        self.count = int(values["count"])
        self.index_setting = values["index"]
        self.pruned = int(values["pruned"])

    def close(self) -> None:
        """End what is still being iterated over: a cursor left open would hold on to this moment."""
        self._ended = True
        for cursor in self._cursors:
            cursor.close()

    def query(self, sql: str, *values: object) -> list[Any]:
        """All rows of a statement: none of it is left open."""
        if self._ended:  # its connection may be another's by now
            raise GalleryError(f"{self.meta.path}: expected to be read within the 'with' block, found it ended")
        return self.database.execute(sql, values).fetchall()

    def blocks(self, sql: str, size: int, *values: object) -> Iterator[list[Any]]:
        """Rows of a statement in blocks of `size`, for as long as the moment lasts."""
        with closing(self.database.execute(sql, values)) as cursor:
            self._cursors.append(cursor)
            while rows := [] if self._ended else cursor.fetchmany(size):
                yield rows
            self.query("SELECT 1")  # an iteration that outlasted the moment is no end of the rows
            self._cursors.remove(cursor)

    def rows(self, numbers: Iterable[int] | NDArray[np.int64]) -> list[Row]:
        """Entries in the order of their numbers as given. Raises GalleryError for one that is not there."""
        sql = ROW.format(source="entry e", more="", joined=" WHERE e.number = ?")
        rows = []
        for number in map(int, numbers):
            found = self.query(sql, number)
            if len(found) != 1:
                raise self.damaged(f"expected the entry number {number}, found none")
            self.check_row(found[0])
            rows.append(found[0])
        return rows

    def all_rows(self) -> Iterator[list[Row]]:
        """Every entry, without its vector, in blocks."""
        seen = 0
        for rows in self.blocks(ROW.format(source="entry e", more="", joined=" ORDER BY e.number"), 4096):
            for row in rows:
                self.check_row(row)
            yield rows
            seen += len(rows)
        if seen != self.count:
            raise self.damaged(f"expected {self.count} entries, found {seen}")

    def checked_vectors(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Of rows (number, dtype, vector, digest)."""
        dim = self.meta.card.embedding_dim
        for number, dtype, vector, found in rows:
            if vector is None or schema.vector_digest(number, dtype, vector) != found:
                raise self.damaged(f"the embedding of the entry {self._name(number)} is damaged")
            if dtype != schema.DTYPE or len(vector) != 4 * dim:
                raise self.damaged(f"expected embeddings of {dim} values in {schema.DTYPE}, found others")
        data = b"".join(vector for _, _, vector, _ in rows)
        vectors = np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(len(rows), dim)
        wrong = np.flatnonzero(~schema.are_unit(vectors))
        if len(wrong):  # it would hide its own image and others: a NaN compares as nearest and as farthest
            name = self._name(rows[int(wrong[0])][0])
            raise self.damaged(f"expected finite embeddings of norm 1, found another in the entry {name} "
                                f"({len(wrong)} in all)")  # fmt: skip
        return vectors

    def checked_thumbnail(self, row: Row) -> bytes | None:
        expected = row[COLUMN["thumbnail"]]
        found = self.query("SELECT jpeg FROM thumbnail WHERE number = ?", row[0])
        if expected is None and not found:
            return None
        if len(found) != 1 or schema.digest_bytes(found[0][0]) != expected:
            raise self.damaged(f"the thumbnail of the entry {row[1]!r} is damaged")
        return bytes(found[0][0])

    def entry_of(self, row: Row) -> Entry:
        values = dict(zip(schema.COLUMNS, row, strict=False))
        return Entry(
            id=values["id"], image=values["image"], patient_id=row[_PATIENT] or "", study_id=row[_STUDY] or "",
            sop_instance_uid=values["sop_instance_uid"], view=values["view"], date=values["date"],
            split=values["split"], report=values["report"], labels=self.meta.codec.decode(values["labels"]),
            sha256=values["sha256"],
        )  # fmt: skip

    def check_row(self, row: Row) -> None:
        """A row of `ROW`: its digest, and the keys of its patient and study by their numbers."""
        if schema.digest(row[:_DIGEST]) != row[_DIGEST]:
            raise self.damaged(f"the entry {row[1]!r} (number {row[0]}) is damaged")
        for key, number, kind in (
            (row[_PATIENT], row[COLUMN["patient"]], schema.patient_number),
            (row[_STUDY], row[COLUMN["study"]], schema.study_number),
        ):
            if kind(key or "") != (number or 0):
                raise self.damaged(f"the patient or study of the entry {row[1]!r} is damaged")

    def _name(self, number: int) -> str:
        found = self.query("SELECT id FROM entry WHERE number = ?", number)
        return repr(found[0][0]) if found else f"number {number}"

    def damaged(self, what: str) -> GalleryError:
        return GalleryError(f"{self.meta.path}: {what}{SEE_VERIFY}: bring back a copy of the gallery, or build it "
                            f"again")  # fmt: skip


_VECTOR = ", v.dtype, v.vector, v.digest"
_WITH_VECTOR = {"more": _VECTOR, "joined": " LEFT JOIN embedding v ON v.number = e.number ORDER BY e.number"}
# CROSS JOIN: SQLite keeps this order of the two, and does not look through all entries for a few.
_GIVEN = "json_each(?) AS given CROSS JOIN entry e ON e.number = given.value"
# The plus keeps SQLite from putting ?1 in the place of sha256 in the other condition, which would scan all entries.
_BY_SHA256 = "SELECT number FROM entry INDEXED BY {} WHERE {} AND +sha256 = ?1 AND sha256 != ''"


class Reader(VerifiedRows):
    """One moment of a gallery, of the generation `generation` with `count` entries; valid within its `with` block.

    Whatever it reads, it raises GalleryError for damage.
    """

    @classmethod
    @contextmanager
    def begin(cls, meta: Meta, connections: Connections) -> Iterator[Self]:
        """A read transaction. Raises GalleryError where the gallery is closed."""
        with connections.use("read") as database:
            database.execute("BEGIN").close()
            reader = cls(meta, database)
            try:
                yield reader
            finally:
                reader.close()

    def changes_since(self, generation: int) -> NDArray[np.int64] | None:
        """Numbers of the entries added, updated or removed since a generation: int64 [n], sorted, distinct.

        None where this is not known: the generation is of the future, or the record of it is pruned or damaged. All
        entries are to be read then.
        """
        if not self.pruned <= generation <= self.generation:
            return None
        rows = self.query("SELECT generation, numbers, digest FROM change WHERE generation > ? ORDER BY generation",
                         generation)  # fmt: skip
        if [row[0] for row in rows] != list(range(generation + 1, self.generation + 1)):
            return None
        if any(schema.change_digest(number, numbers) != found for number, numbers, found in rows):
            return None
        return np.unique(np.frombuffer(b"".join(numbers for _, numbers, _ in rows), "<i8").astype(np.int64))

    def columns(self, numbers: NDArray[np.int64] | None = None, size: int = 4096) -> Iterator[Columns]:
        """The entries, or those of `numbers` that exist, in blocks of up to `size`, in the order of their numbers."""
        if numbers is None:
            seen = 0
            for rows in self.blocks(ROW.format(source="entry e", **_WITH_VECTOR), size):
                yield self._columns(rows)
                seen += len(rows)
            if seen != self.count:
                raise self.damaged(f"expected {self.count} entries, found {seen}")
            return
        wanted = np.unique(numbers)
        for start in range(0, len(wanted), size):
            given = json.dumps(wanted[start : start + size].tolist())
            for rows in self.blocks(ROW.format(source=_GIVEN, **_WITH_VECTOR), size, given):
                yield self._columns(rows)

    def entries(self, numbers: Iterable[int] | NDArray[np.int64]) -> list[Entry]:
        """In the order of the numbers. Raises GalleryError for one that is not there."""
        return [self.entry_of(row) for row in self.rows(numbers)]

    def every_entry(self) -> Iterator[Entry]:
        """All entries, in the order of adding, read as they are asked for."""
        for rows in self.all_rows():
            yield from map(self.entry_of, rows)

    def vectors(self, numbers: Iterable[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [n, D] in the order of the numbers. Raises GalleryError for one that is not there."""
        rows = []
        for number in map(int, numbers):
            found = self.query("SELECT dtype, vector, digest FROM embedding WHERE number = ?", number)
            rows.append((number, *(found[0] if found else (None, None, None))))
        return self.checked_vectors(rows)

    def thumbnails(self, numbers: Iterable[int] | NDArray[np.int64]) -> list[bytes | None]:
        """JPEG in the order of the numbers; None where none was stored. Raises GalleryError for a number not there."""
        return [self.checked_thumbnail(row) for row in self.rows(numbers)]

    def number(self, id: str) -> int:
        """An entry's number. Raises GalleryError for an id that is not there."""
        rows = self.query("SELECT number FROM entry WHERE id = ?", id)
        if not rows:
            raise GalleryError(f"{self.meta.path}: expected the id of an entry of this gallery, found {id!r}")
        number = int(rows[0][0])
        if self.rows([number])[0][COLUMN["id"]] != id:
            raise self.damaged(f"expected the entry {id!r} under its id, found another")
        return number

    def find(self, sha256: str) -> list[int]:
        """Numbers of the entries made from a file with this digest, in the order of adding."""
        if not sha256:
            return []
        found = [
            sorted(int(number) for (number,) in self.query(sql, sha256))
            for sql in (_BY_SHA256.format("entry_sha256", "sha256 = ?1"),
                        _BY_SHA256.format("entry_content", "substr(sha256, 1, 16) = substr(?1, 1, 16)"))
        ]  # fmt: skip
        if found[0] != found[1] or any(row[COLUMN["sha256"]] != sha256 for row in self.rows(found[0])):
            raise self.damaged("expected the same entries of a file in both indexes of files, found others")
        return found[0]

    def find_case(self, case: str) -> Entry | None:
        """The entry that a case id stands for; None where there is none."""
        rows = self.rows(number for (number,) in self.query("SELECT number FROM entry WHERE case_id = ?", case))
        if any(row[COLUMN["case_id"]] != case for row in rows):
            raise self.damaged("expected the entry of a case id in the index of these, found another")
        return self.entry_of(rows[0]) if rows else None

    def ids(self) -> list[str]:
        """Every id, in the order of adding."""
        return [str(row[1]) for rows in self.all_rows() for row in rows]

    def ids_of(self, numbers: NDArray[np.int64]) -> dict[int, str]:
        """The ids of entries by their numbers; these rows are not verified."""
        sql = "SELECT number, id FROM entry WHERE number IN (SELECT value FROM json_each(?))"
        return {number: str(name) for number, name in self.query(sql, json.dumps(numbers.tolist()))}

    def counts(self) -> dict[str, Any]:
        """How many patients and studies there are, images of each split and view, and images in which a label is
        positive or uncertain; `days` are the first and the last, YYYY-MM-DD, empty where no day is known."""
        values: dict[str, Counter[Any]] = {name: Counter() for name in ("patient", "split", "view", "date")}
        studies: set[tuple[int | None, int]] = set()
        codes = np.zeros(len(self.meta.labels), np.int64)
        for block in self.all_rows():
            for name, counter in values.items():
                counter.update(row[COLUMN[name]] for row in block)
            studies |= {(row[COLUMN["patient"]], row[COLUMN["study"]]) for row in block if row[COLUMN["study"]]}
            labels = self.meta.codec.decode_many([row[COLUMN["labels"]] for row in block])
            codes += ((labels == 1) | (labels == -1)).sum(axis=0)
        days = values["date"].keys() - {""}
        return {
            "patients": len(values["patient"].keys() - {None}),
            "studies": len(studies),
            "splits": dict(sorted(values["split"].items())),
            "views": dict(sorted(values["view"].items())),
            "labels": dict(zip(self.meta.labels.names, codes.tolist(), strict=True)),
            "days": [min(days, default=""), max(days, default="")],
        }

    def has_patient(self, patient_id: str) -> bool:
        """Whether an entry is of this patient. Raises GalleryError as `Meta.patient_numbers`."""
        for number in self.meta.patient_numbers([patient_id]):
            known = self.query("SELECT 1 FROM patient WHERE number = ?", number)
            entries = self.query("SELECT 1 FROM entry WHERE patient = ? LIMIT 1", number)
            if bool(known) != bool(entries):  # one of the two places is damaged
                raise self.damaged("a patient is known of whom there is no entry, or the other way round")
            return bool(known)
        return False

    def copy(self, target: sqlite3.Connection) -> None:
        """Make `target`, a connection to an empty database, a copy of this moment."""
        self.database.backup(target)

    def _columns(self, rows: Sequence[Row]) -> Columns:
        for row in rows:
            self.check_row(row)

        def column(name: str) -> list[Any]:
            position = COLUMN[name]
            return [row[position] for row in rows]

        names = sorted(set(column("view")))
        codes = {name: code for code, name in enumerate(names)}
        return Columns(
            numbers=np.array(column("number"), np.int64),
            patients=np.array([number or 0 for number in column("patient")], np.int64),
            studies=np.array([number or 0 for number in column("study")], np.int64),
            views=np.array([codes[name] for name in column("view")], np.int32),
            dates=np.array([schema.day_number(day) for day in column("date")], np.int32),
            labels=np.ascontiguousarray(self.meta.codec.decode_many(column("labels")).T),
            vectors=self.checked_vectors([(row[0], *row[-3:]) for row in rows]),
            names=tuple(names),
        )
