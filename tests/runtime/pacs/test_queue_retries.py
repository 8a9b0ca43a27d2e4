"""The durable queue: jobs that fail, wait for a receiver, or are given up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbmir.errors import QueueError
from cbmir.runtime.pacs import queue as queue_module
from cbmir.runtime.pacs.jobs import DEAD_LETTERS, ResultObject
from cbmir.runtime.pacs.queue import LONGEST_DELAY, LONGEST_HOLD, DurableQueue
from pacs_rig import PLANTED
from queue_rig import MODEL, Clock, claimed, put, reopened, spooled


def test_delays_grow_until_a_job_is_a_dead_letter(queue: DurableQueue, clock: Clock) -> None:
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
    assert (len(queue), queue.state()["dead_letters"], spooled(queue)) == (0, 1, [])
    reason, file = sorted((queue.folder / DEAD_LETTERS).iterdir(), key=lambda path: path.suffix, reverse=True)
    assert file.read_bytes() == b"file 1 1"
    told = json.loads(reason.read_text())
    assert (told["reason"], told["attempts"], told["source"]) == ("the archive is away", 3, "SENDER")
    assert reason.stem == file.stem
    assert not any(text in reason.read_text() + str(file) for text in PLANTED)
    assert put(queue)  # sent again, it is accepted


def test_sending_pauses_while_an_archive_is_down(queue: DurableQueue, clock: Clock) -> None:
    """Failed jobs are retried with growing delays, finished results wait until the pause ends, the rest continues."""
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
    queue.done(claimed(queue), MODEL, sent=False)  # no results: this says nothing about the receiver
    assert queue.is_holding
    assert queue.claim() is None
    clock.now += 10
    assert not queue.is_holding
    assert claimed(queue) == replace(second, attempts=1, fingerprint=MODEL)
    assert queue.put_off(second, "it is away", hold=True) == 10
    assert queue.claim() is None
    clock.now += 10
    assert queue.claim() is None  # the pause is twice as long now
    queue.done(third, MODEL)  # the receiver is back
    assert not queue.is_holding
    assert claimed(queue).sop_instance_uid == first.sop_instance_uid


def test_a_thread_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    with DurableQueue(tmp_path / "queue", quiet=0, first_delay=0.2) as queue:
        put(queue)
        job = claimed(queue)
        queue.keep(job, [], MODEL)
        queue.put_off(job, "it is away", hold=True)
        assert queue.claim(wait=60) is not None


def test_sending_is_retried_for_days(queue: DurableQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_days_without_a_running_process_do_not_count(queue: DurableQueue, clock: Clock) -> None:
    put(queue)
    clock.now += 2
    queue.keep(claimed(queue), [], MODEL)
    clock.now += 8 * 86400
    with reopened(queue, clock) as again:
        assert again.put_off(claimed(again), "it is away", hold=True) == 10
        assert (len(again), again.state()["dead_letters"]) == (1, 0)


def test_holding_back_uses_no_attempt(queue: DurableQueue, clock: Clock) -> None:
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


def test_state(queue: DurableQueue, clock: Clock) -> None:
    assert queue.state() == {
        "waiting": 0,
        "unsent": 0,
        "oldest_s": 0,
        "dead_letters": 0,
        "reused_uids": 0,
        "refused": {},
    }
    for image in (1, 2, 3):
        put(queue, image=image)
        clock.now += 2
    job = claimed(queue)
    queue.keep(job, [], MODEL)
    queue.bury(claimed(queue), "no answer")
    assert queue.state() == {
        "waiting": 2,
        "unsent": 1,
        "oldest_s": 6,
        "dead_letters": 1,
        "reused_uids": 0,
        "refused": {},
    }


def test_delays_are_limited(tmp_path: Path, clock: Clock) -> None:
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
    with pytest.raises(QueueError, match="has changed on disk"):
        queue.file(job)
    file.unlink()
    with pytest.raises(QueueError, match="cannot be read"):
        queue.file(job)
    queue.bury(job, "it is gone")
    assert len(queue) == 0
