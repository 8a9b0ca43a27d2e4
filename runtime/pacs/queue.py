"""A durable queue of DICOM files in a folder of its own: what `put` has returned from is there until it is answered,
refused or given up, whatever happens.

::

    FOLDER/queue.sqlite    jobs, results that are made but not sent, and what is done (WAL, synchronous = FULL)
    FOLDER/spool/          the file of each job
    FOLDER/dead-letters/   what was given up: the file, and beside it why

A job is claimed, its results are kept, they are sent, it is done; each step is on disk before the next begins. A
process that is killed loses none of them: its jobs are claimed anew, and results that were kept are sent as they were
made, byte by byte. So results are sent at least once. An object is known by its SOP Instance UID, its content and the
model that answered: what is known is not done again. The folder is patient data; names of files in it, and all that is
ever logged, are not.

What the queue remembers of objects that it has ended with: those that were answered on disk, the others for now.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cbmir.errors import QueueFullError
from cbmir.runtime.pacs.database import Store, is_full, is_there
from cbmir.runtime.pacs.jobs import Arrival, Job, ResultObject, State, content_digest
from cbmir.runtime.pacs.spool import Spool

#: So many objects that were answered are remembered, the oldest are forgotten; and so many that were passed over.
REMEMBERED, PASSED_OVER = 1_000_000, 100_000


class Known:
    """Objects by their SOP Instance UID, content and the model that was asked; of UIDs only the SHA-256 is kept.

    Whoever calls holds the queue's lock.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        # By UID, content and model. Not on disk: the next process may take what this one refuses.
        self._passed_over = dict[bytes, tuple[bytes, str | None]]()

    def answered(self, job: Job, fingerprint: str, report: str) -> None:
        """An object was answered by the model of this fingerprint, with the SR of this UID."""
        row = (_hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), job.digest, fingerprint, report)
        number = self._database.execute(
            "INSERT OR REPLACE INTO done (instance, study, digest, fingerprint, report) VALUES (?, ?, ?, ?, ?)", row
        ).lastrowid
        self._database.execute("DELETE FROM done WHERE number <= ?", ((number or 0) - REMEMBERED,))

    def passed_over(self, job: Job, fingerprint: str | None = None) -> None:
        """An object was refused, or (None) given up: of these `has` knows none, so who sends one again has it tried."""
        self._passed_over[_hashed(job.sop_instance_uid)] = (job.digest, fingerprint)
        if len(self._passed_over) > PASSED_OVER:
            del self._passed_over[next(iter(self._passed_over))]

    def has(self, sop_instance_uid: str, digest: bytes, fingerprint: str) -> bool:
        """Whether this content was answered, or refused, by the model of this fingerprint."""
        uid = _hashed(sop_instance_uid)
        return self._passed_over.get(uid) == (digest, fingerprint) or is_there(
            self._database, "SELECT 1 FROM done WHERE instance = ? AND digest = ? AND fingerprint = ?",
            (uid, digest, fingerprint),
        )  # fmt: skip

    def has_any(self, sop_instance_uid: str) -> bool:
        """Whether an object of this UID was, by whatever model and whatever its content."""
        uid = _hashed(sop_instance_uid)
        return uid in self._passed_over or is_there(self._database, "SELECT 1 FROM done WHERE instance = ?", (uid,))

    def predecessor(self, job: Job, fingerprint: str) -> str:
        """The UID of the SR that the last other model made of an object in this study; empty where there is none."""
        row = self._database.execute(
            "SELECT report FROM done WHERE instance = ? AND study = ? AND fingerprint <> ? AND report <> '' "
            "ORDER BY number DESC LIMIT 1",
            (_hashed(job.sop_instance_uid), _hashed(job.study_instance_uid), fingerprint),
        ).fetchone()
        return "" if row is None else str(row[0])


def _hashed(uid: str) -> bytes:
    return hashlib.sha256(uid.encode()).digest()


DATABASE = "queue.sqlite"
LONGEST_DELAY = 3600.0  # seconds between two attempts
#: Seconds for which a job is tried again and again that fails for what is not its own: an archive that is away.
SENDING = 7 * 86400.0
LONGEST_HOLD = 300.0  # seconds for which nothing is sent to an archive that did not take something
#: A study that never gets quiet is begun after so many times the time of quiet.
PATIENCE = 20

_COLUMNS = "number, name, instance, study, digest, source, received, attempts, fingerprint"


class DurableQueue(Store):
    """The queue in a folder; one process at a time has it, any number of its threads use it."""

    def __init__(
        self,
        folder: Path,
        capacity: int = 10_000,
        *,
        quiet: float = 5.0,
        attempts: int = 12,
        first_delay: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the queue, makes it where there is none, and takes up what another process left.

        `capacity` is how many files may wait. A file is due once its study has been quiet for `quiet` seconds. A job
        that fails is tried again after `first_delay` seconds, then twice that, up to an hour, and given up after so
        many `attempts`; one that is put off, after `SENDING` seconds. `clock` gives seconds since 1970.
        Raises PacsError where the folder is not usable or in use.
        """
        self.folder, self.capacity, self.quiet = folder, capacity, quiet
        self.attempts, self.first_delay = attempts, first_delay
        self._clock = clock
        self._stopped = False
        self._arriving = set[str]()  # names of files being written, which have no row yet
        self._claimed = set[str]()  # names of the jobs that a thread has
        self._held_until, self._failures = 0.0, 0  # of sending: how often it failed since it last succeeded
        self._failing = dict[str, float]()  # by names of jobs that were put off: when this process did so first
        self.spool = Spool(folder)
        super().__init__(folder / DATABASE)
        self._known = Known(self._database)
        self._recover()

    def put(self, data: bytes, arrival: Arrival, fingerprint: str) -> bool:
        """Take a file: on disk when this returns. False, and nothing taken, where it is waiting already, or was done or
        (by this process) refused by the model of this fingerprint. Raises QueueFullError where the queue or the disk
        is full."""
        digest, name = content_digest(data), secrets.token_hex(12)
        with self._changed:
            if self._is_known(arrival.sop_instance_uid, digest, fingerprint):
                return False
            if self._count() + len(self._arriving) >= self.capacity:
                raise QueueFullError(f"{self.folder}: the queue holds {self.capacity:,} files, as many as it may")
            self._arriving.add(name)
        try:
            self.spool.write(name, data)
            self._add(name, digest, arrival)
        except sqlite3.IntegrityError:  # the same file came by another association meanwhile
            self.spool.remove(name)
            return False
        except BaseException as error:
            self.spool.remove(name)
            if is_full(error):
                raise QueueFullError(f"{self.folder}: the disk is full") from error
            raise
        finally:
            with self._changed:
                self._arriving.discard(name)
        return True

    def knows(self, sop_instance_uid: str) -> bool:
        """Whether an object of this UID is waiting or was done, or by this process refused or given up; by whatever
        model and whatever its content."""
        with self._changed:
            return self._known.has_any(sop_instance_uid) or is_there(
                self._database, "SELECT 1 FROM job WHERE instance = ?", (sop_instance_uid,)
            )

    def claim(self, wait: float = 0.0) -> Job | None:
        """The next job that is due, for this thread alone until it is done, refused, failed, buried or released; None
        where there is none within `wait` seconds, and once the queue was stopped."""
        until = time.monotonic() + wait
        with self._changed:
            while not self._stopped:
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
        """Let a claimed job, where it is still there, be claimed again. Writes nothing, and never fails."""
        with self._changed:
            self._claimed.discard(job.name)
            self._changed.notify_all()

    def file(self, job: Job) -> bytes:
        """The job's file. Raises PacsError where it is gone or not what was received."""
        return self.spool.read(job.name, job.digest)

    def keep(self, job: Job, results: Sequence[ResultObject], fingerprint: str) -> None:
        """Keep what was made by the model of this fingerprint, until `done`. Attempts are counted anew from here."""
        rows = [(job.number, position, made.kind, made.uid, made.data) for position, made in enumerate(results)]
        with self._writing() as database:
            database.execute("UPDATE job SET fingerprint = ?, attempts = 0 WHERE number = ?", (fingerprint, job.number))
            database.executemany("INSERT OR REPLACE INTO result VALUES (?, ?, ?, ?, ?)", rows)
            self._failing.pop(job.name, None)

    def kept(self, job: Job) -> list[ResultObject]:
        """What `keep` was given, in its order."""
        with self._changed:
            rows = self._database.execute(
                "SELECT kind, uid, data FROM result WHERE job = ? ORDER BY position", (job.number,)
            ).fetchall()
        return [ResultObject(*row) for row in rows]

    def done(self, job: Job, fingerprint: str, report: str = "", *, sent: bool = True) -> None:
        """End a job whose results, by the model of this fingerprint, with the SR of this UID, were taken. Where any
        were `sent`, who takes them is there."""
        with self._removing(job):
            self._known.answered(job, fingerprint, report)
            if sent:
                self._held_until, self._failures = 0.0, 0
        self.spool.remove(job.name)

    def refused(self, job: Job, fingerprint: str) -> None:
        """End a job that is not to be answered. This is known for as long as the process lives: another may be told to
        take what this one refuses."""
        with self._removing(job):
            self._known.passed_over(job, fingerprint)
        self.spool.remove(job.name)

    def predecessor(self, job: Job, fingerprint: str) -> str:
        """The UID of the SR that the last other model made of the job's object in this study; empty without one."""
        with self._changed:
            return self._known.predecessor(job, fingerprint)

    def failed(self, job: Job, reason: str) -> float | None:
        """Try a job again later: in how many seconds. None where it is given up: now a dead letter, with the reason."""
        if job.attempts >= self.attempts:
            self.bury(job, reason)
            return None
        delay = min(self.first_delay * 2 ** (job.attempts - 1), LONGEST_DELAY)
        with self._ending(job) as database:
            database.execute("UPDATE job SET due = ? WHERE number = ?", (self._clock() + delay, job.number))
        return float(delay)

    def put_off(self, job: Job, reason: str, *, hold: bool = False) -> float | None:
        """Try a job again later, without using an attempt up, since what failed is not of its own: in how many seconds.
        None where it is given up, after `SENDING` seconds in which this process tried.

        With `hold` nothing is sent meanwhile (`is_holding`) to who may be away: for `first_delay` seconds, then twice
        that, up to five minutes, until something is taken.
        """
        now = self._clock()
        failing = now - self._failing.setdefault(job.name, now)
        if failing >= SENDING:
            self.bury(job, f"put off for {SENDING / 86400:g} days: {reason}")
            return None
        delay = min(max(failing, self.first_delay), LONGEST_DELAY)  # twice as long: ever later
        with self._ending(job) as database:
            self._give_back(job)
            database.execute("UPDATE job SET due = ? WHERE number = ?", (now + delay, job.number))
            if hold:
                self._held_until = now + min(self.first_delay * 2 ** min(self._failures, 16), LONGEST_HOLD)
                self._failures += 1
        return float(delay)

    def hold_back(self, job: Job) -> None:
        """Let a job whose results are kept wait until `is_holding` ends, without using an attempt up."""
        with self._ending(job):
            self._give_back(job)

    @property
    def is_holding(self) -> bool:
        """Whether nothing is to be sent now: no job is given out whose results are kept."""
        with self._changed:
            return self._held_until > self._clock()

    def bury(self, job: Job, reason: str) -> None:
        """Give a job up: its file becomes a dead letter, and beside it stands the reason."""
        about = {"reason": reason, "attempts": job.attempts, "source": job.source}
        times = {"received": job.received, "given_up": self._clock()}
        about |= {key: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for key, at in times.items()}
        self.spool.bury(job.name, about)
        with self._removing(job):
            self._known.passed_over(job)

    def dead_letters(self) -> int:
        """How many files were given up and still lie there."""
        return len(self.spool.buried())

    def state(self) -> State:
        """How it does now."""
        with self._changed:
            waiting, unsent, oldest = self._database.execute(
                "SELECT count(*), coalesce(sum(fingerprint <> ''), 0), min(received) FROM job"
            ).fetchone()
        age = 0.0 if oldest is None else round(max(0.0, self._clock() - oldest), 1)
        return State(waiting, unsent, age, self.dead_letters())

    def __len__(self) -> int:
        """How many files are waiting or worked on."""
        with self._changed:
            return self._count()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Let nothing be claimed any more: what waits stays for the next process. The rest goes on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and let go of the folder. May be called again."""
        self.stop()
        super().close()

    def _add(self, name: str, digest: bytes, arrival: Arrival) -> None:
        now = self._clock()
        due, instance, study = now + self.quiet, arrival.sop_instance_uid, arrival.study_instance_uid
        with self._writing() as database:
            database.execute(
                "INSERT INTO job (name, instance, study, digest, source, received, due) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, instance, study, digest, arrival.source, now, due),
            )
            database.execute(
                "UPDATE job SET due = min(?, received + ?) WHERE study = ? AND attempts = 0 AND fingerprint = ''",
                (due, PATIENCE * self.quiet, study),
            )
            self._arriving.discard(name)

    def _is_known(self, sop_instance_uid: str, digest: bytes, fingerprint: str) -> bool:
        return self._known.has(sop_instance_uid, digest, fingerprint) or is_there(
            self._database, "SELECT 1 FROM job WHERE instance = ? AND digest = ?", (sop_instance_uid, digest)
        )

    def _count(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM job").fetchone()[0])

    def _next(self, *, may_send: bool) -> tuple[int, float] | None:
        """Number of the job that is due first, of those that no thread has, and when."""
        rows = self._database.execute(
            "SELECT number, due, name FROM job WHERE ? OR fingerprint = '' ORDER BY due, number LIMIT ?",
            (may_send, len(self._claimed) + 1),
        ).fetchall()
        return next(((number, due) for number, due, name in rows if name not in self._claimed), None)

    def _claim(self, number: int) -> Job:
        with self._writing() as database:
            ((*row,),) = database.execute(
                f"UPDATE job SET attempts = attempts + 1 WHERE number = ? RETURNING {_COLUMNS}", (number,)
            ).fetchall()
        job = Job(*row)
        self._claimed.add(job.name)
        return job

    def _give_back(self, job: Job) -> None:
        """Take back the attempt that `_claim` counted."""
        self._database.execute("UPDATE job SET attempts = max(attempts - 1, 0) WHERE number = ?", (job.number,))

    def _recover(self) -> None:
        """Take up what a process left that ended at any moment."""
        for row in self._database.execute(f"SELECT {_COLUMNS} FROM job").fetchall():
            job = Job(*row)
            if self.spool.is_buried(job.name):  # ended while it was being buried
                with self._writing() as database:
                    database.execute("DELETE FROM job WHERE number = ?", (job.number,))
            elif job.attempts >= self.attempts:
                self.bury(job, f"the process ended at work on it, at the last of {job.attempts} attempts")
        self.spool.keep_only({name for (name,) in self._database.execute("SELECT name FROM job").fetchall()})

    @contextmanager
    def _ending(self, job: Job) -> Iterator[sqlite3.Connection]:
        """A transaction that ends what a thread does with a job."""
        with self._changed:
            with self._writing() as database:
                yield database
            self._claimed.discard(job.name)

    @contextmanager
    def _removing(self, job: Job) -> Iterator[None]:
        """A transaction that ends a job for good."""
        with self._ending(job) as database:
            database.execute("DELETE FROM job WHERE number = ?", (job.number,))
            yield
            self._failing.pop(job.name, None)
