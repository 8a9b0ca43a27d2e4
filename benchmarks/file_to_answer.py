"""Measure the time of each stage of `Finder.analyze`, from file to answer, and its memory.

    python benchmarks/file_to_answer.py model.onnx -o file_to_answer.json
    python benchmarks/file_to_answer.py model.onnx --memory
    python benchmarks/file_to_answer.py model.onnx --decoder --threads 1

The inputs are one phantom X-ray as a 1024x1024 PNG, and as a 12-bit DICOM file of 2500x3056, uncompressed, RLE and
JPEG-LS; the gallery has 10,000 random unit vectors. `search` is everything except reading, preprocessing and the model.
`--decoder` reads each file alternately in this process and in a process of `DecoderPool`, as services do.
`ratio` is (read + preprocess + search) / model, from the medians of one run. The aim for fp32 is at most 1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from PIL import Image
from tqdm import tqdm

from cbmir.export.perf.process import memory
from cbmir.files import write_json
from cbmir.runtime import Entry, Finder, Gallery, finder, open_engine, read_image
from cbmir.runtime.imaging.decoder_process import DecoderPool
from cbmir.training.phantom.files import write_dicom
from cbmir.training.phantom.patients import describe
from cbmir.training.phantom.picture import draw, render

ENTRIES = 10_000
ROWS, COLUMNS = 3056, 2500
STAGES = ("read", "preprocess", "model", "search", "whole")
BATCHES = (1, 2, 1, 8, 1, 32, 1, 2)  # batch sizes of the requests in the memory test
FIRST_ANSWER = """
import time; start = time.perf_counter()
from cbmir.runtime import Finder
with Finder.open({model!r}, {gallery!r}) as finder:
    finder.analyze({image!r})
    print(time.perf_counter() - start, open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("-n", "--requests", default=500, show_default=True, help="Requests per file.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the engine; all by default.")
@click.option("--memory", is_flag=True, help="Measure the first answer of a process, and memory over 1,000 requests.")
@click.option("--decoder", is_flag=True, help="Measure the cost of reading in a separate process.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(model: Path, requests: int, threads: int | None, memory: bool, decoder: bool, output: Path | None) -> None:
    """Time the stages from file to answer, or measure their memory with --memory."""
    with tempfile.TemporaryDirectory() as scratch:
        files, gallery = write_files(Path(scratch)), write_gallery(model, Path(scratch) / "gallery")
        with Finder.open(model, gallery, threads=threads) as opened:
            health = opened.health()
            about = {"model": model.name, "engine": health.engine, "precision": health.precision,
                     "threads": health.threads, "version": health.version}  # fmt: skip
            if decoder:
                figures = {name: reading(path, requests, health.threads) for name, path in files.items()}
            elif memory:
                figures = first_answer(model, gallery, files["PNG 1024x1024"]) | resident_over_requests(opened)
            else:
                figures = {name: stages(opened, path, requests) for name, path in files.items()}
    click.echo(", ".join(f"{key} {value}" for key, value in about.items()))
    click.echo(decoder_text(figures) if decoder else memory_text(figures) if memory else stages_text(figures))
    if output:
        write_json(output, about | {"figures": figures})


def write_files(folder: Path) -> dict[str, Path]:
    """Write the input files, and return their paths by name."""
    from pydicom import dcmread
    from pydicom.uid import JPEGLSLossless, RLELossless

    phantom = next(describe(1))
    paths = {name: folder / name for name in ("xray.png", "native.dcm", "rle.dcm", "jpegls.dcm")}
    Image.fromarray(draw(phantom, 1024)).save(paths["xray.png"])
    grey = Image.fromarray(render(phantom, 1024).astype(np.float32)).resize((COLUMNS, ROWS), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(0).normal(0, 0.002, (ROWS, COLUMNS))  # a detector's: no runs for RLE in low bits
    write_dicom(paths["native.dcm"], np.clip(np.asarray(grey) + noise, 0, 1), phantom, seed=0, inverted=False)
    for syntax, name in ((RLELossless, "rle.dcm"), (JPEGLSLossless, "jpegls.dcm")):
        dataset = dcmread(paths["native.dcm"])
        dataset.compress(syntax)
        dataset.save_as(paths[name])
    names = ("PNG 1024x1024", "DICOM 2500x3056", "DICOM 2500x3056, RLE", "DICOM 2500x3056, JPEG-LS")
    return dict(zip(names, paths.values(), strict=True))


def write_gallery(model: Path, path: Path) -> Path:
    """Write a gallery of random unit vectors from 1,000 patients."""
    with open_engine(model) as engine, Gallery.create(path, engine.card) as gallery:
        vectors = np.random.default_rng(0).normal(size=(ENTRIES, engine.card.embedding_dim)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        entries = [Entry(f"image-{n}", f"/{n}.png", f"patient-{n % 1000}", sha256=f"{n:064}") for n in range(ENTRIES)]
        gallery.add(entries, vectors)
        gallery.write_index()  # as a build does
    return path


def stages(opened: Finder, path: Path, requests: int) -> dict[str, Any]:
    """Return p50 and p99 in ms of each stage, and the ratio."""
    spent = dict.fromkeys(STAGES, 0.0)
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with (
        timed(opened, "read", spent, "read"),
        timed(finder, "preprocess", spent, "preprocess"),
        timed(opened.engine, "run", spent, "model"),
    ):
        for request in tqdm(range(requests + 5), desc=path.name, disable=None):
            start = time.perf_counter()
            opened.analyze(path)
            spent["whole"] = time.perf_counter() - start
            spent["search"] = spent["whole"] - spent["read"] - spent["preprocess"] - spent["model"]
            if request >= 5:  # the first five are a warm-up
                for stage in STAGES:
                    times[stage].append(1000 * spent[stage])
    p50, p99 = ({stage: float(np.percentile(times[stage], q)) for stage in STAGES} for q in (50, 99))
    return {"p50": p50, "p99": p99, "ratio": (p50["read"] + p50["preprocess"] + p50["search"]) / p50["model"]}


def reading(path: Path, requests: int, threads: int) -> dict[str, float]:
    """Return the median ms of reading a file's bytes here and in a decoder process, and of the difference."""
    data, times = path.read_bytes(), dict[str, list[float]](here=[], there=[])
    with DecoderPool(1) as pool:
        for request in tqdm(range(requests + 5), desc=path.name, disable=None):
            for where, read in (("here", read_image), ("there", pool.read)):
                start = time.perf_counter()
                read(data, threads=threads)
                if request >= 5:
                    times[where].append(1000 * (time.perf_counter() - start))
    more = np.subtract(times["there"], times["here"])
    return {where: float(np.median(found)) for where, found in (*times.items(), ("more", more))}


def timed(owner: Any, name: str, spent: dict[str, float], stage: str) -> AbstractContextManager[Any]:
    """Record, within the block, the seconds of each call of `owner.name` in `spent[stage]`."""
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        answer = real(*args, **options)
        spent[stage] = time.perf_counter() - start
        return answer

    return patch.object(owner, name, call)


def first_answer(model: Path, gallery: Path, image: Path) -> dict[str, float]:
    """Return seconds from import to first answer, and peak resident MB: medians over five fresh processes."""
    code = FIRST_ANSWER.format(model=str(model), gallery=str(gallery), image=str(image))
    command = [sys.executable, "-c", code]
    answers = [subprocess.run(command, capture_output=True, check=True, text=True).stdout.split() for _ in range(5)]
    found = [[float(word) for word in answer] for answer in answers]
    seconds, kilobytes = np.median(found, axis=0)
    return {"first_answer_s": seconds, "first_answer_mb": kilobytes / 1024}


def resident_over_requests(opened: Finder) -> dict[str, float]:
    """Return the resident MB of this process after 100 and 1,000 requests with mixed batch sizes."""
    size, figures = opened.card.preprocess.crop, {}
    images = np.random.default_rng(0).integers(0, 256, (max(BATCHES), 1, size, size), dtype=np.uint8)
    for request in tqdm(range(1000), desc="requests", disable=None):
        opened.embed(images[: BATCHES[request % len(BATCHES)]])
        if request + 1 in (100, 1000):
            figures[f"after_{request + 1}_mb"] = memory()["VmRSS"] / 2**20
    return figures | {"growth": figures["after_1000_mb"] / figures["after_100_mb"]}


def stages_text(figures: dict[str, Any]) -> str:
    lines = [f"{'p50 (p99), ms':<22}" + "".join(f"{stage:>18}" for stage in STAGES) + f"{'ratio':>8}"]
    for name, found in figures.items():
        cells = "".join(f"{found['p50'][stage]:>9.1f} ({found['p99'][stage]:>6.1f})" for stage in STAGES)
        lines.append(f"{name:<22}{cells}{found['ratio']:>8.2f}")
    return "\n".join(lines)


def decoder_text(figures: dict[str, Any]) -> str:
    lines = [f"{'p50, ms':<28}{'in process':>12}{'decoder':>12}{'more':>8}"]
    lines += [f"{name:<28}{f['here']:>12.1f}{f['there']:>12.1f}{f['more']:>8.1f}" for name, f in figures.items()]
    return "\n".join(lines)


def memory_text(figures: dict[str, float]) -> str:
    return "\n".join(f"{key:<18} {value:10.2f}" for key, value in figures.items())


if __name__ == "__main__":
    main()
