"""One step of benchmarks/gpu.py: `python benchmarks/gpu_steps.py STEP OUT [MODEL.onnx]` writes rows to OUT/STEP.jsonl.

Without MODEL, the model is a DenseNet121 with random weights at 224 px if there is a GPU, else a ResNet18 at 64 px.
Engines are timed by the clock, host to host, since their calls are synchronous; PyTorch by CUDA events (gpu_torch.py).
"""

from __future__ import annotations

import functools
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_torch import BATCHES, SECONDS, Row, peak, random_model, timed, torch_compiled, torch_eager, training
from numpy.typing import NDArray

from cbmir.choices import ENGINES
from cbmir.errors import CbmirError
from cbmir.export.perf.bench import synthetic_images
from cbmir.export.perf.process import time_runs
from cbmir.runtime.engines.registry import open_engine, probe, why_not

#: Maximum error of an embedding, relative to the mean distance of two images, and maximum error of a score.
LIMITS = {"float32": (1e-3, 1e-4), "float16": (5e-2, 5e-3)}


def machine(out: Path, model: Path | None) -> Iterator[Row]:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    facts = {
        "card": f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB",
        "versions": f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
                    f"Python {platform.python_version()}",
        "engines": ", ".join(filter(None, (probe(name)[0] for name in ("onnxruntime", "tensorrt")))),
        "attained bf16 peak": f"{peak() / 1e12:.0f} TFLOP/s",
    }  # fmt: skip
    for name, value in facts.items():
        yield {"name": name, "value": value}


def export(out: Path, model: Path | None) -> Iterator[Row]:
    folder = out / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = {"float32": folder / "model.onnx", "float16": folder / "model.fp16.onnx"}
    if model:
        files["float32"].write_bytes(model.read_bytes())
        del files["float16"]
    else:
        import torch

        from cbmir.export.onnx_graph import to_onnx

        retrieval, card = random_model(torch.cuda.is_available())
        for precision, file in files.items():
            file.write_bytes(to_onnx(retrieval, card, precision))  # type: ignore[arg-type]
    if not why_not("tensorrt"):
        from cbmir.export.tensorrt import resolve_target, write_plan

        target = resolve_target("current")
        for file in files.values():
            write_plan(file.read_bytes(), file.with_suffix(f".{target}.plan"), "current", BATCHES[-1])
    yield {"name": "files", "value": ", ".join(file.name for file in models(out))}


def parity(out: Path, model: Path | None) -> Iterator[Row]:
    reference, images = None, None
    for file, name in choices(out):
        if why := why_not(name):
            yield {"name": name, "problem": why}
            continue
        row = {"engine": name, "file": file.name}
        try:
            with open_engine(file, engine=name, cache=out / "cache") as engine:
                images = synthetic_images(48, engine.card.preprocess.crop) if images is None else images
                found = engine.run(images)
                limits = LIMITS.get(engine.card.precision, LIMITS["float16"])
        except (CbmirError, RuntimeError) as error:
            yield row | {"problem": str(error), "within": False}
            continue
        reference = reference or found  # the first one is model.onnx in ONNX Runtime on the CPU
        error, score = differences(reference, found)
        within = error <= limits[0] and score <= limits[1]
        overlap = float((nearest(reference.embedding)[:, :, None] == nearest(found.embedding)[:, None]).any(2).mean())
        yield row | {"error": error, "score_difference": score, "overlap": overlap, "within": within}


def differences(reference: Any, found: Any) -> tuple[float, float]:
    a, b = (side.embedding.astype(np.float64) for side in (reference, found))
    apart = np.linalg.norm(a[:, None] - a[None], axis=2).sum() / (len(a) * (len(a) - 1))
    error = np.linalg.norm(a - b, axis=1).max() / apart
    return float(error), float(np.abs(reference.scores - found.scores).max())


def nearest(embedding: NDArray[np.float32]) -> NDArray[np.intp]:
    cosine = embedding @ embedding.T
    np.fill_diagonal(cosine, -2)
    return np.argsort(-cosine, axis=1)[:, :10]


def engines(out: Path, model: Path | None) -> Iterator[Row]:
    for file, name in choices(out):
        if name in ("onnxruntime", "openvino") or why_not(name):
            continue
        try:
            with open_engine(file, engine=name, cache=out / "cache") as engine:
                for batch in BATCHES:
                    images = synthetic_images(batch, engine.card.preprocess.crop)
                    run = functools.partial(engine.run, images)
                    row = timed(f"{name} {engine.card.precision}", batch, lambda run=run: milliseconds(run))
                    yield row | {"warnings": engine.health().warnings}
        except CbmirError as error:
            yield {"name": f"{name} {file.name}", "problem": str(error)}


def models(out: Path) -> list[Path]:
    """Return the files to run, model.onnx first."""
    files = [*out.glob("models/*.onnx"), *out.glob("models/*.plan")]
    return sorted(files, key=lambda file: (file.name != "model.onnx", file.name))


def choices(out: Path) -> Iterator[tuple[Path, str]]:
    for file in models(out):
        for name in ENGINES[1:]:
            if (file.suffix == ".plan") == (name == "tensorrt") and (name != "openvino" or file.name == "model.onnx"):
                yield file, name


def milliseconds(run: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each run, after three warm-up runs."""
    run(), run()
    return [1e3 * seconds for seconds in time_runs(run, SECONDS)]


STEPS = {
    "machine": machine, "export": export, "parity": parity, "engines": engines, "torch": torch_eager,
    "training": training, "compile": torch_compiled,
}  # fmt: skip


def main(step: str, out: str, model: str | None = None) -> None:
    with (Path(out) / f"{step}.jsonl").open("w", encoding="utf-8") as file:
        for row in STEPS[step](Path(out), Path(model) if model else None):
            file.write(json.dumps({"step": step} | row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
