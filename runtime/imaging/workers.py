"""Work on many images in worker processes, far enough ahead that an engine never waits, with results in order.

Decoders hold Python's lock between calls, so processes scale and threads do not. Processes are spawned, because a fork
would break the threads of the engines' libraries. So a script needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from logging.handlers import QueueHandler
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from cbmir.errors import ImageError, UserError, WorkerError
from cbmir.process import available_threads

_S = TypeVar("_S")
_T = TypeVar("_T")

AHEAD = 64  # items taken from the source ahead of the results
FEW = 64  # fewer items are done before processes would have started (0.2 s each)
_KILLED, _TERMINATED = -9, -15  # exit codes: SIGKILL, and SIGTERM, by which the pool ends the others


def work_through(
    function: Callable[[_S], _T], items: Iterable[_S], *, workers: int | None = None
) -> Generator[_T | ImageError, None, None]:
    """Yield `function(item)` for each item, in order; an ImageError that it raises is yielded in its place.

    With 0 workers everything runs in this process; None means 0 for a few items, else one worker per processor.
    `function`, items and results must be picklable. The workers' logs go to this process. The workers end with the
    iterator, even if it is closed early. Raises UserError for a negative number, WorkerError if a process dies.
    """
    if workers is not None and workers < 0:
        raise UserError(f"expected 0 or more worker processes, found {workers}")
    return _work_through(function, iter(items), workers)


def _work_through(
    function: Callable[[_S], _T], items: Iterator[_S], workers: int | None
) -> Generator[_T | ImageError, None, None]:
    if workers is None:
        first = list(islice(items, FEW))
        workers, items = (0 if len(first) < FEW else available_threads()), chain(first, items)
    yield from _by_processes(function, items, workers) if workers else (_result(function, item) for item in items)


def _by_processes(
    function: Callable[[_S], _T], items: Iterator[_S], workers: int
) -> Generator[_T | ImageError, None, None]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(logging.getLogger().level,))
    before, own = set(multiprocessing.active_children()), set[BaseProcess]()
    waiting: deque[Future[tuple[_T | ImageError, list[logging.LogRecord]]]] = deque()
    try:
        while True:
            for item in islice(items, AHEAD - len(waiting)):
                waiting.append(pool.submit(_logged_result, function, item))
            own |= set(multiprocessing.active_children()) - before  # some have only just started
            if not waiting:
                return
            result, records = waiting.popleft().result()
            for record in records:
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
            yield result
    except BrokenProcessPool as error:
        pool.shutdown()
        raise WorkerError(_why_broken(own, workers)) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _why_broken(processes: Iterable[BaseProcess], workers: int) -> str:
    codes = {process.exitcode for process in processes}
    if _KILLED in codes:
        return (
            f"one of {workers} worker processes was killed (SIGKILL), as Linux does when memory runs out; "
            f"use fewer workers, or 0"
        )
    found = ", ".join(sorted(str(code) for code in codes - {0, None, _TERMINATED})) or "unknown"
    return (
        f"one of {workers} worker processes died (exit code {found}): a decoder crashed, or a script starts workers "
        f'outside of `if __name__ == "__main__":`; with 0 workers everything is done in one process'
    )


def _result(function: Callable[[_S], _T], item: _S) -> _T | ImageError:
    try:
        return function(item)
    except ImageError as error:
        return error


_RECORDS: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()


def _start(level: int) -> None:
    """Set up a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(QueueHandler(_RECORDS))
    logging.captureWarnings(True)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _logged_result(function: Callable[[_S], _T], item: _S) -> tuple[_T | ImageError, list[logging.LogRecord]]:
    result = _result(function, item)
    return result, [_RECORDS.get() for _ in range(_RECORDS.qsize())]
