"""A float32 graph made ready for int8: the function stays the same, the operators become those that have int8 kernels.

What a convolution can take in (a BatchNorm after it) is folded. A BatchNorm that is left, as each one after a Concat,
becomes a depthwise 1x1 convolution: there is no int8 BatchNorm, and going to float and back for it costs more than
int8 gains.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from cbmir.errors import require

Floats = NDArray[np.float64]


class Graph:
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
    graph = Graph(folded)
    for node in graph.nodes:
        node.name = f"{node.op_type}:{node.output[0]}"
        if node.op_type == "BatchNormalization":
            _make_depthwise(graph, node)
    return folded


def _make_depthwise(graph: Graph, node: NodeProto) -> None:
    gamma, beta, mean, variance = (graph.constant(name) for name in node.input[1:])
    slope = gamma / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    conv = helper.make_node("Conv", node.input[:1], node.output[:1], node.name, group=len(slope), kernel_shape=[1, 1])
    graph.set_input(conv, 1, slope.reshape(-1, 1, 1, 1))
    graph.set_input(conv, 2, beta - slope * mean)
    node.CopyFrom(conv)
