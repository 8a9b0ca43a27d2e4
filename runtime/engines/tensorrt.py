"""TensorRT plans on an NVIDIA GPU: TensorRT runs the plan, and `cuda-python` moves the data.

A plan cannot hold a model card, so a sidecar, `model.sm86.plan.json`, is written beside it. Batches of 1 and of the
plan's largest size are captured as a CUDA graph on first use, then replayed; others are enqueued kernel by kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, CbmirError, EngineError, ModelError, require
from cbmir.input_file import MOST_MODEL, read_input, read_json
from cbmir.runtime.engines.base import Engine, Runner, decode_head, encode_head, outputs_of
from cbmir.runtime.engines.nvidia import Cuda, current_gpu, find_tensorrt, tensorrt_logger


def check(engine: str) -> str:
    """Return TensorRT's name and version. Raises CbmirError if it cannot run here."""
    current_gpu()  # first, because the packages take seconds to import
    trt, flavour = find_tensorrt()
    require("cuda.bindings.runtime", flavour)
    return f"{'TensorRT' if flavour == 'tensorrt' else 'TensorRT for RTX'} {trt.__version__}"


_FACTS = {"target": str, "max_batch": int, "flavour": str, "version": str, "sha256": str, "source_sha256": str}


@dataclass(frozen=True, eq=False)
class PlanInfo:
    """A plan's sidecar: the model's card and head (float32 [P, D]), the GPU it was built for (sm86), its largest batch,
    the flavour and version of the TensorRT that built it, and the SHA-256 of the plan and of the ONNX file."""

    card: ModelCard
    head: NDArray[np.float32]
    target: str
    max_batch: int
    flavour: str
    version: str
    sha256: str
    source_sha256: str

    def to_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in _FACTS}
        return {CARD_KEY: self.card.to_json(), HEAD_KEY: encode_head(self.head), **facts}

    def why_not(self) -> str:
        """Return why this plan cannot run here, in one sentence; "" if its GPU and its TensorRT are available."""
        try:
            gpu = current_gpu()
            if gpu.target != self.target:
                return (f"the plan was built for a GPU of compute capability {self.target}, and this {gpu.name} is "
                        f"{gpu.target}; export again with --target {gpu.target}")  # fmt: skip
            trt, _ = find_tensorrt(self.flavour)
        except CbmirError as error:
            return str(error)
        if trt.__version__ != self.version:
            return (f"the plan was built by {self.flavour} {self.version}, and {trt.__version__} is installed; export "
                    f"it again, or install that version")  # fmt: skip
        return ""


def sidecar_of(plan: Path) -> Path:
    return plan.with_name(plan.name + ".json")


def read_plan_info(plan: Path) -> PlanInfo:
    """Read a plan's sidecar. Raises CardError if it is missing or damaged."""
    path = sidecar_of(plan)
    try:
        data = read_json(path)
        facts = {name: data[name] for name in _FACTS}
        card, head = json.dumps(data[CARD_KEY]), data[HEAD_KEY]
    except FileNotFoundError as error:
        raise CardError(f"{plan}: expected its card in {path.name} beside it, found none; the two files that "
                        f"'cbmir export' writes belong together") from error  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CardError(f"{path}: expected the card of a plan in JSON, found {type(error).__name__}: {error}; export "
                        f"the model again") from error  # fmt: skip
    wrong = [name for name, kind in _FACTS.items() if not isinstance(facts[name], kind)]
    if wrong or not isinstance(head, str):
        raise CardError(f"{path}: expected the text and numbers of a plan, found others in "
                        f"{', '.join(wrong or [HEAD_KEY])}; export the model again")  # fmt: skip
    model = ModelCard.loads(card, source=str(path))
    return PlanInfo(model, decode_head(head, model, path), **facts)


def read_plan(plan: Path, info: PlanInfo) -> bytes:
    """Read a plan. Raises ModelError if it cannot be read or does not match its sidecar."""
    try:
        data = read_input(plan, MOST_MODEL)
    except OSError as error:
        raise ModelError(f"{plan}: cannot read the plan ({error.strerror})") from error
    found = hashlib.sha256(data).hexdigest()
    if found != info.sha256:
        raise ModelError(f"{plan}: expected SHA-256 {info.sha256} as in {sidecar_of(plan).name}, found {found}: the "
                         f"plan is damaged or from another export; export the model again")  # fmt: skip
    return data


@dataclass(frozen=True)
class _Buffer:
    """Memory for a tensor of the largest batch: pinned host memory as an array, and an address on the GPU."""

    host: NDArray[Any]
    device: int


class TensorRtEngine(Engine):
    """A plan of `cbmir export --tensorrt` on the first GPU, run by one thread at a time.

    Raises CardError if the sidecar is missing or damaged, ModelError if the plan does not match it, EngineError if the
    GPU or the TensorRT that it needs is not available, MissingDependencyError without cuda-python.
    """

    streams = False

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        info = read_plan_info(path)
        data = read_plan(path, info)
        if why := info.why_not():
            raise EngineError(f"{path.name} cannot be run here: {why}")
        super().__init__(info.card, info.head, threads=1, mode="latency")
        self.max_batch = info.max_batch
        self._info, self._gpu = info, current_gpu()
        self._cuda, self._gpu_lock = Cuda(info.flavour), threading.Lock()
        self._trt, _ = find_tensorrt(info.flavour)
        self._logger = tensorrt_logger(self._trt)
        self._contexts: dict[int, Any] = {}
        self._graphs: dict[int, Any] = {}
        self._fixed = {1, info.max_batch}
        self._resources = ExitStack()  # freed by `close`, in reverse order
        try:
            self._load(data)
        except BaseException:
            self._resources.close()
            raise

    def close(self) -> None:
        super().close()
        if os.getpid() == self._process:  # a forked child must not free CUDA's memory
            with self._gpu_lock:
                self._resources.close()

    def _open(self, threads: int) -> Runner:
        return self._run_plan

    def _describe(self) -> tuple[str, str, str]:
        return "tensorrt", f"cuda:0 {self._gpu.name}", f"{self._info.flavour} {self._info.version}"

    def _run_plan(self, batch: NDArray[np.uint8], names: Sequence[str]) -> Sequence[NDArray[np.float32]]:
        count = len(batch)
        with self._gpu_lock:
            self._check_usable()
            self._buffers["image"].host[:count] = batch
            if graph := self._graph(count):
                self._cuda("cudaGraphLaunch", graph, self._stream)
            else:
                self._enqueue(count)
            if "feature_map" in names:
                self._fetch("feature_map", count)
            self._cuda("cudaStreamSynchronize", self._stream)
            return [self._buffers[name].host[:count].copy() for name in names]

    def _load(self, data: bytes) -> None:
        self._stream = self._cuda("cudaStreamCreate")
        self._resources.callback(self._cuda, "cudaStreamDestroy", self._stream)
        self._engine = self._trt.Runtime(self._logger).deserialize_cuda_engine(data)
        if self._engine is None:
            raise self._failure("cannot load the plan")
        self._buffers = {"image": self._buffer("image", np.dtype(np.uint8))}
        self._buffers |= {name: self._buffer(name, np.dtype(np.float32)) for name in outputs_of(self.card)}
        self._resources.callback(self._unload)

    def _unload(self) -> None:
        self._contexts.clear()
        self._engine = None

    def _buffer(self, name: str, dtype: np.dtype[Any]) -> _Buffer:
        shape = (self._info.max_batch, *tuple(self._engine.get_tensor_shape(name))[1:])
        size = math.prod(shape) * dtype.itemsize
        pinned = self._cuda("cudaMallocHost", size)
        self._resources.callback(self._cuda, "cudaFreeHost", pinned)
        device = self._cuda("cudaMalloc", size)
        self._resources.callback(self._cuda, "cudaFree", device)
        memory = (ctypes.c_uint8 * size).from_address(int(pinned))
        return _Buffer(np.frombuffer(memory, dtype).reshape(shape), int(device))

    def _context(self, count: int) -> Any:
        """Return the execution context for a batch size: one per captured size, because a graph is only valid while
        nothing else uses its context, and one for all other sizes."""
        key = count if count in self._fixed else 0
        if key not in self._contexts:
            self._contexts[key] = self._make_context(fixed=bool(key))
        context = self._contexts[key]
        if not context.set_input_shape("image", (count, *self._buffers["image"].host.shape[1:])):
            raise self._failure(f"does not take a batch of {count}")
        return context

    def _make_context(self, *, fixed: bool) -> Any:
        if fixed and self._info.flavour == "tensorrt-rtx":  # else a graph could capture kernels that are replaced later
            config = self._engine.create_runtime_config()
            eager = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context()
        if context is None:
            raise self._failure("cannot make an execution context")
        for name, buffer in self._buffers.items():
            context.set_tensor_address(name, buffer.device)
        return context

    def _enqueue(self, count: int) -> None:
        """Enqueue, without waiting: copy the images to the GPU, run the plan, copy embeddings and scores back."""
        context = self._context(count)
        image = self._buffers["image"]
        kind = self._cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        rows = image.host[:count]
        self._cuda("cudaMemcpyAsync", image.device, rows.ctypes.data, rows.nbytes, kind, self._stream)
        if not context.execute_async_v3(int(self._stream)):
            raise self._failure(f"failed on a batch of {count}")
        for name in outputs_of(self.card)[:-1]:
            self._fetch(name, count)

    def _fetch(self, name: str, count: int) -> None:
        buffer = self._buffers[name]
        rows, kind = buffer.host[:count], self._cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._cuda("cudaMemcpyAsync", rows.ctypes.data, buffer.device, rows.nbytes, kind, self._stream)

    def _graph(self, count: int) -> Any:
        """Return the CUDA graph for a fixed batch size, captured on first use; None for other sizes or on failure."""
        if count in self._fixed and count not in self._graphs:
            try:
                self._graphs[count] = self._capture(count)
            except EngineError as error:
                self._graphs[count] = None
                self.warn(f"batches of {count} run kernel by kernel, which is slower, since they could not be "
                           f"captured as a CUDA graph: {error}")  # fmt: skip
        return self._graphs.get(count)

    def _capture(self, count: int) -> Any:
        self._enqueue(count)  # TensorRT's setup in the first run cannot be captured
        self._cuda("cudaStreamSynchronize", self._stream)
        context = self._contexts[count]
        if self._info.flavour == "tensorrt-rtx" and not context.is_stream_capturable(int(self._stream)):
            raise EngineError("TensorRT for RTX cannot capture this plan")
        mode = self._cuda.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._cuda("cudaStreamBeginCapture", self._stream, mode)
        try:
            self._enqueue(count)
        finally:
            captured = self._cuda("cudaStreamEndCapture", self._stream)
            self._resources.callback(self._cuda, "cudaGraphDestroy", captured)
        graph = self._cuda("cudaGraphInstantiate", captured, 0)
        self._resources.callback(self._cuda, "cudaGraphExecDestroy", graph)
        return graph

    def _failure(self, what: str) -> EngineError:
        words = "; ".join(self._logger.errors) or "unknown reason"
        self._logger.errors.clear()
        return EngineError(f"TensorRT {what}: {words}")
