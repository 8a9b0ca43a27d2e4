"""TensorRT plans on an NVIDIA GPU: TensorRT runs the plan, and `cuda-python` moves the data.

Batches of 1 and of the plan's largest size are captured as a CUDA graph when they first come, and replayed from then
on; others are enqueued kernel by kernel.
"""

from __future__ import annotations

import ctypes
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

from cbmir.errors import EngineError
from cbmir.runtime.engines.base import OUTPUTS, Engine, Runner
from cbmir.runtime.engines.nvidia import Cuda, current_gpu, find_tensorrt, tensorrt_logger
from cbmir.runtime.engines.tensorrt_plan import read_plan, read_plan_info


@dataclass(frozen=True)
class _Buffer:
    """Room for a tensor of the largest batch: pinned memory of the host, seen as an array, and the GPU's address."""

    host: NDArray[Any]
    device: int


class TensorRtEngine(Engine):
    """A plan of `cbmir export --tensorrt`, with its sidecar beside it, on the first GPU: one thread at a time.

    Raises CardError for a sidecar that is missing or damaged, ModelError for a plan that is not the sidecar's,
    EngineError where its GPU or its TensorRT is not here, MissingDependencyError without cuda-python.
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
        self._resources = ExitStack()  # what is freed at the end, the latest first
        try:
            self._load(data)
        except BaseException:
            self._resources.close()
            raise

    def close(self) -> None:
        super().close()
        if os.getpid() == self._process:  # after a fork, CUDA's memory is not the child's to free
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
        self._buffers |= {name: self._buffer(name, np.dtype(np.float32)) for name in OUTPUTS}
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
        """The execution context for a batch size, set to it: one for each size that is captured, since its graph holds
        only while nothing else is done with the context, and one for all others."""
        key = count if count in self._fixed else 0
        if key not in self._contexts:
            self._contexts[key] = self._make_context(fixed=bool(key))
        context = self._contexts[key]
        if not context.set_input_shape("image", (count, *self._buffers["image"].host.shape[1:])):
            raise self._failure(f"does not take a batch of {count}")
        return context

    def _make_context(self, *, fixed: bool) -> Any:
        if fixed and self._info.flavour == "tensorrt-rtx":  # else a capture could hold kernels that are soon replaced
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
        """The image to the GPU, the plan, embedding and scores back: put on the stream, not waited for."""
        context = self._context(count)
        image = self._buffers["image"]
        kind = self._cuda.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        rows = image.host[:count]
        self._cuda("cudaMemcpyAsync", image.device, rows.ctypes.data, rows.nbytes, kind, self._stream)
        if not context.execute_async_v3(int(self._stream)):
            raise self._failure(f"failed on a batch of {count}")
        for name in OUTPUTS[:2]:
            self._fetch(name, count)

    def _fetch(self, name: str, count: int) -> None:
        buffer = self._buffers[name]
        rows, kind = buffer.host[:count], self._cuda.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._cuda("cudaMemcpyAsync", rows.ctypes.data, buffer.device, rows.nbytes, kind, self._stream)

    def _graph(self, count: int) -> Any:
        """The CUDA graph of a fixed batch size, captured on its first use; None for other sizes."""
        if count in self._fixed and count not in self._graphs:
            try:
                self._graphs[count] = self._capture(count)
            except EngineError as error:
                self._graphs[count] = None
                self.warn(f"batches of {count} run kernel by kernel, which is slower, since they could not be "
                           f"captured as a CUDA graph: {error}")  # fmt: skip
        return self._graphs.get(count)

    def _capture(self, count: int) -> Any:
        self._enqueue(count)  # what TensorRT sets up on a first run cannot be captured
        self._cuda("cudaStreamSynchronize", self._stream)
        context = self._contexts[count]
        if self._info.flavour == "tensorrt-rtx" and not context.is_stream_capturable(int(self._stream)):
            raise EngineError("TensorRT for RTX says that this plan cannot be")
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
        words = "; ".join(self._logger.errors) or "it gave no word"
        self._logger.errors.clear()
        return EngineError(f"TensorRT {what}: {words}")
