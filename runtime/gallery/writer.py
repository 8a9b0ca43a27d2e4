"""Write transactions, which change a gallery completely or not at all."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.manifest import boxes_text
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.database import Connections
from cbmir.runtime.gallery.entry import Added, Entry, longer_ids
from cbmir.runtime.gallery.pseudonyms import case_id
from cbmir.runtime.gallery.reader import COLUMN, Reader
from cbmir.runtime.gallery.schema import LastCommit, Meta, check_index, write_meta

_ROUNDING = 2.5e-7  # error of the norm of a vector that was normalised in float32
_NAMES = (*schema.COLUMNS, "digest")
_INSERT = f"INSERT INTO entry ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"
_UPDATE = f"UPDATE entry SET {', '.join(f'{name} = ?' for name in _NAMES)} WHERE number = ?"


class Writer(Reader):
    """A write transaction. It sees its own changes; others see them only after its `with` block has ended.

    `generation` is the one before this transaction.
    """

    def __init__(self, meta: Meta, database: sqlite3.Connection) -> None:
        super().__init__(meta, database)
        self._changed: list[int] = []
        rows = self.query("SELECT max(seq) FROM (SELECT seq FROM sqlite_sequence WHERE name = 'entry' UNION ALL "
                         "SELECT max(number) FROM entry)")  # fmt: skip
        self._last: int = rows[0][0] or 0  # the highest number ever assigned
        self._dirty = False

    @classmethod
    @contextmanager
    def begin(cls, meta: Meta, connections: Connections) -> Iterator[Self]:
        """Begin a write transaction, acknowledged when the block ends. Raises GalleryError if it cannot be written."""
        with connections.transaction() as database:
            writer = cls(meta, database)
            try:
                yield writer
                generation = writer.finish()
            finally:
                writer.close()
        LastCommit(meta.uuid, generation).write(connections.home)

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32],
        thumbnails: Sequence[bytes | None] | None = None, cells: NDArray[np.int8] | None = None, *,
        renaming: bool = False,
    ) -> Added:  # fmt: skip
        """Add entries as `Gallery.add` does; `cells` are codes. With `renaming`, an entry whose id belongs to another
        image gets a longer one, from its path."""
        check_batch(entries, embeddings, thumbnails, self.meta.card.embedding_dim)
        if (cells is None) != (self.meta.cells is None) or (cells is not None and len(cells) != len(entries)):
            expected = "no" if self.meta.cells is None else len(entries)
            raise GalleryError(f"{self.meta.path}: expected the cells of {expected} images, found those of "
                               f"{'none' if cells is None else len(cells)}: a gallery keeps those of all its images or "
                               f"of none ('cbmir index build --cells')")  # fmt: skip
        added, duplicates, renamed = [], [], []
        for position, entry in enumerate(entries):
            there = self._same_content(entry)
            if there is not None:
                duplicates.append((entry.id, there))
                continue
            new = replace(entry, id=self._free_id(entry, renaming))
            jpeg = None if thumbnails is None else thumbnails[position]
            self._insert(new, embeddings[position], jpeg, None if cells is None else cells[position])
            added.append(new.id)
            if new.id != entry.id:
                renamed.append((entry.id, new.id))
        return Added(tuple(added), tuple(duplicates), tuple(renamed))

    def update(self, entries: Sequence[Entry]) -> int:
        """Update entries as `Gallery.update` does."""
        changed = 0
        for entry in entries:
            schema.check_entry(entry)
            number = self.number(entry.id)
            (row,) = self.rows([number])
            old = self.entry_of(row)
            if entry.sha256 not in ("", old.sha256):
                raise GalleryError(f"{self.meta.path}: expected the stored content of the entry {entry.id!r}, found "
                                   f"other content; remove the entry, then add the new one")  # fmt: skip
            self._write(_UPDATE, number, replace(entry, sha256=old.sha256), row[COLUMN["thumbnail"]], number)
            if self.entry_of(self.rows([number])[0]) != old:
                changed += 1
                self._changed.append(number)
        return changed

    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries as `Gallery.remove` does."""
        check_several(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
        numbers = self._numbers("id", ids)
        # The plus makes SQLite scan all entries: in an index, a damaged page could hide some of a patient's.
        of_patients = self._numbers("+patient_id", map(self.meta.keys.patient, patient_ids))
        of_studies = self._numbers("+study_id", map(self.meta.keys.study, study_ids))
        if study_ids and not patient_ids:
            sql = "SELECT study_id, patient_id FROM entry WHERE number = ?"
            rows = [tuple(row) for number in of_studies for row in self.query(sql, number)]
            check_one_patient_each(rows, self.meta.path)
        numbers |= of_patients & of_studies if study_ids and patient_ids else of_patients | of_studies
        sql = "SELECT id FROM entry WHERE number = ?"  # unverified, so damaged entries can be removed too
        gone = [str(name) for number in numbers for (name,) in self.query(sql, number)]
        self.database.executemany("DELETE FROM entry WHERE number = ?", [(number,) for number in numbers])
        self._changed += sorted(numbers)
        self.count -= len(numbers)
        return tuple(sorted(gone))

    def _numbers(self, column: str, keys: Iterable[str]) -> set[int]:
        """Return the numbers of entries with one of these texts in a column; empty texts match nothing."""
        if not (given := [key for key in keys if key]):
            return set()
        sql = f"SELECT number FROM entry WHERE {column} IN (SELECT value FROM json_each(?))"
        return {int(number) for (number,) in self.query(sql, json.dumps(given))}

    def set_index(self, setting: str) -> None:
        """Change the index setting. Raises GalleryError for an unknown one."""
        check_index(setting)
        if setting != self.index_setting:
            write_meta(self.database, {"index": setting})
            self._dirty = True

    def tidy(self) -> None:
        """Rebuild the database's indexes and clear the record of changes, so that readers of an earlier generation read
        all entries again."""
        self.query("REINDEX")
        self.query("DELETE FROM change WHERE generation <= ?", self.generation)
        write_meta(self.database, {"pruned": self.generation})

    def finish(self) -> int:
        """Record the changes, if any, as the next generation. Return the current generation."""
        if not self._changed and not self._dirty:
            return self.generation
        generation = self.generation + 1
        numbers = np.unique(np.array(self._changed, np.int64)).astype("<i8").tobytes()
        digest = schema.digest_bytes(numbers, generation)
        self.query("INSERT INTO change VALUES (?, ?, ?)", generation, numbers, digest)
        write_meta(self.database, {"generation": generation, "count": self.count})
        return generation

    def _insert(
        self, entry: Entry, embedding: NDArray[np.float32], jpeg: bytes | None, cells: NDArray[np.int8] | None
    ) -> None:
        schema.check_entry(entry)
        number = self._last = self._last + 1
        self._write(_INSERT, number, entry, None if jpeg is None else schema.digest_bytes(jpeg))
        vector = _even(embedding).astype("<f4").tobytes()
        self.query("INSERT INTO embedding VALUES (?, ?, ?)", number, vector, schema.digest_bytes(vector, number))
        if jpeg is not None:
            self.query("INSERT INTO thumbnail VALUES (?, ?)", number, jpeg)
        if cells is not None:
            codes = cells.tobytes()
            self.query("INSERT INTO cells VALUES (?, ?, ?)", number, codes, schema.digest_bytes(codes, number))
        self._changed.append(number)
        self.count += 1

    def _write(self, sql: str, number: int, entry: Entry, thumbnail: int | None, *more: object) -> None:
        kept = {
            "number": number,
            "case_id": case_id(self.meta.case_key, entry.id),
            "patient_id": self.meta.keys.patient(entry.patient_id),
            "study_id": self.meta.keys.study(entry.study_id),
            "labels": self.meta.codec.encode(entry.labels),
            "boxes": boxes_text(entry.boxes),
            "thumbnail": thumbnail,
        }  # the other columns are taken from the entry
        row = [kept[name] if name in kept else getattr(entry, name) for name in schema.COLUMNS]
        self.query(sql, *row, schema.digest(row), *more)

    def _same_content(self, entry: Entry) -> str | None:
        """Return the id of the entry with the same content; of several entries, prefer the one with the same id."""
        names = [str(row[1]) for row in self.rows(self.find(entry.sha256))]
        return entry.id if entry.id in names else next(iter(names), None)

    def _free_id(self, entry: Entry, renaming: bool) -> str:
        """Return the entry's id, or with `renaming` a free longer one. Raises GalleryError if that is not possible."""
        there = self._digests(entry.id)
        if not there:
            return entry.id
        if renaming and entry.sha256 and there[0]:
            longer = next((name for name in longer_ids(entry.id, entry.image) if not self._digests(name)), None)
            if longer is not None:
                return longer
        raise GalleryError(f"{self.meta.path}: expected new ids, each once, found {entry.id!r}, which exists "
                           f"with other content; nothing was added")  # fmt: skip

    def _digests(self, id: str) -> list[str]:
        """Return the file digest of the entry with this id as a list, empty if there is no such entry."""
        return [sha256 for (sha256,) in self.query("SELECT sha256 FROM entry WHERE id = ?", id)]


def _even(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise a vector, float32 [D], unless its norm is 1 up to rounding, so that cosines order as distances do."""
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if abs(norm - 1) < _ROUNDING else (vector / norm).astype(np.float32)


def check_several(**given: Collection[str]) -> None:
    """Raise GalleryError if a single text was passed instead of a collection."""
    for name, values in given.items():
        if isinstance(values, str):
            raise GalleryError(f"expected several {name} to remove, found a single text; put it into a list")


def check_one_patient_each(found: Collection[tuple[object, object]], place: object) -> None:
    """Raise GalleryError if a study in these pairs (study, patient) belongs to several patients."""
    most = max(Counter(study for study, _ in set(found)).values(), default=0)
    if most > 1:
        raise GalleryError(f"{place}: expected a study id that belongs to one patient, found one of {most} patients; "
                           f"nothing was removed: name the patient as well")  # fmt: skip


def check_batch(
    entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes | None] | None, dim: int
) -> None:
    """Raise GalleryError unless each entry has a valid embedding and, if `thumbnails` are given, a thumbnail."""
    check_vectors(embeddings, len(entries), dim)
    if thumbnails is not None and len(thumbnails) != len(entries):
        raise GalleryError(f"expected {len(entries)} thumbnails, found {len(thumbnails)}")


def check_vectors(vectors: NDArray[np.float32], count: int, dim: int) -> None:
    """Raise GalleryError unless `vectors` are float32 [count, dim] of unit norm."""
    expected = (count, dim)
    if vectors.shape != expected or vectors.dtype != np.float32:
        found = f"{vectors.dtype} {list(vectors.shape)}"
        raise GalleryError(f"expected embeddings float32 {list(expected)}, found {found}")
    if not schema.are_unit(vectors).all():
        raise GalleryError("expected finite embeddings of norm 1, found others; pass them as the engine returns them")
