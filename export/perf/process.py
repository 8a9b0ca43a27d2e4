"""An object in its own process, idle while others have their turn; for `cbmir speed` a contender.

Libraries then share no threads or memory, and each contender has its own loading time and peak memory.
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
    """Starts a process by spawn, in which `make` (picklable) creates an object; `call` calls its methods. Errors name
    `name`."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        self.name = name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, make), daemon=True)
        with signal_handled(signal.SIGINT, signal.SIG_IGN):  # the parent handles Ctrl-C, and ends this process
            self._process.start()
        theirs.close()  # so that a wait for an answer ends with the process

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method there. Raises the process's CbmirError, and EngineError for any other failure."""
        with suppress(ConnectionError):  # it has ended, and the pipe holds its error
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
    """The process of a `RemoteObject`: answers until the parent stops or dies, or something fails."""
    try:
        made = make()
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(made, method)(*arguments))
    except (EOFError, ConnectionError):
        pass
    except CbmirError as error:
        pipe.send(error)
    except Exception as error:  # noqa: BLE001  whatever a library raises is told by the parent
        pipe.send(EngineError(f"{name}: {type(error).__name__}: {error}"))


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened contender: `seconds` until its first answer, including the import of its library, and its `embedding`
    of the `compared` images, float32 [M, D] (None for random weights)."""

    health: EngineHealth
    seconds: float
    embedding: NDArray[np.float32] | None


class RunningContender:
    """An open contender. `images` is uint8 [M, 1, S, S]; a batch is its first images."""

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
    """A `RunningContender` in its own process. `peak_bytes` is its largest memory."""

    def __init__(self, contender: Contender, images: NDArray[np.uint8], *, compared: int = 16) -> None:
        super().__init__(contender.name, partial(RunningContender, contender, images, compared))
        self.peak_bytes: int | None = None

    def opened(self) -> Opened:
        """Wait for the contender's first answer. Raises what opening it raised."""
        return cast(Opened, self.call("opened"))

    def turn(self, batch: int, seconds: float) -> list[float]:
        """Run batches for about this long, at least one, and return the seconds of each. Raises what running raised."""
        times: list[float]
        times, self.peak_bytes = self.call("turn", batch, seconds)
        return times


def time_runs(run: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each run, at least one, until `seconds` have passed. The first run is not counted, since another
    contender has used the processor and its caches."""
    run()
    times: list[float] = []
    started = now = clock()
    while not times or now - started < seconds:
        before, _ = now, run()
        now = clock()
        times.append(now - before)
    return times


def memory() -> dict[str, int]:
    """Bytes by the names of /proc/self/status, if it exists: VmRSS now, RssAnon (its own) and RssFile (mapped), and
    VmHWM at its peak. (getrusage's ru_maxrss begins at the parent's size.)"""
    status = Path("/proc/self/status")
    lines = [line.split() for line in status.read_text().splitlines()] if status.exists() else []
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
