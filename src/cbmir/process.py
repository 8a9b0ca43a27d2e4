"""Process-wide matters: closing resources, holding signals, and counting threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from cbmir.errors import UserError


class Closing(ABC):
    """Makes a class with `close` a context manager; `close` may be called more than once."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


STOP = (signal.SIGTERM, signal.SIGINT)
RELOAD = getattr(signal, "SIGHUP", None)
SIGNALS = frozenset(STOP if RELOAD is None else (*STOP, RELOAD))


@contextmanager
def signals_held() -> Iterator[None]:
    """Let `SIGNALS` wait for `signal.sigtimedwait`. Enter this before any thread starts.

    numpy starts threads when it is imported: a signal that reached one would end the process. Raises UserError where
    they cannot wait."""
    if not hasattr(signal, "sigtimedwait"):
        raise UserError(f"expected Linux, whose signals can be waited for, found {sys.platform}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signal_handled(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal like this within the block. Outside the main thread, which alone can do that, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def sigterm_interrupts() -> AbstractContextManager[None]:
    """Let SIGTERM end the block as Ctrl-C does, by KeyboardInterrupt."""
    return signal_handled(signal.SIGTERM, signal.default_int_handler)


def available_threads() -> int:
    """Processors that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(threads: int | None, at_once: int) -> int:
    """`threads` if given; else the processors divided by `at_once`, the number of answers at once."""
    return threads or max(1, available_threads() // at_once)
