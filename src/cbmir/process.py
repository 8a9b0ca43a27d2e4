"""Closing resources, handling signals, and counting threads."""

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
    """A base class for context managers with `close`, which may be called more than once."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


STOP = (signal.SIGTERM, signal.SIGINT)
RELOAD = getattr(signal, "SIGHUP", None)
SIGNALS = frozenset(STOP if RELOAD is None else (*STOP, RELOAD))


@contextmanager
def signals_held() -> Iterator[None]:
    """Block `SIGNALS`, so that `signal.sigtimedwait` can receive them. Enter this before any thread starts.

    numpy starts threads on import, and a signal delivered to one would end the process. Raises UserError if the system
    has no `sigtimedwait`."""
    if not hasattr(signal, "sigtimedwait"):
        raise UserError(f"expected Linux, whose signals can be waited for, found {sys.platform}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signal_handled(number: int, handler: Any) -> Iterator[None]:
    """Set a signal's handler within the block. Outside the main thread Python cannot do this, and nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def sigterm_interrupts() -> AbstractContextManager[None]:
    """Let SIGTERM raise KeyboardInterrupt within the block, as Ctrl-C does."""
    return signal_handled(signal.SIGTERM, signal.default_int_handler)


def available_threads() -> int:
    """Return the number of processors that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(threads: int | None, at_once: int) -> int:
    """Return `threads`, or without it the available processors divided by `at_once`, the number of parallel answers."""
    return threads or max(1, available_threads() // at_once)
