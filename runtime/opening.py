"""Opening a model: a file by its suffix, or the best file of an export's folder for this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from cbmir.errors import EngineError, ModelError
from cbmir.runtime.available import PROVIDERS, why_not
from cbmir.runtime.engine import ENGINES, Engine, Mode
from cbmir.runtime.plan import read_plan_info

log = logging.getLogger("cbmir")

#: Which engines can run a file of a suffix; the first that works here is what `auto` takes.
_OF_SUFFIX = {
    ".onnx": ("onnxruntime-cuda", "onnxruntime", "openvino", "onnxruntime-tensorrt"),
    ".xml": ("openvino",),
    ".plan": ("tensorrt",),
}
#: Files of an export's folder that share one embedding space, the fastest first, and what runs them. int8 is not among
#: them: its space is its own, so it is opened by name.
_OF_FOLDER = (
    (".plan", "tensorrt"),
    (".fp16.onnx", "onnxruntime-cuda"),
    (".onnx", "onnxruntime-cuda"),
    (".openvino-bf16.xml", "openvino"),
    (".onnx", "onnxruntime"),
)
_ENDINGS = (".plan", ".fp16.onnx", ".int8.onnx", ".openvino-bf16.xml", ".openvino-int8.xml", ".onnx")


def open_engine(
    path: str | Path,
    *,
    engine: str = "auto",
    threads: int | None = None,
    mode: Mode = "auto",
    cache: str | Path | None = None,
    allow_fallback: bool = False,
) -> Engine:
    """Open a model file, or a folder that `cbmir export` wrote.

    A file is run as it is, in its own precision: `auto` takes CUDA for an .onnx file where it works, else ONNX Runtime
    on the CPU; OpenVINO for an .xml, TensorRT for a .plan. Of a folder, `auto` takes the fastest file that this machine
    runs, among those that share an embedding space (so never int8). What was picked, and why, is in `health()`, and of
    a folder in the log. `cache` is a folder where engines may keep what they compile. `allow_fallback`: where the
    engine that was asked for is not there, run on the CPU by ONNX Runtime, with a warning.

    Raises ModelError for a file that is not cbmir's, CardError for one without a usable card, EngineError for an engine
    that is not there or cannot run this file, MissingDependencyError for one that is not installed.
    """
    path = Path(path)
    if engine not in ENGINES:
        raise EngineError(f"expected an engine of {', '.join(ENGINES)}; found {engine!r}")
    _check_exists(path)
    every = list(_of_folder(path) if path.is_dir() else _of_file(path))
    choices = [(file, name) for file, name in every if engine in ("auto", name)]
    if not choices:
        if path.is_dir():
            raise ModelError(f"{path}: no file in this folder is for engine {engine}; 'cbmir export --help' says how "
                             f"to make one")  # fmt: skip
        others = " or ".join(name for _, name in every)
        raise EngineError(f"{path.name} is run by {others}, not by {engine}")
    not_here: list[str] = []
    for file, name in choices:
        why = _why_not(file, name)
        if not why or (file, name) == choices[-1]:
            break
        not_here.append(f"not {name} ({file.name}): {why}")
    picked = f"asked for {engine}" if engine != "auto" else "; ".join([f"{name} runs {file.name}", *not_here])
    if why and allow_fallback and file.suffix == ".onnx" and name != "onnxruntime":
        warning = f"engine {name} was asked for and cannot be used: {why}. Running on onnxruntime instead."
        opened = _open(file, "onnxruntime", engine, warning, threads, mode, cache)
        opened.warnings += (warning,)
        log.warning("%s", warning)
        return opened
    if why:
        raise EngineError(f"engine {name} was asked for, but cannot be used here: {why}")
    opened = _open(file, name, engine, picked, threads, mode, cache)
    log.log(logging.INFO if path.is_dir() else logging.DEBUG, "Engine: %s.", picked)
    return opened


def _why_not(file: Path, name: str) -> str:
    return why_not(name) or (read_plan_info(file).why_not() if name == "tensorrt" else "")


def _open(
    file: Path, name: str, requested: str, reason: str, threads: int | None, mode: Mode, cache: str | Path | None
) -> Engine:
    cache = None if cache is None else Path(cache)
    if name in PROVIDERS:
        from cbmir.runtime.onnx_engine import OnnxEngine

        return OnnxEngine(
            file, engine=name, requested=requested, reason=reason, threads=threads, mode=mode, cache=cache
        )
    if name == "openvino":
        from cbmir.runtime.openvino_engine import OpenVinoEngine

        return OpenVinoEngine(file, requested=requested, reason=reason, threads=threads, mode=mode, cache=cache)
    from cbmir.runtime.tensorrt_engine import TensorRtEngine

    return TensorRtEngine(file, requested=requested, reason=reason)


def _check_exists(path: Path) -> None:
    try:
        exists = path.exists()
    except OSError as error:
        raise ModelError(f"{path}: cannot look for the model file ({error.strerror})") from error
    if not exists:
        raise ModelError(f"{path}: no such model file; make one with 'cbmir export RUN -o model.onnx'")


def _of_file(path: Path) -> Iterator[tuple[Path, str]]:
    suffix = path.suffix.lower()
    if suffix not in _OF_SUFFIX:
        raise ModelError(f"{path}: expected a model file ({', '.join(_OF_SUFFIX)}) or a folder of them, found the "
                         f"suffix {path.suffix!r}; 'cbmir export' writes one")  # fmt: skip
    if path.name.lower().endswith(".int8.onnx"):  # quantised for the CPU's instructions
        return iter([(path, "onnxruntime")])
    return ((path, name) for name in _OF_SUFFIX[suffix])


def _of_folder(path: Path) -> Iterator[tuple[Path, str]]:
    """The folder's files and what runs them, fastest first. Raises ModelError for none, or for those of two models."""
    files = sorted(file for file in path.iterdir() if file.name.endswith(_ENDINGS))
    models = sorted({_stem(file) for file in files})
    if len(models) != 1:
        raise ModelError(f"{path}: expected the files of one model, found {', '.join(models) or 'none'}; "
                         f"name a file ({', '.join(_OF_SUFFIX)})")  # fmt: skip
    choices = [(file, name) for ending, name in _OF_FOLDER for file in files if _ending(file) == ending]
    if not choices:
        raise ModelError(f"{path}: expected model.onnx or another file of its embedding space, found "
                         f"{', '.join(file.name for file in files)}; an int8 file is opened by its name")  # fmt: skip
    return iter(choices)


def _ending(file: Path) -> str:
    return next(ending for ending in _ENDINGS if file.name.endswith(ending))


def _stem(file: Path) -> str:
    """The name without its ending; of model.sm86.plan it is model."""
    stem = file.name.removesuffix(_ending(file))
    return stem.rsplit(".sm", 1)[0] if file.suffix == ".plan" else stem
