"""Connections to `gallery.sqlite`: a few, each for one thread at a time; SQLite's errors become GalleryError."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cbmir.errors import GalleryError, GalleryReplacedError

DATABASE = "gallery.sqlite"
LOG_FILE, SHARED_FILE = f"{DATABASE}-wal", f"{DATABASE}-shm"
#: Seconds that a writer waits for another before it is refused.
WAIT = 10.0

_SETTINGS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA synchronous = FULL",  # what is acknowledged outlives a power failure
    "PRAGMA secure_delete = ON",  # what is deleted is overwritten
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
    f"PRAGMA journal_size_limit = {64 << 20}",  # a log that a large merge has swollen shrinks again
)
_ADVICE = {
    "SQLITE_BUSY": "another is writing to it, and did not end in time; try again when it has ended",
    "SQLITE_FULL": "the disk is full; nothing was changed: make room, then try again",
    "SQLITE_IOERR": "the disk refused; nothing was changed: make room or look after the disk, then try again",
    "SQLITE_READONLY": "it may not be written to; check the permissions of the folder",
    "SQLITE_CANTOPEN": "check the permissions of the folder",
    "SQLITE_PERM": "check the permissions of the folder",
}
#: Follows on what is damaged; `verify` itself cuts it off.
SEE_VERIFY = "; 'cbmir index verify' says what is affected"
_KEPT_IDLE = 8
#: What reading a damaged database may raise: SQLite's own errors, and Python's where their text is damaged too.
DAMAGE = (sqlite3.Error, UnicodeDecodeError)


class Connections:
    """To the gallery in a folder; none is used any more once another gallery has taken its place."""

    def __init__(self, folder: Path, *, read_only: bool = False, wait: float = WAIT) -> None:
        """Raises GalleryError where no connection can be made."""
        self.folder = folder
        self.writable = not read_only and os.access(folder, os.W_OK)
        self._wait = wait
        self._lock = threading.Lock()
        self._closed = False
        self._idle = [self._connect()]
        self._file = (folder / DATABASE).stat()

    @contextmanager
    def use(self, verb: str) -> Iterator[sqlite3.Connection]:
        """A connection for one thread. What the block leaves open of a transaction is rolled back at its end."""
        connection = self._take()
        try:
            with translated(self.folder, verb):
                try:
                    yield connection
                finally:
                    connection.rollback()
        finally:
            self._give_back(connection)

    def replaced(self) -> bool:
        """Whether the folder has been moved, deleted or replaced since this was opened."""
        try:
            return not os.path.samestat(self._file, (self.folder / DATABASE).stat())
        except OSError:
            return True

    def empty_log(self, *, wait: bool) -> bool:
        """Bring the log into the database and cut it to nothing; whether that was possible, with a reader about."""
        with self.use("write to") as database:
            database.execute(f"PRAGMA busy_timeout = {int(1000 * self._wait) if wait else 0}").close()
            try:
                busy = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0]
            finally:
                database.execute(f"PRAGMA busy_timeout = {int(1000 * self._wait)}").close()
        return not busy

    def close(self) -> None:
        """Close all; those in use are closed when their users are done. May be called again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise GalleryError(f"{self.folder}: the gallery is closed; open it again")
            self._check_place()
            if self._idle:
                return self._idle.pop()
        connection = self._connect()
        try:
            self._check_place()  # else it may be to the gallery that has come there
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_place(self) -> None:
        if self.replaced():
            raise GalleryReplacedError(f"{self.folder}: the gallery was moved, deleted or replaced; open it again")

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            # Where nothing can be written none is kept: one that takes the file as it stands never sees a later write.
            keep = self.writable and not self._closed and len(self._idle) < _KEPT_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _mode(self) -> str:
        if self.writable:
            return "rw"
        # Where nothing can be written, the log of an open writer can be shared, and none can be made: where there is
        # none the file stands still, and is taken as it stands.
        shared = all((self.folder / name).exists() for name in (LOG_FILE, SHARED_FILE))
        return "ro" if shared or os.access(self.folder, os.W_OK) else "ro&immutable=1"

    def _connect(self) -> sqlite3.Connection:
        uri = f"{(self.folder / DATABASE).resolve().as_uri()}?mode={self._mode()}"
        with translated(self.folder, "open"):
            connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=self._wait
            )
            try:
                for setting in _SETTINGS:
                    connection.execute(setting).close()
                # SQLite opens the log at the first read: at once, so that it is this gallery's.
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            except BaseException:
                connection.close()
                raise
        return connection


def is_passing(error: BaseException) -> bool:
    """Whether an error in reading a gallery, or what it came from, says nothing of what is in it: it is busy, the disk
    refuses, or permissions are missing."""
    cause = error if error.__cause__ is None else error.__cause__
    return isinstance(cause, OSError) or (getattr(cause, "sqlite_errorname", "") or "").startswith(tuple(_ADVICE))


def new_file(folder: Path) -> Path:
    """The database's file, made empty and for its owner only: SQLite gives its log the same permissions."""
    place = folder / DATABASE
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return place


def said(error: Exception) -> str:
    """What an error of `DAMAGE` says, without a value of the gallery's, which may be a report."""
    return str(error) if _is_quotable(error) else "text that is not UTF-8"


def _is_quotable(error: Exception) -> bool:
    return isinstance(error, sqlite3.ProgrammingError) or hasattr(error, "sqlite_errorname")


@contextmanager
def translated(folder: Path, verb: str) -> Iterator[None]:
    """SQLite's errors become GalleryError."""
    try:
        yield
    except DAMAGE as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        advice = next((text for start, text in _ADVICE.items() if name.startswith(start)), f"it is damaged{SEE_VERIFY}")
        cause = error if _is_quotable(error) else None
        raise GalleryError(f"{folder}: cannot {verb} the gallery ({said(error)}): {advice}") from cause
    except UnicodeEncodeError:
        raise GalleryError(f"{folder}: expected text in UTF-8, found text that is none; nothing was changed") from None
