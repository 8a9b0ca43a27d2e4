"""Attacks on stored data: kills, damage, full disks, concurrent access."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from lab import Lab, attack, told
from watch import cbmir

from gallery_faults import Server, damage, damage_files, fill_disks, kill_builders, kill_writers, make_undamaged
from gallery_process import let_the_index_propose_all

LOAD = Path(__file__).resolve().parents[2] / "benchmarks" / "gallery_load.py"


def steps(of: Iterator[object]) -> Iterator[str]:
    """Turn checks into attempts: each one keeps the promise, until the first AssertionError."""
    let_the_index_propose_all()
    try:
        for _ in of:
            yield ""
    except AssertionError as error:
        yield (str(error).strip().splitlines() or ["not as it must be"])[-1]


@attack(60)
def kills_of_a_writer(lab: Lab, count: int) -> Iterator[str]:
    """SIGKILL while a gallery is added to, updated, merged, compacted or rebuilt: acknowledged entries are there, and
    unfinished work is there completely or not at all."""
    with closing(Server()) as server:
        yield from steps(kill_writers(server, lab.new() / "g", count))


@attack(30)
def kills_of_a_build(lab: Lab, count: int) -> Iterator[str]:
    """SIGKILL while a gallery is built: the old or the new gallery is there and complete, and the next run
    continues."""
    with closing(Server()) as server:
        yield from steps(kill_builders(server, lab.new(), count))


@attack(150)
def damaged_galleries(lab: Lab, count: int) -> Iterator[str]:
    """Flipped bits, cut and zeroed files: every answer is right or an error, and `index verify` reports the damage."""
    undamaged = lab.new() / "undamaged"
    make_undamaged(undamaged)
    with closing(Server()) as server:
        yield from steps(damage_files(server, undamaged, lab.new(), count))


@attack(120)
def full_disk(lab: Lab, count: int) -> Iterator[str]:
    """From a random point of a write on, no file can grow (RLIMIT_FSIZE): an error, nothing lost, nothing half written.
    With room again the work continues."""
    with closing(Server()) as server:
        yield from steps(fill_disks(server, lab.new() / "g", count))


@attack(20)
def damaged_models(lab: Lab, count: int) -> Iterator[str]:
    """Model files with flipped bits, cut or zeroed: a typed error or an answer, no crash."""
    rng = random.Random(4)
    for _ in range(count):
        damaged = lab.new() / "model.onnx"
        shutil.copy(lab.model, damaged)
        what = damage(damaged, rng)
        reason = cbmir("query", damaged, lab.gallery, lab.folder / "00.png")
        yield told(what, reason)


@attack(180, whole=True)
def writers_at_once(lab: Lab, count: int) -> Iterator[str]:
    """One writer and eight readers at once, in processes and threads: every answer equals a brute-force search of the
    state that it names."""
    command = [sys.executable, str(LOAD), "--operations", str(count), "--readers", "8" if count > 10 else "2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    for _ in range(count):
        yield "" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1]
