"""Rewriting an ONNX graph without changing what it computes. benchmarks/graph_work.py has what was tried."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

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
