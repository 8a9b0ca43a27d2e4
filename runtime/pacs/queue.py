"""A durable queue of DICOM files in a folder: an accepted file stays until it is answered, refused or given up.

::

    FOLDER/queue.sqlite    jobs, results that are not sent yet, and hashes of answered files
    FOLDER/spool/          the file of each job
    FOLDER/dead-letters/   files that were given up, each with the reason beside it

A job is claimed, its results are stored, they are sent, and the job is done; each step is on disk before the next
begins. After a crash, jobs are claimed again, and stored results are sent again unchanged (at-least-once delivery). An
object is identified by its SOP Instance UID, its content and the model, and is not answered twice. The folder is
patient data, but the names of its files and the log messages are not.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cbmir.errors import QueueError, QueueFullError
from cbmir.process import Closing
from cbmir.runtime.gallery.database import error_name
from cbmir.runtime.logs import fields, pacs_log
from cbmir.runtime.pacs.jobs import Arrival, Job, ResultObject, Spool, content_digest, open_database

REMEMBERED, PASSED_OVER = 1_000_000, 100_000  # answered objects, and skipped ones; the oldest are forgotten
LONGEST_DELAY = 3600.0  # seconds between two attempts
SENDING = 7 * 86400.0  # seconds for which a job is retried that fails through no fault of its own
LONGEST_HOLD = 300.0  # most seconds without sending, after an archive did not accept something
PATIENCE = 20  # times `quiet`, after which a study is begun although files still arrive

_COLUMNS = "number, name, instance, study, digest, source, received, attempts, fingerprint"
_REUSED = "reused_uids"  # the key of the count of UIDs that arrived again with other content
_COUNT = "INSERT INTO refusal VALUES (?, 1) ON CONFLICT (reason) DO UPDATE SET count = count + 1"
_UNCOUNTED = "attempts = max(attempts - 1, 0)"  # undoes the count of `claim`


class DurableQueue(Closing):
    """The queue in a folder, for one process and its threads. Methods raise QueueError if the database fails."""

    def __init__(
        self, folder: Path, capacity: int = 10_000, *, quiet: float = 5.0, attempts: int = 12,
        first_delay: float = 10.0, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Open or make the queue, and recover what another process left.

        Args:
            capacity: How many files may wait.
            quiet: Seconds that must pass without a new file of a study before its files are due.
            attempts: A failing job is given up after this many; one that is put off, after `SENDING` seconds.
            first_delay: Seconds until a failed job is retried, which double with each attempt, up to an hour.
            clock: Returns seconds since 1970.
        """
        self.folder, self.capacity, self.quiet = folder, capacity, quiet
        self.attempts, self.first_delay = attempts, first_delay
        self._clock = clock
        self._changed = threading.Condition()
        self.stopped = False
        self._arriving = set[str]()  # names of files being written, which have no row yet
        self._claimed = set[str]()  # names of the jobs that threads have claimed
        self._held_until, self._failures = 0.0, 0  # when to send again, and failures to send since the last success
        self._failing = dict[str, float]()  # when this process first put a job off, by the job's name
        # Content and model of refused objects (None: given up), by hashed UID. The next process may accept them.
        self._passed_over = dict[bytes, tuple[bytes, str | None]]()
        self.spool = Spool(folder)
        self._connections = open_database(folder)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def put(self, data: bytes, arrival: Arrival, fingerprint: str) -> bool:
        """Accept a file, which is on disk when this returns. Returns False if it is already waiting, or was answered or
        (in this process) refused by the model with this fingerprint. Raises QueueFullError, also for a full disk."""
        digest, name = content_digest(data), secrets.token_hex(12)
        with self._changed:
            if self._is_known(arrival.sop_instance_uid, digest, fingerprint):
                return False
            if len(self) + len(self._arriving) >= self.capacity:
                raise QueueFullError(f"{self.folder}: the queue holds {self.capacity:,} files, which is its limit")
            self._arriving.add(name)
        is_new = False
        try:
            self.spool.write(name, data)
            is_new = self._add(name, digest, arrival)
        except (OSError, QueueError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or error_name(error) == "SQLITE_FULL":
                raise QueueFullError(f"{self.folder}: the disk is full") from error
            raise
        finally:
            if not is_new:
                self.spool.remove(name)
            with self._changed:
                self._arriving.discard(name)
        return is_new

    def knows(self, sop_instance_uid: str) -> bool:
        """Return whether an object with this UID waits, was answered, or was skipped by this process."""
        uid = _hashed(sop_instance_uid)
        query = "SELECT 1 FROM done WHERE instance = ? UNION ALL SELECT 1 FROM job WHERE instance = ? LIMIT 1"
        with self._changed:
            return uid in self._passed_over or bool(self._rows(query, uid, sop_instance_uid))

    def claim(self, wait: float = 0.0) -> Job | None:
        """Claim the next due job, which no other thread gets until it is settled or released. Returns None if no job is
        due within `wait` seconds, or the queue was stopped."""
        until = time.monotonic() + wait
        with self._changed:
            while not self.stopped:
                now = self._clock()
                found = self._next(may_send=self._held_until <= now)
                if found is not None and found[1] <= now:
                    return self._claim(found[0])
                left = until - time.monotonic()
                if left <= 0:
                    return None
                moments = [self._held_until] if found is None else [self._held_until, found[1]]
                self._changed.wait(min([left, *(moment - now for moment in moments if moment > now)]))
            return None

    def release(self, job: Job) -> None:
        """Let a claimed job be claimed again, if it still exists. Writes nothing, and never fails."""
        with self._changed:
            self._claimed.discard(job.name)
            self._changed.notify_all()

    def file(self, job: Job) -> bytes:
        """Read the job's file. Raises QueueError if it is gone or not what was received."""
        return self.spool.read(job.name, job.digest)

    def keep(self, job: Job, results: Sequence[ResultObject], fingerprint: str) -> None:
        """Keep the results of the model with this fingerprint until `done`, and count attempts from 0 again."""
        rows = [(job.number, position, each.kind, each.uid, each.data) for position, each in enumerate(results)]
        with self._writing() as database:
            database.execute("UPDATE job SET fingerprint = ?, attempts = 0 WHERE number = ?", (fingerprint, job.number))
            database.executemany("INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?)", rows)
            self._failing.pop(job.name, None)

    def kept(self, job: Job) -> list[ResultObject]:
        rows = self._rows("SELECT kind, uid, data FROM result WHERE job = ? ORDER BY position", job.number)
        return [ResultObject(*row) for row in rows]

    def done(self, job: Job, fingerprint: str, report: str = "", *, sent: bool = True) -> None:
        """End a job whose results, with the SR `report`, were accepted. If any was `sent`, the receiver is working."""
        row = (_hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), job.digest, fingerprint, report)
        with self._ending(job, for_good=True) as database:
            number = database.execute(
                "INSERT OR REPLACE INTO done (instance, study, digest, fingerprint, report) VALUES (?, ?, ?, ?, ?)", row
            ).lastrowid
            database.execute("DELETE FROM done WHERE number <= ?", ((number or 0) - REMEMBERED,))
            if sent:
                self._held_until, self._failures = 0.0, 0
        self.spool.remove(job.name)

    def refused(self, job: Job, fingerprint: str, reason: str) -> None:
        """End a job that this process refuses, and count it (`count_refusal`). The next process may accept it."""
        self._pass_over(job, fingerprint, reason)
        self.spool.remove(job.name)

    def count_refusal(self, reason: str) -> None:
        """Count a refused object by its `ImageError.reason`, for `state`."""
        with self._writing() as database:
            database.execute(_COUNT, (reason,))

    def predecessor(self, job: Job, fingerprint: str) -> str:
        """Return the UID of the last SR by another model for the job's object in this study; empty without one."""
        rows = self._rows(
            "SELECT report FROM done WHERE instance = ? AND study = ? AND fingerprint <> ? AND report <> '' "
            "ORDER BY number DESC LIMIT 1",
            _hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), fingerprint,
        )  # fmt: skip
        return rows[0][0] if rows else ""

    def failed(self, job: Job, reason: str) -> float | None:
        """Retry a job later. Returns in how many seconds, or None if it is given up (`bury`)."""
        if job.attempts >= self.attempts:
            self.bury(job, reason)
            return None
        delay = min(self.first_delay * 2 ** (job.attempts - 1), LONGEST_DELAY)
        with self._ending(job) as database:
            database.execute("UPDATE job SET due = ? WHERE number = ?", (self._clock() + delay, job.number))
        return float(delay)

    def put_off(self, job: Job, reason: str, *, hold: bool = False) -> float | None:
        """Retry a job later, as `failed`, if the failure is not the job's own: this uses up no attempt, and the job is
        given up after `SENDING` seconds.

        With `hold`, nothing is sent for a while (`is_holding`), because the receiver may be unavailable: for
        `first_delay` seconds, then twice that, up to `LONGEST_HOLD`, until something is accepted.
        """
        now = self._clock()
        failing = now - self._failing.setdefault(job.name, now)
        if failing >= SENDING:
            self.bury(job, f"put off for {SENDING / 86400:g} days: {reason}")
            return None
        delay = min(max(failing, self.first_delay), LONGEST_DELAY)  # as long as it has failed so far: doubles the time
        with self._ending(job) as database:
            database.execute(f"UPDATE job SET due = ?, {_UNCOUNTED} WHERE number = ?", (now + delay, job.number))
            if hold:
                self._held_until = now + min(self.first_delay * 2 ** min(self._failures, 16), LONGEST_HOLD)
                self._failures += 1
        return float(delay)

    def hold_back(self, job: Job) -> None:
        """Let a job whose results are kept wait until `is_holding` ends, without using up an attempt."""
        with self._ending(job) as database:
            database.execute(f"UPDATE job SET {_UNCOUNTED} WHERE number = ?", (job.number,))

    @property
    def is_holding(self) -> bool:
        """Whether nothing is to be sent now. Jobs whose results are kept cannot be claimed then."""
        with self._changed:
            return self._held_until > self._clock()

    def bury(self, job: Job, reason: str) -> None:
        """Give up a job: its file becomes a dead letter, with the reason beside it."""
        about = {"reason": reason, "attempts": job.attempts, "source": job.source}
        times = {"received": job.received, "given_up": self._clock()}
        about |= {key: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for key, at in times.items()}
        self.spool.bury(job.name, about)
        self._pass_over(job, None)

    def state(self) -> dict[str, Any]:
        """Return the number of files that wait or are processed, of those with unsent results, of dead letters, of UIDs
        that came again with other content, and of objects ever refused, by reason; and the age of the oldest file in
        seconds (0 without one)."""
        query = "SELECT count(*), coalesce(sum(fingerprint <> ''), 0), min(received) FROM job"
        ((waiting, unsent, oldest),) = self._rows(query)
        age = 0.0 if oldest is None else round(max(0.0, self._clock() - oldest), 1)
        refused = dict(self._rows("SELECT reason, count FROM refusal ORDER BY count DESC, reason"))
        counts = {"dead_letters": len(self.spool.buried()), "reused_uids": int(self.marked(_REUSED) or 0)}
        return {"waiting": waiting, "unsent": unsent, "oldest_s": age} | counts | {"refused": refused}

    def __len__(self) -> int:
        """Count the files that wait or are processed."""
        ((count,),) = self._rows("SELECT count(*) FROM job")
        return int(count)

    def mark(self, key: str, value: str) -> None:
        """Store a value under a key, such as how far a source was followed. An unchanged value is not written."""
        if self.marked(key) != value:
            with self._writing() as database:
                database.execute("INSERT OR REPLACE INTO mark VALUES (?, ?)", (key, value))

    def marked(self, key: str) -> str:
        """Return the value that `mark` stored under a key; empty without one."""
        rows = self._rows("SELECT value FROM mark WHERE key = ?", key)
        return rows[0][0] if rows else ""

    def tidy(self) -> None:
        """Empty SQLite's log (WAL), in which finished jobs would stay until it is overwritten."""
        with self._changed:
            self._connections.empty_log(wait=False)

    def stop(self) -> None:
        """Let no more jobs be claimed: those that wait stay for the next process. Everything else still works."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and release the folder. May be called again."""
        self.stop()
        with self._changed:
            self._connections.close()

    def _recover(self) -> None:
        for row in self._rows(f"SELECT {_COLUMNS} FROM job"):
            job = Job(*row)
            if self.spool.is_buried(job.name):  # the process ended while burying it
                with self._writing() as database:
                    database.execute("DELETE FROM job WHERE number = ?", (job.number,))
            elif job.attempts >= self.attempts:
                self.bury(job, f"the process ended while working on it, in the last of {job.attempts} attempts")
        self.spool.keep_only({name for (name,) in self._rows("SELECT name FROM job")})

    def _add(self, name: str, digest: bytes, arrival: Arrival) -> bool:
        """Add a row for a file. Returns False if the same file has arrived by another association meanwhile."""
        now = self._clock()
        due, instance, study = now + self.quiet, arrival.sop_instance_uid, arrival.study_instance_uid
        with self._writing() as database:
            is_new = database.execute(
                "INSERT INTO job (name, instance, study, digest, source, received, due) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (instance, digest) DO NOTHING",
                (name, instance, study, digest, arrival.source, now, due),
            ).rowcount  # fmt: skip
            if is_new:
                self._warn_of_other_content(database, name, digest, arrival)
                database.execute(
                    "UPDATE job SET due = min(?, received + ?) WHERE study = ? AND attempts = 0 AND fingerprint = ''",
                    (due, PATIENCE * self.quiet, study),
                )
            self._arriving.discard(name)
        return bool(is_new)

    def _warn_of_other_content(self, database: sqlite3.Connection, name: str, digest: bytes, arrival: Arrival) -> None:
        """Log and count a file with the SOP Instance UID of another file, which PS3.5 chapter 9 forbids."""
        instance = arrival.sop_instance_uid
        query = (
            "SELECT 1 FROM done WHERE instance = ? AND digest <> ? "
            "UNION ALL SELECT 1 FROM job WHERE instance = ? AND digest <> ? LIMIT 1"
        )
        if database.execute(query, (_hashed(instance), digest, instance, digest)).fetchall():
            database.execute(
                "INSERT INTO mark VALUES (?, '1') ON CONFLICT (key) DO UPDATE SET value = value + 1", (_REUSED,)
            )
            pacs_log.warning("a SOP Instance UID was received again with other content: both are analysed",
                             extra=fields(job=name, source=arrival.source))  # fmt: skip

    def _is_known(self, sop_instance_uid: str, digest: bytes, fingerprint: str) -> bool:
        uid = _hashed(sop_instance_uid)
        return self._passed_over.get(uid) == (digest, fingerprint) or bool(self._rows(
            "SELECT 1 FROM done WHERE instance = ? AND digest = ? AND fingerprint = ? "
            "UNION ALL SELECT 1 FROM job WHERE instance = ? AND digest = ? LIMIT 1",
            uid, digest, fingerprint, sop_instance_uid, digest,
        ))  # fmt: skip

    def _next(self, *, may_send: bool) -> tuple[int, float] | None:
        """Return the number and due time of the job that is due first, among those that no thread has claimed."""
        rows = self._rows(
            "SELECT number, due, name FROM job WHERE ? OR fingerprint = '' ORDER BY due, number LIMIT ?",
            may_send, len(self._claimed) + 1,
        )  # fmt: skip
        return next(((number, due) for number, due, name in rows if name not in self._claimed), None)

    def _claim(self, number: int) -> Job:
        with self._writing() as database:
            ((*row,),) = database.execute(
                f"UPDATE job SET attempts = attempts + 1 WHERE number = ? RETURNING {_COLUMNS}", (number,)
            ).fetchall()
        job = Job(*row)
        self._claimed.add(job.name)
        return job

    def _pass_over(self, job: Job, fingerprint: str | None, reason: str = "") -> None:
        """End a job that was refused for a reason, or given up (no fingerprint). The latter is retried if resent."""
        with self._ending(job, for_good=True) as database:
            if reason:
                database.execute(_COUNT, (reason,))
            self._passed_over[_hashed(job.sop_instance_uid)] = (job.digest, fingerprint)
            if len(self._passed_over) > PASSED_OVER:
                del self._passed_over[next(iter(self._passed_over))]

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._changed, self._connections.use("read") as database:
            return database.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Make a transaction, which is on disk when the block has ended."""
        with self._changed:
            with self._connections.transaction() as database:
                yield database
            self._changed.notify_all()

    @contextmanager
    def _ending(self, job: Job, *, for_good: bool = False) -> Iterator[sqlite3.Connection]:
        with self._changed:
            with self._writing() as database:
                if for_good:
                    database.execute("DELETE FROM job WHERE number = ?", (job.number,))
                yield database
            self._claimed.discard(job.name)
            if for_good:
                self._failing.pop(job.name, None)


def _hashed(uid: str) -> bytes:
    return hashlib.sha256(uid.encode()).digest()
