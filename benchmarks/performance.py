"""Measure all figures of docs/performance.md, in one command.

    python benchmarks/performance.py EXPORT -o FOLDER --write-docs docs/performance.md

EXPORT is a folder that `cbmir export` wrote, with model.onnx and any of model.fp16.onnx, model.int8.onnx,
model.openvino-bf16.xml and model.openvino-int8.xml. All of them, handwritten code for PyTorch, ONNX Runtime and
OpenVINO, and bare matrix products take turns in one run. FOLDER gets bench.json and modes.json (`cbmir speed --json`),
speed.png, .svg and .csv, and performance.md with the sections. `--write-docs` puts each section between its marks,
<!-- performance:NAME --> and <!-- /performance:NAME -->. Run nothing else meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from figures import filled, ratio_text, reached, table

from cbmir.export.perf.bench import BenchReport, Ratio, Speed, bench, ratio
from cbmir.export.perf.contenders import count_flops, float32_file, model_contenders, peer_contenders
from cbmir.files import write_json, write_text
from cbmir.machine import in_words
from cbmir.runtime import open_engine

# The timed processes import this file too, so heavy imports are inside the functions that use them.
if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHES = (1, 8)
TORCH = "peer torch"
PEAK = "peak bfloat16"
FILE_TO_ANSWER = Path(__file__).with_name("file_to_answer.py")


@dataclass(frozen=True)
class Aim:
    """The aim that `own` is at least `least` times as fast as `against`; "" means the fastest model file."""

    words: str
    own: str
    against: str
    batch: int
    least: float


AIMS = (
    Aim("fastest file / PyTorch eager", "", TORCH, 1, 9.0),
    Aim("fastest file / PyTorch eager", "", TORCH, 8, 10.0),
    Aim("model.onnx / PyTorch eager", "model.onnx", TORCH, 1, 2.2),
    Aim("model.onnx / PyTorch eager", "model.onnx", TORCH, 8, 2.2),
    Aim("model.int8.onnx / model.onnx", "model.int8.onnx", "model.onnx", 1, 2.2),
    Aim("model.int8.onnx / model.onnx", "model.int8.onnx", "model.onnx", 8, 2.2),
    Aim("model.openvino-bf16.xml, share of the bfloat16 peak", "model.openvino-bf16.xml", PEAK, 1, 0.6),
    Aim("model.openvino-bf16.xml, share of the bfloat16 peak", "model.openvino-bf16.xml", PEAK, 8, 0.6),
)


@click.command()
@click.argument("export", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--seconds", default=6.0, show_default=True, help="For each contender at each batch size.")
@click.option("--threads", type=click.IntRange(min=1), help="Of each contender.  [default: every processor]")
@click.option("--write-docs", "docs", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE.md")
def main(export: Path, output: Path, seconds: float, threads: int | None, docs: Path | None) -> None:
    """Time the files of EXPORT and handwritten code, and write tables and a chart for docs/performance.md."""
    output.mkdir(parents=True, exist_ok=True)
    with open_engine(float32_file([export])) as engine:
        card = engine.card
    flops = count_flops(float32_file([export]))
    size = card.preprocess.crop
    models = model_contenders([export], threads=threads)
    contenders = [*models, *peer_contenders([export], card, ("torch", "onnxruntime", "openvino"), threads, peak=True)]
    report = bench(contenders, size, batches=BATCHES, baseline=TORCH, seconds=seconds)
    _check_finished(report, output / "bench.json")
    in_modes = model_contenders([export], modes=("latency", "throughput"), threads=threads)
    modes = bench(in_modes, size, batches=BATCHES, seconds=seconds)
    _check_finished(modes, output / "modes.json")
    draw(report, output)
    about = (
        f"{card.encoder}, {size}x{size} pixels, {flops / 1e9:.2f} GFLOP per image. {seconds:g} s for each contender "
        f"and batch size, in rounds."
    )
    sections = {
        "machine": f"{about}\n```\n{in_words(report.machine)}\n```",
        "speed": speed_table(report),
        "aims": aims_table(report, _accepted(export)),
        "contenders": entrants_table(report),
        "modes": speed_table(modes),
        "file-to-answer": _file_to_answer(export, output, threads),
    }
    write_text(output / "performance.md", "\n\n".join(f"## {name}\n{text}" for name, text in sections.items()) + "\n")
    if docs is not None:
        write_text(docs, filled(docs.read_text("utf-8"), "performance", sections))
    click.echo(output / "performance.md")


def _check_finished(report: BenchReport, path: Path) -> None:
    write_json(path, report.to_json())
    if not report.finished:
        raise click.Abort


def _file_to_answer(export: Path, output: Path, threads: int | None) -> str:
    """Run `file_to_answer.py` for time and memory, and return its output."""
    texts = []
    for name, options in (("file_to_answer", []), ("memory", ["--memory"])):
        options += ["-o", str(output / f"{name}.json"), *([] if threads is None else ["--threads", str(threads)])]
        command = [sys.executable, str(FILE_TO_ANSWER), str(float32_file([export])), *options]
        texts.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    return "\n\n".join(f"```\n{text}\n```" for text in texts)


def speed_table(report: BenchReport) -> str:
    """Return a Markdown table by batch size, fastest first."""
    rows = [
        (
            str(one.batch), f"`{one.contender}`", f"{one.milliseconds:.1f}",
            "-" if one.p99 is None else f"{one.p99:.1f}", f"{one.images_per_second:.1f}", _ratio(one.ratio),
        )
        for one in report.speeds
    ]  # fmt: skip
    header = ("batch", "contender", "ms per batch", "p99", "images/s", f"times as fast as `{report.baseline}` [10-90%]")
    return table(header, rows)


def _accepted(export: Path) -> set[str]:
    """Return the files that were accepted although they miss their limits."""
    from cbmir.export.export import REPORT, read_report

    return {name for name, facts in read_report(export / REPORT).items() if "accepted" in facts}


def aims_table(report: BenchReport, beyond: Collection[str] = ()) -> str:
    """Return a Markdown table of the aims for which this run has both contenders. Files `beyond` their limits never
    count as the fastest."""
    rows = []
    for aim in AIMS:
        at_batch = {one.contender: one for one in report.speeds if one.batch == aim.batch}  # fastest first
        files = (name for name in at_batch if not name.startswith(("peer", "peak")) and name not in beyond)
        own, against = at_batch.get(aim.own or next(files, "")), at_batch.get(aim.against)
        if own is None or against is None:
            continue
        found = ratio(own.rounds, against.rounds)
        words = aim.words if aim.own else f"{aim.words} (`{own.contender}`)"
        is_reached = found.median >= aim.least
        rows.append((words, str(aim.batch), _ratio(found), f"{aim.least:g}", reached(is_reached)))
    return table(("comparison", "batch", "ratio [10-90%]", "aim", ""), rows)


def entrants_table(report: BenchReport) -> str:
    """Return a Markdown table of the contenders: engine, time from opening to the first answer, and peak memory."""
    rows = [
        (
            f"`{one.name}`", f"{one.health.engine} {one.health.version}", one.health.precision,
            f"{one.load_seconds:.2f}", "-" if one.peak_memory_mb is None else f"{one.peak_memory_mb:.0f}",
            "-" if one.cosine_distance is None else f"{one.cosine_distance:.0e}",
        )
        for one in report.entrants
    ]  # fmt: skip
    return table(("contender", "runs in", "precision", "load s", "peak MB", "1 - cosine"), rows)


def draw(report: BenchReport, folder: Path) -> None:
    """Plot ratios to the baseline with their spread, one panel per batch size; hollow dots are handwritten code."""
    from cbmir.training.comparison.figures.sheet import BLACK, BLUE, ReportFigure, save, sheet

    def dot(axis: Axes, one: Speed) -> None:
        by_hand = one.contender.startswith("peer")
        reach = [[one.ratio.median - one.ratio.low], [one.ratio.high - one.ratio.median]]
        axis.errorbar(
            one.ratio.median, names.index(one.contender), xerr=reach, fmt="s" if by_hand else "o",
            color=BLACK if by_hand else BLUE, markerfacecolor="white" if by_hand else None, markersize=5, capsize=2,
            elinewidth=0.8,
        )  # fmt: skip

    batches = sorted({one.batch for one in report.speeds})
    names = [one.contender for one in report.speeds if one.batch == batches[0] and not one.contender.startswith("peak")]
    names.reverse()  # fastest at the top
    with sheet(7.0, 0.9 + 0.26 * len(names)) as figure:
        axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=True):
            for one in report.speeds:
                if one.batch == batch and one.contender in names:
                    dot(axis, one)
            axis.set_yticks(range(len(names)), names)
            axis.set_title(f"batch {batch}")
            axis.set_xlabel(f"times as fast as {report.baseline}")
            axis.set_xlim(left=0)
            axis.grid(axis="x")
        rows = [(one.batch, one.contender, one.ratio.median, one.ratio.low, one.ratio.high) for one in report.speeds]
        caption = "Median over rounds, 10th to 90th percentile; filled: cbmir's files, hollow: handwritten code."
        picture = ReportFigure("speed", f"Times as fast as {report.baseline}", caption)
        save(figure, picture, folder, ("batch", "contender", "ratio", "low", "high"), rows)


def _ratio(found: Ratio) -> str:
    return ratio_text(found.median, found.low, found.high)


if __name__ == "__main__":
    main()
