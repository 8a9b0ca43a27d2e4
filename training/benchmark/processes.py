"""A process for each cell, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import torch

from cbmir.training.benchmark.answers import LOG
from cbmir.training.benchmark.cells import cell_folder
from cbmir.training.benchmark.plan import Cell

#: Runs cells and yields each with its process's exit code, as they end.
Run = Callable[[Path, Sequence[Cell]], Generator[tuple[Cell, int], None, None]]


def command(report: Path, cell: Cell) -> list[str]:
    """What runs one cell."""
    return [sys.executable, "-m", "cbmir", "benchmark-cell", str(report.resolve()), cell.name]


def environment(slot: int, jobs: int) -> dict[str, str]:
    """The environment of one of `jobs` processes that run side by side; what the user has set stays.

    They share the cores and take turns over the GPUs. glibc is told to keep memory between steps, which makes training
    on a CPU up to twice as fast (it else returns every activation to the kernel).
    """
    own = dict(os.environ)
    own.setdefault("MALLOC_MMAP_MAX_", "0")
    own.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**40))
    if jobs > 1:
        own.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        gpus = own.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        if len(gpus) > 1:
            own["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return own


def log_file(report: Path, cell: Cell) -> Path:
    """Where a cell's process writes what it says; its folder is made."""
    folder = cell_folder(report, cell)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / LOG


def on_this_machine(jobs: int) -> Run:
    """Processes on this machine."""

    def run(report: Path, cells: Sequence[Cell]) -> Generator[tuple[Cell, int], None, None]:
        slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(jobs):
            slots.put(slot)
        running: dict[int, subprocess.Popen[bytes]] = {}
        starting, stopped = threading.Lock(), threading.Event()

        def one(cell: Cell) -> int:
            slot = slots.get()
            try:
                with starting:  # so that a stop misses no process
                    if stopped.is_set():
                        return -signal.SIGTERM
                    with log_file(report, cell).open("ab") as stream:
                        # A session of its own: Ctrl-C reaches the cells from here alone, once.
                        running[slot] = subprocess.Popen(
                            command(report, cell), stdout=stream, stderr=stream, env=environment(slot, jobs),
                            start_new_session=True,
                        )  # fmt: skip
                return running[slot].wait()
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(one, cell): cell for cell in cells}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # all done, or stopped
                with starting:
                    stopped.set()
                    for process in running.values():
                        if process.poll() is None:
                            with suppress(ProcessLookupError):  # with those that Lightning started for more devices
                                os.killpg(process.pid, signal.SIGTERM)

    return run
