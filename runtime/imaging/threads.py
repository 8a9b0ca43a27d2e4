"""Jobs that run in parallel threads, for work that NumPy, Pillow and the codecs do without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


def together(threads: int, *jobs: Callable[[], _T]) -> list[_T]:
    """Run jobs in at most `threads` threads, which end with this call. Returns the results in order."""
    if threads == 1 or len(jobs) == 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(min(threads, len(jobs)), thread_name_prefix="together") as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


@contextmanager
def beside(threads: int, job: Callable[[], _T]) -> Iterator[Callable[[], _T]]:
    """Run a job in parallel with the block, if `threads` allows. Yields a function that returns the job's result."""
    if threads == 1:
        yield job
        return
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
        yield pool.submit(job).result
