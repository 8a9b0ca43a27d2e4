"""Following a PACS: what is looked at when, from where it goes on, and what it does while the PACS is away."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import date, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

from cbmir.errors import ImageSizeError, PacsAwayError, PacsError, QueueFullError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import polling
from cbmir.runtime.pacs.dicomweb import Changes, InstanceFound, StudyFound
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.polling import DAYS_BACK, TRIES, Following, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED, wait_for

HOUR = 3600
CR, CT = "1.2.840.10008.5.1.4.1.1.1", "1.2.840.10008.5.1.4.1.1.2"


class Archive:
    """A PACS in memory: files by study, Orthanc's changes, and a day for each study."""

    url = "http://archive"

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.days: dict[str, date] = {}
        self.stable: list[str] = []
        self.retrieved: list[str] = []
        self.asked_since: list[date] = []
        self.broken: dict[str, Exception] = {}  # by study, or by instance: what reading it raises

    def add(self, data: bytes, day: date = date(2026, 1, 1)) -> str:
        dataset = dcmread(io.BytesIO(data))
        study = str(dataset.StudyInstanceUID)
        self.files.setdefault(study, {})[str(dataset.SOPInstanceUID)] = data
        self.days[study] = day
        self.stable.append(study)
        return study

    def studies_since(self, first: date, modalities: Collection[str]) -> dict[str, StudyFound]:
        self.asked_since.append(first)
        return {
            uid: StudyFound(self.days[uid], len(files)) for uid, files in self.files.items() if self.days[uid] >= first
        }

    def instances(self, study_uid: str, modalities: Collection[str]) -> list[InstanceFound]:
        if study_uid in self.broken:
            raise self.broken[study_uid]
        return [InstanceFound(study_uid, "1", CR, uid) for uid in self.files.get(study_uid, {})]

    def retrieve(self, found: InstanceFound, max_bytes: int) -> bytes | None:
        self.retrieved.append(found.sop_instance_uid)
        if found.sop_instance_uid in self.broken:
            raise self.broken[found.sop_instance_uid]
        return self.files[found.study_uid].get(found.sop_instance_uid)

    def changes(self, since: int) -> Changes:
        page = self.stable[since : since + 2]
        return Changes(tuple(page), since + len(page), since + len(page) >= len(self.stable))

    def last_change(self) -> int:
        return len(self.stable)

    def study_uid(self, orthanc_id: str) -> str | None:
        return orthanc_id if orthanc_id in self.files else None


@pytest.fixture(autouse=True)
def _hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it looks at its clock an hour has gone by: what cannot be read is looked at again each time."""
    monkeypatch.setattr(polling, "monotonic", partial(next, count(0, HOUR)))


@pytest.fixture
def archive() -> Any:
    return Archive()


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DurableQueue]:
    with DurableQueue(tmp_path / "queue", 3, quiet=0) as opened:
        yield opened


@pytest.fixture
def intake(queue: DurableQueue, live: ReloadableFinder) -> Intake:
    return Intake(queue, live)


# -- Orthanc's change feed


def test_it_begins_from_now_on(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    archive.add(radiograph(1))
    feed = OrthancChanges(archive, archive, intake)
    assert feed.poll() is False
    archive.add(radiograph(2))
    feed.poll()
    assert len(intake.queue) == 1


def test_it_begins_where_it_is_told_to_and_goes_on_from_there(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    for study in (1, 2, 3):
        archive.add(radiograph(study))
    feed = OrthancChanges(archive, archive, intake, since=0)
    assert feed.poll() is True  # a page of two
    assert feed.poll() is False
    assert len(intake.queue) == 3
    archive.add(radiograph(1))  # stable once more, as after a report: nothing new
    OrthancChanges(archive, archive, intake).poll()
    assert len(intake.queue) == 3
    assert len(archive.retrieved) == 3


def test_another_database_is_noticed(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    feed = OrthancChanges(archive, archive, intake, since=7)
    archive.changes = lambda since: Changes((), 3, True)
    with pytest.raises(PacsError, match="--since 0"):
        feed.poll()


def test_a_full_queue_is_waited_for(
    archive: Any, intake: Intake, queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    for study in range(1, 5):
        archive.add(radiograph(study))
    feed = OrthancChanges(archive, archive, intake, since=0)
    feed.poll()
    with pytest.raises(QueueFullError):
        feed.poll()
    job = queue.claim()
    assert job is not None
    queue.done(job, "model")
    feed.poll()
    assert [queue.knows(f"{PLANTED[2]}.{study}.1") for study in range(1, 5)] == [True] * 4


def test_what_was_deleted_meanwhile_is_passed_over(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    archive.files.pop(archive.add(radiograph(1)))
    gone = archive.add(radiograph(2))
    archive.retrieve = lambda found, max_bytes: None
    OrthancChanges(archive, archive, intake, since=0).poll()
    assert len(intake.queue) == 0
    assert gone in archive.files


def test_damaged_files_and_other_classes_are_passed_over(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], log: Callable[[], str]
) -> None:
    study = archive.add(radiograph(1))
    archive.files[study][f"{PLANTED[2]}.1.2"] = b"no DICOM at all"
    archive.add(radiograph(1, 3))
    OrthancChanges(archive, archive, intake, since=0).poll()
    assert len(intake.queue) == 2
    assert "refused" in log()
    archive.instances = lambda uid, modalities: [InstanceFound(uid, "1", CT, "1.2.3")]
    archive.retrieved.clear()
    OrthancChanges(archive, archive, intake, since=0).poll()
    assert archive.retrieved == []


# -- what cannot be read

FeedOf = Callable[[Any, Intake], OrthancChanges | QidoPolling]


@pytest.fixture(params=["changes", "qido"])
def feed_of(request: pytest.FixtureRequest) -> FeedOf:
    """A feed of everything."""
    if request.param == "changes":
        return lambda archive, intake: OrthancChanges(archive, archive, intake, since=0)
    return lambda archive, intake: QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: date(2026, 1, 2))


def bad_study(archive: Any, radiograph: Callable[..., bytes]) -> tuple[str, str]:
    """A study of two images, and the first of them; a good one follows."""
    study = archive.add(radiograph(1, 1))
    archive.add(radiograph(1, 2))
    archive.stable.pop()
    archive.add(radiograph(2))
    return study, f"{PLANTED[2]}.1.1"


def test_a_study_that_cannot_be_read_is_passed_over_in_the_end(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """As by an archive that answers 500 for one object: the rest of the study, and of the archive, comes at once."""
    _, bad = bad_study(archive, radiograph)
    archive.broken[bad] = PacsError("cannot retrieve an instance: status 500")
    feed = feed_of(archive, intake)
    for _ in range(2):
        feed.poll()
    assert len(intake.queue) == 2
    for _ in range(TRIES):
        feed.poll()
    assert archive.retrieved.count(bad) == TRIES
    assert log().count("a study cannot be read") == TRIES - 1
    assert log().count("passed over: a study that cannot be read") == 1
    for instance in (bad, f"{PLANTED[2]}.1.2", f"{PLANTED[2]}.2.1"):
        assert intake.queue.knows(instance) is (instance != bad)


def test_a_study_that_can_be_read_again_is(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf
) -> None:
    study, bad = bad_study(archive, radiograph)
    archive.broken[study] = PacsError("cannot search for instances: status 404")
    feed = feed_of(archive, intake)
    for _ in range(2):
        feed.poll()
    assert len(intake.queue) == 1
    archive.broken.clear()
    for _ in range(2):
        feed.poll()
    assert len(intake.queue) == 3
    assert intake.queue.knows(bad)


def test_a_pacs_that_is_away_is_waited_for(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf
) -> None:
    """However long: nothing is passed over."""
    bad_study(archive, radiograph)
    archive.broken = dict.fromkeys(archive.files, PacsAwayError("ConnectionError"))
    feed = feed_of(archive, intake)
    raised = 0
    for _ in range(3 * TRIES):
        try:
            feed.poll()
        except PacsAwayError:
            raised += 1
    assert raised >= 3 * TRIES - 1
    archive.broken.clear()
    feed.poll()
    assert len(intake.queue) == 3


def test_a_server_that_fails_for_everything_tells_nothing_of_a_study(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """As one whose disk or plugin is missing, and that answers 500 or 404 meanwhile."""
    archive.add(radiograph(1))
    feed = feed_of(archive, intake)
    for _ in range(2):
        feed.poll()
    archive.add(radiograph(2))
    archive.broken = dict.fromkeys(archive.files, PacsError("status 500"))
    for _ in range(3 * TRIES):
        feed.poll()
    assert len(intake.queue) == 1
    assert log().count("a study cannot be read") > TRIES
    assert "passed over" not in log()
    archive.broken.clear()
    feed.poll()
    assert len(intake.queue) == 2


def test_one_study_that_is_refused_or_not_answered_holds_up_no_other(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """As by a server that answers 403 for some, or not in time."""
    _, bad = bad_study(archive, radiograph)
    archive.broken[bad] = PacsAwayError("status 403")
    feed = feed_of(archive, intake)
    for _ in range(2 + TRIES):
        feed.poll()
    assert len(intake.queue) == 2
    assert archive.retrieved.count(bad) == TRIES
    assert log().count("passed over") == 1


def test_tries_lie_ever_further_apart(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bad = bad_study(archive, radiograph)
    archive.broken[bad] = PacsError("status 500")
    feed = feed_of(archive, intake)
    tries = []
    for now in (0, 0, 0, 9, 10, 69, 70, 71):
        monkeypatch.setattr(polling, "monotonic", partial(float, now))
        feed.poll()
        tries.append(archive.retrieved.count(bad))
    assert tries[2:] == [1, 1, 2, 2, 3, 3]


def test_orthancs_feed_is_read_on_beyond_what_cannot_be_read(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    """And from before it after a start, unless it was passed over."""
    feed = OrthancChanges(archive, archive, intake, since=0)
    archive.broken[archive.add(radiograph(1))] = PacsError("status 500")
    feed.poll()
    for study in (2, 3):  # which become bad at another time
        archive.broken[archive.add(radiograph(study))] = PacsError("status 500")
    archive.add(radiograph(4))
    for _ in range(2):
        feed.poll()
    assert intake.queue.knows(f"{PLANTED[2]}.4.1")
    del archive.broken[archive.stable[0]]
    OrthancChanges(archive, archive, intake).poll()
    assert intake.queue.knows(f"{PLANTED[2]}.1.1")
    for _ in range(TRIES):
        feed.poll()
    archive.broken.clear()
    OrthancChanges(archive, archive, intake).poll()
    assert not intake.queue.knows(f"{PLANTED[2]}.2.1")


def test_orthancs_feed_is_not_read_on_beyond_many(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "_MOST_PENDING", 2)
    for study in (1, 2, 3):
        archive.broken[archive.add(radiograph(study))] = PacsError("status 500")
    feed = OrthancChanges(archive, archive, intake, since=0)
    assert [feed.poll(), feed.poll()] == [True, False]
    archive.broken.clear()
    assert feed.poll() is False
    assert [intake.queue.knows(f"{PLANTED[2]}.{study}.1") for study in (1, 2, 3)] == [True] * 3


def test_orthanc_may_fail_to_name_a_study(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    bad = archive.add(radiograph(1))
    archive.add(radiograph(2))

    def study_uid(orthanc_id: str) -> str:
        if orthanc_id == bad:
            raise PacsError("status 500")
        return orthanc_id

    archive.study_uid = study_uid
    OrthancChanges(archive, archive, intake, since=0).poll()
    assert intake.queue.knows(f"{PLANTED[2]}.2.1")


def test_it_can_be_stopped_between_two_studies(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf
) -> None:
    for study in (1, 2):
        archive.add(radiograph(study))
    feed = feed_of(archive, intake)
    for _ in range(3):
        feed.poll(lambda: len(intake.queue) > 0)
    assert len(intake.queue) == 1
    feed.poll()
    assert len(intake.queue) == 2


def test_an_image_that_is_too_large_is_passed_over(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    _, bad = bad_study(archive, radiograph)
    archive.broken[bad] = ImageSizeError("expected at most 1 byte, found more")
    feed = feed_of(archive, intake)
    for _ in range(3):
        feed.poll()
    assert archive.retrieved.count(bad) == 1
    assert len(intake.queue) == 2
    assert "found more" in log()


# -- QIDO polling


def test_a_study_is_looked_at_when_it_stands_still(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    feed = QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: date(2026, 1, 2))
    archive.add(radiograph(1, 1))
    feed.poll()
    archive.add(radiograph(1, 2))
    feed.poll()
    assert len(intake.queue) == 0  # it grew
    feed.poll()
    assert len(intake.queue) == 2
    feed.poll()
    assert len(archive.retrieved) == 2
    archive.add(radiograph(1, 3))  # a late image
    feed.poll()
    feed.poll()
    assert len(intake.queue) == 3


def test_a_server_that_does_not_count_is_looked_at_each_time(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    archive.studies_since = lambda first, modalities: dict.fromkeys(archive.files, StudyFound(None, None))
    feed = QidoPolling(archive, intake, since=date(2026, 1, 1))
    archive.add(radiograph(1))
    feed.poll()
    feed.poll()
    assert len(intake.queue) == 1
    archive.add(radiograph(1, 2))
    feed.poll()
    assert len(intake.queue) == 2


def test_it_asks_for_the_last_days_once_it_has_caught_up(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    today = date(2026, 3, 10)
    feed = QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: today)
    archive.add(radiograph(1), day=date(2026, 1, 5))
    archive.add(radiograph(2, 1), day=today)
    for image in range(2, 5):  # today's study grows all the while
        feed.poll()
        archive.add(radiograph(2, image), day=today)
    assert archive.asked_since == [date(2026, 1, 1), date(2026, 1, 5), today - timedelta(days=DAYS_BACK)]
    assert intake.queue.knows(f"{PLANTED[2]}.1.1")


def test_it_goes_on_where_it_was_left(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    """Stopped on a Friday and begun on the next Monday: what came between is found."""
    friday, monday = date(2026, 3, 6), date(2026, 3, 9)
    QidoPolling(archive, intake, today=lambda: friday).poll()
    archive.add(radiograph(1), day=date(2026, 3, 7))
    feed = QidoPolling(archive, intake, today=lambda: monday)
    for _ in range(2):
        feed.poll()
    assert archive.asked_since == [friday, friday, date(2026, 3, 7)]
    assert len(intake.queue) == 1
    QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: monday).poll()
    assert archive.asked_since[-1] == date(2026, 1, 1)


def test_what_is_left_is_looked_at_before_the_server_is_asked_again(
    archive: Any, intake: Intake, queue: DurableQueue, radiograph: Callable[..., bytes]
) -> None:
    feed = QidoPolling(archive, intake, since=date(2026, 1, 1))
    for study in range(1, 5):
        archive.add(radiograph(study))
    feed.poll()
    with pytest.raises(QueueFullError):
        feed.poll()
    job = queue.claim()
    assert job is not None
    queue.done(job, "model")
    assert feed.poll() is False
    assert len(queue) == 3
    assert len(archive.asked_since) == 2


def test_it_begins_today(archive: Any, intake: Intake) -> None:
    today = date(2026, 3, 10)
    QidoPolling(archive, intake, today=lambda: today).poll()
    assert archive.asked_since == [today]


# -- in its thread


class Feed:
    """A feed of canned polls: an error is raised, a bool given back; then it is at rest."""

    name = "canned"

    def __init__(self, *polls: Any) -> None:
        self.polls, self.count = list(polls), 0

    def poll(self, stopping: Callable[[], bool]) -> bool:
        self.count += 1
        answer = self.polls.pop(0) if self.polls else False
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def test_it_goes_on_whatever_the_pacs_answers(log: Callable[[], str]) -> None:
    feed = Feed(PacsError("away"), True, QueueFullError("full"), RuntimeError(PLANTED[0]), True, False)
    followed = Following(feed, interval=0.01)
    followed.start()
    wait_for(lambda: feed.count >= 8, "it goes on")
    followed.stop()
    assert "the PACS cannot be followed" in log()
    assert "waits: the queue is full" in log()
    assert "unexpected RuntimeError" in log()


def test_stopping_does_not_wait_for_the_next_poll() -> None:
    followed = Following(Feed(), interval=3600)
    followed.start()
    followed.stop()
    Following(Feed()).stop()  # never started


def test_stopping_is_told_to_the_poll_that_is_under_way() -> None:
    begun = threading.Event()

    class Busy(Feed):
        def poll(self, stopping: Callable[[], bool]) -> bool:
            begun.set()
            wait_for(stopping, "it is told")
            return True

    followed = Following(Busy())
    followed.start()
    assert begun.wait(60)
    followed.stop()
