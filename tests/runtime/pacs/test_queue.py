"""The durable queue: what is acknowledged is there until it is answered, whatever happens to the process."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbmir.errors import PacsError, QueueFullError
from cbmir.runtime.pacs import database, spool
from cbmir.runtime.pacs import queue as queue_module
from cbmir.runtime.pacs.jobs import Arrival, Job, ResultObject, State
from cbmir.runtime.pacs.queue import LONGEST_DELAY, LONGEST_HOLD, PATIENCE, DurableQueue
from cbmir.runtime.pacs.spool import DEAD_LETTERS, SPOOL
from pacs_rig import PLANTED

MODEL, OTHER = "model-1", "model-2"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Iterator[DurableQueue]:
    with DurableQueue(tmp_path / "queue", 5, quiet=2, attempts=3, first_delay=10, clock=clock) as opened:
        yield opened


def arrival(study: int = 1, image: int = 1) -> Arrival:
    return Arrival(f"{PLANTED[2]}.{study}.{image}", f"{PLANTED[2]}.{study}", "SENDER")


def put(queue: DurableQueue, study: int = 1, image: int = 1, data: bytes = b"", model: str = MODEL) -> bool:
    return queue.put(data or f"file {study} {image}".encode(), arrival(study, image), model)


def claimed(queue: DurableQueue) -> Job:
    job = queue.claim()
    assert job is not None
    return job


def spooled(queue: DurableQueue) -> list[Path]:
    return sorted((queue.folder / SPOOL).iterdir())


# -- taking files


def test_what_was_put_is_given_out(queue: DurableQueue, clock: Clock) -> None:
    assert put(queue)
    clock.now += 2
    job = claimed(queue)
    assert (job.sop_instance_uid, job.study_instance_uid) == (arrival().sop_instance_uid, arrival().study_instance_uid)
    assert (job.source, job.received, job.attempts, job.fingerprint) == ("SENDER", clock.now - 2, 1, "")
    assert queue.file(job) == b"file 1 1"
    assert queue.claim() is None  # it is one thread's alone
    assert len(queue) == 1
    queue.done(job, MODEL)
    assert len(queue) == 0
    assert spooled(queue) == []


def test_what_was_put_is_on_disk(queue: DurableQueue, clock: Clock, tmp_path: Path) -> None:
    """As if the power had gone when `put` returned: a copy of the folder has all of it."""
    put(queue)
    shutil.copytree(queue.folder, tmp_path / "copy")
    with DurableQueue(tmp_path / "copy", quiet=0, clock=lambda: clock.now + 2) as copy:
        assert copy.file(claimed(copy)) == b"file 1 1"


def test_the_file_and_its_name_are_synced_before_the_row(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_add, real_fsync, real_sync = queue._add, spool.os.fsync, spool.sync

    def note(what: str, real: Any) -> Any:
        def call(*given: Any) -> None:
            order.append(what)
            real(*given)

        return call

    monkeypatch.setattr(spool.os, "fsync", note("file", real_fsync))
    monkeypatch.setattr(spool, "sync", note("folder", real_sync))
    monkeypatch.setattr(queue, "_add", note("row", real_add))
    put(queue)
    assert order[0] == "file"
    assert order.index("file") < order.index("folder") < order.index("row")
    ((level,),) = queue._database.execute("PRAGMA synchronous").fetchall()
    assert level == 2  # FULL: a commit is on disk when it returns


def test_a_full_queue_takes_no_more(queue: DurableQueue, clock: Clock) -> None:
    for image in range(5):
        assert put(queue, image=image)
    with pytest.raises(QueueFullError, match="holds 5 files"):
        put(queue, image=5)
    assert len(spooled(queue)) == 5
    assert not put(queue, image=0)  # what it has already is no more
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
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda _: SimpleNamespace(free=spool.FREE_SPACE))
    with pytest.raises(QueueFullError, match="the disk is full"):
        put(queue)
    assert spooled(queue) == []
    assert len(queue) == 0


def test_a_disk_that_fills_while_writing(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool.os, "fsync", fail)
    with pytest.raises(QueueFullError, match="the disk is full"):
        put(queue)
    monkeypatch.undo()
    assert spooled(queue) == []
    assert put(queue)


# -- knowing what was done


def test_the_same_file_is_taken_once(queue: DurableQueue, clock: Clock) -> None:
    assert put(queue)
    assert not put(queue)
    clock.now += 2
    job = claimed(queue)
    assert not put(queue)  # being worked on
    queue.done(job, MODEL, "2.25.1")
    assert not put(queue)
    assert put(queue, data=b"another content of the same UID")


def test_it_is_the_same_file_whichever_way_it_came(queue: DurableQueue) -> None:
    """The preamble and the File Meta Information are the last sender's."""
    meta = b"\x02\x00\x10\x00UI\x04\x001.2\x00"
    length = b"\x02\x00\x00\x00UL\x04\x00" + len(meta).to_bytes(4, "little")
    assert put(queue, data=bytes(128) + b"DICM" + length + meta + b"the data set")
    assert not put(queue, data=b"x" * 128 + b"DICM" + length + meta.replace(b"1.2", b"1.3") + b"the data set")
    assert not put(queue, data=b"the data set")
    assert put(queue, data=bytes(128) + b"DICM" + length + meta + b"another set")


def test_another_model_answers_anew(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    queue.done(claimed(queue), MODEL, "2.25.1")
    assert put(queue, model=OTHER)
    clock.now += 2
    job = claimed(queue)
    assert queue.predecessor(job, OTHER) == "2.25.1"
    assert queue.predecessor(job, MODEL) == ""
    assert queue.predecessor(replace(job, sop_instance_uid="1.2"), OTHER) == ""
    assert queue.predecessor(replace(job, study_instance_uid="1.2"), OTHER) == ""  # it was moved to another study


def test_knows_by_uid(queue: DurableQueue, clock: Clock) -> None:
    uid = arrival().sop_instance_uid
    assert not queue.knows(uid)
    put(queue)
    assert queue.knows(uid)
    clock.now += 2
    job = claimed(queue)
    queue.done(job, MODEL)
    assert queue.knows(uid)
    assert not queue.knows(arrival(2).sop_instance_uid)


def test_only_so_many_are_remembered(queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "REMEMBERED", 2)
    for image in range(4):
        put(queue, image=image)
        clock.now += 2
        queue.done(claimed(queue), MODEL)
    assert [queue.knows(arrival(image=image).sop_instance_uid) for image in range(4)] == [False, False, True, True]


def test_what_was_refused_is_known_to_this_process_alone(queue: DurableQueue, clock: Clock) -> None:
    """The next one may be told to take it."""
    uid = arrival().sop_instance_uid
    put(queue)
    clock.now += 2
    queue.refused(claimed(queue), MODEL)
    assert (len(queue), spooled(queue)) == (0, [])
    assert queue.knows(uid)
    assert not put(queue)
    assert put(queue, model=OTHER)
    clock.now += 2
    queue.refused(claimed(queue), OTHER)
    with reopened(queue, clock) as again:
        assert not again.knows(uid)
        assert put(again)


def test_only_so_many_refusals_are_known(queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "PASSED_OVER", 1)
    for image in range(2):
        put(queue, image=image)
        clock.now += 2
        queue.refused(claimed(queue), MODEL)
    assert [queue.knows(arrival(image=image).sop_instance_uid) for image in range(2)] == [False, True]


@pytest.mark.parametrize("closed", [False, True])
def test_nothing_of_the_patient_stays_when_it_is_done(queue: DurableQueue, clock: Clock, *, closed: bool) -> None:
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


# -- waiting for a study to be quiet


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


def test_a_study_that_never_gets_quiet_is_begun(tmp_path: Path, clock: Clock) -> None:
    with DurableQueue(tmp_path / "queue", 1000, quiet=2, clock=clock) as queue:
        image = 0
        while queue.claim() is None:
            put(queue, image=image)
            clock.now += 1
            image += 1
        assert image == PATIENCE * 2


def test_an_arrival_does_not_hurry_or_delay_a_retry(queue: DurableQueue, clock: Clock) -> None:
    put(queue, image=1)
    clock.now += 2
    assert queue.failed(claimed(queue), "no answer") == 10
    put(queue, image=2)
    clock.now += 2
    assert claimed(queue).sop_instance_uid == arrival(image=2).sop_instance_uid
    clock.now += 8
    assert claimed(queue).sop_instance_uid == arrival(image=1).sop_instance_uid


def test_a_waiting_thread_hears_of_a_new_job(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(queue.claim(wait=60)))
        thread.start()
        put(queue)
        thread.join(30)
        assert got[0] is not None


def test_stop_lets_waiting_threads_go_and_keeps_the_rest(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda: got.append(queue.claim(wait=60)))
        thread.start()
        queue.stop()
        thread.join(30)
        assert got == [None]
        assert put(queue)  # what still arrives is taken
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


# -- failing


def test_retries_come_ever_later_and_end_as_a_dead_letter(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    for attempt, delay in enumerate((10, 20), 1):
        job = claimed(queue)
        assert job.attempts == attempt
        assert queue.failed(job, "no answer") == delay
        clock.now += delay - 1
        assert queue.claim() is None
        clock.now += 1
    assert queue.failed(claimed(queue), "the archive is away") is None
    assert (len(queue), queue.dead_letters(), spooled(queue)) == (0, 1, [])
    reason, file = sorted((queue.folder / DEAD_LETTERS).iterdir(), key=lambda path: path.suffix, reverse=True)
    assert file.read_bytes() == b"file 1 1"
    told = json.loads(reason.read_text())
    assert (told["reason"], told["attempts"], told["source"]) == ("the archive is away", 3, "SENDER")
    assert reason.stem == file.stem
    assert not any(text in reason.read_text() + str(file) for text in PLANTED)
    assert put(queue)  # who sends it again gets it done


def test_who_is_away_is_not_asked_by_each(queue: DurableQueue, clock: Clock) -> None:
    """What failed is tried again ever later, what has its results waits for the pause to end, and the rest goes on."""
    for image in (1, 2, 3):
        put(queue, image=image)
    clock.now += 2
    first, second = claimed(queue), claimed(queue)
    for job in (first, second):
        queue.keep(job, [ResultObject("sr", "2.25.1", b"the report")], MODEL)
    assert not queue.is_holding
    assert queue.put_off(first, "it is away", hold=True) == 10
    assert queue.is_holding
    queue.release(second)
    third = claimed(queue)
    assert third.fingerprint == ""
    put(queue, image=4)
    clock.now += 2
    queue.done(claimed(queue), MODEL, sent=False)  # it had no results: of who is away that tells nothing
    assert queue.is_holding
    assert queue.claim() is None
    clock.now += 10
    assert not queue.is_holding
    assert claimed(queue) == replace(second, attempts=1, fingerprint=MODEL)
    assert queue.put_off(second, "it is away", hold=True) == 10
    assert queue.claim() is None
    clock.now += 10
    assert queue.claim() is None  # the pause is twice as long now
    queue.done(third, MODEL)  # it is there again
    assert not queue.is_holding
    assert claimed(queue).sop_instance_uid == first.sop_instance_uid


def test_a_thread_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0, first_delay=0.2) as queue:
        put(queue)
        job = claimed(queue)
        queue.keep(job, [], MODEL)
        queue.put_off(job, "it is away", hold=True)
        assert queue.claim(wait=60) is not None


def test_results_are_sent_for_days(queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    day = 86400.0
    assert day * 7 == queue_module.SENDING
    monkeypatch.setattr(queue_module, "SENDING", day)
    put(queue)
    clock.now += 2
    began, pauses = clock.now, set[float]()
    while True:
        job = claimed(queue)
        assert job.attempts == 1
        if not job.fingerprint:
            queue.keep(job, [], MODEL)
        delay = queue.put_off(job, "it is away", hold=True)
        if delay is None:
            break
        pauses.add(queue._held_until - clock.now)
        clock.now += max(delay, LONGEST_HOLD)
        assert delay <= LONGEST_DELAY
    assert max(pauses) == LONGEST_HOLD
    assert day - LONGEST_DELAY <= clock.now - began <= day + LONGEST_DELAY
    assert "put off for 1 days: it is away" in next((queue.folder / DEAD_LETTERS).glob("*.json")).read_text()


def test_the_days_when_it_was_off_do_not_count(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    queue.keep(claimed(queue), [], MODEL)
    clock.now += 8 * 86400
    with reopened(queue, clock) as again:
        assert again.put_off(claimed(again), "it is away", hold=True) == 10
        assert (len(again), again.dead_letters()) == (1, 0)


def test_what_is_held_back_uses_no_attempt_up(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    job = claimed(queue)
    queue.keep(job, [], MODEL)
    for _ in range(5):
        queue.hold_back(job)
        job = claimed(queue)
        assert job.attempts == 1


def test_a_job_that_is_released_is_claimed_again(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    job = claimed(queue)
    assert queue.claim() is None
    queue.release(job)
    assert claimed(queue) == replace(job, attempts=2)


def test_how_it_does(queue: DurableQueue, clock: Clock) -> None:
    assert queue.state() == State(0, 0, 0, 0)
    for image in (1, 2, 3):
        put(queue, image=image)
        clock.now += 2
    job = claimed(queue)
    queue.keep(job, [], MODEL)
    queue.bury(claimed(queue), "no answer")
    assert queue.state() == State(waiting=2, unsent=1, oldest_s=6, dead_letters=1)


def test_delays_have_an_end(tmp_path: Path, clock: Clock) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0, attempts=100, first_delay=10, clock=clock) as queue:
        put(queue)
        for _ in range(50):
            delay = queue.failed(claimed(queue), "no answer")
            assert delay is not None
            clock.now += delay
        assert delay == LONGEST_DELAY


def test_a_changed_file_is_noticed(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    job = claimed(queue)
    (file,) = spooled(queue)
    file.write_bytes(b"file 1 2")
    with pytest.raises(PacsError, match="has changed on disk"):
        queue.file(job)
    file.unlink()
    with pytest.raises(PacsError, match="cannot be read"):
        queue.file(job)
    queue.bury(job, "it is gone")
    assert len(queue) == 0


# -- beginning again


def reopened(queue: DurableQueue, clock: Clock) -> DurableQueue:
    queue.close()
    return DurableQueue(queue.folder, 5, quiet=2, attempts=3, first_delay=10, clock=clock)


def test_what_was_worked_on_is_claimed_anew(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    claimed(queue)
    with reopened(queue, clock) as again:
        job = claimed(again)
        assert (job.attempts, again.file(job)) == (2, b"file 1 1")


def test_results_are_kept_as_they_were_made(queue: DurableQueue, clock: Clock) -> None:
    made = [
        ResultObject("sr", "2.25.1", b"the report"),
        ResultObject("kos", "2.25.2", b"a"),
        ResultObject("kos", "2.25.3", b"b"),
    ]
    put(queue)
    clock.now += 2
    job = claimed(queue)
    assert queue.kept(job) == []
    queue.keep(job, made, MODEL)
    with reopened(queue, clock) as again:
        job = claimed(again)
        assert (job.fingerprint, again.kept(job)) == (MODEL, made)
        again.done(job, MODEL, "2.25.1")
        assert again.kept(job) == []


def test_a_file_that_ends_the_process_is_given_up(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    for _ in range(3):
        claimed(queue)
        queue = reopened(queue, clock)
        clock.now += 2
    assert (len(queue), queue.dead_letters()) == (0, 1)
    assert "the process ended at work on it" in next((queue.folder / DEAD_LETTERS).glob("*.json")).read_text()
    queue.close()


def test_what_was_never_acknowledged_goes(queue: DurableQueue, clock: Clock) -> None:
    (queue.folder / SPOOL / "half.dcm").write_bytes(b"half a fi")
    with reopened(queue, clock) as again:
        assert spooled(again) == []


def test_a_burial_that_was_cut_off_is_ended(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    (file,) = spooled(queue)
    (queue.folder / DEAD_LETTERS / f"{file.stem}.json").write_text("{}")
    file.rename(queue.folder / DEAD_LETTERS / file.name)
    with reopened(queue, clock) as again:
        assert (len(again), again.dead_letters()) == (0, 1)


def test_a_burial_that_was_cut_off_before_is_begun_anew(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    (file,) = spooled(queue)
    (queue.folder / DEAD_LETTERS / f"{file.stem}.json").write_text("{}")
    with reopened(queue, clock) as again:
        assert (len(again), again.dead_letters()) == (1, 0)


def test_marks_are_kept(queue: DurableQueue, clock: Clock) -> None:
    assert queue.marked("changes") == ""
    queue.mark("changes", "5")
    queue.mark("changes", "7")
    with reopened(queue, clock) as again:
        assert again.marked("changes") == "7"


def test_one_process_has_it(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "WAIT", 0.05)
    with pytest.raises(PacsError, match="another process has this queue"):
        DurableQueue(queue.folder)
    put(queue)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PacsError, match="cannot make the queue's folder"):
        DurableQueue(tmp_path / "file")
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "queue.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(PacsError, match="cannot be opened"):
        DurableQueue(tmp_path / "queue")


def test_a_queue_of_other_tables_is_refused(tmp_path: Path) -> None:
    """As an older version made it: opened, it would fail at the first image."""
    with DurableQueue(tmp_path / "queue") as queue:
        queue._database.execute("PRAGMA user_version = 0")
    with pytest.raises(PacsError, match=r"expected a queue of version 1, found version 0"):
        DurableQueue(tmp_path / "queue")


def test_it_is_its_owners_alone(queue: DurableQueue) -> None:
    put(queue)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (queue.folder, *queue.folder.rglob("*")))


_PUTTER = """
import sys
from pathlib import Path
from cbmir.runtime.pacs.jobs import Arrival
from cbmir.runtime.pacs.queue import DurableQueue
queue = DurableQueue(Path(sys.argv[1]), quiet=0)
for number in range(10_000):
    queue.put(b"%d" % number, Arrival(f"1.2.{number}", "1.2", "SENDER"), "model")
    print(number, flush=True)
"""


def killed_while_putting(folder: Path, after: int) -> int:
    """The last file that a process acknowledged, killed some time after that of this number."""
    command = [sys.executable, "-c", _PUTTER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == after:
                process.send_signal(signal.SIGKILL)
    return last


@pytest.mark.parametrize("after", [0, 7, pytest.param(500, marks=pytest.mark.slow)])
def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path, after: int) -> None:
    last = killed_while_putting(tmp_path / "queue", after)
    assert last >= after
    with DurableQueue(tmp_path / "queue", quiet=0) as queue:
        there = set()
        while (job := queue.claim()) is not None:
            assert queue.file(job).decode() == job.sop_instance_uid.removeprefix("1.2.")
            there.add(int(queue.file(job)))
            queue.done(job, "model")
        assert set(range(last + 1)) <= there <= set(range(last + 2))
        assert spooled(queue) == []


def test_sqlite_errors_of_another_kind_are_raised(queue: DurableQueue) -> None:
    queue._database.execute("DROP TABLE mark")
    with pytest.raises(sqlite3.OperationalError):
        queue.mark("a", "b")
    assert put(queue)  # the transaction is not left open
