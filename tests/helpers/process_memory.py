"""Current memory of processes."""

from __future__ import annotations

import os
from pathlib import Path


def resident(pid: int) -> float:
    """Current MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_tree(pid: int) -> float:
    """Current MiB of a process and its descendants; 0 if it has ended."""
    total, found = 0.0, [pid]
    for one in found:
        try:
            total += resident(one)
            for thread in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, thread.read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
    return total
