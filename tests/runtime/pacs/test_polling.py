"""Following a PACS: order of reading, saved positions, and times when the PACS is unreachable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from archive_in_memory import CT
from cbmir.errors import PacsError, QueueFullError
from cbmir.runtime.pacs.dicomweb import InstanceFound, StudyFound
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.polling import DAYS_BACK, Follower, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED, wait_for


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DurableQueue]:
    with DurableQueue(tmp_path / "queue", 3, quiet=0) as opened:
        yield opened


# -- Orthanc's change feed


def test_it_begins_with_new_changes(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    archive.add(radiograph(1))
    feed = OrthancChanges(archive, archive, intake)
    assert feed.poll() is False
    archive.add(radiograph(2))
    feed.poll()
    assert len(intake.queue) == 1


def test_it_begins_at_a_given_change_and_continues_from_there(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    for study in (1, 2, 3):
        archive.add(radiograph(study))
    feed = OrthancChanges(archive, archive, intake, since=0)
    assert feed.poll() is True  # a page of two
    assert feed.poll() is False
    assert len(intake.queue) == 3
    archive.add(radiograph(1))  # stable again, as after a report: nothing new
    OrthancChanges(archive, archive, intake).poll()
    assert len(intake.queue) == 3
    assert len(archive.retrieved) == 3


def test_another_database_is_noticed(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    feed = OrthancChanges(archive, archive, intake, since=7)
    archive.changes = lambda since: ([], 3, True)
    with pytest.raises(PacsError, match="--since 0"):
        feed.poll()


def test_it_waits_for_a_full_queue(
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


def test_deleted_instances_are_skipped(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    archive.files.pop(archive.add(radiograph(1)))
    gone = archive.add(radiograph(2))
    archive.retrieve = lambda found, max_bytes: None
    OrthancChanges(archive, archive, intake, since=0).poll()
    assert len(intake.queue) == 0
    assert gone in archive.files


def test_damaged_files_and_other_classes_are_skipped(
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


# -- QIDO polling


def test_a_study_is_read_when_it_has_stopped_growing(
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


def test_studies_without_a_count_are_read_at_each_poll(
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


def test_it_queries_the_last_days_once_it_has_caught_up(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    today = date(2026, 3, 10)
    feed = QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: today)
    archive.add(radiograph(1), day=date(2026, 1, 5))
    archive.add(radiograph(2, 1), day=today)
    for image in range(2, 5):  # today's study keeps growing
        feed.poll()
        archive.add(radiograph(2, image), day=today)
    assert archive.asked_since == [date(2026, 1, 1), date(2026, 1, 5), today - timedelta(days=DAYS_BACK)]
    assert intake.queue.knows(f"{PLANTED[2]}.1.1")


def test_it_continues_where_it_stopped(archive: Any, intake: Intake, radiograph: Callable[..., bytes]) -> None:
    """After a stop on Friday and a start on Monday, studies from the weekend are found."""
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


def test_remaining_studies_are_read_before_the_next_query(
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
    """A feed with canned results of polls: errors are raised, bools returned; then it is idle."""

    name = "canned"

    def __init__(self, *polls: Any) -> None:
        self.polls, self.count = list(polls), 0

    def cancel(self) -> None:
        pass

    def poll(self, stopping: Callable[[], bool]) -> bool:
        self.count += 1
        answer = self.polls.pop(0) if self.polls else False
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


def test_it_continues_whatever_the_pacs_answers(log: Callable[[], str]) -> None:
    feed = Feed(PacsError("away"), True, QueueFullError("full"), RuntimeError(PLANTED[0]), True, False)
    followed = Follower(feed, interval=0.01)
    followed.start()
    wait_for(lambda: feed.count >= 8, "it goes on")
    followed.stop()
    assert "the PACS cannot be followed" in log()
    assert "waits: the queue is full" in log()
    assert "unexpected RuntimeError" in log()


def test_stopping_does_not_wait_for_the_next_poll() -> None:
    followed = Follower(Feed(), interval=3600)
    followed.start()
    followed.stop()
    Follower(Feed()).stop()  # never started


def test_stopping_reaches_a_running_poll() -> None:
    begun = threading.Event()

    class Busy(Feed):
        def poll(self, stopping: Callable[[], bool]) -> bool:
            begun.set()
            wait_for(stopping, "it is told")
            return True

    followed = Follower(Busy())
    followed.start()
    assert begun.wait(60)
    followed.stop()
