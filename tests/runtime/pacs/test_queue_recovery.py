"""The durable queue: acknowledged images survive failures of process and disk until they are answered."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cbmir.errors import QueueError, QueueFullError
from cbmir.runtime.pacs import jobs
from cbmir.runtime.pacs.jobs import DEAD_LETTERS, SPOOL, Arrival, ResultObject
from cbmir.runtime.pacs.queue import DurableQueue
from queue_rig import MODEL, Clock, claimed, put, reopened, spooled, timed_queue


def test_unfinished_jobs_are_claimed_again(queue: DurableQueue, clock: Clock) -> None:
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


def test_a_file_that_crashes_the_process_is_given_up(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    for _ in range(3):
        claimed(queue)
        queue = reopened(queue, clock)
        clock.now += 2
    assert (len(queue), queue.state()["dead_letters"]) == (0, 1)
    assert "the process ended while working on it" in next((queue.folder / DEAD_LETTERS).glob("*.json")).read_text()
    queue.close()


def test_unacknowledged_files_are_deleted(queue: DurableQueue, clock: Clock) -> None:
    (queue.folder / SPOOL / "half.dcm").write_bytes(b"half a fi")
    with reopened(queue, clock) as again:
        assert spooled(again) == []


def test_an_interrupted_dead_letter_is_completed(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    (file,) = spooled(queue)
    (queue.folder / DEAD_LETTERS / f"{file.stem}.json").write_text("{}")
    file.rename(queue.folder / DEAD_LETTERS / file.name)
    with reopened(queue, clock) as again:
        assert (len(again), again.state()["dead_letters"]) == (0, 1)


def test_an_interrupted_removal_of_a_dead_letter_is_completed(
    queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unlink = queue.folder / DEAD_LETTERS, Path.unlink
    (folder / "one.dcm").write_bytes(b"an image")
    (folder / "one.json").write_text("{}")

    def stop(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", stop)
        queue.spool.remove_dead_letter("one")
    with reopened(queue, clock) as again:
        assert (again.state()["dead_letters"], list(folder.iterdir())) == (0, [])


def test_a_dead_letter_interrupted_before_the_move_stays_queued(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    (file,) = spooled(queue)
    (queue.folder / DEAD_LETTERS / f"{file.stem}.json").write_text("{}")
    with reopened(queue, clock) as again:
        assert (len(again), again.state()["dead_letters"]) == (1, 0)


def test_marks_are_kept(queue: DurableQueue, clock: Clock) -> None:
    assert queue.marked("changes") == ""
    queue.mark("changes", "5")
    queue.mark("changes", "7")
    with reopened(queue, clock) as again:
        assert again.marked("changes") == "7"


def test_only_one_process_may_open_it(queue: DurableQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "WAIT", 0.05)
    with pytest.raises(QueueError, match="another process uses this queue"):
        DurableQueue(queue.folder)
    put(queue)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QueueError, match="cannot make the queue's folder"):
        DurableQueue(tmp_path / "file")
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "queue.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(QueueError, match="cannot open the queue"):
        DurableQueue(tmp_path / "queue")


def test_a_queue_of_other_tables_is_refused(tmp_path: Path) -> None:
    """If a queue of an older version were opened, it would fail at the first image."""
    with DurableQueue(tmp_path / "queue") as queue:
        queue._rows("PRAGMA user_version = 0")
    with pytest.raises(QueueError, match=r"expected a queue of version 2, found version 0"):
        DurableQueue(tmp_path / "queue")


def test_it_is_readable_only_by_its_owner(queue: DurableQueue) -> None:
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
    """Kill a process some time after it has acknowledged file `after`. Returns the last acknowledged file."""
    command = [sys.executable, "-c", _PUTTER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = -1
        for line in process.stdout:
            last = int(line)
            if last == after:
                process.send_signal(signal.SIGKILL)
    return last


@pytest.mark.parametrize("after", [0, 7, pytest.param(500, marks=pytest.mark.release)])
def test_sigkill_loses_no_acknowledged_file(tmp_path: Path, after: int) -> None:
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


def test_errors_of_the_database_are_typed(queue: DurableQueue) -> None:
    queue._rows("DROP TABLE mark")
    with pytest.raises(QueueError, match=r"no such table: mark.*it is damaged"):
        queue.mark("a", "b")
    assert put(queue)  # the transaction is not left open


def test_a_full_database_is_a_full_queue(queue: DurableQueue) -> None:
    ((pages,),) = queue._rows("PRAGMA page_count")
    queue._rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(QueueFullError, match="the disk is full"):
        queue.put(b"a file", Arrival("1.2.3", "1.2", "S" * 5000), MODEL)
    assert (len(queue), spooled(queue)) == (0, [])


@pytest.mark.parametrize("flips", [20, pytest.param(200, marks=pytest.mark.release)])
def test_a_damaged_database_is_a_typed_error(queue: DurableQueue, clock: Clock, flips: int) -> None:
    """Or it returns what it can. Any bit may be flipped; SQLite's errors do not get out."""
    for image in range(5):
        put(queue, image=image)
    clock.now += 2
    queue.keep(claimed(queue), [ResultObject("sr", "2.25.1", b"the report" * 100)], MODEL)
    queue.close()
    file = queue.folder / jobs.DATABASE
    whole, spool = file.read_bytes(), {path: path.read_bytes() for path in spooled(queue)}
    chance = random.Random(1)
    raised = 0
    for _ in range(flips):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        for path, data in spool.items():
            path.write_bytes(data)
        try:
            with timed_queue(queue.folder, clock) as again:
                while (job := again.claim()) is not None:
                    again.kept(job)
                    with suppress(QueueError):  # for example its digest
                        again.file(job)
                    again.done(job, MODEL)
        except QueueError:
            raised += 1
    assert raised < flips
