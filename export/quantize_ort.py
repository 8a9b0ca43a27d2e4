"""Post-training int8 for ONNX Runtime: a static QDQ file, activations uint8, weights int8 with a scale a channel.

The encoder is quantised, the head (all that follows the feature map) stays float32. Tensors that meet in a Concat or
pass a pooling share one scale, so that those copy bytes. A ReLU or a clipping costs nothing, since the range of a
convolution's output ends where it cuts. What has no int8 kernel (hard swish, the gates of squeeze and excitation) stays
float32 between two int8 layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, UserError, require
from cbmir.export.calibration import Grid, check_percentile, evenly_spread, tensor_ranges, turned_by_rounding
from cbmir.export.equalization import equalise
from cbmir.export.graph_rewrite import QuantizableGraph, quantisable

_ACTIVATIONS = ("Relu", "Clip")
_SAME_SCALE = ("Concat", "MaxPool", "AveragePool")
_QUANTISED = ("Conv", "Add", *_ACTIVATIONS, *_SAME_SCALE)
_LEVELS = 255


def to_int8(
    model: bytes, calibration: NDArray[np.uint8], *, keep: Sequence[str] = (), percentile: float | None = None
) -> bytes:
    """The bytes of an int8 file, from those of a float32 file of cbmir.

    `calibration` holds real images, uint8 [M, 1, S, S], on which the ranges of activations are taken: the least and the
    greatest value, or with `percentile` in (50, 100] the mean over the images of that percentile of each. `keep` names
    convolutions that stay in float, the first of `sensitive_layers`. The file has an embedding space of its own, whose
    name in its card ends with the first digits of the graph's SHA-256. Raises UserError for other images, layers or
    percentiles, CardError for a file without a card.
    """
    card, head = _card_and_head(model)
    _check_images(calibration, card)
    check_percentile(percentile)
    graph, grids, apart = _calibrated(model, calibration, percentile)
    unknown = sorted(set(keep) - {node.name for node in graph.encoder() if node.op_type == "Conv"})
    if unknown:
        raise UserError(f"expected names of convolutions to keep in float, as sensitive_layers gives them, found "
                        f"{', '.join(unknown)}")  # fmt: skip
    quantised = _write(graph, grids, calibration[:1], keep, apart)
    nodes = quantised.graph.node
    nodes.insert(0, nodes.pop(next(i for i, node in enumerate(nodes) if "image" in node.input)))  # for TensorRT
    digits = hashlib.sha256(quantised.graph.SerializeToString(deterministic=True)).hexdigest()[:8]
    info = card.with_(precision="int8", fingerprint=f"{card.fingerprint}-int8-onnxruntime-{digits}")
    del quantised.metadata_props[:]
    helper.set_model_props(quantised, {CARD_KEY: info.dumps(), HEAD_KEY: head})
    onnx.checker.check_model(quantised, full_check=True)
    return bytes(quantised.SerializeToString())


def sensitive_layers(
    model: bytes, calibration: NDArray[np.uint8], *, images: int = 8, percentile: float | None = None
) -> list[str]:
    """The convolutions, those that int8 hurts most first: for `to_int8(keep=…)`.

    A layer's harm is that of the worst tensor which it reads or writes: how far the embedding turns, in the mean over
    so many of the images, when that tensor alone is rounded to int8. So the two ends of the worst tensor come first;
    once both are kept it is float, unless a Concat or a pooling between them keeps it in int8.
    """
    card, _ = _card_and_head(model)
    _check_images(calibration, card)
    graph, grids, _ = _calibrated(model, calibration, percentile)
    readers = {
        name: [node for node in graph.readers[name] if node.op_type == "Conv"]
        for name in grids
        if any(node.op_type in ("Conv", "Add") for node in graph.readers[name])
    }
    some = evenly_spread(calibration, images)
    turned = turned_by_rounding(graph, {name: grids[name] for name in readers}, some)
    ranked: dict[str, None] = {}
    for name in sorted(readers, key=turned.__getitem__, reverse=True):
        writer = graph.writer[name]
        while writer.op_type in _ACTIVATIONS:
            writer = graph.writer[writer.input[0]]
        ranked |= {node.name: None for node in (writer, *readers[name]) if node.op_type == "Conv"}
    return list(ranked)


def _card_and_head(model: bytes) -> tuple[ModelCard, str]:
    metadata = {entry.key: entry.value for entry in onnx.load_from_string(model).metadata_props}
    if CARD_KEY not in metadata or HEAD_KEY not in metadata:
        raise CardError(f"expected a float32 ONNX file of cbmir with {CARD_KEY} and {HEAD_KEY}, found "
                        f"{sorted(metadata)}; make one with 'cbmir export RUN -o model.onnx'")  # fmt: skip
    return ModelCard.loads(metadata[CARD_KEY]), metadata[HEAD_KEY]


def _check_images(images: NDArray[np.uint8], card: ModelCard) -> None:
    size = card.preprocess.crop
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (1, size, size) or not len(images):
        raise UserError(f"expected images to calibrate on, uint8 [M, 1, {size}, {size}], found {images.dtype} "
                        f"{list(images.shape)}; give real X-rays of the kind that the model will see")  # fmt: skip


def _calibrated(
    model: bytes, calibration: NDArray[np.uint8], percentile: float | None
) -> tuple[QuantizableGraph, dict[str, Grid], list[str]]:
    """The float graph, ready to be quantised; the grid of each of its activations; and the nodes of _ACTIVATIONS that a
    range does not stand for, since sharing has widened it to where they cut."""
    prepared = quantisable(model)
    equalise(prepared, calibration)
    graph = QuantizableGraph(prepared)
    nodes = [node for node in graph.encoder() if node.op_type in _QUANTISED]
    names = dict.fromkeys(name for node in nodes for name in (*node.input, *node.output) if name in graph.writer)
    own = tensor_ranges(prepared, list(names), calibration, percentile)
    shared = _shared(nodes, own)
    grids = {name: _grid(low, high) for name, (low, high) in shared.items()}

    def is_widened(node: NodeProto) -> bool:
        name = node.output[0]
        (low, high), (least, most), half = own[name], shared[name], float(grids[name][0]) / 2
        return least < low - half or (node.op_type == "Clip" and most > high + half)

    return graph, grids, [node.name for node in nodes if node.op_type in _ACTIVATIONS and is_widened(node)]


def _shared(nodes: Iterable[NodeProto], ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The ranges with one for all tensors that a node of _SAME_SCALE joins."""
    group = {name: {name} for name in ranges}
    for node in nodes:
        if node.op_type in _SAME_SCALE:
            joined = set().union(*(group[name] for name in (*node.input, *node.output) if name in group))
            group |= dict.fromkeys(joined, joined)
    return {
        name: (min(ranges[other][0] for other in joined), max(ranges[other][1] for other in joined))
        for name, joined in group.items()
    }


def _grid(low: float, high: float) -> Grid:
    """Zero is always on the grid, since it pads."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / _LEVELS or 1.0
    return np.float32(scale), np.uint8(round(-low / scale))


def _write(
    graph: QuantizableGraph, grids: dict[str, Grid], image: NDArray[np.uint8], keep: Sequence[str], apart: Sequence[str]
) -> ModelProto:
    """The QDQ graph, but for the layers `keep` and the activations `apart`, which stay float operators."""
    quantization = require("onnxruntime.quantization", "export")

    class OneImage(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        """It must see an image, but takes the ranges from the overrides."""

        def __init__(self) -> None:
            self.waiting = [{"image": image}]

        def get_next(self) -> Any:
            return self.waiting.pop() if self.waiting else None

    encoder = {node.name for node in graph.encoder()}
    head = [node.name for node in graph.nodes if node.name not in encoder]
    kept = {name for node in graph.nodes if node.name in keep for name in node.output}
    # An activation after a layer in float would else have the values before it quantised.
    after = [node.name for node in graph.nodes if node.op_type in _ACTIVATIONS and node.input[0] in kept]
    overrides = {
        name: [{"scale": np.array(scale), "zero_point": np.array(zero)}] for name, (scale, zero) in grids.items()
    }
    # What a folded or replaced constant leaves behind: ONNX Runtime prints a warning for each.
    left = [tensor for tensor in graph.model.graph.initializer if not graph.is_read(tensor.name)]
    for tensor in left:
        graph.model.graph.initializer.remove(tensor)
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(graph.model, source)
        quantization.quantize_static(
            source,
            target,
            OneImage(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(_QUANTISED),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_exclude=[*head, *keep, *after, *apart],
            extra_options={"TensorQuantOverrides": overrides},
        )
        return onnx.load(target)
