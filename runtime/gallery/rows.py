"""Rows of a gallery's tables, as one transaction sees them: none leaves here that does not fit its digest."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.connections import SEE_VERIFY
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.meta import Meta, read_meta

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
