"""Which engines really work on this machine: what `cbmir doctor` says, and what `auto` decides by."""

from __future__ import annotations

import importlib

import numpy as np

from cbmir.errors import CbmirError, require
from cbmir.runtime.engines.nvidia import current_gpu, find_tensorrt
from cbmir.runtime.engines.openvino import import_openvino

#: Names of ONNX Runtime's providers. Each engine's list ends in the CPU, which takes the operators that others lack.
PROVIDERS = {
    "onnxruntime": ["CPUExecutionProvider"],
    "onnxruntime-cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
    "onnxruntime-tensorrt": ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
}
#: An ONNX model, y = Identity(x) with float32 [1], opset 18: what an engine must be able to load and run.
_IDENTITY = (
    b'\x08\x08:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x02\x10\x12"
)


def why_not(engine: str) -> str:
    """Why an engine, any of ENGINES but auto, cannot run here and what to install; "" where it can. Never raises.

    A provider of ONNX Runtime must run a model to count: one that is listed may lack its libraries or a driver.
    """
    try:
        if engine in PROVIDERS:
            return _onnxruntime(engine)
        if engine == "openvino":
            if "CPU" in (found := import_openvino().Core().available_devices):
                return ""
            others = ", ".join(found) or "nothing"
            return f"OpenVINO finds no CPU that it can use, only {others}; install its wheel again"
        current_gpu()  # first, since the others take seconds to import
        require("cuda.bindings.runtime", find_tensorrt()[1])
        return ""
    except CbmirError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a package that broke off half installed may raise anything
        return f"{engine} does not work: {type(error).__name__}: {error}"


def library(engine: str) -> str:
    """The library that runs an engine and its version, as "OpenVINO 2026.4.0"; "" where it cannot be had."""
    try:
        if engine in PROVIDERS:
            return f"ONNX Runtime {importlib.import_module('onnxruntime').__version__}"
        if engine == "openvino":
            return f"OpenVINO {import_openvino().__version__}"
        trt, flavour = find_tensorrt()
        return f"{'TensorRT' if flavour == 'tensorrt' else 'TensorRT for RTX'} {trt.__version__}"
    except Exception:  # noqa: BLE001  `why_not` says what is wrong
        return ""


def _onnxruntime(engine: str) -> str:
    ort = require("onnxruntime", "cpu" if engine == "onnxruntime" else "gpu")
    provider = PROVIDERS[engine][0]
    if provider not in ort.get_available_providers():
        return f'the installed ONNX Runtime has no {provider}; pip install "cbmir[gpu]" in place of onnxruntime'
    options = ort.SessionOptions()
    options.log_severity_level = 4  # silent: an error is in the answer
    value = np.array([1.5], np.float32)
    try:
        session = ort.InferenceSession(_IDENTITY, options, providers=[provider], enable_fallback=False)
        if session.get_providers()[0] != provider:
            return "ONNX Runtime fell back to the CPU: the driver or the CUDA and cuDNN libraries are missing"
        (answer,) = session.run(None, {"x": value})
    except Exception as error:  # noqa: BLE001  ONNX Runtime's exceptions have no other base, and each is a finding here
        return f"{type(error).__name__}: {error}"
    return "" if np.array_equal(answer, value) else f"answers {answer} where {value} is right"
