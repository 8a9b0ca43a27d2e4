"""The queue's SQLite database: its tables, and how it is opened."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cbmir.errors import PacsError
from cbmir.files import replacing
from cbmir.process import Closing

#: Seconds that a process waits for one before it to let go of the queue.
WAIT = 5.0

_SCHEMA = """
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
CREATE TABLE IF NOT EXISTS mark (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""
#: Of these tables, kept as the database's `user_version`: another number for other tables.
_VERSION = 1
_SETTINGS = (
    "PRAGMA locking_mode = EXCLUSIVE",  # one process, and SQLite lets go of it however that ends
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA trusted_schema = OFF",
    f"PRAGMA journal_size_limit = {64 << 20}",
)


def opened(path: Path) -> sqlite3.Connection:
    """A connection for this process alone, for one thread at a time; the database is made where there is none.

    Raises PacsError where another process has it, and for a file that is no such database, or one of other tables.
    """
    if not path.exists():
        with replacing(path) as temporary:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))  # for its owner only
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT)
    try:
        for setting in _SETTINGS:
            database.execute(setting).fetchall()
        _check_version(database, path)
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    except PacsError:
        database.close()
        raise
    except sqlite3.DatabaseError as error:
        database.close()
        if getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY":
            raise PacsError(f"{path.parent}: another process has this queue; give each its own folder") from None
        raise PacsError(f"{path}: the queue cannot be opened ({error}); move its folder away to begin anew") from error
    return database


def _check_version(database: sqlite3.Connection, path: Path) -> None:
    ((version,),) = database.execute("PRAGMA user_version").fetchall()
    if version != _VERSION and is_there(database, "SELECT 1 FROM sqlite_master"):
        raise PacsError(
            f"{path}: expected a queue of version {_VERSION}, found version {version}: another cbmir made it; let "
            f"that one work it off, then move its folder away"
        )


def is_there(database: sqlite3.Connection, query: str, values: tuple[object, ...] = ()) -> bool:
    """Whether a query finds anything."""
    return database.execute(query, values).fetchone() is not None


def is_full(error: BaseException) -> bool:
    """Whether an error of a file or of SQLite says that the disk is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


class Store(Closing):
    """The database with a lock for its threads, which `_changed` is, and what is remembered under keys."""

    def __init__(self, path: Path) -> None:
        """Raises PacsError, as `opened`."""
        self._changed = threading.Condition()
        self._database = opened(path)

    def mark(self, key: str, value: str) -> None:
        """Remember something under a key: how far a source was followed."""
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (key, value))

    def marked(self, key: str) -> str:
        """What `mark` was last given under a key; empty where there is none."""
        with self._changed:
            row = self._database.execute("SELECT value FROM mark WHERE key = ?", (key,)).fetchone()
        return "" if row is None else str(row[0])

    def tidy(self) -> None:
        """Let nothing of what is done stay in SQLite's log (WAL), where it would be until it is written over."""
        with self._changed:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Let go of the database. May be called again."""
        with self._changed:
            self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on disk when the block has ended."""
        with self._changed:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
            self._changed.notify_all()
