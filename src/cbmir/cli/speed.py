"""`cbmir speed`: compare the speed of exported models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cbmir.choices import ENGINES, MODES
from cbmir.cli.options import PATH, command, json_option, option, print_answer
from cbmir.errors import CbmirError, EngineError

if TYPE_CHECKING:
    from cbmir.card import ModelCard
    from cbmir.export.perf.bench import BenchReport
    from cbmir.export.perf.contenders import ModelContender

WIDTH = 100


def _list_of(kind: Any) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...]]:
    """Return a callback that parses comma-separated values of a click type, without duplicates."""

    def split(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Any, ...]:
        words = [] if text is None else text.split(",")
        return tuple(dict.fromkeys(kind.convert(word.strip(), parameter, context) for word in words))

    return split


@command(
    "cbmir speed models/                                      # every file of the export that runs here",
    "cbmir speed models/ --against torch,onnxruntime          # compared with handwritten code",
    "cbmir speed model.onnx --engine onnxruntime,openvino --batch 1,8,32",
    "cbmir speed models/ --mode latency,throughput --json > speed.json",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL…", type=PATH)
@option("--engine", "engines", callback=_list_of(click.Choice(ENGINES)), default="auto", metavar="A,B,…",
        help=f"Run every file in each of these: {', '.join(ENGINES)}.")  # fmt: skip
@option("--batch", "batches", callback=_list_of(click.IntRange(min=1)), default="1,8", metavar="N,…",
        help="Batch sizes.")  # fmt: skip
@option("--threads", type=click.IntRange(min=1), help="Threads of each contender.  [default: every processor]")
@option("--mode", "modes", callback=_list_of(click.Choice(MODES)), default="auto", metavar="A,B,…", help="auto, "
        "latency (all threads work on one batch), throughput (each image of a batch runs on one thread).")  # fmt: skip
@option("--against", "peers", callback=_list_of(click.Choice(["torch", "onnxruntime", "openvino"])), metavar="A,B,…",
        help="Also time handwritten code on the CPU: torch (eager, random weights), onnxruntime, openvino "
        "(default options). The first of these is the baseline.")  # fmt: skip
@option("--peak", is_flag=True, help="Also time the same arithmetic as bare matrix products: a lower bound.")
@option("--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0,
        help="Time to measure each contender at each batch size.")  # fmt: skip
@json_option
def speed(
    models: tuple[Path, ...], engines: tuple[str, ...], batches: tuple[int, ...], threads: int | None,
    modes: tuple[Any, ...], peers: tuple[str, ...], peak: bool, seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Time MODEL files, or all files of a folder, side by side; --against adds handwritten code.

    Each contender has its own process, and they take turns in short rounds, since times depend on the load of the
    machine. Rely on the ratios, which are taken in each round (median, and 10th to 90th percentile). "1 - cos" is the
    distance of the embeddings from those of the first model. Ctrl-C prints the results so far.
    """
    from cbmir.export.perf.bench import bench as measure
    from cbmir.export.perf.contenders import model_contenders, peer_contenders

    own = model_contenders(models, engines=engines, modes=modes, threads=threads)
    card = _card(own)
    others = list(peer_contenders(models, card, peers, threads, peak=peak))
    baseline = others[0].name if peers else None
    report = measure([*own, *others], card.preprocess.crop, batches=batches, baseline=baseline, seconds=seconds)
    print_answer(as_json, report.to_json(), text(report))
    if not report.finished:
        sys.exit(130)


def _card(contenders: Sequence[ModelContender]) -> ModelCard:
    """Return the card of the first model that can be opened here."""
    from cbmir.runtime import open_engine

    whys = []
    for one in contenders:
        try:
            with open_engine(one.path, engine=one.engine) as opened:
                return opened.card
        except CbmirError as error:
            if not one.optional:
                raise
            whys.append(str(error))
    raise EngineError(f"none of these files can run here: {'; '.join(whys)}")


def text(report: BenchReport) -> str:
    """Return the report as text, at most 100 characters wide."""
    from cbmir.machine import in_words

    entrants = [
        (
            one.name, one.health.engine, one.health.precision, f"{one.health.threads} {one.health.mode}",
            f"{one.load_seconds:.2f}", _number(one.peak_memory_mb, ".0f"), _number(one.cosine_distance, ".0e"),
        )
        for one in report.entrants
    ]  # fmt: skip
    speeds = [
        (
            one.contender, str(one.batch), f"{one.milliseconds:.2f}", _number(one.p99, ".2f"),
            f"{one.images_per_second:.1f}", f"{one.ratio.median:.2f}", f"{one.ratio.low:.2f}-{one.ratio.high:.2f}",
        )
        for one in report.speeds
    ]  # fmt: skip
    return "\n".join(
        [
            in_words(report.machine),
            "",
            *table(("contender", "engine", "precision", "threads", "load s", "peak MB", "1 - cos"), entrants, words=4),
            "",
            *table(("contender", "batch", "ms per batch", "p99", "images/s", "ratio", "10-90%"), speeds, words=1),
            "",
            f"ratio: speed relative to {report.baseline}, by round" + ("" if report.finished else "; stopped early"),
        ]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> Iterator[str]:
    """Yield the lines of a table, the first `words` columns left-aligned. The first column is shortened if too wide."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    widths[0] = max(len(header[0]), min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)))
    for row in (header, *rows):
        cells = [_shorten(row[0], widths[0]), *row[1:]]
        aligned = [
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(aligned).rstrip()


def _shorten(word: str, width: int) -> str:
    """Replace the middle of a text with … if it is too long."""
    if len(word) <= width:
        return word
    front = width // 2
    return f"{word[:front]}…{word[len(word) - (width - front - 1) :]}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
