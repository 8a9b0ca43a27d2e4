"""Rewrites of a float ONNX graph (an `onnx_ir.Model`) that do not change its output.

`bound_channels` replaces BatchNorms for OpenVINO (benchmarks/graph_work.py measures the gain), and `quantisable`
prepares a graph for int8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from cbmir.errors import require

Floats = NDArray[np.float64]
Node = TypeVar("Node")
_LARGE = 3e38
_SMALL = 1e-12  # a slope below it counts as zero


def read_graph(model: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_model_from_string(model))


def graph_bytes(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString())


def encoder_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that compute the feature map, in graph order. All other nodes are the head."""
    found: set[ir.Node] = set()
    waiting: list[ir.Value | None] = [value for value in model.graph.outputs if value.name == "feature_map"]
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(node.inputs)
    return [node for node in model.graph if node in found]


def first_layers(nodes: Iterable[Node], is_layer: Callable[[Node], bool], count: int) -> list[Node]:
    """Return the first `count` layers and all nodes before the next one, of nodes in graph order; none for 0."""
    found: list[Node] = []
    for node in nodes if count else ():
        count -= is_layer(node)
        if count < 0:
            break
        found.append(node)
    return found


def array(value: ir.Value | None) -> Floats:
    assert value is not None and value.const_value is not None
    return np.asarray(value.const_value.numpy(), np.float64)


def constant(graph: ir.Graph, name: str, values: Floats) -> ir.Value:
    """Add a float32 constant, which replaces any of the same name."""
    tensor = ir.tensor(np.ascontiguousarray(values, np.float32), name=name)
    value = ir.val(name, const_value=tensor)
    graph.initializers.add(value)
    return value


def set_input(node: ir.Node, position: int, values: Floats) -> None:
    """Give a node its own float32 constant: other nodes may read the old one."""
    assert node.graph is not None
    node.resize_inputs(max(len(node.inputs), position + 1))
    node.replace_input_with(position, constant(node.graph, f"{node.name}.{position}", values))


def insert_before(node: ir.Node, kind: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
    """Insert a new node before another, and return its only output."""
    made = ir.node(kind, inputs, attributes)
    node.prepend(made)
    return made.outputs[0]


def affine(norm: ir.Node) -> tuple[Floats, Floats]:
    """Return the slope and shift [C] of a batch norm: y = slope * x + shift per channel."""
    gamma, beta, mean, variance = map(array, norm.inputs[1:])
    slope = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    return slope, beta - mean * slope


def norms(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Yield each batch norm with constant parameters whose only reader is a ReLU, with that ReLU."""
    for node in list(graph):
        if node.op_type == "BatchNormalization" and all(value and value.const_value for value in node.inputs[1:]):
            readers = node.outputs[0].consumers()
            if [reader.op_type for reader in readers] == ["Relu"]:
                yield node, readers[0]


def pointwise_reader(value: ir.Value) -> ir.Node | None:
    """Return the reader of a map, if it is the only one and a 1x1 convolution over all channels without padding."""
    readers = value.consumers()
    if len(readers) != 1 or (node := readers[0]).op_type != "Conv" or not (weight := node.inputs[1]):
        return None
    is_point = weight.const_value is not None and array(weight).shape[2:] == (1, 1)
    pads, group = node.attributes.get_ints("pads", ()), node.attributes.get_int("group", 1)
    return node if is_point and group == 1 and not any(pads) else None


def column(values: Floats) -> Floats:
    """Reshape [C] -> [1, C, 1, 1], which broadcasts over maps [N, C, h, w] and over kernels [D, C, 1, 1]."""
    return values.reshape(1, -1, 1, 1)


def bound_channels(model: ir.Model) -> None:
    """Replace BN + ReLU before a 1x1 convolution with bounds per channel, and fold slope and shift into the
    convolution.

    relu(a x + b) is a max(x, -b/a) + b if a > 0, a min(x, -b/a) + b if a < 0, and relu(b) if a = 0. This is exact
    except for rounding, since a 1x1 convolution has no padding.
    """
    for norm, relu in norms(model.graph):
        conv = pointwise_reader(relu.outputs[0])
        if conv is None:
            continue
        slope, shift = affine(norm)
        flat = np.abs(slope) < _SMALL
        slope, shift = np.where(flat, 0, slope), np.where(flat, np.maximum(shift, 0), shift)
        bound = np.where(flat, 0, -shift / np.where(flat, 1, slope))
        name = relu.outputs[0].name
        least = constant(model.graph, f"{name}.least", column(np.where(slope < 0, -_LARGE, bound)))
        x = insert_before(conv, "Max", [norm.inputs[0], least])
        if (slope < 0).any():
            most = constant(model.graph, f"{name}.most", column(np.where(slope < 0, bound, _LARGE)))
            x = insert_before(conv, "Min", [x, most])
        weight = array(conv.inputs[1])
        bias = weight[:, :, 0, 0] @ shift + (array(conv.inputs[2]) if len(conv.inputs) > 2 else 0)
        conv.name = conv.name or f"Conv:{conv.outputs[0].name}"
        conv.replace_input_with(0, x)
        set_input(conv, 1, weight * column(slope))
        set_input(conv, 2, bias)
    RemoveUnusedNodesPass()(model)


def quantisable(model: bytes) -> ir.Model:
    """Rewrite the graph of a float32 file of cbmir with operators that have int8 kernels, without card and head.

    A BatchNorm after a convolution is folded into it. Any other BatchNorm (after a Concat, for example) becomes a
    depthwise 1x1 convolution: there is no int8 BatchNorm, and converting to float and back costs more than int8 gains.
    Each node gets a unique name.
    """
    quantization = require("onnxruntime.quantization", "export")
    with TemporaryDirectory() as folder:
        # Through files: given the graph itself, onnxruntime 1.32 writes the weights to a second file and loses them.
        source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
        source.write_bytes(model)
        quantization.quant_pre_process(str(source), str(target), skip_symbolic_shape=True)
        folded = read_graph(target.read_bytes())
    for node in folded.graph:
        node.name = f"{node.op_type}:{node.outputs[0].name}"
        if node.op_type == "BatchNormalization":
            slope, shift = affine(node)
            node.op_type = "Conv"
            node.attributes.clear()
            node.attributes.add(ir.AttrInt64("group", len(slope)))
            node.attributes.add(ir.AttrInt64s("kernel_shape", [1, 1]))
            node.resize_inputs(3)
            set_input(node, 1, slope.reshape(-1, 1, 1, 1))
            set_input(node, 2, shift)
    return folded
