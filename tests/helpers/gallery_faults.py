"""Kill writers of a gallery and damage its files, and check it: one yield per check, AssertionError if it fails.

Processes of `gallery_process.py` do the work on the gallery, so that they can be killed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import gallery_process
from cbmir.manifest import Manifest, Row
from cbmir.runtime.gallery.build import build_gallery
from cbmir.runtime.gallery.build.folder import GalleryFolder
from cbmir.runtime.gallery.gallery import Gallery, is_gallery_file
from cbmir.runtime.gallery.maintenance import verify
from gallery_process import (
    CARD,
    DIM,
    ENGINE,
    contents,
    entry_of,
    jpeg_of,
    patient_of,
    vector_of,
)


class Server:
    """`serve` in its own process, which is restarted after it has died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, *task: object) -> None:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, gallery_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._buffer = b""
            assert self.line() == "ready"
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task).encode() + b"\n")
        self.process.stdin.flush()

    def line(self, within: float | None = None) -> Any:
        """The next line, or None after `within` seconds. Raises EOFError if the process has died."""
        assert self.process is not None
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            if within is not None and not select.select([self.process.stdout], [], [], within)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                died = self.process.wait()
                self.close()
                raise EOFError(f"the process died ({died})")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def until_killed(self, *task: object, rng: random.Random) -> list[dict[str, Any]]:
        """Run a task for a random number of steps and a random time, kill it, and return all its lines."""
        self.ask(*task)
        pid = self.line()["pid"]
        said: list[dict[str, Any]] = []
        for _ in range(rng.choice([1, 1, 2, 3, 6])):
            said.append(self.line())
            assert "bug" not in said[-1], said[-1]["bug"]
        line = self.line(within=rng.choice([0.0005, 0.002, 0.01, 0.05]) * rng.random())
        os.kill(pid, signal.SIGKILL)
        while line is None or "dead" not in line:
            said += [line] if line else []
            line = self.line()
        bugs = [one["bug"] for one in said if "bug" in one]
        assert not bugs, bugs[0]
        return said

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


# -- killed

Known = dict[str, str]  # id -> report


def after(known: Known, task: dict[str, Any]) -> Known:
    """The expected content after a task."""
    known = copy.copy(known)
    match task["kind"]:
        case "add" | "merge":
            known |= dict.fromkeys(task["ids"], "")
        case "remove":
            known = {name: report for name, report in known.items() if name not in task["ids"]}
        case "patient":
            known = {name: report for name, report in known.items() if patient_of(name) != task["patient"]}
        case "update":
            known |= dict.fromkeys(task["ids"], task["report"])
    return known


def check(folder: Path, possible: list[Known]) -> Known:
    """Check that the gallery equals one of the possible contents, and return that one."""
    with Gallery.open(folder) as gallery:
        known = {entry.id: entry.report for entry in gallery.every_entry()}
        assert known in possible
        for name, report in known.items():
            assert gallery.entry(name) == entry_of(name, report)
        names = sorted(known)
        vectors = np.array([vector_of(name) for name in names]).reshape(len(names), DIM)
        for name in names[:20]:
            assert gallery.thumbnail(name) == jpeg_of(name)
        for number in range(2):
            query = vector_of(f"query {number}")
            distances = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
            expected = [names[row] for row in np.argsort(distances)[:5]]
            for exact in (None, True):
                assert [hit.entry.id for hit in gallery.search(query, 5, exact=exact).hits] == expected
    assert verify(folder) == []
    assert [path.name for path in folder.iterdir() if not is_gallery_file(path.name)] == []
    return known


def kill_writers(server: Server, folder: Path, kills: int) -> Iterator[None]:
    rng = random.Random(1)
    known: Known = {}
    Gallery.create(folder, CARD).close()
    reached = {"at rest": 0, "begun": 0, "undone": 0}
    for number in range(kills):
        said = server.until_killed("write", str(folder), number, rng=rng)
        for one in said:
            if "done" in one:
                known = after(known, one["done"])
        possible = [known]
        if said and "begun" in said[-1]:
            possible.append(after(known, said[-1]["begun"]))
        known = check(folder, possible)
        reached["at rest" if len(possible) == 1 else "begun"] += 1
        reached["undone"] += len(possible) == 2 and known == possible[0] != possible[1]
        yield
        if len(known) > 150:
            with Gallery.open(folder) as gallery:
                gallery.remove(ids=list(known)[:120])
            known = {name: report for name, report in known.items() if name not in list(known)[:120]}
    assert reached["begun"] >= kills // 4, reached  # otherwise no writer was killed while writing


def kill_builders(server: Server, folder: Path, kills: int) -> Iterator[None]:
    (folder / "images").mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64), np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number:02}.png")
    rng = random.Random(2)
    built = 0  # images
    for number in range(kills):
        possible = [built]
        for one in server.until_killed("build", str(folder), number, rng=rng):
            possible = [possible[0], one["begun"]] if "begun" in one else [one["done"]]
        if possible[0] or GalleryFolder(folder / "built").has_gallery():
            with Gallery.open(folder / "built") as gallery:
                ids = gallery.ids()
            # As acknowledged, or as the unfinished task would leave it; an addition leaves whole batches of 4.
            assert ids == [f"{n:02}" for n in range(len(ids))]
            added = len(ids) - possible[0] if possible[-1] == 40 else 0
            assert len(ids) in possible or (added > 0 and added % 4 == 0)
            built = len(ids)
            assert verify(folder / "built") == []
        yield
    rows = tuple(Row(path, "p", (1, None)) for path in (folder / "images").iterdir())
    build_gallery(ENGINE, Manifest(CARD.labels, rows), folder / "built", splits=["all"], workers=0)
    with Gallery.open(folder / "built") as gallery:
        assert len(gallery) == 40


# -- a full disk


def fill_disks(server: Server, folder: Path, writes: int) -> Iterator[None]:
    Gallery.create(folder, CARD).close()
    server.ask("fill", str(folder), writes)
    server.line()  # its pid
    known: Known = {}
    refused = 0
    while "dead" not in (said := server.line()):
        assert "bug" not in said, said["bug"]
        known = after(known, said["done"]) if "done" in said else known
        refused += "refused" in said
        yield
    check(folder, [known])
    assert refused > writes // 10, refused  # otherwise the disk was never full


# -- damaged


def make_undamaged(folder: Path) -> None:
    """Make a gallery as a killed process leaves it: with older derived files, and a log with the latest writes."""
    with Gallery.create(folder.with_name("g"), CARD, index="bf16") as gallery:
        gallery.add(*contents([f"e{n}" for n in range(60)]))
        gallery.write_index()
    with Gallery.open(folder.with_name("g")) as gallery:  # reopened, so that most data is in the database itself
        gallery.add(*contents([f"late{n}" for n in range(5)]))
        gallery.update([entry_of("e7", "changed")])
        shutil.copytree(gallery.path, folder)
    sizes = [(folder / f"gallery.sqlite{end}").stat().st_size for end in ("", "-wal")]
    assert sizes[0] > 20_000 < sizes[1]


def damage(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "cut", "zero"])
    at = rng.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at:]
    else:
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)
    return f"{kind} {path.name} at {at}"


def damage_files(server: Server, undamaged: Path, folder: Path, damages: int) -> Iterator[None]:
    server.ask("look", str(shutil.copytree(undamaged, folder / "whole")), 0)
    whole = server.line()
    truth = whole["answers"]
    assert whole["problems"] == []
    assert not [answer for answer in truth.values() if "GalleryError" in str(answer)]
    rng = random.Random(3)
    refused = right = 0
    for number in range(damages):
        one = shutil.copytree(undamaged, folder / str(number))
        files = sorted(path for path in one.rglob("*") if path.is_file() and path.stat().st_size)
        chosen = rng.choice([*files, *(path for path in files if path.name.startswith("gallery.sqlite"))])
        what = damage(chosen, rng)
        server.ask("look", str(one), 0)
        try:
            seen = server.line()
        except EOFError as error:
            raise AssertionError(f"{what}: {error}") from error
        assert "bug" not in seen, (what, seen["bug"])
        answers, problems = seen["answers"], seen["problems"]
        errors = {name: answer for name, answer in answers.items() if str(answer).startswith("GalleryError")}
        wrong = {name: (answer, truth.get(name)) for name, answer in answers.items()
                 if name not in errors and answer != truth.get(name)}  # fmt: skip
        assert not wrong, (what, wrong)
        if chosen.parent != one:  # a derived file
            assert not errors, (what, errors)
            assert not problems, (what, problems)  # repaired
        if errors:
            assert problems, (what, errors)
        refused += bool(errors)
        right += not errors
        shutil.rmtree(one)
        yield
    assert (refused and right) or damages < 20
