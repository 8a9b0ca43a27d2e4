"""Following a PACS that sends nothing itself, through Orthanc's change feed or a DICOMweb server's QIDO-RS.

A study is read once no more images arrive; its new radiographs are fetched by WADO-RS. The queue stores the position.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from datetime import date, timedelta
from time import monotonic

from cbmir.errors import ImageError, PacsAwayError, PacsError, QueueFullError
from cbmir.runtime.imaging.dicom_header import IMAGE_CLASSES, MODALITIES
from cbmir.runtime.logs import fields, pacs_log, what_failed
from cbmir.runtime.pacs.dicomweb import DicomWeb, InstanceFound, OrthancRest, StudyFound
from cbmir.runtime.pacs.intake import Intake, IntakeStatus

DAYS_BACK = 2  # days before today that QIDO queries again, because images arrive late
TRIES = 5  # minimum number, before a study that cannot be read is skipped
_AGAIN, _SLOWER, _MOST_AGAIN = 10.0, 6, 3600.0  # retry delay of such a study: first (s), factor, longest (s)
_MOST_PENDING = 200  # studies that cannot be read, at which Orthanc's feed is paused
_MOST_FAILED = 10_000  # studies whose failed attempts are remembered
_LONGEST_DELAY = 300.0  # seconds until a failing PACS is polled again


class OrthancChanges:
    """Orthanc's change feed: all studies that became stable after the last change that was read. The stored position is
    before the oldest study that cannot be read yet."""

    def __init__(self, rest: OrthancRest, web: DicomWeb, intake: Intake, *, since: int | None = None) -> None:
        """`since` is the number of the last change to skip; None continues at the stored position, or else now."""
        self.name = "orthanc"
        self._rest, self._web, self._queue = rest, web, intake.queue
        self._studies = Studies(web, intake, self.name, uid_of=rest.study_uid)
        self._key = "changes:" + hashlib.sha256(rest.url.encode()).hexdigest()
        left = self._queue.marked(self._key) if since is None else str(since)
        self._last = int(left) if left else None  # change that was read
        self._pending: dict[str, int] = {}  # Orthanc's ids, each with the last change before its page
        if since is not None:
            self._queue.mark(self._key, left)

    def cancel(self) -> None:
        """Cancel requests to the PACS from another thread: running ones end, and no more are sent."""
        self._rest.cancel()
        self._web.cancel()

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Poll once, until `stopping()`. Returns whether more waits. Raises CbmirError; the next call continues."""
        if self._last is None:
            self._last = self._rest.last_change()
            self._queue.mark(self._key, str(self._last))
            return False
        self._look_at_pending(stopping)
        if len(self._pending) >= _MOST_PENDING or stopping():
            return False
        studies, last, is_newest = self._rest.changes(self._last)
        if last < self._last:
            raise PacsError(
                f"expected Orthanc's change feed to continue from {self._last}, found that it ends at {last}: is it "
                "another database? Use --since 0 to start from the beginning"
            )
        for study in studies:
            self._pending.setdefault(study, self._last)
        self._last = last
        self._look_at_pending(stopping)
        return not is_newest

    def _look_at_pending(self, stopping: Callable[[], bool]) -> None:
        for study in list(self._pending):
            if stopping():
                break
            if self._studies.look_at(study):
                del self._pending[study]
        self._queue.mark(self._key, str(min(self._pending.values(), default=self._last)))


class QidoPolling:
    """A DICOMweb server's studies since a day, each read once its number of instances stops changing. The day advances
    when all studies of earlier days have been read, up to `DAYS_BACK` days before today."""

    def __init__(
        self, web: DicomWeb, intake: Intake, *, since: date | None = None, today: Callable[[], date] = date.today
    ) -> None:
        """`since` is the day of the oldest studies to read; None continues at the stored day, or else today."""
        self.name = "dicomweb"
        self._web, self._studies, self._today = web, Studies(web, intake, self.name), today
        self._queue = intake.queue
        self._key = "qido:" + hashlib.sha256(web.url.encode()).hexdigest()
        left = self._queue.marked(self._key)
        self._first = since or (date.fromisoformat(left) if left else today())
        self._found: dict[str, StudyFound] = {}  # by the last query
        self._seen: dict[str, int | None] = {}  # the number of instances when all of them had been read
        self._pending: list[str] = []  # no longer changing, but not read yet

    def cancel(self) -> None:
        """Cancel requests, as `OrthancChanges.cancel`."""
        self._web.cancel()

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Poll once, as `OrthancChanges.poll`."""
        if not self._pending:
            self._ask()
        while self._pending and not stopping():
            uid = self._pending[0]
            if self._studies.look_at(uid):
                self._seen[uid] = self._found[uid].count
            self._pending.pop(0)
        unseen = [study.day for uid, study in self._found.items() if study.day and uid not in self._seen]
        self._first = max(self._first, min([self._today() - timedelta(days=DAYS_BACK), *unseen]))
        self._queue.mark(self._key, self._first.isoformat())
        return bool(self._pending)

    def _ask(self) -> None:
        before, self._found = self._found, self._web.studies_since(self._first, MODALITIES)
        self._seen = {uid: count for uid, count in self._seen.items() if uid in self._found}
        for uid, study in self._found.items():
            is_quiet = uid in before and before[uid].count == study.count
            is_seen = uid in self._seen and self._seen[uid] == study.count is not None
            if is_quiet and not is_seen:
                self._pending.append(uid)


class Studies:
    """A reader of studies that queues radiographs which are not known yet."""

    def __init__(
        self, web: DicomWeb, intake: Intake, name: str, uid_of: Callable[[str], str | None] = lambda study: study
    ) -> None:
        """`uid_of` returns the Study Instance UID for the argument of `look_at`; None if the study is gone."""
        self._web, self._intake, self._name, self._uid_of = web, intake, name, uid_of
        self._failed: dict[str, tuple[int, float]] = {}  # how often, and when to try again
        self._known: InstanceFound | None = None  # an instance that could be read once

    def look_at(self, study: str) -> bool:
        """Queue new radiographs. Returns False if something cannot be read, or it is too early to try again.

        A study is skipped after `TRIES` attempts if the server still returns what it returned before: else the failure
        says nothing about the study. Raises QueueFullError and PacsAwayError.
        """
        tries, due = self._failed.get(study, (0, 0.0))
        if monotonic() < due:
            return False
        try:
            self._look_at(study)
        except PacsError as error:
            works = self._works()
            is_away = isinstance(error, PacsAwayError) and not works
            tries += not is_away
            about = fields(source=self._name, reason=str(error), attempt=tries)
            if not works or tries < TRIES:
                delay = min(_AGAIN * _SLOWER ** max(tries - 1, 0), _MOST_AGAIN)
                self._failed[study] = tries, monotonic() + delay
                if len(self._failed) > _MOST_FAILED:
                    del self._failed[next(iter(self._failed))]
                if is_away:
                    raise
                pacs_log.warning("a study cannot be read", extra=about)
                return False
            pacs_log.error("skipped: a study that cannot be read", extra=about)
        self._failed.pop(study, None)
        return True

    def _look_at(self, study: str) -> None:
        """Queue new radiographs. Raises PacsError if one cannot be read, but tries the others first."""
        failed: PacsError | None = None
        study_uid = self._uid_of(study)
        for found in self._web.instances(study_uid, MODALITIES) if study_uid else ():
            if found.sop_class_uid not in IMAGE_CLASSES:
                continue
            if self._intake.queue.knows(found.sop_instance_uid):
                self._known = found
                continue
            try:
                data = self._web.retrieve(found, self._intake.limits.max_bytes)
                if data is None:  # deleted meanwhile
                    continue
                self._known = found
                status = self._intake.take(data, self._name, sop_instance_uid=found.sop_instance_uid)
                if status is not IntakeStatus.KNOWN:
                    pacs_log.info(status.value, extra=fields(source=self._name, bytes=len(data)))
            except PacsError as error:
                failed = error
            except ImageError as error:
                pacs_log.info("refused", extra=fields(source=self._name, reason=str(error)))
        if failed is not None:
            raise failed

    def _works(self) -> bool:
        """Return whether the server still finds and returns an instance that could be read before."""
        known = self._known
        try:
            return (
                known is not None
                and known in self._web.instances(known.study_uid, MODALITIES)
                and self._web.retrieve(known, self._intake.limits.max_bytes) is not None
            )
        except PacsError:
            return False


class Follower:
    """A thread that polls a feed until it is stopped."""

    def __init__(self, feed: OrthancChanges | QidoPolling, *, interval: float = 10.0) -> None:
        """`interval` is in seconds. It doubles, up to some minutes, while the PACS fails."""
        self._feed, self._interval = feed, interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cbmir-{feed.name}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop without delay: running requests are cancelled, and repeated by the next process."""
        self._stopping.set()
        self._feed.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        delay = 0.0
        while not self._stopping.wait(delay):
            try:
                delay = 0.0 if self._feed.poll(self._stopping.is_set) else self._interval
            except QueueFullError as error:
                delay = self._interval
                pacs_log.warning("waits: the queue is full", extra=fields(source=self._feed.name, reason=str(error)))
            except Exception as error:  # noqa: BLE001 - no answer of a PACS may end it
                if self._stopping.is_set():  # cancelled
                    return
                delay = min(max(2 * delay, self._interval), _LONGEST_DELAY)
                about = fields(source=self._feed.name, reason=what_failed(error), again_in_s=delay)
                pacs_log.warning("the PACS cannot be followed", extra=about)
