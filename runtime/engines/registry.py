"""The engines by name: which ones work here, and which one opens a model file or an export folder."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import ModuleType

from cbmir.choices import ENGINES, MODES, Mode
from cbmir.errors import CbmirError, EngineError, ModelError
from cbmir.input_file import open_input
from cbmir.runtime.engines import openvino, ort, tensorrt
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.models.catalog import find_model

log = logging.getLogger("cbmir")

#: The module of each engine (ENGINES without auto). Its `check` tests whether the engine works here.
_MODULES: dict[str, ModuleType] = {
    "onnxruntime": ort,
    "onnxruntime-cuda": ort,
    "onnxruntime-tensorrt": ort,
    "openvino": openvino,
    "tensorrt": tensorrt,
}

#: The endings of the file names that `cbmir export` writes; an ending that includes another one comes first.
ENDINGS = (".plan", ".fp16.onnx", ".int8.onnx", ".openvino-bf16.xml", ".openvino-int8.xml", ".onnx")


def probe(engine: str) -> tuple[str, str]:
    """Test whether an engine, one of ENGINES except auto, can run here. Never raises.

    Returns:
        Its library and version, such as "OpenVINO 2026.4.0", and ""; or "" and why it cannot run and what to install.
    """
    try:
        return str(_MODULES[engine].check(engine)), ""
    except CbmirError as error:
        return "", str(error)
    except Exception as error:  # noqa: BLE001  a broken library may raise anything, and the error is the answer
        return "", f"{engine} does not work: {type(error).__name__}: {error}"


def why_not(engine: str) -> str:
    """Return why an engine cannot run here and what to install; "" if it can. Never raises."""
    return probe(engine)[1]


def model_files(folder: Path) -> list[Path]:
    """Return a folder's model files, sorted by name, except hidden ones: these belong to an unfinished export."""
    files = (file for file in folder.iterdir() if not file.name.startswith("."))
    return sorted(file for file in files if file.name.endswith(ENDINGS))


def ending(file: Path) -> str:
    """Return which of ENDINGS a file name has; if it has none of them, its suffix."""
    return next((one for one in ENDINGS if file.name.endswith(one)), file.suffix)


def stem(file: Path) -> str:
    """Return the file name without its ending: model for model.fp16.onnx and model.sm86.plan."""
    name = file.name.removesuffix(ending(file))
    return re.sub(r"\.sm\d+$", "", name) if file.suffix == ".plan" else name


#: The engines that can run a file with this suffix; `auto` uses the first that works here.
_OF_SUFFIX = {
    ".onnx": ("onnxruntime-cuda", "onnxruntime", "openvino", "onnxruntime-tensorrt"),
    ".xml": ("openvino",),
    ".plan": ("tensorrt",),
}
_BY_NAME_ONLY = "onnxruntime-tensorrt"  # takes minutes to compile, so `auto` skips it
_BFLOAT16 = ".openvino-bf16.xml"
#: Files in an export folder that share one embedding space (int8 has its own), and their engines, fastest first.
_OF_FOLDER = (
    (".plan", "tensorrt"),
    (".fp16.onnx", "onnxruntime-cuda"),
    (".onnx", "onnxruntime-cuda"),
    (_BFLOAT16, "openvino"),
    (".onnx", "onnxruntime"),
)


def open_engine(
    path: str | Path, *, engine: str = "auto", threads: int | None = None, mode: Mode = "auto",
    cache: str | Path | None = None, allow_fallback: bool = False,
) -> Engine:  # fmt: skip
    """Open a model file, a folder that `cbmir export` wrote, or a model that comes with cbmir, by its name.

    A file runs in its own precision. With `auto`, an .onnx file runs on CUDA if that works, else in ONNX Runtime on the
    CPU, or in OpenVINO if ONNX Runtime is missing; an .xml file runs in OpenVINO, a .plan in TensorRT. From a folder,
    `auto` opens the fastest file that this machine can run, among those that share an embedding space (so never int8).
    `health()` says which one and why.

    Args:
        threads: None means all processors that this process may use.
        cache: A folder in which engines keep what they compile.
        allow_fallback: Run on the CPU with ONNX Runtime, with a warning, if the requested engine is missing.

    Raises:
        ModelError: The file was not written by cbmir, or has no usable card (CardError).
        EngineError: The engine is missing (the message names what to install) or cannot run this file, or `threads` or
            `mode` is wrong.
    """
    path = find_model(path)
    _check_arguments(path, engine, threads, mode)
    every = _of_folder(path) if path.is_dir() else _of_file(path)
    choices = [(file, name) for file, name in every if name == engine or (engine == "auto" and name != _BY_NAME_ONLY)]
    if not choices and path.is_dir():  # an engine that needs no file of its own
        onnx = {file for file, _ in every if ending(file) == ".onnx"}
        choices = [one for file in onnx for one in _of_file(file) if one[1] == engine]
    if not choices:
        if path.is_dir():
            raise ModelError(f"{path}: no file in this folder is for engine {engine}; 'cbmir export --help' says how "
                             f"to make one")  # fmt: skip
        others = " or ".join(name for _, name in every)
        raise EngineError(f"{path.name} runs on {others}, not on {engine}")
    absent: dict[tuple[Path, str], str] = {}
    for file, name in choices:
        if why := _why_not(file, name):
            absent[file, name] = why
            continue
        reason = f"{engine} was requested"
        if engine == "auto":
            reason = "; ".join([f"{name} runs {file.name}", *_words(absent)])
        opened = _open(file, name, engine, reason, threads, mode, cache)
        log.log(logging.INFO if path.is_dir() else logging.DEBUG, "Engine: %s.", reason)
        return opened
    if engine == "auto":  # the easiest to install first
        absent = dict(sorted(absent.items(), key=lambda one: one[0][1] != "onnxruntime"))
        raise EngineError(f"{path}: no engine for it works here: {'; '.join(_words(absent))}")
    whys = "; ".join(dict.fromkeys(absent.values()))
    on_cpu = [file for file, name in every if name == "onnxruntime"]
    if not allow_fallback or engine == "onnxruntime" or not on_cpu:
        raise EngineError(f"engine {engine} was requested, but cannot be used here: {whys}")
    warning = f"engine {engine} was requested, but cannot be used: {whys}. Running on onnxruntime instead."
    opened = _open(on_cpu[0], "onnxruntime", engine, warning, threads, mode, cache)
    opened.warn(warning)
    return opened


def _check_arguments(path: Path, engine: str, threads: int | None, mode: Mode) -> None:
    if engine not in ENGINES:
        raise EngineError(f"expected an engine among {', '.join(ENGINES)}; found {engine!r}")
    if threads is not None and threads < 1:
        raise EngineError(f"expected at least 1 thread, found {threads}")
    if mode not in MODES:
        raise EngineError(f"expected mode {', '.join(MODES)}; found {mode!r}")
    try:
        exists = path.exists()
        if exists and not path.is_dir():
            open_input(path).close()
    except OSError as error:
        raise ModelError(f"{path}: cannot open the model file: {error.strerror}") from error
    if not exists:
        raise ModelError(
            f"{path}: no such model file; make one with 'cbmir export RUN -o model.onnx', or use one that "
            "comes with cbmir ('cbmir models')"
        )


def _words(absent: dict[tuple[Path, str], str]) -> list[str]:
    return [f"not {name} ({file.name}): {why}" for (file, name), why in absent.items()]


def _why_not(file: Path, name: str) -> str:
    """Extend `why_not` to a file: a plan needs its GPU, and a bfloat16 file a processor with bfloat16 arithmetic."""
    if why := why_not(name):
        return why
    if name == "tensorrt":
        return tensorrt.read_plan_info(file).why_not()
    return openvino.why_no_bfloat16() if file.name.endswith(_BFLOAT16) else ""


def _open(
    file: Path, name: str, requested: str, reason: str, threads: int | None, mode: Mode, cache: str | Path | None
) -> Engine:
    kept = None if cache is None else Path(cache)
    opened: Engine
    if name in ort.PROVIDERS:
        opened = ort.OnnxEngine(file, engine=name, threads=threads, mode=mode, cache=kept)
    elif name == "openvino":
        opened = openvino.OpenVinoEngine(file, threads=threads, mode=mode, cache=kept)
    else:
        opened = tensorrt.TensorRtEngine(file)
    opened.requested, opened.reason = requested, reason
    return opened


def _of_file(path: Path) -> list[tuple[Path, str]]:
    suffix = path.suffix.lower()
    if suffix not in _OF_SUFFIX:
        raise ModelError(f"{path}: expected a model file ({', '.join(_OF_SUFFIX)}) or a folder of them, found the "
                         f"suffix {path.suffix!r}; 'cbmir export' writes one")  # fmt: skip
    if path.name.lower().endswith(".int8.onnx"):  # quantised for the CPU's instructions
        return [(path, "onnxruntime")]
    return [(path, name) for name in _OF_SUFFIX[suffix]]


def _of_folder(path: Path) -> list[tuple[Path, str]]:
    """Return the folder's files and their engines, fastest first. Raises ModelError for no files or several models."""
    files = model_files(path)
    models = sorted({stem(file) for file in files})
    if len(models) != 1:
        raise ModelError(f"{path}: expected the files of one model, found {', '.join(models) or 'none'}; "
                         f"name a file ({', '.join(_OF_SUFFIX)})")  # fmt: skip
    choices = [(file, name) for end, name in _OF_FOLDER for file in files if ending(file) == end]
    if not choices:
        raise ModelError(f"{path}: expected model.onnx or another file of its embedding space, found "
                         f"{', '.join(file.name for file in files)}; an int8 file is opened by its name")  # fmt: skip
    return choices
