"""How many requests are worked on at once, and how many may wait for that.

A place is taken before a body is read and given back when nothing of the request is left in memory: what is uploaded,
waits or is worked on is bounded, whatever clients do. Work that has begun cannot be stopped: it keeps its place beyond
a timeout, until it ends.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from cbmir.runtime.serving.problems import Problem

_T = TypeVar("_T")
_RECENT = 0.1  # the weight of the last answer in the mean time that one takes


class Gate:
    """`concurrency` threads, and `queue` places more."""

    def __init__(self, concurrency: int, queue: int, timeout_s: float) -> None:
        self.concurrency, self.capacity, self._timeout = concurrency, concurrency + queue, timeout_s
        self.taken = 0  # places
        self.working = 0  # threads
        self._seconds = 0.1  # that an answer takes, a moving mean
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="answer")

    @property
    def waiting(self) -> int:
        """Places of requests that are uploaded or wait."""
        return max(0, self.taken - self.working)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place while the block lasts, and beyond it until its work ends. Raises Problem 429 where there is none."""
        with self._lock:
            if self.taken >= self.capacity:
                seconds = math.ceil(self.taken * self._seconds / self.concurrency)
                raise Problem(429, "busy", f"Expected at most {self.capacity} requests at once, found more; try again "
                                           f"later.", retry_after=min(max(seconds, 1), 60))  # fmt: skip
            self.taken += 1
        place = Place(self)
        try:
            yield place
        finally:
            if place.future is None:
                self._leave(None)
            else:
                place.future.add_done_callback(self._leave)

    def close(self) -> None:
        """Begin nothing more. What is worked on is not waited for: it cannot be broken off, and who asked is gone."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        held = [work]  # emptied when it is cancelled: the pool keeps what waits until a thread is free
        future = self._pool.submit(self._timed, held)
        future.add_done_callback(lambda _: held.clear())
        return future

    def _timed(self, held: list[Callable[[], _T]]) -> _T:
        work = held.pop()
        with self._lock:
            self.working += 1
        start = time.monotonic()
        try:
            return work()
        finally:
            with self._lock:
                self.working -= 1
                self._seconds += _RECENT * (time.monotonic() - start - self._seconds)

    def _leave(self, _: Future[Any] | None) -> None:
        with self._lock:
            self.taken -= 1


class Place:
    """Of one request; made by `Gate.place`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.future: Future[Any] | None = None

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises, in a thread. Raises Problem 503 where it has not ended in time."""
        self.future = future = self._gate._submit(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._gate._timeout)
        except TimeoutError:
            if future.done() and not future.cancelled():  # the work's own
                raise
            raise Problem(503, "timeout", f"Expected an answer within {self._gate._timeout:g} s, found none; try again "
                                          f"when there is less to do.", retry_after=5) from None  # fmt: skip
