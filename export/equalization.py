"""Channels of one range, so that they share an int8 scale well; the function that the graph computes stays the same.

A tensor has one scale in int8, and a channel of small values is left with few of its 256 steps. Where nothing but
depthwise 1x1 convolutions (BatchNorms, see `quantisable`) reads what a convolution wrote, each channel can be shifted
and scaled to [0, 1] in the writer's weights, and back in the readers', at no cost. In a DenseNet that holds for every
channel of every Concat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from cbmir.export.calibration import channel_ranges
from cbmir.export.graph_rewrite import Floats, QuantizableGraph, attribute, quantisable

#: A channel is not stretched beyond this share of the widest: below it there is nothing but noise.
_LEAST = 1e-3
#: Who reads an output of the graph.
_CALLER = NodeProto()


class _Reader(NamedTuple):
    """What reads a tensor's channels, which are those from `first` on in its own input; whether behind a ReLU."""

    node: NodeProto
    first: int
    rectified: bool


def equalised(model: bytes, images: NDArray[np.uint8]) -> bytes:
    """A float32 file of cbmir with its BatchNorms as depthwise convolutions and `equalise`d; card and head inside."""
    graph = quantisable(model)
    equalise(graph, images)
    facts = {entry.key: entry.value for entry in onnx.load_from_string(model).metadata_props}
    del graph.metadata_props[:]
    onnx.helper.set_model_props(graph, facts)
    return bytes(graph.SerializeToString())


def equalise(model: ModelProto, images: NDArray[np.uint8]) -> None:
    """Change the weights in place so that channels fill the same range on `images`, uint8 [M, 1, S, S]."""
    graph = QuantizableGraph(model)
    found = {
        node.output[0]: readers
        for node in graph.nodes
        if node.op_type == "Conv" and not _is_depthwise_point(graph, node)
        if (readers := _depthwise_readers(graph, node.output[0]))
    }
    ranges = channel_ranges(model, list(found), images) if found else {}
    for name, readers in found.items():
        low, high = ranges[name]
        # A scale passes a ReLU, a shift does not.
        shift = np.zeros_like(low) if any(reader.rectified for reader in readers) else low
        scale = np.maximum(high - shift, _LEAST * (high - shift).max())
        if (scale > 0).all():  # all channels may be dead: constant, or below zero before a ReLU
            _rescale(graph, graph.writer[name], readers, shift, scale)


def _depthwise_readers(graph: QuantizableGraph, name: str) -> list[_Reader]:
    """The depthwise 1x1 convolutions that read a tensor's channels; none where anything else reads them too."""
    readers = list(_readers(graph, name))
    return readers if all(_is_depthwise_point(graph, reader.node) for reader in readers) else []


def _is_depthwise_point(graph: QuantizableGraph, node: NodeProto) -> bool:
    if node.op_type != "Conv" or len(node.input) < 3 or any(attribute(node, "pads", [])):
        return False
    channels, *rest = graph.constants[node.input[1]].dims
    return attribute(node, "group", 1) == channels and all(side == 1 for side in rest)


def _readers(graph: QuantizableGraph, name: str, first: int = 0, rectified: bool = False) -> Iterator[_Reader]:
    """What reads a tensor's channels in the end: past concats, pooling and ReLUs, which treat each channel alike."""
    if name in graph.outputs:
        yield _Reader(_CALLER, first, rectified)
    for node in graph.readers[name]:
        if node.op_type == "Concat" and attribute(node, "axis", 0) == 1:
            before = list(node.input)[: list(node.input).index(name)]
            place = first + sum(graph.channels(other) for other in before)
            yield from _readers(graph, node.output[0], place, rectified)
        elif node.op_type in ("MaxPool", "Relu") or _is_plain_mean(node):
            yield from _readers(graph, node.output[0], first, rectified or node.op_type == "Relu")
        else:
            yield _Reader(node, first, rectified)


def _is_plain_mean(node: NodeProto) -> bool:
    return node.op_type == "AveragePool" and not any(attribute(node, "pads", []))


def _rescale(graph: QuantizableGraph, writer: NodeProto, readers: list[_Reader], shift: Floats, scale: Floats) -> None:
    """Let the writer give (y - shift) / scale in place of y, both [C], and the readers take it so."""
    bias = graph.constant(writer.input[2]) if len(writer.input) > 2 else np.zeros_like(scale)
    graph.set_input(writer, 1, graph.constant(writer.input[1]) / scale.reshape(-1, 1, 1, 1))
    graph.set_input(writer, 2, (bias - shift) / scale)
    for reader in readers:
        part = slice(reader.first, reader.first + len(scale))
        slope, offset = (graph.constant(name) for name in reader.node.input[1:])
        offset[part] += slope[part].ravel() * shift
        slope[part] *= scale.reshape(-1, 1, 1, 1)
        graph.set_input(reader.node, 1, slope)
        graph.set_input(reader.node, 2, offset)
