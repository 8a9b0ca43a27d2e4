"""The SQLite databases of the runtime: opening, use by threads, closing, and translation of errors.

The gallery and the queue of the PACS node use it. Both keep patient data: only the owner can read a file, and deleted
data is overwritten. Both acknowledge what they receive: a commit survives a power failure.
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
#: In the folder of a gallery that was built: the name of the folder within that holds the gallery now.
POINTER = "current"
VERSION = re.compile(r"gallery-[0-9a-f]{16}")
#: Seconds that a writer waits for another before it is refused.
WAIT = 10.0
#: Follows on what is damaged; `verify` itself cuts it off.
SEE_VERIFY = "; 'cbmir index verify' says what is affected"
#: What reading a damaged database may raise: SQLite's own errors, and Python's where their text is damaged too.
DAMAGE = (sqlite3.Error, UnicodeDecodeError)

_SETTINGS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA synchronous = FULL",  # what is acknowledged outlives a power failure
    "PRAGMA secure_delete = ON",  # what is deleted is overwritten
    "PRAGMA cell_size_check = ON",
    "PRAGMA trusted_schema = OFF",
    f"PRAGMA journal_size_limit = {64 << 20}",  # a log that a large merge has swollen shrinks again
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
_MOUNTS = Path("/proc/self/mountinfo")  # of Linux
#: File systems of other machines, by their names there.
_SHARES = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs",
    "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.davfs", "fuse.smbnetfs",
})  # fmt: skip


@dataclass(frozen=True)
class DatabaseKind:
    """What a database is to its user: the words and types of its errors.

    `exclusive`: one process at a time has it, until it closes it or ends, however that is. `live`: which file stands
    for the one that was asked for, now.
    """

    noun: str
    error: type[CbmirError]
    replaced: type[CbmirError]
    damaged: str
    busy: str = _PASSING["SQLITE_BUSY"]
    exclusive: bool = False
    live: Callable[[Path], Path] = lambda file: file


def live_folder(folder: Path) -> Path:
    """The folder that holds a gallery's files: the one that `POINTER` names, or `folder` itself without a pointer.

    Raises GalleryError for a pointer that is damaged.
    """
    try:
        name = read_input(folder / POINTER, 4096).decode("utf-8", "replace").strip()  # it may be written by hand
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
    """To a database's file, each for one thread at a time; none is used once another file has taken its place.

    Of an exclusive database there is one, so only one block of `use` or `transaction` may be open at a time.
    """

    def __init__(self, file: Path, kind: DatabaseKind, *, read_only: bool = False, wait: float = WAIT) -> None:
        """Raises the kind's error where no connection can be made, and for a folder on a network share that would be
        written to."""
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
        """A connection for one thread. What the block leaves open of a transaction is rolled back at its end."""
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
        """A write transaction: on disk when the block has ended, and nothing of it where the block raised."""
        with self.use(verb) as connection:
            connection.execute("BEGIN IMMEDIATE").close()
            self._check_place()  # it may have waited here while another file came in its place
            yield connection
            connection.execute("COMMIT").close()

    def replaced(self) -> bool:
        """Whether the file has been moved, deleted or replaced since this was opened."""
        try:
            return not os.path.samestat(self._opened, self._kind.live(self._asked).stat())
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
                raise self._kind.error(f"{self.folder}: the {self._kind.noun} is closed; open it again")
            self._check_place()
            if self._idle:
                return self._idle.pop()
        connection = self._connect()
        try:
            self._check_place()  # else it may be to the file that has come there
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
                # SQLite opens the log at the first read: at once, so that it is this file's.
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            except BaseException:
                connection.close()
                raise
        return connection


def _check_local(folder: Path, kind: DatabaseKind) -> None:
    """SQLite's log needs memory that all who use it share, which no two machines do; its locks may not hold either."""
    device = folder.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.partition(" - ") for line in _MOUNTS.read_text("utf-8", "replace").splitlines()]
    except OSError:  # of another system than Linux
        return
    for place, _, source in mounts:
        if place.split()[2:3] == [numbers] and (system := source.partition(" ")[0]) in _SHARES:
            raise kind.error(
                f"{folder}: expected a folder on a disk of this machine, found a network share ({system}), where "
                f"writes may damage a {kind.noun}: keep it on a local disk, or mount the share read-only to search"
            )


def new_file(file: Path, kind: DatabaseKind) -> None:
    """Make a database's file, empty and readable by its owner only: SQLite gives its log the same permissions.

    Raises FileExistsError where it is there already, and the kind's error where it would be on a network share.
    """
    _check_local(file.parent, kind)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def error_name(error: BaseException) -> str:
    """SQLite's name of an error, or of that which it came from, such as SQLITE_FULL; empty where it is another's."""
    cause = error if error.__cause__ is None else error.__cause__
    return str(getattr(cause, "sqlite_errorname", None) or "")


def is_passing(error: BaseException) -> bool:
    """Whether an error in reading a database, or what it came from, says nothing of what is in it: it is busy, the disk
    refuses, or permissions are missing."""
    cause = error if error.__cause__ is None else error.__cause__
    return isinstance(cause, OSError) or error_name(error).startswith(tuple(_PASSING))


def said(error: Exception) -> str:
    """What an error of `DAMAGE` says, without a value of the database's, which may be a report."""
    return str(error) if _is_quotable(error) else "text that is not UTF-8"


def _is_quotable(error: Exception) -> bool:
    return isinstance(error, sqlite3.ProgrammingError) or hasattr(error, "sqlite_errorname")


@contextmanager
def translated(kind: DatabaseKind, folder: Path, verb: str) -> Iterator[None]:
    """SQLite's errors become the kind's."""
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
