"""A contender in a process of its own, which waits idle while the others have their turn.

So no library's threads or memory disturb another's, and each one's loading time and peak memory are its own.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import CbmirError, EngineError
from cbmir.export.perf.contenders import Contender
from cbmir.process import Closing
from cbmir.runtime.engines.base import EngineHealth


@dataclass(frozen=True, eq=False)
class Opened:
    """`seconds` until the first answer, the import of the library included; `embedding` float32 [M, D] of `compared`
    images, or None where the weights are random."""

    health: EngineHealth
    seconds: float
    embedding: NDArray[np.float32] | None


class BenchProcess(Closing):
    """Starts the process at once, by spawn. `images` is uint8 [M, 1, S, S]; a batch is taken from its front."""

    def __init__(self, contender: Contender, images: NDArray[np.uint8], *, compared: int = 16) -> None:
        self.name = contender.name
        self.peak_bytes: int | None = None
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, images, compared), daemon=True)
        with _interrupts_ignored():  # Ctrl-C is for the parent, which ends this process
            self._process.start()
        theirs.close()  # so that the end of the process ends a wait for its answer

    def opened(self) -> Opened:
        """Wait until the contender has given its first answer. Raises what opening it raised."""
        opened: Opened = self._receive()
        return opened

    def turn(self, batch: int, seconds: float) -> list[float]:
        """Run batches for so long, at least one: the seconds that each took. Raises what running raised."""
        self._pipe.send((batch, seconds))
        times: list[float]
        times, self.peak_bytes = self._receive()
        return times

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise EngineError(
                f"{self.name}: its process ended (exit code {self._process.exitcode}) where an answer was expected; "
                f"with a large model that is most often for want of memory"
            ) from None
        if isinstance(answer, CbmirError):
            raise answer
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def time_runs(run: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each run, until so many have passed; at least one. A first run is not counted: another contender has
    had the processor and its caches before."""
    run()
    times: list[float] = []
    started = now = clock()
    while not times or now - started < seconds:
        before, _ = now, run()
        now = clock()
        times.append(now - before)
    return times


def _serve(pipe: Connection, contender: Contender, images: NDArray[np.uint8], compared: int) -> None:
    try:
        started = time.perf_counter()
        answer, health = contender.open()
        answer(images[:1])
        seconds = time.perf_counter() - started
        embedding = None
        if contender.has_weights:
            embedding = np.concatenate([answer(images[n : n + 1]) for n in range(compared)])
        pipe.send(Opened(health, seconds, embedding))
        while True:
            batch, seconds = pipe.recv()
            pipe.send((time_runs(partial(answer, images[:batch]), seconds), _peak_bytes()))
    except (EOFError, ConnectionError):  # the parent is done, or dead
        pass
    except CbmirError as error:
        pipe.send(error)
    except Exception as error:  # noqa: BLE001  whatever a library raises is told by the parent
        pipe.send(EngineError(f"{contender.name}: {type(error).__name__}: {error}"))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """What is started inside of the block ignores SIGINT from its first moment."""
    if threading.current_thread() is not threading.main_thread():  # where Python allows no change of a handler
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _peak_bytes() -> int | None:
    """The most memory that this process had at once, or None where the system does not tell.

    (getrusage's ru_maxrss begins at the parent's size, whose memory a new process has until it runs its own program.)
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
