"""What a gallery keeps: entries, embeddings and thumbnails in SQLite (write-ahead log), which is the truth."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import CardError, GalleryError
from cbmir.labels import LabelSet

SCHEMA = 1
DATABASE = "gallery.sqlite"
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE entry (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    image TEXT NOT NULL,
    patient_id TEXT NOT NULL,
    study_id TEXT NOT NULL,
    view TEXT NOT NULL,
    split TEXT NOT NULL,
    report TEXT NOT NULL,
    labels TEXT NOT NULL,     -- JSON object: name -> 1, 0, -1 (uncertain) or null (unknown)
    sha256 TEXT NOT NULL,     -- of the image file
    embedding BLOB NOT NULL   -- float32, little-endian, unit norm
) STRICT;
CREATE INDEX entry_sha256 ON entry (sha256);
CREATE TABLE thumbnail (number INTEGER PRIMARY KEY REFERENCES entry (number), jpeg BLOB NOT NULL) STRICT;
"""
_FIELDS = "id, image, patient_id, study_id, view, split, report, labels, sha256"


@dataclass(frozen=True)
class Entry:
    """An image of the gallery. `image` is an absolute path; `labels` are 1, 0, -1 (uncertain) or None (unknown)."""

    id: str
    image: str
    patient_id: str
    study_id: str = ""
    view: str = ""
    split: str = ""
    report: str = ""
    labels: dict[str, int | None] | None = None
    sha256: str = ""

    @property
    def positive(self) -> tuple[str, ...]:
        """Labels that are positive or uncertain: what counts in retrieval (METHOD, "Loss")."""
        return tuple(name for name, value in (self.labels or {}).items() if value in (1, -1))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a search needs, in the order of the entries' numbers, as of one generation."""

    generation: int
    numbers: NDArray[np.int64]
    ids: NDArray[np.object_]
    patients: NDArray[np.object_]
    embeddings: NDArray[np.float32]


class Store:
    """Entries by number, id and file digest: all of a gallery but the search (`cbmir.runtime.gallery.Gallery`)."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = connection
        self._file = (path / DATABASE).stat()
        self._lock = threading.RLock()
        self._cached: Snapshot | None = None
        with self._database("read") as database:
            meta = dict(database.execute("SELECT key, value FROM meta"))
        if meta.get("schema") != str(SCHEMA):
            raise GalleryError(
                f"{path}: this cbmir reads galleries of schema {SCHEMA}, found schema {meta.get('schema', 'none')}; "
                f"upgrade cbmir, or build the gallery again with 'cbmir index build'"
            )
        try:
            self.card = ModelCard.loads(meta["card"], source=str(path))
            self.labels = LabelSet.from_json(json.loads(meta["labels"]))
            self.created = meta["created"]
            self._uuid = meta["gallery"]
        except (KeyError, ValueError, CardError) as error:
            raise GalleryError(
                f"{path}: expected a whole gallery of this cbmir, found {type(error).__name__}: {error}; build it again"
            ) from error

    @classmethod
    def create(cls, path: str | Path, card: ModelCard, labels: LabelSet | None = None) -> Self:
        """Make an empty gallery in a new or empty folder. `labels` (default: the model's) are those of its entries.

        Raises GalleryError if there is something at `path`.
        """
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise GalleryError(f"{path}: expected a new or empty folder for the gallery, found something there")
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        meta = {
            "schema": str(SCHEMA),
            "fingerprint": card.fingerprint,
            "labels": json.dumps((labels or card.labels).to_json(), ensure_ascii=False),
            "dim": str(card.embedding_dim),
            "crop": str(card.preprocess.crop),
            "gallery": uuid.uuid4().hex,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "generation": "0",
            "card": card.dumps(),
        }
        connection = _connect(path / DATABASE, "rwc")
        try:
            with _translated(path, "make"):
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(_TABLES)
                connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            return cls(path, connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a gallery. Raises GalleryError where it is missing, damaged or of a newer schema."""
        path = Path(path)
        database = path / DATABASE
        try:
            exists = database.is_file()
        except OSError as error:
            raise GalleryError(f"{path}: cannot look into the gallery's folder ({error.strerror})") from error
        if not exists:
            found = "no gallery there" if path.is_dir() else "a file" if path.exists() else "nothing there"
            raise GalleryError(
                f"{path}: expected a gallery's folder with {DATABASE}, found {found}; "
                f"make one with 'cbmir index build MODEL MANIFEST -o GALLERY'"
            )
        # Where nothing can be written the write-ahead log cannot be shared either: the file is taken as it stands.
        connection = _connect(database, "rw" if os.access(path, os.W_OK) else "ro&immutable=1")
        try:
            return cls(path, connection)
        except BaseException:
            connection.close()
            raise

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None
    ) -> None:
        """Add N entries with embeddings float32 [N, D] of unit norm, and JPEG thumbnails, in one transaction.

        Raises GalleryError, and adds nothing, for an id that is there already and for unfit embeddings.
        """
        self._check_vectors(embeddings, len(entries))
        rows = [
            (e.id, e.image, e.patient_id, e.study_id, e.view, e.split, e.report,
             json.dumps(e.labels or {}, ensure_ascii=False), e.sha256, vector.astype("<f4").tobytes())
            for e, vector in zip(entries, embeddings, strict=True)
        ]  # fmt: skip
        with self._database("add to") as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                for position, row in enumerate(rows):
                    number = database.execute(
                        f"INSERT INTO entry ({_FIELDS}, embedding) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
                    ).lastrowid
                    if thumbnails is not None:
                        database.execute("INSERT INTO thumbnail VALUES (?, ?)", (number, thumbnails[position]))
                database.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
                database.execute("COMMIT")
            except BaseException as error:
                database.execute("ROLLBACK")
                if isinstance(error, sqlite3.IntegrityError):
                    raise GalleryError(f"{self.path}: expected new ids, each once, found one that is there ({error}); "
                                       f"nothing was added") from error  # fmt: skip
                raise

    def entry(self, id: str) -> Entry:  # noqa: A002 - the field's own name
        """Raises GalleryError for an id that is not there."""
        return self._entries("id", [id])[0]

    def ids(self) -> list[str]:
        """Every id, in the order of adding."""
        return list(self._snapshot().ids)

    def find(self, sha256: str) -> list[Entry]:
        """Every entry made from a file with this digest, in the order of adding."""
        with self._database("read") as database:
            query = f"SELECT {_FIELDS} FROM entry WHERE sha256 = ? AND sha256 != '' ORDER BY number"
            return [_entry(row) for row in database.execute(query, (sha256,))]

    def has_patient(self, patient_id: str) -> bool:
        """Whether an entry is of this patient."""
        return bool((self._snapshot().patients == patient_id).any())

    def vector(self, id: str) -> NDArray[np.float32]:  # noqa: A002
        """float32 [D], unit norm. Raises GalleryError for an id that is not there."""
        with self._database("read") as database:
            row = database.execute("SELECT embedding FROM entry WHERE id = ?", (id,)).fetchone()
        if row is None:
            raise self._unknown(id)
        vector = self._vector(row[0])
        self._check_norms(vector[None], [id])
        return vector

    def thumbnail(self, id: str) -> bytes | None:  # noqa: A002
        """JPEG of about 256 pixels, or None where none was stored. Raises GalleryError for an id that is not there."""
        query = "SELECT jpeg FROM entry LEFT JOIN thumbnail USING (number) WHERE id = ?"
        with self._database("read") as database:
            row = database.execute(query, (id,)).fetchone()
        if row is None:
            raise self._unknown(id)
        return None if row[0] is None else bytes(row[0])

    def __len__(self) -> int:
        with self._database("read") as database:
            return int(database.execute("SELECT count(*) FROM entry").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._cached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _database(self, verb: str) -> Iterator[sqlite3.Connection]:
        """The connection, one thread at a time; SQLite's errors become GalleryError."""
        with self._lock:
            if self._connection is None:
                raise GalleryError(f"{self.path}: the gallery is closed; open it again")
            with _translated(self.path, verb):
                yield self._connection

    def _generation(self) -> int:
        with self._database("read") as database:
            return int(database.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()[0])

    def _snapshot(self) -> Snapshot:
        with self._database("read") as database:
            if self._cached is None or self._cached.generation != self._generation():
                self._cached = None  # its memory is needed for the next
                database.execute("BEGIN")  # rows and generation of one moment
                try:
                    self._cached = self._read_snapshot(database)
                finally:
                    database.execute("ROLLBACK")
            return self._cached

    def _read_snapshot(self, database: sqlite3.Connection) -> Snapshot:
        """Row by row into arrays of their final size: the embeddings of a large gallery fit into memory once."""
        count = database.execute("SELECT count(*) FROM entry").fetchone()[0]
        numbers = np.empty(count, np.int64)
        ids, patients = np.empty(count, object), np.empty(count, object)
        embeddings = np.empty((count, self.card.embedding_dim), np.float32)
        rows = database.execute("SELECT number, id, patient_id, embedding FROM entry ORDER BY number")
        for at, (number, name, patient, blob) in enumerate(rows):
            numbers[at], ids[at], patients[at], embeddings[at] = number, name, patient, self._vector(blob)
        self._check_norms(embeddings, ids)
        return Snapshot(self._generation(), numbers, ids, patients, embeddings)

    def _is_current(self, snapshot: Snapshot) -> bool:
        """Whether the folder still holds what the snapshot shows: others may have added, or replaced the gallery."""
        try:
            in_place = os.path.samestat(self._file, (self.path / DATABASE).stat())
        except FileNotFoundError:
            return False
        return in_place and self._generation() == snapshot.generation

    def _entries(self, column: str, keys: Sequence[Any]) -> list[Entry]:
        """Entries by a unique column, in the order of the keys."""
        entries = []
        with self._database("read") as database:
            for key in keys:
                row = database.execute(f"SELECT {_FIELDS} FROM entry WHERE {column} = ?", (key,)).fetchone()
                if row is None:
                    raise self._unknown(key)
                entries.append(_entry(row))
        return entries

    def _vector(self, blob: bytes) -> NDArray[np.float32]:
        dim = self.card.embedding_dim
        if len(blob) != 4 * dim:
            raise GalleryError(f"{self.path}: expected embeddings of {dim} values, found others; build it again")
        return np.frombuffer(blob, "<f4").astype(np.float32)

    def _check_norms(self, vectors: NDArray[np.float32], ids: Sequence[str] | NDArray[np.object_]) -> None:
        """A damaged embedding would hide its own image and others: a NaN compares as nearest and as farthest."""
        damaged = np.flatnonzero(~_are_unit(vectors))
        if len(damaged):
            raise GalleryError(f"{self.path}: expected finite embeddings of norm 1, found another in the entry "
                               f"{ids[damaged[0]]!r} ({len(damaged)} in all); build it again")  # fmt: skip

    def _check_vectors(self, vectors: NDArray[np.float32], count: int) -> None:
        expected = (count, self.card.embedding_dim)
        if vectors.shape != expected or vectors.dtype != np.float32:
            found = f"{vectors.dtype} {list(vectors.shape)}"
            raise GalleryError(f"expected embeddings float32 {list(expected)}, found {found}")
        if not _are_unit(vectors).all():
            raise GalleryError("expected finite embeddings of norm 1, found others; take them as the engine gives them")

    def _unknown(self, key: object) -> GalleryError:
        return GalleryError(f"{self.path}: expected the id of an entry of this gallery, found {key!r}")


def _are_unit(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [N]: which of float32 [N, D] have norm 1, and so are finite."""
    with np.errstate(over="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)  # without a second array [N, D]
    unit: NDArray[np.bool_] = np.abs(np.sqrt(squares) - 1) < 1e-3  # not so for NaN
    return unit


@contextmanager
def _translated(path: Path, verb: str) -> Iterator[None]:
    """SQLite's errors become GalleryError."""
    try:
        yield
    except sqlite3.Error as error:
        raise GalleryError(f"{path}: cannot {verb} the gallery ({error}); check the folder's permissions, and if it is "
                           f"damaged build it again with 'cbmir index build'") from error  # fmt: skip


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    with _translated(path.parent, "open"):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30)
        connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _entry(row: Sequence[Any]) -> Entry:
    values = dict(zip(_FIELDS.split(", "), row, strict=True))
    return Entry(**values | {"labels": json.loads(values["labels"])})
