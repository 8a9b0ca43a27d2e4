"""Scale the channels of a tensor to the same range, so that one int8 scale fits them all, without changing the output.

An int8 tensor has one scale, so a channel of small values uses few of its 256 steps. If a convolution's output is only
read by depthwise 1x1 convolutions (BatchNorms, see `quantisable`), each channel can be shifted and scaled to [0, 1] in
the weights of the writer, and back in those of the consumers, at no cost. In a DenseNet this applies to every channel
of every Concat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from cbmir.export.calibration import channel_ranges
from cbmir.export.graph_rewrite import Floats, array, graph_bytes, quantisable, read_graph, set_input

#: A channel narrower than this share of the widest is noise: it is scaled as if it were that wide.
_LEAST = 1e-3


class _Consumer(NamedTuple):
    """A consumer of a tensor's channels, their first position in its input, and whether a ReLU comes before it."""

    node: ir.Node | None  # None: the tensor is an output of the graph
    first: int
    rectified: bool


def equalised(model: bytes, images: NDArray[np.uint8]) -> bytes:
    """Equalise a float32 file of cbmir: BatchNorms become depthwise convolutions, card and head are kept."""
    graph = quantisable(model)
    equalise(graph, images)
    graph.metadata_props.clear()
    graph.metadata_props.update(read_graph(model).metadata_props)
    return graph_bytes(graph)


def equalise(model: ir.Model, images: NDArray[np.uint8]) -> None:
    """Change the weights in place so that channels fill the same range on `images`, uint8 [M, 1, S, S]."""
    found = {
        str(node.outputs[0].name): (node, consumers)
        for node in model.graph
        if node.op_type == "Conv" and not is_depthwise_point(node)
        if (consumers := list(_consumers(node.outputs[0])))
        and all(is_depthwise_point(consumer.node) for consumer in consumers)
    }
    ranges = channel_ranges(model, list(found), images) if found else {}
    for name, (writer, consumers) in found.items():
        low, high = ranges[name]
        # A scale can be undone after a ReLU, a shift cannot.
        shift = np.zeros_like(low) if any(consumer.rectified for consumer in consumers) else low
        scale = np.maximum(high - shift, _LEAST * (high - shift).max())
        if (scale > 0).all():  # all channels may be dead: constant, or below zero before a ReLU
            _rescale(writer, consumers, shift, scale)


def is_depthwise_point(node: ir.Node | None) -> bool:
    """Return whether a node scales and shifts channels, as a BatchNorm does (see `quantisable`)."""
    if node is None or node.op_type != "Conv" or len(node.inputs) < 3 or _pads(node):
        return False
    channels, *_, height, width = array(node.inputs[1]).shape
    return bool(node.attributes.get_int("group", 1) == channels and height == width == 1)


def _consumers(value: ir.Value, first: int = 0, rectified: bool = False) -> Iterator[_Consumer]:
    """Yield the consumers of a tensor's channels, behind any Concat, pooling and ReLU, which keep channels separate."""
    if value.is_graph_output():
        yield _Consumer(None, first, rectified)
    for node in value.consumers():
        if node.op_type == "Concat" and node.attributes.get_int("axis") == 1:
            before = node.inputs[: node.inputs.index(value)]
            yield from _consumers(node.outputs[0], first + sum(map(_channels, before)), rectified)
        elif node.op_type in ("MaxPool", "Relu") or (node.op_type == "AveragePool" and not _pads(node)):
            yield from _consumers(node.outputs[0], first, rectified or node.op_type == "Relu")
        else:
            yield _Consumer(node, first, rectified)


def _channels(value: ir.Value | None) -> int:
    """Return C of a feature map [N, C, h, w]."""
    assert value is not None and value.shape is not None
    return int(value.shape[1])  # type: ignore[arg-type]


def _pads(node: ir.Node) -> bool:
    return any(node.attributes.get_ints("pads", ()))


def _rescale(writer: ir.Node, consumers: list[_Consumer], shift: Floats, scale: Floats) -> None:
    """Make the writer return (y - shift) / scale instead of y, both [C], and undo it in the consumers."""
    bias = array(writer.inputs[2]) if len(writer.inputs) > 2 else np.zeros_like(scale)
    set_input(writer, 1, array(writer.inputs[1]) / scale.reshape(-1, 1, 1, 1))
    set_input(writer, 2, (bias - shift) / scale)
    for consumer in consumers:
        assert consumer.node is not None
        part = slice(consumer.first, consumer.first + len(scale))
        slope, offset = map(array, consumer.node.inputs[1:])
        offset[part] += slope[part].ravel() * shift
        slope[part] *= scale.reshape(-1, 1, 1, 1)
        set_input(consumer.node, 1, slope)
        set_input(consumer.node, 2, offset)
