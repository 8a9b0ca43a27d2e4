"""Test a gallery under load: concurrent readers and a writer, with every answer compared with brute force.

    python benchmarks/gallery_load.py --seconds 120 -o docs/gallery/load.json

Half of the readers are processes, half are threads of one process that share a gallery. The generation's number
determines what the writer does (add, update, remove), so every reader can compute the content of any generation
(`Replica`). An exact answer must match in every entry. An answer by the index must have the right number of entries of
that generation, with true distances; its recall is measured. The first wrong answer ends the run with an error.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import click
import numpy as np
from figures import any_card
from numpy.typing import NDArray

from cbmir.files import write_json
from cbmir.machine import describe_machine
from cbmir.runtime import Entry, Gallery
from cbmir.runtime.gallery import index_cache
from cbmir.runtime.gallery.entry import SearchResult
from cbmir.runtime.gallery.filters import Filter

DIM, START, K = 64, 3000, 10
TAIL = 100  # low, so that the index files are rebuilt every few seconds
LABELS = ("Effusion", "Mass")


class Replica:
    """The content of the gallery at a generation, computed in the same way by every process."""

    def __init__(self) -> None:
        self.generation = 0
        self.entries: list[Entry] = []
        self.vectors = np.empty((0, DIM))
        self.given = 0  # number of ids so far

    def next(self) -> tuple[str, list[Entry], NDArray[np.float32]]:
        """Advance one generation. Returns "add", "update" or "remove", the entries, and the vectors of added ones."""
        self.generation += 1
        rng = np.random.default_rng((7, self.generation))
        kind = "add" if self.generation == 1 else str(rng.choice(["add", "add", "update", "remove"]))
        if kind == "add":
            count = START if self.generation == 1 else int(rng.integers(1, 40))
            own = [self._entry(self.given + n, 0) for n in range(count)]
            self.given += count
            vectors = rng.normal(size=(count, DIM)) + 1
            units = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
            self.entries += own
            self.vectors = np.concatenate([self.vectors, units.astype(np.float64)])
            return kind, own, units
        at = np.sort(rng.choice(len(self.entries), int(rng.integers(1, 20)), replace=False))
        own = [self.entries[n] for n in at]
        if kind == "update":
            own = [self._entry(int(entry.id), self.generation) for entry in own]
            for position, entry in zip(at, own, strict=True):
                self.entries[position] = entry
        else:
            self.entries = [entry for n, entry in enumerate(self.entries) if n not in set(at.tolist())]
            self.vectors = np.delete(self.vectors, at, axis=0)
        return kind, own, np.empty((0, DIM), np.float32)

    @staticmethod
    def _entry(number: int, version: int) -> Entry:
        rng = np.random.default_rng((11, number, version))
        values = rng.choice([1, 0, -1], len(LABELS)).tolist()
        return Entry(
            id=f"{number:08}", image=f"/{number}.png", patient_id=f"p{number % 500}", report=f"Version {version}.",
            view=str(rng.choice(["PA", "AP"])), labels=dict(zip(LABELS, values, strict=True)),
        )  # fmt: skip

    def nearest(self, query: NDArray[np.float32], wanted: Filter) -> tuple[list[Entry], NDArray[np.float64]]:
        """Return all entries that pass, nearest first (ties by id), and their distances."""
        passing = [n for n, entry in enumerate(self.entries) if passes(entry, wanted)]
        differences = self.vectors[passing] - query
        distances = np.sqrt(np.vecdot(differences, differences))  # summed as in the gallery, so bit-identical
        order = sorted(range(len(passing)), key=lambda n: (distances[n], self.entries[passing[n]].id))
        return [self.entries[passing[n]] for n in order], distances[order]


def passes(entry: Entry, wanted: Filter) -> bool:
    """Return whether an entry passes a filter of `any_filter`."""
    of_view = not wanted.view or entry.view == wanted.view
    return entry.patient_id not in wanted.exclude_patients and of_view and wanted.where in ("", *entry.positive)


def check(replica: Replica, query: NDArray[np.float32], wanted: Filter, found: SearchResult) -> float:
    """Return the recall of a correct answer. Raises AssertionError for a wrong one."""
    while replica.generation < found.generation:
        replica.next()
    if replica.generation != found.generation:
        raise AssertionError(f"an answer of generation {found.generation} after one of {replica.generation}")
    entries, distances = replica.nearest(query, wanted)
    expected = entries[:K]
    hits, far = [hit.entry for hit in found.hits], [hit.distance for hit in found.hits]
    if found.method == "exact" and hits != expected:
        raise AssertionError(f"generation {found.generation}: expected {expected}, found {hits}")
    true = {entry.id: (entry, distance) for entry, distance in zip(entries, distances.tolist(), strict=True)}
    for hit in found.hits:
        entry, distance = true.get(hit.entry.id, (None, -1.0))
        if hit.entry != entry or hit.distance != distance:
            raise AssertionError(f"generation {found.generation}: expected {entry} at {distance}, found {hit}")
    if len(hits) != len(expected) or far != sorted(far):
        raise AssertionError(f"generation {found.generation}: expected {len(expected)} in order, found {found.hits}")
    return len({entry.id for entry in hits} & {entry.id for entry in expected}) / max(len(expected), 1)


def read(gallery: Gallery, last: Any, seed: int) -> Counter[str]:
    """Search and check until an answer is of the last generation. The recall counts only answers by the index."""
    rng = np.random.default_rng((13, seed))
    replica, tally, seen = Replica(), Counter[str](), -1
    while not 0 < last.value <= seen:
        values = rng.normal(size=DIM) + 1
        query = (values / np.linalg.norm(values)).astype(np.float32)
        wanted, exact = any_filter(rng), bool(rng.integers(2))
        start = time.perf_counter()
        found = gallery.search(query, K, filter=wanted, exact=exact)
        seconds = time.perf_counter() - start
        if found.generation == 0:  # the writer has not started
            continue
        recall, by_index = check(replica, query, wanted, found), found.method != "exact"
        tally.update(
            answers=1, generations=int(found.generation != seen), exact=int(not by_index), filtered=int(bool(wanted)),
            recall=recall * by_index, seconds=seconds,
        )  # fmt: skip
        seen = found.generation
    return tally


def any_filter(rng: np.random.Generator) -> Filter:
    """Return a random filter: usually empty, or excluding two patients, or requiring a finding and a view."""
    kind = rng.integers(4)
    if kind == 0:
        return Filter(exclude_patients=frozenset({f"p{rng.integers(500)}", f"p{rng.integers(500)}"}))
    return Filter(where=str(rng.choice(LABELS)), view="PA") if kind == 1 else Filter()


def reader(path: Path, last: Any, seeds: Sequence[int], results: Queue[Any]) -> None:
    """Read in this process, with one thread per seed."""
    try:
        index_cache.TAIL_LIMIT = TAIL
        with Gallery.open(path) as gallery, ThreadPoolExecutor(len(seeds)) as pool:
            results.put(list(pool.map(lambda seed: read(gallery, last, seed), seeds)))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        results.put(f"{type(error).__name__}: {error}")


def write(path: Path, last: Any, seconds: float, operations: int, results: Queue[Any]) -> None:
    """Write in this process, for `seconds` or a number of `operations`, then publish the last generation."""
    try:
        index_cache.TAIL_LIMIT = TAIL
        replica, end = Replica(), time.monotonic() + seconds
        with Gallery.open(path) as gallery:
            while replica.generation < operations or (not operations and time.monotonic() < end):
                kind, entries, vectors = replica.next()
                if kind == "add":
                    gallery.add(entries, vectors)
                elif kind == "update":
                    gallery.update(entries)
                else:
                    gallery.remove(ids=[entry.id for entry in entries])
                if replica.generation == 1:
                    gallery.write_index()
        last.value = replica.generation
        results.put(replica.generation)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        last.value = 1  # ends the readers
        results.put(f"{type(error).__name__}: {error}")


def load(path: Path, seconds: float, operations: int, readers: int) -> dict[str, Any]:
    """Run the test, and return its figures as JSON types. Raises AssertionError for a wrong answer."""
    Gallery.create(path, any_card(LABELS, DIM, fingerprint="load"), index="int8").close()
    context = get_context("spawn")
    last, results = context.Value("q", 0), context.Queue()
    groups = [[seed] for seed in range(readers // 2)] + [list(range(readers // 2, readers))]
    start = time.perf_counter()
    processes = [context.Process(target=reader, args=(path, last, seeds, results)) for seeds in groups]
    processes.append(context.Process(target=write, args=(path, last, seconds, operations, results)))
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]  # each process puts one, even after an error
    for process in processes:
        process.join()
    wrong = [one for one in found if isinstance(one, str)]
    if wrong:
        raise AssertionError("; ".join(wrong))
    tallies = [tally for one in found if isinstance(one, list) for tally in one]
    total = sum(tallies, Counter[str]())
    return {
        "seconds": time.perf_counter() - start,
        "readers": readers,
        "generations": next(one for one in found if isinstance(one, int)),
        **{name: total[name] for name in ("answers", "exact", "filtered")},
        "wrong": 0,
        "recall_by_index": total["recall"] / max(total["answers"] - total["exact"], 1),
        "generations_seen": [one["generations"] for one in tallies],
        "ms_an_answer": 1000 * total["seconds"] / total["answers"],
    }


@click.command()
@click.option("--seconds", default=120.0, show_default=True, help="Time that the writer writes.")
@click.option("--operations", default=0, help="Number of writes, instead of --seconds.")
@click.option("--readers", default=8, show_default=True, help="Half of them processes, half threads.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(seconds: float, operations: int, readers: int, output: Path | None) -> None:
    """Read and write concurrently, and check every answer."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        figures = load(Path(folder) / "gallery", seconds, operations, readers)
    if output is not None:
        write_json(output, figures | {"machine": describe_machine()})
    click.echo(", ".join(f"{name} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
