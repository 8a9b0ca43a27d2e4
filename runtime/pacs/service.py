"""Sources, workers and a queue, run together until a signal ends them.

SIGTERM and SIGINT: no new work begins, work in progress is finished, waiting files stay on disk. A second signal ends
the process immediately, also without loss. SIGHUP: model and gallery are opened again, and replace the old ones when
they are warm.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

from cbmir.errors import QueueError, WorkerError
from cbmir.files import write_json
from cbmir.process import RELOAD, SIGNALS, STOP
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.logs import fields, pacs_log, what_failed
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.worker import Workers

#: Python's switch interval between threads, in seconds. Senders get their answers two to three times faster than with
#: the default of 0.005, because making a report is pure Python.
_SWITCH = 0.0005
_REPORT = 60.0  # seconds between two reports on the queue
STATUS = "status.json"  # in the queue's folder: the last report and its time


class ImageSource(Protocol):
    """A source of files: a node, or a feed. No files come after `stop`, which may be called without `start`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run(
    queue: DurableQueue, workers: Workers, sources: Sequence[ImageSource], live: ReloadableFinder,
    ready: Callable[[], None],
) -> None:  # fmt: skip
    """Run until SIGTERM or SIGINT, within `signals_held`; `ready` is called once all sources have started. Raises the
    errors of starting, and WorkerError if a worker died: a supervisor must start the process again."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    workers.start()
    try:
        for source in sources:
            source.start()
        ready()
        _wait(queue, workers, live)
    finally:
        pacs_log.info("stopping: work in progress is finished; a second signal stops at once")
        with _signals_end_it():
            queue.stop()
            for source in sources:
                source.stop()
            workers.stop()
            sys.setswitchinterval(before)
            pacs_log.info("stopped", extra=fields(**queue.state()))


@contextmanager
def _signals_end_it() -> Iterator[None]:
    # The default would suffice, except for process 1 of a container, which only receives signals that it handles.
    handlers = {number: signal.signal(number, lambda sent, _: os._exit(128 + sent)) for number in STOP}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(queue: DurableQueue, workers: Workers, live: ReloadableFinder) -> None:
    before: dict[str, Any] = {}
    while True:
        before = _report(queue, before)
        received = signal.sigtimedwait(SIGNALS, _REPORT)
        if received is not None and received.si_signo == RELOAD:
            # In a thread, so that a gallery or a disk that hangs delays neither the end nor the reports.
            threading.Thread(target=_reload, args=(live,), name="cbmir-reload", daemon=True).start()
        elif received is not None:
            return
        if not workers.alive:
            raise WorkerError("expected all workers to run, found that one has ended; restart the process: what waits "
                              "is on disk")  # fmt: skip


def _report(queue: DurableQueue, before: dict[str, Any]) -> dict[str, Any]:
    """Log the queue's state if something waits or has changed, and write it to a file for monitoring."""
    try:
        queue.tidy()
        state = queue.state()
        write_json(queue.folder / STATUS, {"time": datetime.now(UTC).isoformat(timespec="seconds")} | state)
    except (OSError, QueueError) as error:
        pacs_log.error("the queue failed", extra=fields(reason=what_failed(error)))
        return before
    if state["waiting"] or state != before:
        pacs_log.info("queue", extra=fields(**state))
    return state


def _reload(live: ReloadableFinder) -> None:
    try:
        live.reload()
    except Exception as error:  # noqa: BLE001 - a bad model must not stop the service
        pacs_log.error("not reloaded: the old model and gallery stay in use", extra=fields(reason=what_failed(error)))
    else:
        pacs_log.info("reloaded", extra=fields(generation=live.generation))
