"""A process for each cell as Ray tasks, here or on a cluster whose nodes all see REPORT and the images."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from cbmir.errors import require
from cbmir.training.benchmark import processes
from cbmir.training.benchmark.plan import Cell
from cbmir.training.benchmark.processes import Run

log = logging.getLogger("cbmir")


def on_ray(address: str, jobs: int) -> Run:
    """Ray tasks, each of which starts the same process on its node."""
    ray = require("ray", "distributed")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
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
    own = {name: value for name, value in processes.environment(0, 1).items() if name.startswith("MALLOC_")}
    # Ray's own choice is one thread where a task asks for GPUs.
    own["OMP_NUM_THREADS"] = str(needs.get("num_cpus", max(1, int(resources["CPU"] // resources.get("GPU", 1)))))

    def run(report: Path, cells: Sequence[Cell]) -> Generator[tuple[Cell, int], None, None]:
        logs = [str(processes.log_file(report, cell).resolve()) for cell in cells]
        tasks = [
            remote.remote(processes.command(report, cell), path, own) for cell, path in zip(cells, logs, strict=True)
        ]
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
        finally:  # all done, or stopped: the task is interrupted, and kills its process
            for reference in waiting:
                ray.cancel(reference)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=10)

    return run
