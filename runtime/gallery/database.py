"""SQLite databases of the runtime: opening, sharing between threads, closing, and translating errors.

The gallery and the queue of the PACS node use this module. Both store patient data, so only the owner can read their
files, and deleted data is overwritten. Both acknowledge what they receive, so a commit survives a power failure.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import CbmirError, GalleryError, GalleryReplacedError
from cbmir.input_file import read_input
from cbmir.process import Closing

DATABASE = "gallery.sqlite"
LOG_FILE, SHARED_FILE = f"{DATABASE}-wal", f"{DATABASE}-shm"
#: File in a built gallery's folder that contains the name of the inner folder with the live gallery.
POINTER = "current"
VERSION = re.compile(r"gallery-[0-9a-f]{16}")
#: Seconds that a writer waits for another one before it raises an error.
WAIT = 10.0
#: Appended to messages about damage; `verify` itself removes it.
SEE_VERIFY = "; 'cbmir index verify' says what is affected"
#: Exceptions from reading a damaged database: SQLite's errors, and Python's if a text is not UTF-8.
DAMAGE = (sqlite3.Error, UnicodeDecodeError)

_SETTINGS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA synchronous = FULL",  # acknowledged writes survive a power failure
    "PRAGMA secure_delete = ON",  # deleted data is overwritten
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
    f"PRAGMA journal_size_limit = {64 << 20}",  # the log shrinks again after a large merge
)
_PASSING = {
    "SQLITE_BUSY": "another process is writing to it, and did not finish in time; try again later",
    "SQLITE_FULL": "the disk is full; nothing was changed: make room, then try again",
    "SQLITE_IOERR": "the disk returned an error; nothing was changed: make room or check the disk, then try again",
    "SQLITE_READONLY": "it is not writable; check the permissions of the folder",
    "SQLITE_CANTOPEN": "check the permissions of the folder",
    "SQLITE_PERM": "check the permissions of the folder",
}
_KEPT_IDLE = 8
_MOUNTS = Path("/proc/self/mountinfo")  # Linux only
#: Network file systems, by their names in `_MOUNTS`.
_SHARES = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs",
    "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.davfs", "fuse.smbnetfs",
})  # fmt: skip


@dataclass(frozen=True)
class DatabaseKind:
    """A kind of database: the words and types of its errors, and how it is opened.

    If `exclusive`, one process at a time can open it, until that process closes it or ends in any way. `live` returns
    the file that currently holds the data of the requested one.
    """

    noun: str
    error: type[CbmirError]
    replaced: type[CbmirError]
    damaged: str
    busy: str = _PASSING["SQLITE_BUSY"]
    exclusive: bool = False
    live: Callable[[Path], Path] = lambda file: file


def live_folder(folder: Path) -> Path:
    """Return the folder that holds a gallery's files: the one that `POINTER` names, or `folder` without a pointer.

    Raises GalleryError for a damaged pointer.
    """
    try:
        name = read_input(folder / POINTER, 4096).decode("utf-8", "replace").strip()  # may be edited by hand
    except (FileNotFoundError, NotADirectoryError):
        return folder
    except OSError as error:
        raise GalleryError(f"{folder}: cannot read the gallery's folder ({error.strerror})") from error
    if VERSION.fullmatch(name) is None:
        raise GalleryError(f"{folder / POINTER}: expected the name of a folder beside it, gallery-..., found something "
                           f"else; write that name, or delete the file and build again")  # fmt: skip
    return folder / name


GALLERY = DatabaseKind(
    "gallery", GalleryError, GalleryReplacedError, f"it is damaged{SEE_VERIFY}",
    live=lambda file: live_folder(file.parent) / file.name,
)  # fmt: skip


class Connections(Closing):
    """Connections to a database file, each used by one thread at a time, and none after the file has been replaced.

    An exclusive database has only one connection, so only one block of `use` or `transaction` may be open at a time.
    """

    def __init__(self, file: Path, kind: DatabaseKind, *, read_only: bool = False, wait: float = WAIT) -> None:
        """Raises the kind's error if no connection can be made, or for a writable folder on a network share."""
        self.folder, self.file = file.parent, kind.live(file)
        self.home = self.file.parent
        self.writable = not read_only and os.access(self.home, os.W_OK)
        if self.writable:
            _check_local(self.home, kind)
        self._asked, self._kind, self._wait = file, kind, wait
        self._lock = threading.Lock()
        self._closed = False
        self._idle = [self._connect()]
        self._opened = self.file.stat()

    @contextmanager
    def use(self, verb: str) -> Iterator[sqlite3.Connection]:
        """Yield a connection for one thread. A transaction that is still open when the block ends is rolled back."""
        connection = self._take()
        try:
            with translated(self._kind, self.folder, verb):
                try:
                    yield connection
                finally:
                    connection.rollback()
        finally:
            self._give_back(connection)

    @contextmanager
    def transaction(self, verb: str = "write to") -> Iterator[sqlite3.Connection]:
        """Yield a connection in a write transaction, which is on disk after the block, or rolled back if it raised."""
        with self.use(verb) as connection:
            connection.execute("BEGIN IMMEDIATE").close()
            self._check_place()  # the file may have been replaced while this waited
            yield connection
            connection.execute("COMMIT").close()

    def replaced(self) -> bool:
        """Return whether the file has been moved, deleted or replaced since it was opened."""
        try:
            return not os.path.samestat(self._opened, self._kind.live(self._asked).stat())
        except OSError:
            return True

    def empty_log(self, *, wait: bool) -> bool:
        """Checkpoint and truncate the log. Return whether that was possible: a reader may prevent it."""
        with self.use("write to") as database:
            database.execute(f"PRAGMA busy_timeout = {int(1000 * self._wait) if wait else 0}").close()
            try:
                busy = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0]
            finally:
                database.execute(f"PRAGMA busy_timeout = {int(1000 * self._wait)}").close()
        return not busy

    def close(self) -> None:
        """Close all connections; those in use are closed when they are released. May be called more than once."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise self._kind.error(f"{self.folder}: the {self._kind.noun} is closed; open it again")
            self._check_place()
            if self._idle:
                return self._idle.pop()
        connection = self._connect()
        try:
            self._check_place()  # the connection may be to a file that replaced this one
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_place(self) -> None:
        if self.replaced():
            raise self._kind.replaced(
                f"{self.folder}: the {self._kind.noun} was moved, deleted or replaced; open it again"
            )

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            # Read-only connections are not kept: one that was opened as immutable never sees a later write.
            keep = self.writable and not self._closed and len(self._idle) < _KEPT_IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _mode(self) -> str:
        if self.writable:
            return "rw"
        # In a read-only folder, SQLite can share the log of an open writer but not create one. Without a log the file
        # does not change, so it is opened as immutable.
        shared = all(self.file.with_name(self.file.name + ending).exists() for ending in ("-wal", "-shm"))
        return "ro" if shared or os.access(self.home, os.W_OK) else "ro&immutable=1"

    def _connect(self) -> sqlite3.Connection:
        uri = f"{self.file.resolve().as_uri()}?mode={self._mode()}"
        with translated(self._kind, self.folder, "open"):
            connection = sqlite3.connect(
                uri, uri=True, isolation_level=None, check_same_thread=False, timeout=self._wait
            )
            try:
                if self._kind.exclusive:
                    connection.execute("PRAGMA locking_mode = EXCLUSIVE").close()
                for setting in _SETTINGS:
                    connection.execute(setting).close()
                # SQLite opens the log at the first read, so read now, while the log belongs to this file.
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            except BaseException:
                connection.close()
                raise
        return connection


def _check_local(folder: Path, kind: DatabaseKind) -> None:
    """Raise the kind's error for a network share: SQLite's log needs shared memory, and its locks may fail there."""
    device = folder.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.partition(" - ") for line in _MOUNTS.read_text("utf-8", "replace").splitlines()]
    except OSError:  # not Linux
        return
    for place, _, source in mounts:
        if place.split()[2:3] == [numbers] and (system := source.partition(" ")[0]) in _SHARES:
            raise kind.error(
                f"{folder}: expected a folder on a disk of this machine, found a network share ({system}), where "
                f"writes may damage a {kind.noun}: keep it on a local disk, or mount the share read-only to search"
            )


def new_file(file: Path, kind: DatabaseKind) -> None:
    """Create an empty database file that only its owner can read. SQLite gives its log the same permissions.

    Raises FileExistsError if the file exists, and the kind's error if the folder is on a network share.
    """
    _check_local(file.parent, kind)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def error_name(error: BaseException) -> str:
    """Return SQLite's name for an error or its cause, such as SQLITE_FULL; empty if it is not from SQLite."""
    cause = error if error.__cause__ is None else error.__cause__
    return str(getattr(cause, "sqlite_errorname", None) or "")


def is_passing(error: BaseException) -> bool:
    """Return whether a read error, or its cause, says nothing about the data: the database is busy, the disk failed, or
    permissions are missing."""
    cause = error if error.__cause__ is None else error.__cause__
    return isinstance(cause, OSError) or error_name(error).startswith(tuple(_PASSING))


def said(error: Exception) -> str:
    """Return the message of an error in `DAMAGE`, without values from the database, such as a report."""
    return str(error) if _is_quotable(error) else "text that is not UTF-8"


def _is_quotable(error: Exception) -> bool:
    return isinstance(error, sqlite3.ProgrammingError) or hasattr(error, "sqlite_errorname")


@contextmanager
def translated(kind: DatabaseKind, folder: Path, verb: str) -> Iterator[None]:
    """Translate SQLite's errors into the kind's."""
    try:
        yield
    except DAMAGE as error:
        name = error_name(error)
        passing = _PASSING | {"SQLITE_BUSY": kind.busy}
        advice = next((text for start, text in passing.items() if name.startswith(start)), kind.damaged)
        cause = error if _is_quotable(error) else None
        raise kind.error(f"{folder}: cannot {verb} the {kind.noun} ({said(error)}): {advice}") from cause
    except UnicodeEncodeError:
        raise kind.error(f"{folder}: expected text in UTF-8, found other text; nothing was changed") from None
