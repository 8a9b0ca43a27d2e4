"""Post-training int8 for ONNX Runtime: a static QDQ file, activations uint8, weights int8 with one scale per channel.

Only the encoder is quantised; the head (everything after the feature map) stays float32. Tensors that meet in a Concat
or pass through pooling share one scale, so that these operators only copy bytes. A ReLU or clip is free, since the
range of the convolution's output ends at its bounds. Operators without an int8 kernel (hard swish, the gates of
squeeze-and-excitation) stay float32 between int8 layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, UserError, require
from cbmir.export.calibration import check_percentile, tensor_ranges
from cbmir.export.equalization import equalise, is_depthwise_point
from cbmir.export.graph_rewrite import encoder_nodes, first_layers, quantisable, read_graph

_ACTIVATIONS = ("Relu", "Clip")
_SAME_SCALE = ("Concat", "MaxPool", "AveragePool")
_QUANTISED = ("Conv", "Add", *_ACTIVATIONS, *_SAME_SCALE)

#: Scale and zero point of a tensor: value = scale * (q - zero point), q in 0..255.
Grid = tuple[np.float32, np.uint8]


def to_int8(
    model: bytes, calibration: NDArray[np.uint8], *, float_layers: int = 0, percentile: float | None = None
) -> bytes:
    """Convert the bytes of a float32 file of cbmir to those of an int8 file.

    The file has its own embedding space: the fingerprint in its card ends with the first digits of the graph's SHA-256.

    Args:
        model: The bytes of a float32 file of `cbmir export`.
        calibration: Real images, uint8 [M, 1, S, S], from which the ranges of activations are taken.
        float_layers: Number of convolutions from the image on that stay in float, with everything between them. If it
            is above 0, the sums of residual connections stay in float too.
        percentile: In (50, 100]: a range is the mean of the images' percentiles. None: a range goes from the smallest
            to the largest value.

    Raises:
        UserError: The images or the percentile are not valid.
        CardError: The file has no card.
    """
    card, head = _checked(model, calibration)
    check_percentile(percentile)
    graph, grids, apart = _calibrated(model, calibration, percentile)
    quantised = _quantise(graph, grids, calibration[:1], float_layers, apart)
    (cast,) = quantised.graph.inputs[0].consumers()
    quantised.graph.insert_before(quantised.graph[0], cast)  # for TensorRT
    digits = hashlib.sha256(ir.to_proto(quantised.graph).SerializeToString(deterministic=True)).hexdigest()[:8]
    info = card.with_(precision="int8", fingerprint=f"{card.fingerprint}-int8-onnxruntime-{digits}")
    quantised.metadata_props.clear()
    quantised.metadata_props.update({CARD_KEY: info.dumps(), HEAD_KEY: head})
    proto = ir.to_proto(quantised)
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString())


def _checked(model: bytes, images: NDArray[np.uint8]) -> tuple[ModelCard, str]:
    """Return the file's card and head. Raises CardError if they are missing, UserError for images of the wrong size."""
    metadata = read_graph(model).metadata_props
    if CARD_KEY not in metadata or HEAD_KEY not in metadata:
        raise CardError(f"expected a float32 ONNX file of cbmir with {CARD_KEY} and {HEAD_KEY}, found "
                        f"{sorted(metadata)}; make one with 'cbmir export RUN -o model.onnx'")  # fmt: skip
    card = ModelCard.loads(metadata[CARD_KEY])
    size = card.preprocess.crop
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (1, size, size) or not len(images):
        raise UserError(f"expected images to calibrate on, uint8 [M, 1, {size}, {size}], found {images.dtype} "
                        f"{list(images.shape)}; give real X-rays of the kind that the model will see")  # fmt: skip
    return card, metadata[HEAD_KEY]


def _calibrated(
    model: bytes, calibration: NDArray[np.uint8], percentile: float | None
) -> tuple[ir.Model, dict[str, Grid], list[str]]:
    """Return the float graph to quantise, the grid of each tensor, and the _ACTIVATIONS that grids cannot replace."""
    graph = quantisable(model)
    equalise(graph, calibration)
    nodes = [node for node in encoder_nodes(graph) if node.op_type in _QUANTISED]
    names = _tensors(nodes)
    own = tensor_ranges(graph, list(names), calibration, percentile)
    shared = _shared(nodes, own)
    grids = {name: _grid(low, high) for name, (low, high) in shared.items()}

    def is_widened(node: ir.Node) -> bool:
        name = node.outputs[0].name or ""
        (low, high), (least, most), half = own[name], shared[name], float(grids[name][0]) / 2
        return least < low - half or (node.op_type == "Clip" and most > high + half)

    return graph, grids, [node.name or "" for node in nodes if node.op_type in _ACTIVATIONS and is_widened(node)]


def _tensors(nodes: Iterable[ir.Node]) -> dict[str, ir.Value]:
    """Return the tensors that the nodes read and write, by name, without the graph's inputs and constants."""
    values = (value for node in nodes for value in (*node.inputs, *node.outputs))
    return {value.name: value for value in values if value is not None and value.name and value.producer()}


def _shared(nodes: Iterable[ir.Node], ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the ranges, with one for all tensors that a node of _SAME_SCALE joins."""
    group = {name: {name} for name in ranges}
    for node in nodes:
        if node.op_type in _SAME_SCALE:
            joined = set().union(*(group[name] for name in _tensors([node])))
            group |= dict.fromkeys(joined, joined)
    return {
        name: (min(ranges[other][0] for other in joined), max(ranges[other][1] for other in joined))
        for name, joined in group.items()
    }


def _grid(low: float, high: float) -> Grid:
    """Return the grid of a range. It always contains zero, which padding uses."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    return np.float32(scale), np.uint8(round(-low / scale))


def _quantise(
    model: ir.Model, grids: dict[str, Grid], image: NDArray[np.uint8], float_layers: int, apart: Sequence[str]
) -> ir.Model:
    """Return the QDQ graph, with the first layers and the activations `apart` as float operators."""
    quantization = require("onnxruntime.quantization", "export")

    encoder = encoder_nodes(model)
    first = first_layers(encoder, lambda node: node.op_type == "Conv" and not is_depthwise_point(node), float_layers)
    sums = [node for node in encoder if node.op_type == "Add"] if first else []
    in_float = [node.name for node in model.graph if node in first or node in sums or node not in encoder]
    ranges = {name: [{"scale": np.array(step), "zero_point": np.array(zero)}] for name, (step, zero) in grids.items()}
    RemoveUnusedNodesPass()(model)  # ONNX Runtime prints a warning for each folded or replaced constant
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        ir.save(model, source)
        # Required, although the scales come from `ranges`.
        one_image = SimpleNamespace(get_next=partial(next, iter([{"image": image}]), None))
        quantization.quantize_static(
            source, target, one_image, quant_format=quantization.QuantFormat.QDQ, op_types_to_quantize=list(_QUANTISED),
            per_channel=True, activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=[*in_float, *apart], extra_options={"TensorQuantOverrides": ranges},
        )  # fmt: skip
        return read_graph(target.read_bytes())
