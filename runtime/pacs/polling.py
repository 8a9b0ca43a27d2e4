"""Following a PACS that sends nothing itself: by Orthanc's change feed, or by QIDO-RS from a DICOMweb server.

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

DAYS_BACK = 2  # days besides today that QIDO asks for again: images come late
TRIES = 5  # at a study that cannot be read, at least, before it is passed over
_AGAIN, _SLOWER, _MOST_AGAIN = 10.0, 6, 3600.0  # seconds until it is looked at again: at first, times, at most
_MOST_PENDING = 200  # studies that cannot be read, beyond which Orthanc's feed is not read on
_MOST_FAILED = 10_000  # studies that could not be read, of which it is known how often
_LONGEST_DELAY = 300.0  # seconds until a PACS that fails is asked again


class OrthancChanges:
    """Orthanc's change feed: every study that became stable since the last change that was seen. The place that is kept
    is before the oldest study that cannot be read yet."""

    def __init__(self, rest: OrthancRest, web: DicomWeb, intake: Intake, *, since: int | None = None) -> None:
        """`since` is the number of the last change to pass over, None: where it was left, at first from now on."""
        self.name = "orthanc"
        self._rest, self._web, self._queue = rest, web, intake.queue
        self._studies = Studies(web, intake, self.name, uid_of=rest.study_uid)
        self._key = "changes:" + hashlib.sha256(rest.url.encode()).hexdigest()
        left = self._queue.marked(self._key) if since is None else str(since)
        self._last = int(left) if left else None  # change that was read
        self._pending: dict[str, int] = {}  # Orthanc's ids, and the last change before the page that had each
        if since is not None:
            self._queue.mark(self._key, left)

    def cancel(self) -> None:
        """Break off what the PACS is asked, from another thread: nothing more is asked."""
        self._rest.cancel()
        self._web.cancel()

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Look once, until `stopping()`: whether more is known to wait. Raises CbmirError; the next call goes on."""
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
    """A DICOMweb server: its studies since a day, each once the number of its instances stands still. The day moves on
    once all studies of earlier ones have been looked at, up to `DAYS_BACK` days before today."""

    def __init__(
        self, web: DicomWeb, intake: Intake, *, since: date | None = None, today: Callable[[], date] = date.today
    ) -> None:
        """`since` is the day of the oldest studies to look at, None: where it was left, at first today."""
        self.name = "dicomweb"
        self._web, self._studies, self._today = web, Studies(web, intake, self.name), today
        self._queue = intake.queue
        self._key = "qido:" + hashlib.sha256(web.url.encode()).hexdigest()
        left = self._queue.marked(self._key)
        self._first = since or (date.fromisoformat(left) if left else today())
        self._found: dict[str, StudyFound] = {}  # when last asked for
        self._seen: dict[str, int | None] = {}  # the number of instances, when all of them had been looked at
        self._pending: list[str] = []  # quiet, and not looked at yet

    def cancel(self) -> None:
        """As `OrthancChanges.cancel`."""
        self._web.cancel()

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """As `OrthancChanges.poll`."""
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
    """Looks at a study for radiographs that are not known yet."""

    def __init__(
        self, web: DicomWeb, intake: Intake, name: str, uid_of: Callable[[str], str | None] = lambda study: study
    ) -> None:
        """`uid_of` gives the Study Instance UID of what `look_at` is given, None where the study is gone."""
        self._web, self._intake, self._name, self._uid_of = web, intake, name, uid_of
        self._failed: dict[str, tuple[int, float]] = {}  # how often, and when to look again
        self._known: InstanceFound | None = None  # an instance that could be read once

    def look_at(self, study: str) -> bool:
        """Queue what is new. False where something cannot be read, or it is too early to look again.

        A study is passed over at the last of `TRIES`, if the server still gives what it gave before: else the failure
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
        """Raises PacsError where an instance cannot be read, but tries the others first."""
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
                if data is None:  # deleted since
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
        """Whether the server finds and gives an instance that could be read once."""
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
    """Polls a feed from a thread of its own until it is stopped."""

    def __init__(self, feed: OrthancChanges | QidoPolling, *, interval: float = 10.0) -> None:
        """`interval`: seconds; it doubles, up to some minutes, while the PACS fails."""
        self._feed, self._interval = feed, interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"cbmir-{feed.name}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once: what the PACS is asked is broken off, and asked again by the next process."""
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
                if self._stopping.is_set():  # broken off
                    return
                delay = min(max(2 * delay, self._interval), _LONGEST_DELAY)
                about = fields(source=self._feed.name, reason=what_failed(error), again_in_s=delay)
                pacs_log.warning("the PACS cannot be followed", extra=about)
