"""Run the cells of a benchmark, each in its own process, several at a time: here, or as tasks on a Ray cluster.

A cell that crashes or runs out of memory does not stop the others, and Lightning can start its process once per GPU.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cbmir.errors import require
from cbmir.files import write_json
from cbmir.process import sigterm_interrupts
from cbmir.training.comparison.cells import FAILED, LOG, cell_folder, is_finished
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Plan

log = logging.getLogger("cbmir")

#: Runs cells, and yields each with the exit code of its process when it ends.
Run = Callable[[Path, Sequence[Cell]], Generator[tuple[Cell, int], None, None]]


def command(report: Path, cell: Cell) -> list[str]:
    """Return the command that runs one cell."""
    return [sys.executable, "-m", "cbmir", "benchmark-cell", str(report.resolve()), cell.name]


def environment(slot: int, jobs: int) -> dict[str, str]:
    """Return the environment of one of `jobs` parallel processes, based on the user's.

    The processes share the cores, and each gets one of the GPUs. glibc is set to keep memory between steps, which is up
    to twice as fast on a CPU.
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
    """Return the path of the log of a cell's process, and create its folder."""
    folder = cell_folder(report, cell)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / LOG


def on_this_machine(jobs: int) -> Run:
    """Return a function that runs the processes on this machine."""

    def run(report: Path, cells: Sequence[Cell]) -> Generator[tuple[Cell, int], None, None]:
        slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(jobs):
            slots.put(slot)
        running: dict[int, subprocess.Popen[bytes]] = {}
        starting, stopped = threading.Lock(), threading.Event()

        def one(cell: Cell) -> int:
            slot = slots.get()
            try:
                with starting:  # so that a stop reaches every process
                    if stopped.is_set():
                        return -signal.SIGTERM
                    with log_file(report, cell).open("ab") as stream:
                        # A new session, so that Ctrl-C does not reach the cells directly: they are stopped below.
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
                            with suppress(ProcessLookupError):  # the group includes processes that Lightning started
                                os.killpg(process.pid, signal.SIGTERM)

    return run


def on_ray(address: str, jobs: int) -> Run:
    """Return a function that runs Ray tasks, each of which starts the same process on its node."""
    ray = require("ray", "distributed")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", "local")
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    resources = ray.cluster_resources()
    if resources.get("GPU", 0):
        needs: dict[str, Any] = {"num_gpus": 1}
    else:
        largest = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
        needs = {"num_cpus": max(1, min(largest, int(resources["CPU"]) // jobs))}
    log.info("Ray: %d CPUs, %d GPUs; each cell takes %s.", resources["CPU"], resources.get("GPU", 0), needs)

    def task(arguments: list[str], path: str, own: dict[str, str]) -> int:
        with Path(path).open("ab") as stream:
            return subprocess.run(arguments, stdout=stream, stderr=stream, env=os.environ | own, check=False).returncode

    remote = ray.remote(**needs, max_retries=0)(task)
    own = {name: value for name, value in environment(0, 1).items() if name.startswith("MALLOC_")}
    # Ray's default is one thread for a task with GPUs.
    own["OMP_NUM_THREADS"] = str(needs.get("num_cpus", max(1, int(resources["CPU"] // resources.get("GPU", 1)))))

    def run(report: Path, cells: Sequence[Cell]) -> Generator[tuple[Cell, int], None, None]:
        logs = [str(log_file(report, cell).resolve()) for cell in cells]
        tasks = [remote.remote(command(report, cell), path, own) for cell, path in zip(cells, logs, strict=True)]
        waiting = dict(zip(tasks, cells, strict=True))
        try:
            while waiting:
                (done, *_), _ = ray.wait(list(waiting))
                try:
                    code = ray.get(done)
                except ray.exceptions.RayError as error:  # the node or its worker was lost
                    log.warning("Ray: %s", error)
                    code = 1
                yield waiting.pop(done), code
        finally:  # all done, or stopped: a cancelled task kills its process
            for reference in waiting:
                ray.cancel(reference)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=10)

    return run


def run_cells(report: Path, plan: Plan, *, jobs: int = 1, ray: str = "") -> int:
    """Run every unfinished cell, `jobs` at a time. A failed cell leaves failed.json, and the others continue.

    Returns the number of failures. `ray` is the address of a cluster whose nodes can all read REPORT and the images,
    `auto` (RAY_ADDRESS, or a new cluster on this machine), or empty to run without Ray. Ctrl-C or a scheduler's SIGTERM
    stops the running cells; they can be resumed.
    """
    every = list(plan.cells())
    waiting = [cell for cell in every if not is_finished(report, cell)]
    # Cells that use the BCE network's features wait for it.
    rounds = [[cell for cell in waiting if METHODS[cell.method].needs_bce is late] for late in (False, True)]
    run, failed = on_ray(ray, jobs) if ray else on_this_machine(jobs), 0
    with (
        sigterm_interrupts(),
        logging_redirect_tqdm(),
        tqdm(total=len(every), initial=len(every) - len(waiting), desc="cells", unit="cell", disable=None) as bar,
    ):
        for cells in rounds:
            with closing(run(report, cells)) as ended:  # an interruption closes it, which stops the processes
                for cell, code in ended:
                    failed += not _close(report, cell, code)
                    bar.update()
    return failed


def _close(report: Path, cell: Cell, code: int) -> bool:
    """Log how a cell ended, and write the error of a failed one; return whether the cell is finished."""
    folder = cell_folder(report, cell)
    if code == 0 and is_finished(report, cell):
        (folder / FAILED).unlink(missing_ok=True)
        log.info("%s: done", cell.name)
        return True
    text = (folder / LOG).read_text("utf-8", errors="replace").strip() if (folder / LOG).exists() else ""
    last = text.splitlines()[-1] if text else "no message"
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}, perhaps for lack of memory; last message: {last}"
    last = last.removeprefix("Error: ")
    write_json(folder / FAILED, {"error": last, "exit": code, "log": f"{cell.name}/{LOG}"})
    log.error("%s failed: %s", cell.name, last)
    return False
