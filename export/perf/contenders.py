"""The contenders of `cbmir speed`: cbmir's engines, handwritten code for each library, and bare matrix products.

A contender is a small picklable description. Its own process opens it and imports the libraries, so that loading time
is measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.choices import Mode
from cbmir.errors import ModelError, require
from cbmir.process import available_threads
from cbmir.runtime.engines.base import EngineHealth
from cbmir.runtime.engines.openvino import import_openvino
from cbmir.runtime.engines.registry import ENDINGS, model_files, open_engine, stem
from cbmir.runtime.models.catalog import find_model

#: Runs uint8 [N, 1, S, S] and returns the embeddings, float32 [N, D].
Answer = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(frozen=True)
class Contender(ABC):
    """One contender; its name is unique in a run."""

    name: str
    #: Whether it has the model's weights, so that embeddings can be compared.
    has_weights: ClassVar[bool] = True
    #: Whether to leave it out with a warning if it cannot be opened: true for files found in a folder.
    optional: bool = field(default=False, kw_only=True)
    threads: int | None = field(default=None, kw_only=True)

    @abstractmethod
    def open(self) -> tuple[Answer, EngineHealth]:
        """Load it; called in the contender's own process. Raises CbmirError."""


@dataclass(frozen=True)
class ModelContender(Contender):
    """A model file in one of cbmir's engines; the fields are arguments of `open_engine`."""

    path: Path
    engine: str = "auto"
    mode: Mode = "auto"

    def open(self) -> tuple[Answer, EngineHealth]:
        engine = open_engine(self.path, engine=self.engine, mode=self.mode, threads=self.threads)
        return lambda batch: engine.run(batch).embedding, engine.health()


@dataclass(frozen=True)
class OnnxRuntimePeer(Contender):
    """A plain InferenceSession on the CPU with default options, except for the threads."""

    path: Path

    def open(self) -> tuple[Answer, EngineHealth]:
        ort = require("onnxruntime", "cpu")
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads or available_threads()
        session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        health = peer_health("onnxruntime", ort.__version__, self.threads, "InferenceSession with default options")
        names = [output.name for output in session.get_outputs() if output.name != "feature_map"]  # embedding first
        return lambda batch: np.asarray(session.run(names, {"image": batch})[0]), health


@dataclass(frozen=True)
class OpenVinoPeer(Contender):
    """A plain compile_model of the ONNX file with default settings, except for a given number of threads.

    OpenVINO chooses bfloat16 itself if the processor has the instructions for it.
    """

    path: Path

    def open(self) -> tuple[Answer, EngineHealth]:
        openvino = import_openvino()
        settings = {} if self.threads is None else {"INFERENCE_NUM_THREADS": self.threads}
        compiled = openvino.Core().compile_model(str(self.path), "CPU", settings)
        hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        precision = {"bf16": "bfloat16", "f16": "float16"}.get(hint, "float32")
        embedding = compiled.output("embedding")
        version, reason = openvino.__version__.split("-")[0], "compile_model with default settings"
        health = peer_health("openvino", version, self.threads, reason, precision)
        return lambda batch: np.asarray(compiled({"image": batch})[embedding]), health


@dataclass(frozen=True)
class TorchPeer(Contender):
    """The same architecture in PyTorch: inference mode, eager, float32. Random weights do not affect speed."""

    has_weights = False

    card: ModelCard
    channels_last: bool = False

    def open(self) -> tuple[Answer, EngineHealth]:
        torch = require("torch", "train")
        from cbmir.training.encoders.encoder import encoder_of
        from cbmir.training.model import RetrievalModel, head_of

        torch.set_num_threads(self.threads or available_threads())
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = RetrievalModel(encoder_of(self.card), head_of(self.card)).eval().to(memory_format=layout)

        def answer(batch: NDArray[np.uint8]) -> NDArray[np.float32]:
            with torch.inference_mode():
                embedding, _, _ = model(torch.from_numpy(batch).contiguous(memory_format=layout))
            return np.asarray(embedding)

        name = "channels_last" if self.channels_last else "NCHW"
        return answer, peer_health("torch", torch.__version__, self.threads, f"eager, {name}, random weights")


@dataclass(frozen=True)
class MatrixPeak(Contender):
    """One matrix product per image with as many operations as the model. Its time is a lower bound on this
    processor, and its ratio to a model's time is the model's share of the peak."""

    has_weights = False

    flops: int
    precision: Literal["float32", "bfloat16"]

    def open(self) -> tuple[Answer, EngineHealth]:
        torch = require("torch", "train")
        torch.set_num_threads(self.threads or available_threads())
        inner = 1024
        rows = max(1, round(self.flops / (2 * inner * inner)))
        dtype = getattr(torch, self.precision)
        left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, inner, dtype=dtype)
        product = torch.empty(rows, inner, dtype=dtype)

        def answer(batch: NDArray[np.uint8]) -> NDArray[np.float32]:
            for _ in range(len(batch)):
                torch.mm(left, right, out=product)
            return np.empty((len(batch), 0), np.float32)

        reason = f"matrix products of [{rows}, {inner}] by [{inner}, {inner}]"
        return answer, peer_health("torch", torch.__version__, self.threads, reason, self.precision)


def peer_contenders(
    models: Sequence[Path], card: ModelCard, libraries: Sequence[str], threads: int | None, *, peak: bool = False
) -> Iterator[Contender]:
    """Yield handwritten contenders for `libraries` (torch, onnxruntime, openvino); `peak` adds matrix products.

    Raises ModelError if there is no float32 .onnx file for the models, which all except torch need.
    """
    for library in libraries:
        if library == "torch":
            yield TorchPeer("peer torch", card, threads=threads)
            yield TorchPeer("peer torch channels_last", card, channels_last=True, threads=threads)
        else:
            kind = OnnxRuntimePeer if library == "onnxruntime" else OpenVinoPeer
            yield kind(f"peer {library}", float32_file(models), threads=threads)
    if peak:
        flops = count_flops(float32_file(models))
        yield MatrixPeak("peak float32", flops, "float32", threads=threads)
        yield MatrixPeak("peak bfloat16", flops, "bfloat16", threads=threads)


def peer_health(
    library: str, version: str, threads: int | None, reason: str, precision: str = "float32"
) -> EngineHealth:
    """Return the health of a handwritten contender, which runs one batch at a time on the CPU with all threads."""
    return EngineHealth(
        engine=library, requested=library, reason=reason, device="cpu", precision=precision,
        threads=threads or available_threads(), mode="latency", version=version,
    )  # fmt: skip


def model_contenders(
    models: Sequence[Path], *, engines: Sequence[str] = ("auto",), modes: Sequence[Mode] = ("auto",),
    threads: int | None = None,
) -> list[ModelContender]:  # fmt: skip
    """Return every model file in every engine and mode; the files of a folder are optional, shortest name first.

    Raises ModelError for a missing file, and for a folder without a model file.
    """
    files = list(_files(models))
    names = [path.name for path, _ in files]
    found = []
    for path, optional in files:
        name = path.name if names.count(path.name) == 1 else str(path)
        for engine, mode in product(engines, modes):
            words = [name, *([engine] if engine != "auto" else []), *([mode] if len(modes) > 1 else [])]
            found.append(ModelContender(" ".join(words), path, engine, mode, threads=threads, optional=optional))
    return found


def float32_file(models: Sequence[Path]) -> Path:
    """Return the float32 .onnx file of these models, for handwritten contenders. Raises ModelError if none exists."""
    for path, _ in _files(models):
        file = path.with_name(f"{stem(path)}.onnx")
        if file.is_file():
            return file
    raise ModelError(
        f"expected model.onnx beside {models[0]}, for the handwritten code to load, found none; give it as well"
    )


def _files(models: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file, and whether it comes from a folder: this machine need not be able to run those."""
    for path in map(find_model, models):
        if not path.is_dir():
            yield path, False
            continue
        files = model_files(path)
        if not files:
            raise ModelError(f"{path}: expected a model file ({', '.join(ENDINGS)}) in this folder, found none; "
                             f"'cbmir export' writes them")  # fmt: skip
        for file in sorted(files, key=lambda file: (len(file.name), file.name)):
            yield file, True


def count_flops(path: Path) -> int:
    """Count floating-point operations per image in convolutions and matrix products, which are almost all of the work;
    a multiply-add counts as two. Raises ModelError for a graph with unknown shapes."""
    onnx = require("onnx", "export")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):  # 0 for an unknown dimension
        shapes[value.name] = [side.dim_value for side in value.type.tensor_type.shape.dim]
    total = 0
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        weight, output = shapes.get(node.input[1], []), shapes.get(node.output[0], [])
        if not weight or not output or 0 in output:
            raise ModelError(f"{path}: the shape of {node.op_type} {node.output[0]} is not known; export it again")
        # An output value sums over C / groups, h and w of a kernel [M, C / groups, h, w], or over the inner dimension.
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        summed = math.prod(weight[1:]) if node.op_type == "Conv" or transposed else weight[-2]
        total += 2 * math.prod(output) * summed
    return total
