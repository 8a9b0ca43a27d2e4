"""A job of the queue, and its data on disk: its rows in the database, and its file."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbmir.errors import QueueError
from cbmir.files import sync, write_json
from cbmir.input_file import read_json
from cbmir.runtime.gallery.database import Connections, DatabaseKind, new_file

DATABASE = "queue.sqlite"
WAIT = 5.0  # seconds for another process to close the queue
SPOOL, DEAD_LETTERS = "spool", "dead-letters"
FREE_SPACE = 2**29  # bytes of the disk that stay free, so that a full queue can be processed
_GROUP_LENGTH = b"\x02\x00\x00\x00UL\x04\x00"  # (0002,0000), of 4 bytes

_KIND = DatabaseKind(
    "queue", QueueError, QueueError, "it is damaged; move its folder away to start with a new one",
    busy="another process uses this queue; give each its own folder", exclusive=True,
)  # fmt: skip
_VERSION = 2  # of the tables below; change it with them
#: `done` only keeps the SHA-256 of UIDs.
_TABLES = f"""
CREATE TABLE IF NOT EXISTS job (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, instance TEXT NOT NULL, study TEXT NOT NULL,
    digest BLOB NOT NULL, source TEXT NOT NULL, received REAL NOT NULL, due REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, fingerprint TEXT NOT NULL DEFAULT '',
    UNIQUE (instance, digest)
) STRICT;
CREATE INDEX IF NOT EXISTS job_due ON job (due);
CREATE INDEX IF NOT EXISTS job_study ON job (study);
CREATE TABLE IF NOT EXISTS result (
    job INTEGER NOT NULL REFERENCES job ON DELETE CASCADE, position INTEGER NOT NULL, kind TEXT NOT NULL,
    uid TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (job, position)
) STRICT;
CREATE TABLE IF NOT EXISTS done (
    number INTEGER PRIMARY KEY, instance BLOB NOT NULL, study BLOB NOT NULL, digest BLOB NOT NULL,
    fingerprint TEXT NOT NULL, report TEXT NOT NULL, UNIQUE (instance, digest, fingerprint)
) STRICT;
CREATE TABLE IF NOT EXISTS refusal (reason TEXT PRIMARY KEY, count INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS mark (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
PRAGMA user_version = {_VERSION};
"""


@dataclass(frozen=True)
class Arrival:
    """The queue's data about a file: its UIDs, and its sender (an AE title, or the name of a source)."""

    sop_instance_uid: str
    study_instance_uid: str
    source: str


@dataclass(frozen=True)
class Job:
    """A file to process. `name` says nothing about the patient; `received` is a time as from `time.time`; `attempts`
    includes this one; `fingerprint` is that of the model whose results are kept, else empty."""

    number: int
    name: str
    sop_instance_uid: str
    study_instance_uid: str
    digest: bytes
    source: str
    received: float
    attempts: int
    fingerprint: str


@dataclass(frozen=True)
class ResultObject:
    """A DICOM object ready to be sent: its kind (`sr`, `sc`, `kos`), SOP Instance UID and file."""

    kind: str
    uid: str
    data: bytes


class Spool:
    """Two folders of files `NAME.dcm`: those of jobs, and dead letters."""

    def __init__(self, folder: Path) -> None:
        """Make the folders, accessible only to their owner. Raises QueueError if that fails."""
        self._spool, self._dead = folder / SPOOL, folder / DEAD_LETTERS
        try:
            for part in (folder, self._spool, self._dead):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise QueueError(f"{folder}: cannot make the queue's folder ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which is on disk when this returns. Raises OSError: ENOSPC if only reserved space is left."""
        if shutil.disk_usage(self._spool).free < len(data) + FREE_SPACE:
            raise OSError(errno.ENOSPC, "only the space that stays reserved is left")
        with open(os.open(self._file(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:  # noqa: PTH123
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync(self._spool)

    def read(self, name: str, digest: bytes) -> bytes:
        """Read the file with this `content_digest`. Raises QueueError if it is gone or has another."""
        try:
            data = self._file(name).read_bytes()
        except OSError as error:
            raise QueueError(f"job {name}: its file cannot be read ({error.strerror})") from None
        if content_digest(data) != digest:
            raise QueueError(f"job {name}: its file has changed on disk since it was received")
        return data

    def remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def keep_only(self, names: Collection[str]) -> None:
        """Remove files without a job (never acknowledged, or done), and what is left of a removed dead letter."""
        for file in self._spool.iterdir():
            if file.suffix != ".dcm" or file.stem not in names:
                file.unlink()
        for name in set(self.buried()).intersection(names):  # a process ended while burying these
            self._reason(name).unlink()
        for file in self._dead.glob("*.dcm"):
            if not self._reason(file.stem).exists():  # a process ended while removing it
                file.unlink()

    def bury(self, name: str, about: dict[str, Any]) -> None:
        """Turn a file, if it still exists, into a dead letter, after writing what is known about it to `NAME.json`."""
        write_json(self._reason(name), about)
        if self._file(name).exists():
            self._file(name).replace(self._dead / f"{name}.dcm")
        sync(self._dead)

    def is_buried(self, name: str) -> bool:
        return not self._file(name).exists() and (self._dead / f"{name}.dcm").exists()

    def buried(self) -> list[str]:
        return sorted(path.stem for path in self._dead.glob("*.json"))

    def dead_letter(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """Read a dead letter's file, and what is known about it. Raises OSError and ValueError."""
        return (self._dead / f"{name}.dcm").read_bytes(), read_json(self._reason(name))

    def remove_dead_letter(self, name: str) -> None:
        self._reason(name).unlink(missing_ok=True)
        (self._dead / f"{name}.dcm").unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._spool / f"{name}.dcm"

    def _reason(self, name: str) -> Path:
        return self._dead / f"{name}.json"


def open_database(folder: Path) -> Connections:
    """Open or make the queue's database. Raises QueueError, also if another process uses it or its version differs."""
    with suppress(OSError):  # if it cannot be made, opening it says why
        new_file(folder / DATABASE, _KIND)
    connections = Connections(folder / DATABASE, _KIND, wait=WAIT)
    try:
        with connections.use("make") as database:
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version != _VERSION and database.execute("SELECT 1 FROM sqlite_schema").fetchall():
                raise QueueError(
                    f"{folder / DATABASE}: expected a queue of version {_VERSION}, found version {version}: another "
                    "version of cbmir made it; let that version finish it, then move its folder away"
                )
            database.execute("PRAGMA journal_mode = WAL").fetchall()
            database.executescript(f"BEGIN; {_TABLES} COMMIT;")
    except BaseException:
        connections.close()
        raise
    return connections


def content_digest(data: bytes) -> bytes:
    """Return the SHA-256 of a DICOM file without the last sender's preamble and File Meta Information (PS3.10 7.1)."""
    start = 0
    if data[128:132] == b"DICM":
        start = 132
        if data[132:140] == _GROUP_LENGTH:
            start = 144 + int.from_bytes(data[140:144], "little")
    return hashlib.sha256(memoryview(data)[start:]).digest()
