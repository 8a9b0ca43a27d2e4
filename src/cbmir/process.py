"""What is opened, used and closed: the with statement for it.

Signals that wait until a service asks for them.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A class with a `close` of its own, which may be called again, becomes a context manager by this one."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


STOP = (signal.SIGTERM, signal.SIGINT)
RELOAD = getattr(signal, "SIGHUP", None)
SIGNALS = frozenset(STOP if RELOAD is None else (*STOP, RELOAD))


@contextmanager
def signals_held() -> Iterator[None]:
    """Let `SIGNALS` wait for `signal.sigtimedwait`: to be entered before any thread is started, so that none gets one.

    numpy starts threads when it is imported: one of those would get a signal, and end the process by it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def available_threads() -> int:
    """Processors that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
