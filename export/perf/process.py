"""Objects in their own processes, which are idle between calls; `cbmir speed` runs each contender in one.

So libraries share no threads or memory, and loading time and peak memory are measured per contender.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import CbmirError, EngineError
from cbmir.export.perf.contenders import Contender
from cbmir.process import Closing, signal_handled
from cbmir.runtime.engines.base import EngineHealth


class RemoteObject(Closing):
    """An object that `make` (picklable) creates in a spawned process; `call` calls its methods. Errors state `name`."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self.name = name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, make), daemon=True)
        with signal_handled(signal.SIGINT, signal.SIG_IGN):  # the parent handles Ctrl-C and ends the child
            self._process.start()
        theirs.close()  # so that `recv` fails once the process has ended

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the process. Raises its CbmirError, or EngineError for any other failure."""
        with suppress(ConnectionError):  # the process has ended; the pipe holds its error
            self._pipe.send((method, arguments))
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise EngineError(
                f"{self.name}: its process ended (exit code {self._process.exitcode}) before it answered; with a large "
                "model the usual cause is too little memory"
            ) from None
        if isinstance(answer, CbmirError):
            raise answer
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def serve(pipe: Connection, name: str, make: Callable[[], object]) -> None:
    """Run a `RemoteObject`'s process: answer calls until the parent ends or a call fails."""
    try:
        made = make()
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(made, method)(*arguments))
    except (EOFError, ConnectionError):
        pass
    except CbmirError as error:
        pipe.send(error)
    except Exception as error:  # noqa: BLE001  the parent reports any error of a library
        pipe.send(EngineError(f"{name}: {type(error).__name__}: {error}"))


@dataclass(frozen=True, eq=False)
class Opened:
    """Facts about an opened contender: `seconds` until its first answer, with the import of its library, and the
    `embedding` float32 [M, D] of the first M images (None for random weights)."""

    health: EngineHealth
    seconds: float
    embedding: NDArray[np.float32] | None


class RunningContender:
    """An open contender. `images` is uint8 [M, 1, S, S]; a batch of N is the first N images."""

    def __init__(self, contender: Contender, images: NDArray[np.uint8], compared: int) -> None:
        self._images = images
        started = time.perf_counter()
        self._answer, health = contender.open()
        self._answer(images[:1])
        seconds = time.perf_counter() - started
        ones = [images[n : n + 1] for n in range(compared)]
        embedding = np.concatenate(list(map(self._answer, ones))) if contender.has_weights else None
        self._opened = Opened(health, seconds, embedding)

    def opened(self) -> Opened:
        return self._opened

    def turn(self, batch: int, seconds: float) -> tuple[list[float], int | None]:
        return time_runs(partial(self._answer, self._images[:batch]), seconds), memory().get("VmHWM")


class BenchProcess(RemoteObject):
    """A `RunningContender` in its own process. `peak_bytes` is the peak memory of that process."""

    def __init__(self, contender: Contender, images: NDArray[np.uint8], *, compared: int = 16) -> None:
        super().__init__(contender.name, partial(RunningContender, contender, images, compared))
        self.peak_bytes: int | None = None

    def opened(self) -> Opened:
        """Wait for the contender's first answer. Raises the error of opening it."""
        return cast(Opened, self.call("opened"))

    def turn(self, batch: int, seconds: float) -> list[float]:
        """Run at least one batch, for about `seconds`, and return the seconds of each. Raises the error of running."""
        times: list[float]
        times, self.peak_bytes = self.call("turn", batch, seconds)
        return times


def time_runs(run: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Repeat `run` until `seconds` have passed, and return the seconds of each run, at least one. A first run is not
    counted, since another contender has just used the processor's caches."""
    run()
    times: list[float] = []
    started = now = clock()
    while not times or now - started < seconds:
        before, _ = now, run()
        now = clock()
        times.append(now - before)
    return times


def memory() -> dict[str, int]:
    """Read bytes by name from /proc/self/status; {} without it. VmRSS is the current memory, RssAnon its private and
    RssFile its mapped part, VmHWM the peak. (getrusage's ru_maxrss starts at the parent's size.)"""
    status = Path("/proc/self/status")
    lines = [line.split() for line in status.read_text().splitlines()] if status.exists() else []
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
