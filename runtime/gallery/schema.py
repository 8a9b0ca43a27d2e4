"""The tables of `gallery.sqlite`, and the digest that every row carries.

SQLite detects an invalid page, but not a flipped bit within a value. So each row carries a BLAKE2b digest of all
its values, which is verified whenever the row is read for an answer: a damaged row is an error, never an answer. The
digest is kept as a signed 64-bit integer; it guards against accidents, not against an attacker.

Searches identify patients and studies by numbers, which are hashes of their ids. So whether an entry is of a given
patient never depends on an index in which a damaged page could hide the patient. Studies of two patients may have the
same id, and so the same number, as in CheXpert, so a study is identified by both numbers.

The generation last acknowledged stands in a file beside the database too (`LastCommit`): SQLite drops what a damaged or
missing write-ahead log held without a word, and the gallery would open as it was some writes ago. The file is written
after each write and never synced, so it may lag behind (after a power failure) but never runs ahead. A gallery without
a file of its own is a copy, or was brought back from one: it gets a new uuid, since what was derived from the gallery
of the old one may be of writes that it has never seen.
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

#: Of the tables below; a gallery of another is refused.
SCHEMA = 6
#: A label whose value is not known, in an int8 array where the others are 1, 0 and -1 (uncertain).
UNKNOWN = -2

#: Table or index -> how it is made. A gallery whose own differ is refused: so a damaged definition is never obeyed.
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
    # Twice, in two trees of pages: that a file is not there must not rest on one page that may be damaged.
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
    """Fill an empty database with the tables of a gallery without entries."""
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
    """Raise GalleryError unless the database has just the tables and indexes of `DEFINITIONS`."""
    found = dict(database.execute("SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'"))
    if found != DEFINITIONS:
        names = sorted(name for name in found.keys() | DEFINITIONS if found.get(name) != DEFINITIONS.get(name))
        raise GalleryError(f"{path}: expected the tables of schema {SCHEMA}, found others ({', '.join(map(str, names))}"
                           f" differ); the gallery is damaged: restore a copy, or build it again")  # fmt: skip


def digest(values: Iterable[object]) -> int:
    """Of a row's values, as a signed 64-bit integer."""
    return digest_bytes("\x1f".join(map(str, values)).encode("utf-8", "surrogatepass"))


def digest_bytes(data: object, *row: object) -> int:
    """Of bytes and the rest of their row, as `digest`: a vector must not pass for another entry's. Anything else than
    bytes, which a flipped bit may make of them, has another digest."""
    if not isinstance(data, bytes):
        return digest((type(data).__name__, data))
    head = "".join(f"{value} " for value in row).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(head + data, digest_size=8).digest(), "little", signed=True)


def patient_number(key: str) -> int:
    """A patient's number in [1, 2^63), made from the key alone; 0 for the empty key, an unknown patient."""
    return _number(b"patient", key)


def study_number(key: str) -> int:
    """A study's number in [1, 2^63), made from the key alone, so that studies of two patients may have the same; 0 for
    the empty key, an unknown study."""
    return _number(b"study", key)


def _number(kind: bytes, key: str) -> int:
    if not key:
        return 0
    text = str(key).encode("utf-8", "surrogatepass")  # a flipped bit may have made bytes of it: not the same text
    hashed = hashlib.blake2b(text, digest_size=8, person=kind).digest()
    return int.from_bytes(hashed, "little") >> 1 or 1


class LabelCodec:
    """Between an entry's labels and the text in which they are kept, a character a label."""

    def __init__(self, labels: LabelSet) -> None:
        self._names = labels.names

    def encode(self, values: dict[str, int | None] | None) -> str:
        """Labels that are not named are unknown. Raises GalleryError for other labels and for other values."""
        values = values or {}
        if other := values.keys() - self._names:
            raise GalleryError(f"expected labels of {', '.join(self._names)}; found {', '.join(sorted(other))}")
        try:
            return "".join([_CHARACTERS[values.get(name)] for name in self._names])
        except KeyError as error:
            raise GalleryError(f"expected 1, 0, -1 or None for a label, found {error}") from error

    def decode(self, text: str) -> dict[str, int | None]:
        return {name: _VALUES[character] for name, character in zip(self._names, text, strict=True)}

    def decode_many(self, texts: Sequence[str]) -> NDArray[np.int8]:
        """int8 [N, C]: 1, 0, -1 (uncertain) or UNKNOWN."""
        codes = np.frombuffer("".join(texts).encode("latin-1", "replace"), np.uint8)
        return _CODES[codes.reshape(len(texts), len(self._names))]


def day_number(day: str) -> int:
    """YYYYMMDD of a day YYYY-MM-DD; 0 for the empty text, an unknown day."""
    return int(day.replace("-", "")) if day else 0


def check_entry(entry: Entry) -> None:
    """Raise GalleryError for an entry without an id, or with an invalid date."""
    if not entry.id:
        raise GalleryError("expected an id for every entry, found an empty one")
    if entry.date:
        parse_day(entry.date, f" (entry {entry.id!r})")


def are_unit(vectors: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [N]: which of float32 [N, D] have norm 1, and so are finite."""
    with np.errstate(over="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)  # without a second array [N, D]
    unit: NDArray[np.bool_] = np.abs(np.sqrt(squares) - 1) < 1e-3  # not so for NaN
    return unit


@dataclass(frozen=True, eq=False)
class Meta:
    """What does not change while a gallery is open."""

    path: Path
    uuid: str
    created: str
    card: ModelCard
    labels: LabelSet
    codec: LabelCodec
    keys: Keys
    case_key: str  # a secret: case ids are made with it
    cells: CellCodec | None

    def patient_numbers(self, ids: Iterable[str]) -> set[int]:
        """Numbers of patients by their ids as given to `add`; also of those that are not there. Without the unknown.

        Raises GalleryError where the gallery keeps pseudonyms and their key is not there.
        """
        return {patient_number(self.keys.patient(one)) for one in ids} - {0}

    def study_numbers(self, ids: Iterable[str]) -> set[int]:
        """Numbers of studies, as `patient_numbers`: each covers all studies of this id, of any patient."""
        return {study_number(self.keys.study(one)) for one in ids} - {0}

    @classmethod
    def load(cls, database: sqlite3.Connection, path: Path, pseudonyms: Pseudonyms | None) -> Self:
        """Raises GalleryError for another schema, and where something is missing or damaged."""
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
    """A gallery, whole or not, of another schema."""


def _check_schema(database: sqlite3.Connection, path: Path) -> None:
    """Raise GalleryError for a gallery that does not state its schema, SchemaError for another than the present one."""
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
    """The values of some keys, or of all. Raises GalleryError for a key that is missing and a damaged value."""
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
        raise GalleryError(f"expected an index setting of {', '.join(INDEX_SETTINGS)}; found {setting!r}")


log = logging.getLogger("cbmir")

LAST_COMMIT = "gallery.generation"
_LENGTH = 128


@dataclass(frozen=True)
class LastCommit:
    """That a generation of the gallery with this uuid has been acknowledged."""

    uuid: str
    generation: int

    def write(self, folder: Path) -> None:
        """Where that is not possible a warning says so, and no more: the write itself is on the disk already."""
        text = json.dumps([self.uuid, self.generation, digest((self.uuid, self.generation))]).encode()
        try:
            # In place, by one call and at one length: nothing is left over where the process is killed.
            descriptor = os.open(folder / LAST_COMMIT, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, text.ljust(_LENGTH))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: cannot write %s (%s); what was written to the gallery is safe", folder, LAST_COMMIT, error)

    @classmethod
    def read(cls, folder: Path) -> LastCommit | None:
        """None if it is missing or damaged."""
        try:
            uuid, generation, stamp = read_json(folder / LAST_COMMIT)
            whole = stamp == digest((uuid, generation))
            return cls(str(uuid), int(generation)) if whole else None
        except (OSError, ValueError, TypeError):
            return None

    def check(self, folder: Path, generation: int) -> None:
        """Raise GalleryError where more was acknowledged than the gallery still has."""
        if self.generation > generation:
            raise GalleryError(
                f"{folder}: expected generation {self.generation}, the last that was acknowledged, found generation "
                f"{generation}: its write-ahead log was lost or damaged, or an older database was put in its place. "
                f"Restore a whole copy; to continue without the {self.generation - generation} writes that are lost, "
                f"delete {LAST_COMMIT}"
            )


def open_meta(connections: Connections, pseudonyms: Pseudonyms | None) -> Meta:
    """What the gallery says of itself, once it is checked. One without a last commit of its own gets a new uuid.

    Raises GalleryError for another schema, for damage, and where acknowledged writes are missing.
    """
    path = connections.folder
    seen = LastCommit.read(connections.home)  # first: a writer may go on meanwhile
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
            return meta  # another process was first
        meta = replace(meta, uuid=uuid.uuid4().hex)
        write_meta(database, {"gallery": meta.uuid})
        generation = int(read_meta(database, path, "generation")["generation"])
        # Before the next opener can begin, which would give another name still. Where this one does not get to the
        # end, the last commit is of no gallery, and the next opener does the same.
        LastCommit(meta.uuid, generation).write(connections.home)
    return meta
