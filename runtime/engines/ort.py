"""ONNX Runtime, on a CPU or with its CUDA and TensorRT providers.

File contract: input `image` uint8 [N,1,S,S] with dynamic N; outputs `embedding` float32 [N,D], `scores` float32 [N,C]
(none in a model without findings), `feature_map` float32 [N,D,h,w]; metadata `cbmir.card` (JSON) and `cbmir.head`
(base64 of little-endian float32 [P,D]).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.choices import Mode
from cbmir.errors import CardError, EngineError, ModelError, installing, require
from cbmir.input_file import MOST_MODEL, input_digest
from cbmir.process import available_threads
from cbmir.runtime.engines.base import Engine, Runner, check_graph, decode_head, give_back_freed_memory
from cbmir.runtime.engines.nvidia import cache_key, current_gpu, loaded_tensorrt

Options = dict[str, str]

#: ONNX Runtime's providers for each engine. Each list ends with the CPU, which runs operators that the others lack.
PROVIDERS = {
    "onnxruntime": ["CPUExecutionProvider"],
    "onnxruntime-cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
    "onnxruntime-tensorrt": ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
}
#: An ONNX model to test engines with: y = Identity(x), float32 [1], opset 18.
_IDENTITY = (
    b'\x08\x08:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x02\x10\x12"
)

#: Batch sizes for TensorRT: the smallest, the one to tune for, and the largest (the engine's `max_batch`).
BATCHES = (1, 8, 32)
MEMORY_SHARE = 0.5  # the part of the GPU's memory for one engine


def provider_options(
    engine: str, *, precision: str = "float32", size: int = 0, memory: int = 0, cache: Path | None = None
) -> list[tuple[str, Options]]:
    """Return the providers of an engine (a key of PROVIDERS) with their options, for `InferenceSession(providers=…)`.

    The rest is for a GPU: the file's `precision`, the side of its image (`size`), the GPU's `memory` in bytes, and a
    folder (`cache`) that is only for what TensorRT compiles from this file on this GPU.
    """
    cuda = {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",  # the other strategy doubles the arena and keeps it
        "gpu_mem_limit": str(int(MEMORY_SHARE * memory)),
        "cudnn_conv_algo_search": "HEURISTIC",  # EXHAUSTIVE measures again for each new batch size
        "use_tf32": "0",  # TF32 rounds float32 to 10 bits of mantissa
    }
    tensorrt = {
        "device_id": "0",
        "trt_fp16_enable": str(int(precision == "float16")),
        "trt_max_workspace_size": str(1 << 30),
    }
    for name, batch in zip(("min", "opt", "max"), BATCHES, strict=True):
        tensorrt[f"trt_profile_{name}_shapes"] = f"image:{batch}x1x{size}x{size}"
    for kind in ("engine", "timing") if cache is not None else ():
        tensorrt |= {f"trt_{kind}_cache_enable": "1", f"trt_{kind}_cache_path": str(cache)}
    options = {"CUDAExecutionProvider": cuda, "TensorrtExecutionProvider": tensorrt}
    return [(provider, options.get(provider, {})) for provider in PROVIDERS[engine]]


#: Off, because it quantises layers that an int8 file keeps in float, with one scale per tensor (onnxruntime PR 25673).
DISABLED_OPTIMIZERS = ("WeightBiasQuantization",)
_TYPES = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}


def check(engine: str) -> str:
    """Return ONNX Runtime's name and version. Raises CbmirError if an engine, a key of PROVIDERS, cannot run here.

    The check runs a model, because a provider may be listed although its libraries or a driver are missing.
    """
    ort = require("onnxruntime", "cpu" if engine == "onnxruntime" else "gpu")
    provider = PROVIDERS[engine][0]
    if provider not in ort.get_available_providers():
        raise EngineError(f"the installed ONNX Runtime has no {provider}; "
                          f"in place of onnxruntime, {installing('gpu')}")  # fmt: skip
    options = ort.SessionOptions()
    options.log_severity_level = 4  # silent: errors are raised
    value = np.array([1.5], np.float32)
    session = ort.InferenceSession(_IDENTITY, options, providers=[provider], enable_fallback=False)
    if session.get_providers()[0] != provider:
        raise EngineError("ONNX Runtime fell back to the CPU: the driver or the CUDA and cuDNN libraries are missing")
    (answer,) = session.run(None, {"x": value})
    if not np.array_equal(answer, value):
        raise EngineError(f"{engine} returned {answer} instead of {value}")
    return f"ONNX Runtime {ort.__version__}"


class OnnxEngine(Engine):
    """An ONNX file of cbmir in ONNX Runtime. `engine` is a key of PROVIDERS; see `open_engine` for the rest."""

    def __init__(
        self, path: str | Path, *, engine: str = "onnxruntime", threads: int | None = None, mode: Mode = "auto",
        cache: Path | None = None,
    ) -> None:  # fmt: skip
        self._ort = require("onnxruntime", "cpu" if engine == "onnxruntime" else "gpu")
        self._errors = _ort_errors()
        self._path, self._engine, self._cache = path, engine, cache
        self.streams = engine == "onnxruntime"
        first = 1 if self.streams and mode == "throughput" else threads or available_threads()
        session = self._session(first, provider_options("onnxruntime"))  # options for a GPU need the card inside
        metadata = session.get_modelmeta().custom_metadata_map
        if CARD_KEY not in metadata:
            raise CardError(f"{path}: expected a model card inside the ONNX file ({CARD_KEY}), found none; "
                            f"only files written by 'cbmir export' can be used")  # fmt: skip
        card = ModelCard.loads(metadata[CARD_KEY], source=str(path))
        head = decode_head(metadata.get(HEAD_KEY, ""), card, path)
        nodes = (*session.get_inputs(), *session.get_outputs())
        found = {node.name: (_TYPES.get(node.type, node.type), node.shape) for node in nodes}
        check_graph(path, card, len(session.get_inputs()), found)
        super().__init__(card, head, threads=threads, mode=mode)
        if not self.streams:
            session = self._session(first, self._options_of_gpu())
        self._runners[first] = self._runner_of(session)

    def _open(self, threads: int) -> Runner:
        return self._runner_of(self._session(threads, provider_options("onnxruntime")))

    def _describe(self) -> tuple[str, str, str]:
        return self._engine, "cpu" if self._engine == "onnxruntime" else "cuda:0", self._ort.__version__

    def _options_of_gpu(self) -> list[tuple[str, Options]]:
        gpu, precision, cache = current_gpu(), self.card.precision, None
        if self._engine == "onnxruntime-tensorrt":
            if precision == "float32" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
                self.warn("TensorRT may round float32 to TF32, and ONNX Runtime has no option to prevent it; set "
                          "NVIDIA_TF32_OVERRIDE=0")  # fmt: skip
            if self._cache is not None:
                sha256 = input_digest(self._path, MOST_MODEL)
                versions = f"{self._ort.__version__}-{loaded_tensorrt()}"
                cache = self._cache / self._engine / cache_key(sha256, gpu.name, versions, precision)
                cache.mkdir(parents=True, exist_ok=True)
        size = self.card.preprocess.crop
        return provider_options(self._engine, precision=precision, size=size, memory=gpu.memory, cache=cache)

    def _session(self, threads: int, providers: list[tuple[str, Options]]) -> Any:
        ort, (wanted, _) = self._ort, providers[0]
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.enable_cpu_mem_arena = False
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # fatal only: errors are raised, so they need not be printed too
        # Spinning threads take the processors from everything but the model (reading images takes twice as long).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = ort.InferenceSession(
                str(self._path), options, providers=providers, enable_fallback=False,
                disabled_optimizers=DISABLED_OPTIMIZERS,
            )  # fmt: skip
        except self._errors as error:
            if wanted != "CPUExecutionProvider":  # the CPU could load it, so the file is fine
                raise EngineError(f"{self._path}: ONNX Runtime cannot load it with {wanted}: {error}; 'cbmir doctor' "
                                  f"says what is missing") from error  # fmt: skip
            raise ModelError(f"{self._path}: expected an ONNX model written by 'cbmir export', ONNX Runtime cannot "
                             f"load it with {wanted}: {error}") from error  # fmt: skip
        # ONNX Runtime continues without a provider that it cannot load, so check which one the session uses.
        if session.get_providers()[0] != wanted:
            raise EngineError(
                f"engine {self._engine!r} was requested, but ONNX Runtime fell back to {session.get_providers()[0]}; "
                f"'cbmir doctor' says what is missing"
            )
        give_back_freed_memory()
        return session

    def _runner_of(self, session: Any) -> Runner:
        def run(batch: Any, names: Any) -> Any:
            try:
                return session.run(names, {"image": batch})
            except self._errors as error:
                raise EngineError(f"ONNX Runtime failed ({self._engine}): {error}") from error

        return run


def _ort_errors() -> tuple[type[Exception], ...]:
    """Return ONNX Runtime's exceptions, whose only common base class is Exception."""
    state = require("onnxruntime.capi.onnxruntime_pybind11_state", "cpu")
    found = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*found, RuntimeError)
