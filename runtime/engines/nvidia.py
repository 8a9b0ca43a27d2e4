"""Access to NVIDIA's software: the first GPU (as CUDA_VISIBLE_DEVICES selects it), TensorRT in either of its two
builds, and CUDA with every status checked."""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cbmir.errors import EngineError, MissingDependencyError, installing, require

log = logging.getLogger("cbmir")

#: TensorRT's two builds, which share one Python interface, and the modules that may provide each. `tensorrt` tunes a
#: plan on the GPU that will run it; `tensorrt-rtx` also builds for other GPUs, and compiles the rest on the target.
FLAVOURS = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
#: Device attributes of CUDA's driver API: the parts of the compute capability.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True)
class Gpu:
    """A GPU. `target` is its compute capability as in the names of plans, sm86 for 8.6; `memory` is in bytes."""

    name: str
    target: str
    memory: int


def current_gpu() -> Gpu:
    """Return the first GPU. Only needs the driver, no package. Raises EngineError without a GPU."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise EngineError(f"this machine has no NVIDIA GPU with a driver ({library} cannot be loaded); install its "
                          f"driver, and {installing('tensorrt', 'gpu')}") from error  # fmt: skip

    def ask(function: str, *arguments: Any) -> None:
        if status := getattr(driver, function)(*arguments):
            raise EngineError(f"this machine has no working NVIDIA GPU ({function}: CUDA error {status}); 'nvidia-smi' "
                              "says more")  # fmt: skip

    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(device), 0)
    ask("cuDeviceGetName", name, len(name), device)
    ask("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(name.value.decode(errors="replace"), f"sm{major.value}{minor.value}", memory.value)


def find_tensorrt(*flavours: str) -> tuple[ModuleType, str]:
    """Return TensorRT's module and its flavour: the first of these FLAVOURS that is installed.

    Raises MissingDependencyError if no flavour is installed, EngineError if one does not import.
    """
    flavours = flavours or tuple(FLAVOURS)
    for flavour in flavours:
        for name in FLAVOURS[flavour]:
            try:
                return importlib.import_module(name), flavour
            except (ImportError, OSError, RuntimeError) as error:
                if not isinstance(error, ModuleNotFoundError) or error.name != name:
                    raise EngineError(f"{name} does not import: {error}; {installing(flavour)}") from error
    raise MissingDependencyError(f"{' or '.join(flavours)} is not installed: {installing(*flavours)}")


def loaded_tensorrt() -> str:
    """Return the version of the TensorRT library that ONNX Runtime finds (101300 is 10.13), or "unknown"."""
    for library in ("libnvinfer.so.11", "libnvinfer.so.10", "nvinfer_11.dll", "nvinfer_10.dll"):
        try:
            return str(ctypes.CDLL(library).getInferLibVersion())
        except (OSError, AttributeError):
            continue
    return "unknown"


def tensorrt_logger(trt: Any) -> Any:
    """Make a logger for TensorRT that logs to `cbmir` at level debug and keeps errors and warnings in lists."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            log.debug("TensorRT: %s", message)
            if int(severity) <= int(trt.ILogger.ERROR):
                self.errors.append(message)
            elif int(severity) == int(trt.ILogger.WARNING):
                self.warnings.append(message)

    return Logger()


class Cuda:
    """CUDA's runtime through cuda-python: `cuda("cudaMalloc", 64)` returns the value or raises EngineError.

    `flavour`, one of FLAVOURS, is the extra that installs cuda-python.
    """

    def __init__(self, flavour: str = "tensorrt") -> None:
        self.api: Any = require("cuda.bindings.runtime", flavour)

    def __call__(self, function: str, *arguments: Any) -> Any:
        try:
            status, *values = getattr(self.api, function)(*arguments)
        except RuntimeError as error:  # CUDA's library itself cannot be loaded
            raise EngineError(f"CUDA: {function} failed: {error}") from error
        if int(status):
            raise EngineError(f"CUDA: {function} failed with {getattr(status, 'name', status)}")
        return values[0] if values else None


def cache_key(sha256: str, gpu: str, version: str, precision: str) -> str:
    """Return the cache name for one model, GPU, version and precision.

    Models that share a cache have given wrong answers (microsoft/onnxruntime#6455).
    """
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in (sha256[:16], gpu, version, precision))
