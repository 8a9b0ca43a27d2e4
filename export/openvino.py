"""Convert a float32 ONNX file of cbmir to OpenVINO's .xml and .bin: for bfloat16, or quantised to int8 by NNCF.

In both, the head (everything after the feature map: mean, norm, distances, exp) computes in float32. In bfloat16 the
CPU plugin keeps float32 only after the last convolution or matrix product, so the head's matrix product is written as a
multiplication and a sum. NNCF leaves the head out.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, ModelCard
from cbmir.errors import ModelError, require
from cbmir.export.calibration import check_percentile
from cbmir.export.equalization import equalised
from cbmir.export.graph_rewrite import bound_channels, first_layers, graph_bytes, read_graph
from cbmir.files import replacing
from cbmir.runtime.engines.openvino import WEIGHTS_KEY, hidden, import_openvino

OpenVinoPrecision = Literal["bfloat16", "int8"]
_METADATA = "framework"  # where OpenVINO stores the metadata of an ONNX file


def write_openvino(
    model: bytes, path: Path, precision: OpenVinoPrecision, calibration: NDArray[np.uint8] | None = None, *,
    float_layers: int = 0, percentile: float | None = None,
) -> None:  # fmt: skip
    """Write a .xml file and the .bin beside it. An int8 file has its own embedding space: the fingerprint in its card
    ends with the first digits of the SHA-256 of the .bin.

    Args:
        model: The bytes of a float32 file of `cbmir export`.
        path: The .xml file.
        precision: `bfloat16` or `int8`.
        calibration: For int8: real images, uint8 [M, 1, S, S].
        float_layers: As in `quantize_ort.to_int8`; in bfloat16, later sums of residual connections are not in float.
        percentile: As in `quantize_ort.to_int8`.

    Raises:
        ModelError: No images for int8.
        UserError: The percentile is not in (50, 100].
    """
    check_percentile(percentile)
    if precision == "bfloat16":  # not for int8, which fits channels better after the norm
        bounded = read_graph(model)
        bound_channels(bounded)
        model = graph_bytes(bounded)
    graph = _read(model)
    card = ModelCard.loads(graph.get_rt_info([_METADATA, CARD_KEY]).astype(str)).with_(precision=precision)
    if precision == "int8":
        if calibration is None or not len(calibration):
            raise ModelError(f"{path}: expected images to calibrate int8 on, found none; give real ones")
        graph = _quantise(_read(equalised(model, calibration)), calibration, float_layers, percentile)
    else:
        for node in _first_layers(graph, float_layers):
            # The mark is meant for float16, but the CPU plugin also follows it in bfloat16 (openvinotoolkit/openvino
            # pull requests 20625, 21440 and 36719).
            _kept_pooling(node).get_rt_info()["precise_0"] = ""
    _save(graph, card, path)


def _read(model: bytes) -> Any:
    """Read a graph for batches of one image, with a head whose operators OpenVINO keeps in float32."""
    graph = import_openvino().Core().read_model(model)
    size = graph.input(0).partial_shape[2].get_length()
    graph.reshape([1, 1, size, size])
    ops, encoder = import_openvino().opset13, _encoder(graph)
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and node.get_friendly_name() not in encoder:
            rows, weights = node.input_value(0), node.input_value(1)
            if not node.get_attributes()["transpose_b"]:
                weights = ops.transpose(weights, [1, 0]).output(0)
            product = ops.reduce_sum(ops.multiply(ops.unsqueeze(rows, [1]), weights), [2])  # [1, 1, D] x [P, D]
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(product.output(0))
    return graph


def _encoder(graph: Any) -> dict[str, Any]:
    """Return the nodes that compute the feature map, by name. All other nodes are the head, which stays float32."""
    wanted, found = [graph.output("feature_map").get_node()], set()
    while wanted:
        node = wanted.pop()
        if node.get_friendly_name() not in found:
            found.add(node.get_friendly_name())
            wanted.extend(value.get_node() for value in node.input_values())
    return {name: node for node in graph.get_ordered_ops() if (name := node.get_friendly_name()) in found}


def _first_layers(graph: Any, count: int) -> list[Any]:
    return first_layers(_encoder(graph).values(), _is_layer, count)


def _is_layer(node: Any) -> bool:
    """Return whether a node is a convolution, but not a BatchNorm that became a depthwise 1x1 convolution."""
    kind = node.get_type_name()
    return kind == "Convolution" or (kind == "GroupConvolution" and list(node.input_value(1).shape)[-2:] != [1, 1])


def _kept_pooling(node: Any) -> Any:
    """Replace a MaxPool by an older version of it, which keeps its mark when the CPU plugin compiles the graph. Return
    the new node, or any other node as it is."""
    facts = node.get_attributes()
    if node.get_type_name() != "MaxPool" or set(facts["dilations"]) != {1}:
        return node
    names = ("strides", "pads_begin", "pads_end", "kernel", "rounding_type", "auto_pad")
    older = import_openvino().opset1.max_pool(node.input_value(0), *(facts[name] for name in names))
    for reader in node.output(0).get_target_inputs():
        reader.replace_source_output(older.output(0))
    return older


def _quantise(graph: Any, images: NDArray[np.uint8], float_layers: int, percentile: float | None) -> Any:
    nncf = import_nncf()
    encoder = _encoder(graph)
    names = {node.get_friendly_name() for node in graph.get_ordered_ops()}
    products = [node for node in encoder.values() if node.get_type_name() == "MatMul"]
    first = _first_layers(graph, float_layers)
    sums = [node for node in encoder.values() if node.get_type_name() == "Add"] if first else []
    in_float = {node.get_friendly_name() for node in (*first, *sums)}
    ranges = nncf.quantization.range_estimator
    options = nncf.AdvancedQuantizationParameters(
        # All 8 bits of the weights: sums may overflow without VNNI, but such processors gain nothing from int8.
        overflow_fix=nncf.quantization.advanced_parameters.OverflowFix.DISABLE,
    )
    # NNCF's default, the mean of the images' extremes, cuts off rare values, which changes a few embeddings a lot.
    options.activations_range_estimator_params = ranges.RangeEstimatorParametersSet.MINMAX
    if percentile is not None:
        bound = ranges.StatisticsCollectorParameters(
            ranges.StatisticsType.QUANTILE, ranges.AggregatorType.MEAN, quantile_outlier_prob=1 - percentile / 100
        )
        options.activations_range_estimator_params = ranges.RangeEstimatorParameters(bound, bound)
    with redirect_stdout(StringIO()):  # its progress bars
        return nncf.quantize(
            graph, nncf.Dataset([image[None] for image in images]), subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER if products else None, advanced_parameters=options,
            ignored_scope=nncf.IgnoredScope(names=sorted(names - encoder.keys() | in_float), validate=False),
        )  # fmt: skip


def import_nncf() -> Any:
    """Import NNCF without telemetry and warnings. It imports PyTorch if that is installed, which may warn about CUDA's
    compiler on a machine without a GPU."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with hidden("openvino_telemetry", "openvino.tools.ovc"):
        nncf = require("nncf", "quantise")
        require("nncf.quantization.range_estimator", "quantise")
    logging.getLogger("nncf").setLevel(logging.ERROR)  # NNCF's function for this would change all handlers
    return nncf


def _save(graph: Any, card: ModelCard, path: Path) -> None:
    """Write .bin and .xml. The .xml's metadata has the SHA-256 of the .bin, which also names int8 embedding spaces."""
    ov = import_openvino()
    with TemporaryDirectory() as folder:
        xml, weights = Path(folder, "model.xml"), Path(folder, "model.bin")
        ov.serialize(graph, xml, weights)
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
        if card.precision == "int8":
            card = card.with_(fingerprint=f"{card.fingerprint}-int8-openvino-{sha256[:8]}")
        graph.set_rt_info(sha256, [_METADATA, WEIGHTS_KEY])
        graph.set_rt_info(card.dumps(), [_METADATA, CARD_KEY])
        ov.serialize(graph, xml, weights)
        # OpenVINO 2026.0 knows only the older form of the mark in `write_openvino`.
        newer, older = 'name="DisablePrecisionConversion" version="0" value="dynamic:f16"', 'name="precise" version="0"'
        xml.write_text(xml.read_text("utf-8").replace(newer, older), "utf-8")
        for file in (weights, xml):
            with replacing(path.with_suffix(file.suffix)) as temporary:
                shutil.copyfile(file, temporary)
