"""Following a PACS that is unreachable or has unreadable images: what waits, and what is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import ImageSizeError, PacsAwayError, PacsError, QueueError
from cbmir.runtime.pacs import jobs, polling
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.polling import TRIES, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DurableQueue]:
    with DurableQueue(tmp_path / "queue", 3, quiet=0) as opened:
        yield opened


# -- unreadable images

FeedOf = Callable[[Any, Intake], OrthancChanges | QidoPolling]


@pytest.fixture(params=["changes", "qido"])
def feed_of(request: pytest.FixtureRequest) -> FeedOf:
    """A feed from the beginning, of either kind."""
    if request.param == "changes":
        return lambda archive, intake: OrthancChanges(archive, archive, intake, since=0)
    return lambda archive, intake: QidoPolling(archive, intake, since=date(2026, 1, 1), today=lambda: date(2026, 1, 2))


def bad_study(archive: Any, radiograph: Callable[..., bytes]) -> tuple[str, str]:
    """Add a study of two images, then a good study. Returns the first study and its first image."""
    study = archive.add(radiograph(1, 1))
    archive.add(radiograph(1, 2))
    archive.stable.pop()
    archive.add(radiograph(2))
    return study, f"{PLANTED[2]}.1.1"


def test_an_unreadable_study_is_skipped_after_some_tries(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """An archive may answer 500 for one object: the rest of the study and of the archive is read at once."""
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
    assert log().count("skipped: a study that cannot be read") == 1
    for instance in (bad, f"{PLANTED[2]}.1.2", f"{PLANTED[2]}.2.1"):
        assert intake.queue.knows(instance) is (instance != bad)


def test_a_study_that_becomes_readable_is_read(
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


def test_it_waits_for_a_pacs_that_is_down(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf
) -> None:
    """Nothing is skipped, however long it takes."""
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


def test_a_server_that_always_fails_does_not_skip_studies(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """A server whose disk or plugin is missing may answer everything with 500 or 404."""
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
    assert "skipped" not in log()
    archive.broken.clear()
    feed.poll()
    assert len(intake.queue) == 2


def test_a_refused_or_unanswered_study_does_not_delay_others(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], feed_of: FeedOf, log: Callable[[], str]
) -> None:
    """A server may answer 403 for some studies, or not in time."""
    _, bad = bad_study(archive, radiograph)
    archive.broken[bad] = PacsAwayError("status 403")
    feed = feed_of(archive, intake)
    for _ in range(2 + TRIES):
        feed.poll()
    assert len(intake.queue) == 2
    assert archive.retrieved.count(bad) == TRIES
    assert log().count("skipped") == 1


def test_delays_between_tries_grow(
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


def test_the_feed_of_orthanc_continues_past_an_unreadable_study(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes]
) -> None:
    """After a restart it is read again from before that study, unless the study was skipped."""
    feed = OrthancChanges(archive, archive, intake, since=0)
    archive.broken[archive.add(radiograph(1))] = PacsError("status 500")
    feed.poll()
    for study in (2, 3):  # which fail later
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


def test_the_feed_of_orthanc_stops_at_many_unreadable_studies(
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


def test_a_failing_queue_does_not_skip_studies(
    archive: Any, intake: Intake, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a study would be skipped because the disk failed."""
    archive.add(radiograph(1))
    feed = OrthancChanges(archive, archive, intake, since=0)
    with monkeypatch.context() as failing:
        failing.setattr(jobs.os, "fsync", _no_disk)
        for _ in range(2 * TRIES):
            with pytest.raises((QueueError, OSError)):
                feed.poll()
    feed.poll()
    assert len(intake.queue) == 1


def _no_disk(_: int) -> None:
    raise OSError(5, "Input/output error")
