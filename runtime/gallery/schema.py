"""The tables of `gallery.sqlite`, and the digest that every row carries.

SQLite detects an invalid page, but not a flipped bit within a value. So each row carries a BLAKE2b digest of all
its values, which is verified whenever the row is read for an answer: a damaged row is an error, never an answer. The
digest is stored as a signed 64-bit integer; it guards against accidents, not against an attacker.

Searches identify patients and studies by numbers, which are hashes of their ids, so they never depend on an SQLite
index in which a damaged page could hide a patient. Two patients' studies may have the same id, and so the same number,
as in CheXpert, so a study is identified by both numbers.

The last acknowledged generation is also stored in a file beside the database (`LastCommit`), because SQLite silently
drops the contents of a damaged or missing write-ahead log, and the gallery would open in an older state. The file is
written after each write but never synced, so after a power failure it may lag behind, but it never runs ahead. A
gallery without a matching file is a copy, or was restored from one. It gets a new uuid, since files derived from the
original gallery may include writes that the copy never had.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sqlite3
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.choices import INDEX_SETTINGS
from cbmir.errors import CardError, GalleryError
from cbmir.input_file import parse_json, read_json
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.cells import CellCodec
from cbmir.runtime.gallery.database import Connections
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.filters import parse_day
from cbmir.runtime.gallery.pseudonyms import Keys, Pseudonyms

#: Version of the tables below; a gallery with another one is refused.
SCHEMA = 6
#: An unknown label in an int8 array, where the known ones are 1, 0 and -1 (uncertain).
UNKNOWN = -2

#: SQL of each table and index. A gallery with different SQL is refused, so a damaged definition is never used.
DEFINITIONS = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, digest INTEGER NOT NULL) STRICT",
    "entry": """CREATE TABLE entry (
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice
    id TEXT NOT NULL,
    case_id TEXT NOT NULL, -- made of the id and meta's case_key
    image TEXT NOT NULL,
    patient_id TEXT NOT NULL, -- or its pseudonym, or empty
    study_id TEXT NOT NULL, -- the same
    sop_instance_uid TEXT NOT NULL,
    view TEXT NOT NULL,
    source TEXT NOT NULL,
    date TEXT NOT NULL, -- YYYY-MM-DD or empty
    split TEXT NOT NULL,
    report TEXT NOT NULL,
    labels TEXT NOT NULL, -- a character a label, in meta's order: 1, 0, - (uncertain) or ? (unknown)
    boxes TEXT NOT NULL, -- as in a manifest, or empty
    sha256 TEXT NOT NULL, -- of the image file, or empty
    warnings TEXT NOT NULL, -- kinds of those that reading it gave, as `kinds_text` joins them
    thumbnail INTEGER, -- digest of the thumbnail, NULL where there is none
    digest INTEGER NOT NULL
) STRICT""",
    "embedding": """CREATE TABLE embedding (
    number INTEGER PRIMARY KEY REFERENCES entry (number) ON DELETE CASCADE,
    vector BLOB NOT NULL, -- float32, little-endian, unit norm
    digest INTEGER NOT NULL
) STRICT""",
    "thumbnail": """CREATE TABLE thumbnail (
    number INTEGER PRIMARY KEY REFERENCES entry (number) ON DELETE CASCADE,
    jpeg BLOB NOT NULL
) STRICT""",
    "cells": """CREATE TABLE cells (
    number INTEGER PRIMARY KEY REFERENCES entry (number) ON DELETE CASCADE,
    codes BLOB NOT NULL, -- int8 [h, w, d] by meta's codec; of each entry, or of none
    digest INTEGER NOT NULL
) STRICT""",
    "change": """CREATE TABLE change (
    generation INTEGER PRIMARY KEY,
    numbers BLOB NOT NULL, -- int64, little-endian: the entries added, updated or removed
    digest INTEGER NOT NULL
) STRICT""",
    "entry_id": "CREATE UNIQUE INDEX entry_id ON entry (id)",
    "entry_case": "CREATE INDEX entry_case ON entry (case_id)",
    # Two indexes in separate pages, so that one damaged page cannot make an existing file seem absent.
    "entry_sha256": "CREATE INDEX entry_sha256 ON entry (sha256) WHERE sha256 != ''",
    "entry_content": "CREATE INDEX entry_content ON entry (substr(sha256, 1, 16)) WHERE sha256 != ''",
}
#: Columns of `entry` that its digest covers, in this order.
COLUMNS = (
    "number", "id", "case_id", "image", "patient_id", "study_id", "sop_instance_uid", "view", "source",
    "date", "split", "report", "labels", "boxes", "sha256", "warnings", "thumbnail",
)  # fmt: skip

_CHARACTERS = {1: "1", 0: "0", -1: "-", None: "?"}
_VALUES = {character: value for value, character in _CHARACTERS.items()}
_CODES = np.full(256, 127, np.int8)
for _character, _value in _VALUES.items():
    _CODES[ord(_character)] = UNKNOWN if _value is None else _value


def create(
    connections: Connections, card: ModelCard, labels: LabelSet, pseudonyms: Pseudonyms | None, index: str,
    cells: CellCodec | None,
) -> None:  # fmt: skip
    """Create the tables of a gallery without entries in an empty database."""
    values = {
        "schema": SCHEMA,
        "gallery": uuid.uuid4().hex,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card.dumps(),
        "labels": json.dumps(labels.to_json(), ensure_ascii=False),
        "pseudonyms": pseudonyms.check if pseudonyms else "",
        "index": index,
        "generation": 0,
        "count": 0,
        "pruned": 0,
        "case_key": secrets.token_hex(16),
        "cells": cells.dumps() if cells else "",
    }
    with connections.use("make") as database:
        database.execute("PRAGMA journal_mode = WAL").close()
    with connections.transaction("make") as database:
        for statement in DEFINITIONS.values():
            database.execute(statement).close()
        write_meta(database, values)
    LastCommit(str(values["gallery"]), 0).write(connections.home)


def _check_tables(database: sqlite3.Connection, path: Path) -> None:
    """Raise GalleryError unless the database has exactly the tables and indexes of `DEFINITIONS`."""
    found = dict(database.execute("SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'"))
    if found != DEFINITIONS:
        names = sorted(name for name in found.keys() | DEFINITIONS if found.get(name) != DEFINITIONS.get(name))
        raise GalleryError(f"{path}: expected the tables of schema {SCHEMA}, found others ({', '.join(map(str, names))}"
                           f" differ); the gallery is damaged: restore a copy, or build it again")  # fmt: skip


def digest(values: Iterable[object]) -> int:
    """Return the digest of a row's values, a signed 64-bit integer."""
    return digest_bytes("\x1f".join(map(str, values)).encode("utf-8", "surrogatepass"))


def digest_bytes(data: object, *row: object) -> int:
    """Return the digest of bytes and the rest of their row, so that a vector cannot pass for another entry's. If a
    flipped bit has turned the bytes into another type, the digest differs."""
    if not isinstance(data, bytes):
        return digest((type(data).__name__, data))
    head = "".join(f"{value} " for value in row).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(head + data, digest_size=8).digest(), "little", signed=True)


def patient_number(key: str) -> int:
    """Hash a patient's key to a number in [1, 2^63); 0 for the empty key of an unknown patient."""
    return _number(b"patient", key)


def study_number(key: str) -> int:
    """Hash a study's key to a number in [1, 2^63), so studies of two patients may have the same number; 0 for the empty
    key of an unknown study."""
    return _number(b"study", key)


def _number(kind: bytes, key: str) -> int:
    if not key:
        return 0
    text = str(key).encode("utf-8", "surrogatepass")  # str: a flipped bit may have turned the text into bytes
    hashed = hashlib.blake2b(text, digest_size=8, person=kind).digest()
    return int.from_bytes(hashed, "little") >> 1 or 1


class LabelCodec:
    """A codec between an entry's labels and the text that stores them, with one character per label."""

    def __init__(self, labels: LabelSet) -> None:
        self._names = labels.names

    def encode(self, values: dict[str, int | None] | None) -> str:
        """Encode labels; those that are missing are unknown. Raises GalleryError for an invalid label or value."""
        values = values or {}
        if other := values.keys() - self._names:
            raise GalleryError(f"expected labels among {', '.join(self._names)}; found {', '.join(sorted(other))}")
        try:
            return "".join([_CHARACTERS[values.get(name)] for name in self._names])
        except KeyError as error:
            raise GalleryError(f"expected 1, 0, -1 or None for a label, found {error}") from error

    def decode(self, text: str) -> dict[str, int | None]:
        return {name: _VALUES[character] for name, character in zip(self._names, text, strict=True)}

    def decode_many(self, texts: Sequence[str]) -> NDArray[np.int8]:
        """Decode N texts to int8 [N, C] of 1, 0, -1 (uncertain) or `UNKNOWN`."""
        codes = np.frombuffer("".join(texts).encode("latin-1", "replace"), np.uint8)
        return _CODES[codes.reshape(len(texts), len(self._names))]


def day_number(day: str) -> int:
    """Convert a date YYYY-MM-DD to the number YYYYMMDD; 0 for the empty text of an unknown date."""
    return int(day.replace("-", "")) if day else 0


def check_entry(entry: Entry) -> None:
    """Raise GalleryError for an entry without an id, or with an invalid date."""
    if not entry.id:
        raise GalleryError("expected an id for every entry, found an empty one")
    if entry.date:
        parse_day(entry.date, f" (entry {entry.id!r})")


def are_unit(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which vectors of float32 [N, D] have norm 1, and so are finite: bool [N]."""
    with np.errstate(over="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)  # makes no temporary array [N, D]
    unit: NDArray[np.bool_] = np.abs(np.sqrt(squares) - 1) < 1e-3  # False for NaN
    return unit


@dataclass(frozen=True, eq=False)
class Meta:
    """The properties of a gallery that do not change while it is open."""

    path: Path
    uuid: str
    created: str
    card: ModelCard
    labels: LabelSet
    codec: LabelCodec
    keys: Keys
    case_key: str  # the secret key of the case ids
    cells: CellCodec | None

    def patient_numbers(self, ids: Iterable[str]) -> set[int]:
        """Return the numbers of patients by their ids as passed to `add`, even without entries; skip empty ids.

        Raises GalleryError if the gallery stores pseudonyms and was opened without their key.
        """
        return {patient_number(self.keys.patient(one)) for one in ids} - {0}

    def study_numbers(self, ids: Iterable[str]) -> set[int]:
        """Return the numbers of studies, as in `patient_numbers`; each covers this study id for all patients."""
        return {study_number(self.keys.study(one)) for one in ids} - {0}

    @classmethod
    def load(cls, database: sqlite3.Connection, path: Path, pseudonyms: Pseudonyms | None) -> Self:
        """Load them from the database. Raises GalleryError if a value is missing or damaged."""
        found = read_meta(database, path)
        try:
            labels = LabelSet.from_json(parse_json(found["labels"]))
            card = ModelCard.loads(found["card"], source=str(path))
            keys = Keys(path, found["pseudonyms"], pseudonyms)
            cells = CellCodec.loads(found["cells"]) if found["cells"] else None
            return cls(
                path, found["gallery"], found["created"], card, labels, LabelCodec(labels), keys, found["case_key"],
                cells,
            )  # fmt: skip
        except (KeyError, ValueError, CardError) as error:
            raise GalleryError(
                f"{path}: expected a whole gallery of this cbmir, found {type(error).__name__}: {error}; build it again"
            ) from error


class SchemaError(GalleryError):
    """The gallery has another schema."""


def _check_schema(database: sqlite3.Connection, path: Path) -> None:
    """Raise GalleryError for a gallery that does not state its schema, SchemaError if the schema is not `SCHEMA`."""
    rows = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchall()
    if len(rows) != 1 or not str(rows[0][0]).isdecimal():
        raise GalleryError(f"{path}: expected a gallery that states its schema, found none; build it again with "
                           f"'cbmir index build'")  # fmt: skip
    schema = int(rows[0][0])
    if schema != SCHEMA:
        remedy = "upgrade cbmir, or build" if schema > SCHEMA else "build"
        raise SchemaError(f"{path}: this cbmir reads galleries of schema {SCHEMA}, found schema {schema}; "
                          f"{remedy} the gallery again with 'cbmir index build'")  # fmt: skip


def read_meta(database: sqlite3.Connection, path: Path, *keys: str) -> dict[str, str]:
    """Read the values of some keys, or of all. Raises GalleryError for a missing key or a damaged value."""
    where = f"WHERE key IN ({', '.join('?' * len(keys))})" if keys else ""
    values = {}
    for key, value, found in database.execute(f"SELECT key, value, digest FROM meta {where}", keys).fetchall():
        if digest((key, value)) != found:
            raise GalleryError(f"{path}: the gallery's {key!r} is damaged; restore a copy, or build it again")
        values[key] = value
    missing = sorted(set(keys) - values.keys())
    if missing:
        raise GalleryError(f"{path}: expected {missing[0]!r} in the gallery, found none; it is damaged: restore a "
                           "copy, or build it again")  # fmt: skip
    return values


def write_meta(database: sqlite3.Connection, values: Mapping[str, object]) -> None:
    rows = [(key, str(value), digest((key, value))) for key, value in values.items()]
    database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", rows)


def check_index(setting: str) -> None:
    """Raise GalleryError unless the setting is in `INDEX_SETTINGS`."""
    if setting not in INDEX_SETTINGS:
        raise GalleryError(f"expected an index setting among {', '.join(INDEX_SETTINGS)}; found {setting!r}")


log = logging.getLogger("cbmir")

LAST_COMMIT = "gallery.generation"
_LENGTH = 128


@dataclass(frozen=True)
class LastCommit:
    """The last acknowledged generation of the gallery with this uuid."""

    uuid: str
    generation: int

    def write(self, folder: Path) -> None:
        """Write the file. A failure is only logged, since the gallery's own write is on the disk already."""
        text = json.dumps([self.uuid, self.generation, digest((self.uuid, self.generation))]).encode()
        try:
            # In place, with a single call of fixed length, so a killed process leaves no temporary file or old bytes.
            descriptor = os.open(folder / LAST_COMMIT, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, text.ljust(_LENGTH))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: cannot write %s (%s); what was written to the gallery is safe", folder, LAST_COMMIT, error)

    @classmethod
    def read(cls, folder: Path) -> LastCommit | None:
        """Read the file; None if it is missing or damaged."""
        try:
            uuid, generation, stamp = read_json(folder / LAST_COMMIT)
            whole = stamp == digest((uuid, generation))
            return cls(str(uuid), int(generation)) if whole else None
        except (OSError, ValueError, TypeError):
            return None

    def check(self, folder: Path, generation: int) -> None:
        """Raise GalleryError if the gallery's generation is older than the acknowledged one."""
        if self.generation > generation:
            raise GalleryError(
                f"{folder}: expected generation {self.generation}, the last that was acknowledged, found generation "
                f"{generation}: its write-ahead log was lost or damaged, or an older database was put in its place. "
                f"Restore a whole copy; to continue without the {self.generation - generation} writes that are lost, "
                f"delete {LAST_COMMIT}"
            )


def open_meta(connections: Connections, pseudonyms: Pseudonyms | None) -> Meta:
    """Check a gallery and return its properties. A gallery without a matching `LastCommit` gets a new uuid.

    Raises GalleryError if it has another schema, is damaged, or has lost acknowledged writes.
    """
    path = connections.folder
    seen = LastCommit.read(connections.home)  # first, since a writer may commit meanwhile
    with connections.use("read") as database:
        _check_schema(database, path)
        _check_tables(database, path)
        meta = Meta.load(database, path, pseudonyms)
        generation = int(read_meta(database, path, "generation")["generation"])
    if seen is not None and seen.uuid == meta.uuid:
        seen.check(path, generation)
    elif connections.writable and not connections.replaced():
        return _renamed(connections, pseudonyms)
    return meta


def _renamed(connections: Connections, pseudonyms: Pseudonyms | None) -> Meta:
    path = connections.folder
    with connections.transaction() as database:
        meta = Meta.load(database, path, pseudonyms)
        seen = LastCommit.read(connections.home)
        if seen is not None and seen.uuid == meta.uuid:
            return meta  # another process was faster
        meta = replace(meta, uuid=uuid.uuid4().hex)
        write_meta(database, {"gallery": meta.uuid})
        generation = int(read_meta(database, path, "generation")["generation"])
        # Inside the transaction, or the next process to open the gallery would choose yet another uuid. If this process
        # is killed before the commit, the file matches no gallery, and the next process does the same again.
        LastCommit(meta.uuid, generation).write(connections.home)
    return meta
