"""The durable queue: accepted and known files, and the order of jobs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbmir.errors import QueueFullError
from cbmir.runtime.pacs import jobs
from cbmir.runtime.pacs import queue as queue_module
from cbmir.runtime.pacs.jobs import Arrival, Job, ResultObject
from cbmir.runtime.pacs.queue import PATIENCE, DurableQueue
from pacs_rig import PLANTED
from queue_rig import MODEL, OTHER, Clock, arrival, claimed, put, reopened, spooled

# -- accepting files


def test_a_stored_job_is_claimed(queue: DurableQueue, clock: Clock) -> None:
    assert put(queue)
    clock.now += 2
    job = claimed(queue)
    assert (job.sop_instance_uid, job.study_instance_uid) == (arrival().sop_instance_uid, arrival().study_instance_uid)
    assert (job.source, job.received, job.attempts, job.fingerprint) == ("SENDER", clock.now - 2, 1, "")
    assert queue.file(job) == b"file 1 1"
    assert queue.claim() is None  # only one thread gets it
    assert len(queue) == 1
    queue.done(job, MODEL)
    assert len(queue) == 0
    assert spooled(queue) == []


def test_a_stored_job_is_on_disk(queue: DurableQueue, clock: Clock, tmp_path: Path) -> None:
    """As after a power failure when `put` returns: a copy of the folder is complete."""
    put(queue)
    shutil.copytree(queue.folder, tmp_path / "copy")
    with DurableQueue(tmp_path / "copy", quiet=0, clock=lambda: clock.now + 2) as copy:
        assert copy.file(claimed(copy)) == b"file 1 1"


def test_the_file_and_its_name_are_synced_before_the_row(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_add, real_fsync, real_sync = queue._add, jobs.os.fsync, jobs.sync

    def note(what: str, real: Any) -> Any:
        def call(*given: Any) -> None:
            order.append(what)
            real(*given)

        return call

    monkeypatch.setattr(jobs.os, "fsync", note("file", real_fsync))
    monkeypatch.setattr(jobs, "sync", note("folder", real_sync))
    monkeypatch.setattr(queue, "_add", note("row", real_add))
    put(queue)
    assert order[0] == "file"
    assert order.index("file") < order.index("folder") < order.index("row")
    ((level,),) = queue._rows("PRAGMA synchronous")
    assert level == 2  # FULL: a commit is on disk when it returns


def test_a_full_queue_refuses_more(queue: DurableQueue, clock: Clock) -> None:
    for image in range(5):
        assert put(queue, image=image)
    with pytest.raises(QueueFullError, match="holds 5 files"):
        put(queue, image=5)
    assert len(spooled(queue)) == 5
    assert not put(queue, image=0)  # a known image is not added
    clock.now += 2
    queue.done(claimed(queue), MODEL)
    assert put(queue, image=5)


def test_threads_do_not_overfill_it(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", 5) as queue:
        taken, refused = [], []
        start = threading.Barrier(16)

        def work(image: int) -> None:
            start.wait()
            try:
                taken.append(put(queue, image=image))
            except QueueFullError:
                refused.append(image)

        threads = [threading.Thread(target=work, args=(image,)) for image in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len(refused), len(queue)) == (5, 11, 5)


def test_a_full_disk_is_a_full_queue(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda _: SimpleNamespace(free=jobs.FREE_SPACE))
    with pytest.raises(QueueFullError, match="the disk is full"):
        put(queue)
    assert spooled(queue) == []
    assert len(queue) == 0


def test_a_disk_that_fills_while_writing(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jobs.os, "fsync", fail)
    with pytest.raises(QueueFullError, match="the disk is full"):
        put(queue)
    monkeypatch.undo()
    assert spooled(queue) == []
    assert put(queue)


# -- known files


def test_the_same_file_is_queued_once(queue: DurableQueue, clock: Clock) -> None:
    assert put(queue)
    assert not put(queue)
    clock.now += 2
    job = claimed(queue)
    assert not put(queue)  # being worked on
    queue.done(job, MODEL, "2.25.1")
    assert not put(queue)
    assert put(queue, data=b"another content of the same UID")


def test_the_same_file_from_different_sources_is_queued_once(queue: DurableQueue) -> None:
    """Preamble and File Meta Information depend on the sender."""
    meta = b"\x02\x00\x10\x00UI\x04\x001.2\x00"
    length = b"\x02\x00\x00\x00UL\x04\x00" + len(meta).to_bytes(4, "little")
    assert put(queue, data=bytes(128) + b"DICM" + length + meta + b"the data set")
    assert not put(queue, data=b"x" * 128 + b"DICM" + length + meta.replace(b"1.2", b"1.3") + b"the data set")
    assert not put(queue, data=b"the data set")
    assert put(queue, data=bytes(128) + b"DICM" + length + meta + b"another set")


def test_another_model_analyses_again(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    queue.done(claimed(queue), MODEL, "2.25.1")
    assert put(queue, model=OTHER)
    clock.now += 2
    job = claimed(queue)
    assert queue.predecessor(job, OTHER) == "2.25.1"
    assert queue.predecessor(job, MODEL) == ""
    assert queue.predecessor(replace(job, sop_instance_uid="1.2"), OTHER) == ""
    assert queue.predecessor(replace(job, study_instance_uid="1.2"), OTHER) == ""  # moved to another study


def test_knows_files_by_uid(queue: DurableQueue, clock: Clock) -> None:
    uid = arrival().sop_instance_uid
    assert not queue.knows(uid)
    put(queue)
    assert queue.knows(uid)
    clock.now += 2
    job = claimed(queue)
    queue.done(job, MODEL)
    assert queue.knows(uid)
    assert not queue.knows(arrival(2).sop_instance_uid)


def test_the_number_of_remembered_jobs_is_limited(
    queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "REMEMBERED", 2)
    for image in range(4):
        put(queue, image=image)
        clock.now += 2
        queue.done(claimed(queue), MODEL)
    assert [queue.knows(arrival(image=image).sop_instance_uid) for image in range(4)] == [False, False, True, True]


def test_refusals_are_remembered_only_by_this_process(queue: DurableQueue, clock: Clock) -> None:
    """The next process may be configured to accept it."""
    uid = arrival().sop_instance_uid
    put(queue)
    clock.now += 2
    queue.refused(claimed(queue), MODEL, "ViewPosition")
    assert (len(queue), spooled(queue)) == (0, [])
    assert queue.knows(uid)
    assert not put(queue)
    assert put(queue, model=OTHER)
    clock.now += 2
    queue.refused(claimed(queue), OTHER, "ViewPosition")
    with reopened(queue, clock) as again:
        assert not again.knows(uid)
        assert put(again)


def test_the_number_of_remembered_refusals_is_limited(
    queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "PASSED_OVER", 1)
    for image in range(2):
        put(queue, image=image)
        clock.now += 2
        queue.refused(claimed(queue), MODEL, "ViewPosition")
    assert [queue.knows(arrival(image=image).sop_instance_uid) for image in range(2)] == [False, True]


@pytest.mark.parametrize("closed", [False, True])
def test_finished_jobs_leave_no_patient_data(queue: DurableQueue, clock: Clock, *, closed: bool) -> None:
    put(queue, data=PLANTED[0].encode())
    clock.now += 2
    job = claimed(queue)
    queue.keep(job, [ResultObject("sr", "2.25.1", PLANTED[0].encode())], MODEL)
    queue.done(job, MODEL, "2.25.1")
    assert PLANTED[0].encode() in everything(queue)
    queue.close() if closed else queue.tidy()
    assert not any(text.encode() in everything(queue) for text in PLANTED)


def everything(queue: DurableQueue) -> bytes:
    return b"".join(path.read_bytes() for path in queue.folder.rglob("*") if path.is_file())


# -- waiting until a study is complete


def test_a_study_is_due_when_it_is_quiet(queue: DurableQueue, clock: Clock) -> None:
    put(queue, study=1, image=1)
    clock.now += 1.5
    put(queue, study=1, image=2)
    put(queue, study=2)
    clock.now += 1.5  # 3 s after the first, but 1.5 s after its study's last
    assert queue.claim() is None
    clock.now += 0.5
    assert {claimed(queue).sop_instance_uid for _ in range(3)} == {
        arrival(1, 1).sop_instance_uid, arrival(1, 2).sop_instance_uid, arrival(2).sop_instance_uid
    }  # fmt: skip


def test_a_study_that_never_becomes_quiet_is_started(tmp_path: Path, clock: Clock) -> None:
    with DurableQueue(tmp_path / "queue", 1000, quiet=2, clock=clock) as queue:
        image = 0
        while queue.claim() is None:
            put(queue, image=image)
            clock.now += 1
            image += 1
        assert image == PATIENCE * 2


def test_an_arrival_does_not_change_the_time_of_a_retry(queue: DurableQueue, clock: Clock) -> None:
    put(queue, image=1)
    clock.now += 2
    assert queue.failed(claimed(queue), "no answer") == 10
    put(queue, image=2)
    clock.now += 2
    assert claimed(queue).sop_instance_uid == arrival(image=2).sop_instance_uid
    clock.now += 8
    assert claimed(queue).sop_instance_uid == arrival(image=1).sop_instance_uid


def test_a_waiting_thread_is_woken_by_a_new_job(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(queue.claim(wait=60)))
        thread.start()
        put(queue)
        thread.join(30)
        assert got[0] is not None


def test_stop_releases_waiting_threads_and_keeps_jobs(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(queue.claim(wait=60)))
        thread.start()
        queue.stop()
        thread.join(30)
        assert got == [None]
        assert put(queue)  # later images are still accepted
        assert queue.claim() is None
        assert len(queue) == 1


def test_each_job_is_given_to_one_thread(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        for image in range(40):
            put(queue, image=image)
        got: list[str] = []

        def work() -> None:
            while (job := queue.claim()) is not None:
                got.append(job.sop_instance_uid)
                queue.done(job, MODEL)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == len(set(got)) == 40


def test_a_reused_uid_with_other_content_is_reported(queue: DurableQueue, clock: Clock, log: Callable[[], str]) -> None:
    """While the first one waits, after its answer, and in the next process. The same content is no conflict."""
    same = Arrival("1.2.3", "1.2", "SENDER")
    queue.put(b"first", same, MODEL)
    queue.put(b"first", same, MODEL)
    assert queue.state()["reused_uids"] == 0
    queue.put(b"second", same, MODEL)
    assert queue.state()["reused_uids"] == 1
    clock.now += 60
    for _ in range(2):
        queue.done(claimed(queue), MODEL)
    again = reopened(queue, clock)
    again.put(b"third", same, MODEL)
    assert (again.state()["reused_uids"], len(again)) == (2, 1)
    assert log().count("was received again with other content") == 2
    again.close()
