"""Compare speed: contenders take turns on the same images, in rounds.

On a shared machine, load changes absolute times by a factor of two, but within a round it is much the same for all
contenders. So rely on the ratio to the baseline per round, and its spread over the rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from cbmir.errors import CbmirError, EngineError
from cbmir.export.perf.contenders import Contender
from cbmir.export.perf.process import BenchProcess, Opened
from cbmir.machine import describe_machine
from cbmir.runtime.engines.base import EngineHealth

log = logging.getLogger("cbmir")

ROUNDS = 12
COMPARED = 16


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the baseline: median, 10th and 90th percentile over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """A contender's speed at one batch size: median time per batch over all runs, `p99` (None for fewer than 100 runs),
    and the median of each round in milliseconds, in order."""

    batch: int
    contender: str
    milliseconds: float
    p99: float | None
    images_per_second: float
    ratio: Ratio
    runs: int
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Entrant:
    """A contender in the report.

    Attributes:
        load_seconds: Time from opening to the first answer.
        peak_memory_mb: Peak memory of its process over all batch sizes; None if the system does not report it.
        cosine_distance: Maximum of 1 - cosine to the first contender's embeddings; None for random weights.
    """

    name: str
    health: EngineHealth
    load_seconds: float
    peak_memory_mb: float | None
    cosine_distance: float | None


@dataclass(frozen=True)
class BenchReport:
    """The results of a run. `finished` is False if it was stopped before the last round."""

    baseline: str
    finished: bool
    seconds: float
    entrants: tuple[Entrant, ...]
    speeds: tuple[Speed, ...]
    machine: dict[str, Any] = field(default_factory=describe_machine)
    images: str = "smooth random images, uint8, seed 0"
    schema: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return JSON types, with the field names as keys; speeds sorted by batch size, fastest first."""
        return asdict(self)


#: (batch size, duration in seconds) -> seconds of each run.
Turn = Callable[[int, float], list[float]]
#: (batch size, contender) -> for each round, the seconds of each run.
Times = dict[tuple[int, str], list[list[float]]]


def bench(
    contenders: Sequence[Contender], size: int, *, batches: Sequence[int] = (1, 8), baseline: str | None = None,
    seconds: float = 3.0,
) -> BenchReport:  # fmt: skip
    """Time contenders, which take turns and are all in memory. Ctrl-C after the first round returns partial results.

    Args:
        size: Side of the square images in pixels.
        baseline: The name of a contender; None means the first.
        seconds: Approximate time for each contender at each batch size.

    Raises:
        EngineError: No contenders, or a batch size below 1.
        CbmirError: A contender cannot be opened or run. Optional ones that cannot be opened are left out, with a
            warning.
    """
    if not contenders or min(batches, default=0) < 1:
        raise EngineError(f"expected contenders and batch sizes of at least 1, found {len(contenders)} and {batches}")
    images = synthetic_images(max(*batches, COMPARED), size)
    times: Times = {}
    finished = False
    with ExitStack() as stack:
        processes, opened = _open(contenders, images, stack)
        baseline = baseline or next(iter(processes))
        try:
            take_turns({name: process.turn for name, process in processes.items()}, batches, seconds, times)
            finished = True
        except KeyboardInterrupt:
            if (batches[0], next(reversed(processes))) not in times:  # not even one round of one batch size
                raise
        peaks = {name: process.peak_bytes for name, process in processes.items()}
    distances = cosine_distances({name: one.embedding for name, one in opened.items()})
    entrants = tuple(
        Entrant(name, one.health, one.seconds, peak / 1e6 if (peak := peaks[name]) else None, distances[name])
        for name, one in opened.items()
    )
    return BenchReport(baseline, finished, seconds, entrants, summarise(times, baseline))


def take_turns(
    turns: Mapping[str, Turn], batches: Sequence[int], seconds: float, times: Times, rounds: int = ROUNDS
) -> None:
    """Run each contender at each batch size once per round, and add to `times`. Each round starts with a different
    contender, so that the order favours none."""
    names = list(turns)
    with tqdm(total=rounds * len(batches) * len(names), desc="Measuring", unit="turn", disable=None) as bar:
        for number in range(rounds):
            first = number % len(names)
            for batch in batches:
                for name in names[first:] + names[:first]:
                    turn = turns[name](batch, seconds / rounds)
                    times.setdefault((batch, name), []).append(turn)
                    bar.update()


def summarise(times: Times, baseline: str) -> tuple[Speed, ...]:
    """Return speeds sorted by batch size, fastest first; batch sizes that the baseline has not run are left out."""
    speeds = [
        _speed(batch, name, rounds, times[batch, baseline])
        for (batch, name), rounds in times.items()
        if (batch, baseline) in times
    ]
    return tuple(sorted(speeds, key=lambda speed: (speed.batch, speed.milliseconds)))


def _speed(batch: int, name: str, rounds: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Speed:
    runs = np.concatenate(rounds) * 1000
    median = float(np.median(runs))
    p99 = float(np.percentile(runs, 99)) if len(runs) >= 100 else None
    return Speed(
        batch=batch, contender=name, milliseconds=median, p99=p99, images_per_second=batch / median * 1000,
        ratio=ratio(_medians(rounds), _medians(baseline)), runs=len(runs), rounds=_medians(rounds),
    )  # fmt: skip


def ratio(own: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the speed relative to the baseline, over the rounds that both have."""
    low, median, high = np.percentile([other / mine for mine, other in zip(own, baseline, strict=False)], (10, 50, 90))
    return Ratio(float(median), float(low), float(high))


def cosine_distances(embeddings: Mapping[str, NDArray[np.float32] | None]) -> dict[str, float | None]:
    """Return the maximum of 1 - cosine of each contender's embeddings [M, D] and the first ones; None without any."""
    first = next((one for one in embeddings.values() if one is not None), None)
    return {
        name: None if own is None or first is None else float(1 - (_unit(own) * _unit(first)).sum(axis=1).min())
        for name, own in embeddings.items()
    }


def synthetic_images(count: int, size: int) -> NDArray[np.uint8]:
    """Make smooth random images uint8 [count, 1, size, size], always the same. Content does not affect speed."""
    rng = np.random.default_rng(0)
    images = np.empty((count, 1, size, size), np.uint8)
    for image in images:
        blobs = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
        image[0] = np.array(blobs.resize((size, size), Image.Resampling.BICUBIC))
    return images


def _open(
    contenders: Sequence[Contender], images: NDArray[np.uint8], stack: ExitStack
) -> tuple[dict[str, BenchProcess], dict[str, Opened]]:
    """Open the contenders one by one, so that each has the machine to itself while it loads."""
    processes, opened = {}, {}
    for contender in tqdm(contenders, desc="Opening", unit="contender", disable=None):
        process = stack.enter_context(BenchProcess(contender, images, compared=COMPARED))
        try:
            opened[contender.name] = process.opened()
        except CbmirError as error:
            if not contender.optional:
                raise
            log.warning("Left out %s: %s", contender.name, error)
        else:
            processes[contender.name] = process
    if not opened:
        raise EngineError("none of these files can run here; the warnings above say why")
    return processes, opened


def _unit(embedding: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = embedding.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


def _medians(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(np.median(runs)) * 1000 for runs in rounds)
