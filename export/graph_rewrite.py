"""A float32 graph made ready for int8: the function stays the same, the operators become those that have int8 kernels.

What a convolution can take in (a BatchNorm after it) is folded. A BatchNorm that is left, as each one after a Concat,
becomes a depthwise 1x1 convolution: there is no int8 BatchNorm, and going to float and back for it costs more than
int8 gains.

Rewriting an ONNX graph without changing what it computes. benchmarks/graph_work.py has what was tried.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from cbmir.errors import require

Array = NDArray[np.float32]
_LARGE = np.float32(3e38)
_SMALL = 1e-12  # a slope below it is none
_NUMBERS = itertools.count()  # one for all, so that a graph can be rewritten twice


class Graph:
    """A copy of a model to be changed. Batch norms are read as y = slope * x + shift of each channel."""

    def __init__(self, model: ModelProto) -> None:
        self.model = copy.deepcopy(model)
        self._constants = {tensor.name: copy.deepcopy(tensor) for tensor in self.model.graph.initializer}

    @property
    def nodes(self) -> Any:
        return self.model.graph.node

    def readers(self, name: str) -> list[NodeProto]:
        return [node for node in self.nodes if name in node.input]

    def array(self, name: str) -> Array:
        return np.asarray(numpy_helper.to_array(self._constants[name]), np.float32)

    def constant(self, array: Array) -> str:
        tensor = numpy_helper.from_array(np.ascontiguousarray(array, np.float32), f"rewritten_{next(_NUMBERS)}")
        self._constants[tensor.name] = tensor
        return str(tensor.name)

    def affine(self, norm: NodeProto) -> tuple[Array, Array]:
        gamma, beta, mean, variance = (self.array(name) for name in norm.input[1:])
        slope = gamma / np.sqrt(variance + np.float32(epsilon(norm)))
        return slope, beta - mean * slope

    def norms(self) -> Iterator[tuple[NodeProto, NodeProto]]:
        """Each batch norm of known numbers with the ReLU that alone reads it."""
        for norm in [node for node in self.nodes if node.op_type == "BatchNormalization"]:
            readers = self.readers(norm.output[0])
            if [node.op_type for node in readers] == ["Relu"] and self._constants.keys() >= set(norm.input[1:]):
                yield norm, readers[0]

    def is_pointwise(self, node: NodeProto) -> bool:
        """Whether it is a 1x1 convolution over all channels, without padding."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        return (
            node.op_type == "Conv"
            and node.input[1] in self._constants
            and self.array(node.input[1]).shape[2:] == (1, 1)
            and attributes.get("group", 1) == 1
            and not any(attributes.get("pads", ()))
        )

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """A new node at the end; `finish` sorts. Its only output."""
        name = f"rewritten_{next(_NUMBERS)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def finish(self) -> ModelProto:
        """Without what nothing reads, in an order in which every node follows its inputs."""
        makers = {name: node for node in self.nodes for name in node.output}
        wanted, sources = [value.name for value in self.model.graph.output], dict[str, list[str]]()
        while wanted:
            node = makers[wanted.pop()]
            if node.output[0] not in sources:
                inputs = [name for name in node.input if name in makers]
                sources[node.output[0]] = [makers[name].output[0] for name in inputs]
                wanted.extend(inputs)
        kept = [copy.deepcopy(makers[name]) for name in TopologicalSorter(sources).static_order()]
        del self.nodes[:]
        self.nodes.extend(kept)
        read = {name for node in kept for name in node.input}
        tensors = [tensor for name, tensor in self._constants.items() if name in read]
        del self.model.graph.value_info[:], self.model.graph.initializer[:]
        self.model.graph.initializer.extend(tensors)
        onnx.checker.check_model(self.model)
        return self.model


def bound_channels(model: ModelProto) -> ModelProto:
    """BN + ReLU before a 1x1 convolution as bounds of each channel, their slope and shift in the convolution.

    relu(a x + b) = a max(x, -b/a) + b where a > 0, and a min(x, -b/a) + b where a < 0; where a = 0 it is relu(b). Exact
    but for rounding, since a 1x1 convolution has no padding.
    """
    graph = Graph(model)
    for norm, relu in list(graph.norms()):
        readers = graph.readers(relu.output[0])
        if len(readers) != 1 or not graph.is_pointwise(readers[0]):
            continue
        (conv,) = readers
        slope, shift = graph.affine(norm)
        flat = np.abs(slope) < _SMALL
        slope, shift = np.where(flat, 0, slope), np.where(flat, np.maximum(shift, 0), shift)
        bound = np.where(flat, 0, -shift / np.where(flat, 1, slope))
        x = graph.add("Max", [norm.input[0], graph.constant(column(np.where(slope < 0, -_LARGE, bound)))])
        if (slope < 0).any():
            x = graph.add("Min", [x, graph.constant(column(np.where(slope < 0, bound, _LARGE)))])
        weight = graph.array(conv.input[1])
        bias = weight[:, :, 0, 0] @ shift + (graph.array(conv.input[2]) if len(conv.input) > 2 else 0)
        conv.input[:] = [x, graph.constant(weight * column(slope)), graph.constant(bias)]
    return graph.finish()


def epsilon(norm: NodeProto) -> float:
    """What a batch norm adds to the variance."""
    return next((float(a.f) for a in norm.attribute if a.name == "epsilon"), 1e-5)


def column(array: Array) -> Array:
    """[C] -> [1, C, 1, 1], which broadcasts over maps [N, C, h, w] and over kernels [D, C, 1, 1]."""
    return np.asarray(array, np.float32).reshape(1, -1, 1, 1)


Floats = NDArray[np.float64]


class QuantizableGraph:
    """An ONNX graph with its look-ups: who writes a tensor, who reads it, and constants, which may be replaced."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.nodes = model, model.graph.node
        self.outputs = {output.name for output in model.graph.output}
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.writer = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.readers[name].append(node)

    def is_read(self, name: str) -> bool:
        return any(name in node.input for node in self.nodes)

    def constant(self, name: str) -> Floats:
        return np.asarray(numpy_helper.to_array(self.constants[name]), np.float64)

    def set_input(self, node: NodeProto, position: int, value: Floats) -> None:
        """Let a node read a float32 constant of its own: the one that it reads now may serve others too."""
        name = f"{node.name}.{position}"
        if name not in self.constants:
            self.constants[name] = self.model.graph.initializer.add()
        self.constants[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))
        node.input[position:] = [name, *node.input[position + 1 :]]

    def channels(self, name: str) -> int:
        """C of a feature map [N, C, h, w] that convolutions, pooling, activations and concats make."""
        writer = self.writer[name]
        if writer.op_type == "Conv":
            return int(self.constants[writer.input[1]].dims[0])
        return sum(map(self.channels, writer.input)) if writer.op_type == "Concat" else self.channels(writer.input[0])

    def encoder(self) -> list[NodeProto]:
        """The nodes that make the feature map, in the graph's order; the others are the head."""
        found: set[str] = set()
        waiting = ["feature_map"]
        while waiting:
            node = self.writer.get(waiting.pop())
            if node is not None and node.output[0] not in found:
                found.add(node.output[0])
                waiting.extend(node.input)
        return [node for node in self.nodes if node.output[0] in found]


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def quantisable(model: bytes) -> ModelProto:
    """The graph of a float32 file of cbmir, folded, each node with a name of its own; without its metadata."""
    quantization = require("onnxruntime.quantization", "export")
    with TemporaryDirectory() as folder:
        # By files: given the graph itself, it writes the weights beside a file and loses them (onnxruntime 1.32).
        source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
        source.write_bytes(model)
        quantization.quant_pre_process(str(source), str(target), skip_symbolic_shape=True)
        folded = onnx.load(target)
    graph = QuantizableGraph(folded)
    for node in graph.nodes:
        node.name = f"{node.op_type}:{node.output[0]}"
        if node.op_type == "BatchNormalization":
            _make_depthwise(graph, node)
    return folded


def _make_depthwise(graph: QuantizableGraph, node: NodeProto) -> None:
    gamma, beta, mean, variance = (graph.constant(name) for name in node.input[1:])
    slope = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    conv = helper.make_node("Conv", node.input[:1], node.output[:1], node.name, group=len(slope), kernel_shape=[1, 1])
    graph.set_input(conv, 1, slope.reshape(-1, 1, 1, 1))
    graph.set_input(conv, 2, beta - slope * mean)
    node.CopyFrom(conv)
