"""Run the cells of a benchmark: each in a process of its own, several at a time, here or as Ray tasks.

A process a cell: one that crashes or is killed for memory takes nothing with it, Lightning can start it once more for
each further GPU, and a finished cell is never run again.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cbmir.files import write_json
from cbmir.training.benchmark.answers import FACTS, FAILED, LOG
from cbmir.training.benchmark.cells import cell_folder
from cbmir.training.benchmark.methods import METHODS
from cbmir.training.benchmark.on_ray import on_ray
from cbmir.training.benchmark.plan import Cell, Plan
from cbmir.training.benchmark.processes import on_this_machine

log = logging.getLogger("cbmir")


def run_cells(report: Path, plan: Plan, *, jobs: int = 1, ray: str = "") -> int:
    """Run every cell that is not finished, `jobs` at a time; a failed one leaves failed.json and the rest goes on.

    Returns how many failed. `ray` is the address of a cluster whose nodes all see REPORT and the images, `auto`
    (that of RAY_ADDRESS, or a new one here), or empty: without Ray.
    Ctrl-C, or SIGTERM as schedulers send it, stops the running cells in a state from which they go on.
    """
    waiting = [cell for cell in plan.cells() if not (cell_folder(report, cell) / FACTS).exists()]
    # Those that rest on the BCE network's features have to wait for it.
    rounds = [[cell for cell in waiting if METHODS[cell.method].needs_bce is late] for late in (False, True)]
    total = len(list(plan.cells()))
    run, failed = on_ray(ray, jobs) if ray else on_this_machine(jobs), 0
    with (
        _terminated_like_interrupted(),
        logging_redirect_tqdm(),
        tqdm(total=total, initial=total - len(waiting), desc="cells", unit="cell", disable=None) as bar,
    ):
        for cells in rounds:
            with closing(run(report, cells)) as ended:  # at once when interrupted: it stops the processes
                for cell, code in ended:
                    failed += not _close(report, cell, code)
                    bar.update()
    return failed


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _close(report: Path, cell: Cell, code: int) -> bool:
    """Say how a cell ended, and keep the error of one that failed; returns whether it is finished."""
    folder = cell_folder(report, cell)
    if code == 0 and (folder / FACTS).exists():
        (folder / FAILED).unlink(missing_ok=True)
        log.info("%s: done", cell.name)
        return True
    text = (folder / LOG).read_text("utf-8", errors="replace").strip() if (folder / LOG).exists() else ""
    last = text.splitlines()[-1] if text else "no message"
    if code < 0:
        last = f"killed by {signal.Signals(-code).name}, perhaps for want of memory; last words: {last}"
    write_json(folder / FAILED, {"error": last.removeprefix("Error: "), "exit": code, "log": f"{cell.name}/{LOG}"})
    log.error("%s failed: %s", cell.name, last.removeprefix("Error: "))
    return False
