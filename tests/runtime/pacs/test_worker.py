"""The outcomes of a queued file: results in its study, a refusal, a retry, or a dead letter."""

from __future__ import annotations

import io
import itertools
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

from cbmir.errors import (
    DamagedImageError,
    DeliveryAwayError,
    DeliveryError,
    EngineError,
    GalleryError,
    ImageError,
    NotReadyError,
)
from cbmir.runtime.finder import Finder
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import worker as worker_module
from cbmir.runtime.pacs.intake import Intake, IntakeStatus, retry
from cbmir.runtime.pacs.jobs import DEAD_LETTERS, ResultObject
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.worker import Workers
from pacs_rig import PLANTED, wait_for, without

COMPREHENSIVE_3D_SR = "1.2.840.10008.5.1.4.1.1.88.34"


class Archive:
    """A destination that keeps results, after failing a number of times."""

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        self.failures, self.tried = failures, list[list[ResultObject]]()
        self.error = error or DeliveryAwayError("the archive is away")
        self.taken: list[ResultObject] = []

    def send(self, results: Sequence[ResultObject]) -> None:
        self.tried.append(list(results))
        if len(self.tried) <= self.failures:
            raise self.error
        self.taken += results

    @property
    def reports(self) -> list[Any]:
        return [dcmread(io.BytesIO(made.data)) for made in self.taken if made.kind == "sr"]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[DurableQueue]:
    """A queue whose clock advances an hour per reading, so that retries are immediate."""
    clock = itertools.count(1_000_000.0, 3600)
    with DurableQueue(tmp_path / "queue", quiet=0, attempts=3, clock=lambda: next(clock)) as opened:
        yield opened


def work_off(queue: DurableQueue, live: ReloadableFinder, destination: Archive, **options: Any) -> None:
    workers = Workers(queue, live, destination, count=1, **options)
    while (job := queue.claim()) is not None:
        workers.work_on(job)


def test_a_radiograph_gets_a_report_in_its_study(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    data, archive = radiograph(), Archive()
    assert intake.take(data, "SENDER") is IntakeStatus.QUEUED
    work_off(queue, live, archive)
    (report,) = archive.reports
    image = dcmread(io.BytesIO(data))
    assert report.SOPClassUID == COMPREHENSIVE_3D_SR
    assert report.StudyInstanceUID == image.StudyInstanceUID
    assert report.PatientID == image.PatientID
    assert len(queue) == 0
    assert intake.take(data, "SENDER") is IntakeStatus.KNOWN


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
def test_an_accepted_image_with_leading_zeros_in_its_uid_gets_a_report(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    archive = Archive()
    assert intake.take(radiograph(StudyInstanceUID="1.2.392.093012.007"), "SENDER") is IntakeStatus.QUEUED
    work_off(queue, live, archive)
    assert [report.StudyInstanceUID for report in archive.reports] == ["1.2.392.093012.007"]


def test_all_kinds_are_sent(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    archive = Archive()
    intake.take(radiograph(), "SENDER")
    work_off(queue, live, archive, kinds=("sr", "sc"))
    assert [made.kind for made in archive.taken] == ["sr", "sc"]
    assert len({made.uid for made in archive.taken}) == 2


def test_other_body_parts_are_refused_and_forgotten(
    intake: Intake,
    queue: DurableQueue,
    live: ReloadableFinder,
    radiograph: Callable[..., bytes],
    log: Callable[[], str],
) -> None:
    archive, hip = Archive(), radiograph(BodyPartExamined="HIP")
    intake.take(hip, "SENDER")
    work_off(queue, live, archive)
    assert archive.tried == []
    assert (len(queue), queue.state()["dead_letters"]) == (0, 0)
    assert "refused" in log()
    assert "BodyPartExamined (0018,0015)" in log()
    assert intake.take(hip, "SENDER") is IntakeStatus.KNOWN


def test_refusals_are_counted_by_reason(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes], tmp_path: Path
) -> None:
    """Both refusals answered to the sender and later ones count; the next process continues the count."""
    later = [
        {"BodyPartExamined": "HIP"},
        {"BodyPartExamined": "CADERA"},
        {"ViewPosition": "LL"},
        {"WindowCenter": 90000},
    ]
    for image, tags in enumerate(later, 1):
        intake.take(radiograph(image=image, **tags), "SENDER")
    intake.take(radiograph(image=9, BodyPartExamined="PECHO"), "SENDER")  # accepted
    work_off(queue, live, Archive())
    intake.take(radiograph(SOPClassUID=COMPREHENSIVE_3D_SR), "SENDER")
    for data in (b"", radiograph()[:200], without(radiograph(), "StudyInstanceUID")):
        with pytest.raises(ImageError):
            intake.take(data, "SENDER")
    counts = {"BodyPartExamined": 2, "SOPClassUID": 1, "StudyInstanceUID": 1, "ViewPosition": 1, "WindowCenter": 1,
              "not a DICOM radiograph": 1, "no image": 1}  # fmt: skip
    assert queue.state()["refused"] == counts
    queue.close()
    with DurableQueue(tmp_path / "queue") as again:
        assert again.state()["refused"] == counts


def test_a_refusal_is_logged_before_it_is_forgotten(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes],
    log: Callable[[], str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """If killed in between, it is reported twice rather than never, since nothing else records it."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    intake.take(radiograph(BodyPartExamined="HIP"), "SENDER")
    monkeypatch.setattr(queue, "refused", killed)
    with pytest.raises(KeyboardInterrupt):
        work_off(queue, live, Archive())
    assert len(queue) == 1
    assert "refused" in log()


def test_own_results_are_left_alone(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    archive = Archive()
    intake.take(radiograph(), "SENDER")
    work_off(queue, live, archive, kinds=("sr", "sc"))
    assert [intake.take(made.data, "SENDER") for made in archive.taken] == [IntakeStatus.OWN, IntakeStatus.OWN]
    assert len(queue) == 0


def test_a_retry_sends_the_same_bytes(
    intake: Intake,
    queue: DurableQueue,
    live: ReloadableFinder,
    radiograph: Callable[..., bytes],
    log: Callable[[], str],
) -> None:
    archive = Archive(failures=2)
    intake.take(radiograph(), "SENDER")
    work_off(queue, live, archive)
    assert len(archive.tried) == 3
    assert archive.tried[0] == archive.tried[1] == archive.tried[2]
    assert (len(queue), queue.state()["dead_letters"]) == (0, 0)
    assert "the archive is away" in log()


def test_results_that_are_never_accepted_become_a_dead_letter(
    intake: Intake,
    queue: DurableQueue,
    live: ReloadableFinder,
    radiograph: Callable[..., bytes],
    log: Callable[[], str],
) -> None:
    data = radiograph()
    intake.take(data, "SENDER")
    work_off(queue, live, Archive(failures=1000))
    folder = queue.folder / DEAD_LETTERS
    assert json.loads(next(folder.glob("*.json")).read_text())["reason"] == "put off for 7 days: the archive is away"
    assert next(folder.glob("*.dcm")).read_bytes() == data
    assert "given up" in log()
    assert intake.take(data, "SENDER") is IntakeStatus.QUEUED  # sent again, it is tried again


def test_a_refused_result_delays_no_others(
    tmp_path: Path, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    """An archive that refuses one object may accept others."""
    now, archive = [1_000_000.0], Archive(1, DeliveryError("refused an object"))
    with DurableQueue(tmp_path / "queue", quiet=0, attempts=3, clock=lambda: now[0]) as queue:
        for study in (1, 2):
            Intake(queue, live).take(radiograph(study), "SENDER")
        work_off(queue, live, archive)
        assert (len(archive.reports), len(queue), queue.is_holding) == (1, 1, False)
        archive.failures = 1000
        for _ in range(4):
            now[0] += 3600
            work_off(queue, live, archive)
        assert (len(queue), queue.state()["dead_letters"]) == (0, 1)


def test_attempts_to_send_are_counted_apart_from_those_to_analyse(
    intake: Intake,
    queue: DurableQueue,
    live: ReloadableFinder,
    radiograph: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last attempt analyses the image, and its archive refuses the results once."""
    analyze, failures, archive = Finder.analyze, iter([1, 2]), Archive(1, DeliveryError("refused an object"))

    def fail_twice(*given: Any, **options: Any) -> Any:
        if next(failures, None):
            raise RuntimeError("out of luck")
        return analyze(*given, **options)

    monkeypatch.setattr(Finder, "analyze", fail_twice)
    intake.take(radiograph(), "SENDER")
    work_off(queue, live, archive)
    assert (len(archive.tried), len(archive.reports), queue.state()["dead_letters"]) == (2, 1, 0)


@pytest.mark.parametrize("error", [GalleryError("it is away"), NotReadyError("it is closed"), EngineError("no GPU")])
def test_an_archive_that_is_down_uses_no_attempt(
    tmp_path: Path, live: ReloadableFinder, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:  # fmt: skip
    """The gallery or the engine may be unavailable, which is not the image's fault."""
    now, archive, tried = [1_000_000.0], Archive(), []

    def fail(*given: Any, **_: Any) -> None:
        tried.append(given)
        raise error

    with DurableQueue(tmp_path / "queue", quiet=0, attempts=2, clock=lambda: now[0]) as queue:
        Intake(queue, live).take(radiograph(), "SENDER")
        with monkeypatch.context() as patched:
            patched.setattr(Finder, "analyze", fail)
            for _ in range(5):
                work_off(queue, live, archive)
                now[0] += 3600
        assert (len(tried), len(queue), queue.state()["dead_letters"]) == (5, 1, 0)
        work_off(queue, live, archive)
        assert len(archive.reports) == 1


def test_a_job_without_results_does_not_end_a_pause(
    tmp_path: Path, live: ReloadableFinder, radiograph: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without priors, a selection of priors sends nothing."""
    archive, ways = Archive(failures=1), list[Any]((Workers._analyse, lambda *_: ("model", [])))
    with DurableQueue(tmp_path / "queue", quiet=0, clock=lambda: 1_000_000.0) as queue:
        for study in (1, 2):
            Intake(queue, live).take(radiograph(study), "SENDER")
        workers = Workers(queue, live, archive, count=1)
        for way in ways:
            monkeypatch.setattr(Workers, "_analyse", way)
            job = queue.claim()
            assert job is not None
            workers.work_on(job)
            assert queue.is_holding
        assert len(queue) == 1


def test_unforeseen_errors_are_not_quoted(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"bad value {PLANTED[0]}")

    monkeypatch.setattr(worker_module, "make_results", fail)
    intake.take(radiograph(), "SENDER")
    work_off(queue, live, Archive())
    told = next((queue.folder / DEAD_LETTERS).glob("*.json")).read_text()
    assert re.search(r"unexpected RuntimeError at .*test_worker\.py:\d+ fail", told)
    assert not any(text in told for text in PLANTED)


@pytest.mark.parametrize(("error", "tries"), [(DamagedImageError("cut off"), 1), (MemoryError(), 3)])
def test_a_radiograph_that_cannot_be_read_is_kept(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes],
    log: Callable[[], str], monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int,
) -> None:  # fmt: skip
    """A damaged file is kept for inspection. If memory runs out, the file may be intact, so it is retried first."""
    tried = []

    def fail(*given: Any, **_: Any) -> None:
        tried.append(given)
        raise error

    data = radiograph()
    intake.take(data, "SENDER")
    with monkeypatch.context() as patched:
        patched.setattr(Finder, "read", fail)
        work_off(queue, live, Archive())
    assert len(tried) == tries
    assert next((queue.folder / DEAD_LETTERS).glob("*.dcm")).read_bytes() == data
    assert "given up" in log()
    assert retry(queue) == (1, 0)
    assert (len(queue), queue.state()["dead_letters"]) == (1, 0)
    archive = Archive()
    work_off(queue, live, archive)
    assert len(archive.reports) == 1


def test_dead_letters_without_their_file_stay(
    intake: Intake, queue: DurableQueue, radiograph: Callable[..., bytes], log: Callable[[], str]
) -> None:
    for study in (1, 2, 3):
        intake.take(radiograph(study), "SENDER")
        job = queue.claim()
        assert job is not None
        queue.bury(job, "no answer")
        file = queue.folder / DEAD_LETTERS / f"{job.name}.dcm"
        if study == 1:
            file.unlink()
        elif study == 2:
            file.write_bytes(b"no DICOM")
    assert retry(queue) == (1, 2)
    assert (len(queue), queue.state()["dead_letters"]) == (1, 2)
    assert log().count("stays a dead letter") == 2


@pytest.mark.parametrize("about", ["{}", "[]", "no JSON"])
def test_dead_letters_without_a_description_stay(
    intake: Intake, queue: DurableQueue, radiograph: Callable[..., bytes], about: str
) -> None:
    intake.take(radiograph(), "SENDER")
    job = queue.claim()
    assert job is not None
    queue.bury(job, "no answer")
    (queue.folder / DEAD_LETTERS / f"{job.name}.json").write_text(about)
    assert retry(queue) == (0, 1)


def test_images_are_analysed_while_the_archive_is_down(
    tmp_path: Path, live: ReloadableFinder, radiograph: Callable[..., bytes], log: Callable[[], str]
) -> None:
    now, archive = [1_000_000.0], Archive(failures=1)
    with DurableQueue(tmp_path / "queue", quiet=0, clock=lambda: now[0]) as queue:
        for study in (1, 2):
            Intake(queue, live).take(radiograph(study), "SENDER")
        work_off(queue, live, archive)
        assert len(archive.tried) == 1  # by the first worker; the second has results and waits
        assert (queue.state()["waiting"], queue.state()["unsent"]) == (2, 2)
        assert "its results wait" in log()
        now[0] += 10
        work_off(queue, live, archive)
        assert (len(archive.reports), len(queue)) == (2, 0)


@pytest.mark.parametrize("failing", ["claim", "keep", "done"])
def test_a_queue_that_cannot_write_stops_no_worker(
    tmp_path: Path, live: ReloadableFinder, radiograph: Callable[..., bytes],
    log: Callable[[], str], monkeypatch: pytest.MonkeyPatch, failing: str,
) -> None:  # fmt: skip
    """After a moment with a full disk, the same process continues the job, and the sender does not notice."""
    full = threading.Event()
    archive = Archive()
    monkeypatch.setattr(worker_module, "_LOOK_AGAIN", 0.01)
    with DurableQueue(tmp_path / "queue", quiet=0, first_delay=0) as queue:
        real_writing, real_method = queue._writing, getattr(queue, failing)
        times = itertools.count()

        def method(*given: Any, **more: Any) -> Any:
            if next(times) == 0:
                full.set()
            return real_method(*given, **more)

        @contextmanager
        def writing() -> Iterator[sqlite3.Connection]:
            with real_writing() as database:
                yield database
                if full.is_set() and next(refusals) < 2:
                    raise sqlite3.OperationalError("database or disk is full")

        refusals = itertools.count()
        Intake(queue, live).take(radiograph(), "SENDER")
        monkeypatch.setattr(queue, failing, method)
        monkeypatch.setattr(queue, "_writing", writing)
        workers = Workers(queue, live, archive, count=1)
        workers.start()
        try:
            wait_for(lambda: len(queue) == 0, "the job is done all the same")
            assert workers.alive
        finally:
            workers.stop()
        assert "the queue failed" in log()
        assert {report.StudyInstanceUID for report in archive.reports} == {f"{PLANTED[2]}.1"}
        assert queue.state()["dead_letters"] == 0


def test_kept_results_are_sent_even_after_a_new_model(
    queue: DurableQueue, radiograph: Callable[..., bytes], tiny_model: Path, make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    models = [tiny_model, make_tiny_model(tmp_path / "new.onnx", seed=1, fingerprint="tiny-1")]
    archive = Archive(failures=1)
    with ReloadableFinder(lambda: Finder.open(models[0], threads=1)) as live:
        Intake(queue, live).take(radiograph(), "SENDER")
        workers = Workers(queue, live, archive, count=1)
        job = queue.claim()
        assert job is not None
        workers.work_on(job)
        models.pop(0)
        live.reload()
        work_off(queue, live, archive)
        assert archive.tried[0] == archive.tried[1]
        assert len(archive.reports) == 1


def test_a_new_model_names_the_previous_report(
    queue: DurableQueue, radiograph: Callable[..., bytes], tiny_model: Path, make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    models = [tiny_model, make_tiny_model(tmp_path / "new.onnx", seed=1, fingerprint="tiny-1")]
    archive, data = Archive(), radiograph()
    with ReloadableFinder(lambda: Finder.open(models[0], threads=1)) as live:
        intake = Intake(queue, live)
        intake.take(data, "SENDER")
        work_off(queue, live, archive)
        models.pop(0)
        live.reload()
        assert intake.take(data, "SENDER") is IntakeStatus.QUEUED
        work_off(queue, live, archive)
    first, second = archive.reports
    assert first.SOPInstanceUID != second.SOPInstanceUID
    (study,) = second.PredecessorDocumentsSequence
    (document,) = study.ReferencedSeriesSequence[0].ReferencedSOPSequence
    assert document.ReferencedSOPInstanceUID == first.SOPInstanceUID


def test_workers_finish_started_jobs_and_keep_the_rest(
    intake: Intake, queue: DurableQueue, live: ReloadableFinder, radiograph: Callable[..., bytes]
) -> None:
    class Slow(Archive):
        begun, go_on = threading.Event(), threading.Event()

        def send(self, results: Sequence[ResultObject]) -> None:
            self.begun.set()
            assert self.go_on.wait(60)
            super().send(results)

    archive = Slow()
    for study in (1, 2, 3):
        intake.take(radiograph(study), "SENDER")
    workers = Workers(queue, live, archive, count=1)
    workers.start()
    assert archive.begun.wait(60)
    stopping = threading.Thread(target=workers.stop)
    stopping.start()
    wait_for(lambda: queue.stopped, "it stops")
    archive.go_on.set()
    stopping.join(60)
    assert (len(archive.reports), len(queue)) == (1, 2)
