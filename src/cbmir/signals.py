"""Signals that wait until a service asks for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

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
