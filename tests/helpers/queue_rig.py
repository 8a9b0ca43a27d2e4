"""A queue of the PACS node with a clock that tests control."""

from __future__ import annotations

from pathlib import Path

from cbmir.runtime.pacs.jobs import SPOOL, Arrival, Job
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED

MODEL, OTHER = "model-1", "model-2"


class Clock:
    """A clock that only advances when a test adds seconds to `now`."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def timed_queue(folder: Path, clock: Clock) -> DurableQueue:
    return DurableQueue(folder, 5, quiet=2, attempts=3, first_delay=10, clock=clock)


def reopened(queue: DurableQueue, clock: Clock) -> DurableQueue:
    queue.close()
    return timed_queue(queue.folder, clock)


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
