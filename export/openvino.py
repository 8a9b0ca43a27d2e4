"""Convert a float32 ONNX file of cbmir to OpenVINO's .xml and .bin: for bfloat16, or quantised to int8 by NNCF.

In both, the head (everything after the feature map: mean, norm, distances, exp) computes in float32. In bfloat16 the
CPU plugin keeps float32 only after the last convolution or matrix product, so the head's matrix product is written as a
multiplication and a sum. NNCF leaves the head out.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cbmir.card import CARD_KEY, ModelCard
from cbmir.errors import ModelError, require
from cbmir.export.calibration import check_percentile, evenly_spread
from cbmir.export.equalization import equalised
from cbmir.export.graph_rewrite import bound_channels, graph_bytes, read_graph
from cbmir.files import replacing
from cbmir.runtime.engines.openvino import WEIGHTS_KEY, hidden, import_openvino

OpenVinoPrecision = Literal["bfloat16", "int8"]
_METADATA = "framework"  # where OpenVINO stores the metadata of an ONNX file
_CONVOLUTIONS = ("Convolution", "GroupConvolution")


def write_openvino(
    model: bytes, path: Path, precision: OpenVinoPrecision, calibration: NDArray[np.uint8] | None = None, *,
    keep: Sequence[str] = (), percentile: float | None = None,
) -> None:  # fmt: skip
    """Write a .xml file and the .bin beside it. See `quantize_ort.to_int8` for the arguments. An int8 file has its own
    embedding space: the fingerprint in its card ends with the first digits of the SHA-256 of the .bin.

    Raises:
        ModelError: No images for int8, or an unknown layer in `keep`.
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
        graph = _quantise(_read(equalised(model, calibration)), calibration, keep, percentile)
    _save(graph, card, path)


def sensitive_layers(
    model: bytes, calibration: NDArray[np.uint8], *, images: int = 32, percentile: float | None = None
) -> list[str]:
    """Return the convolutions of a float32 ONNX file for `write_openvino(keep=…)`, most sensitive to int8 first.

    They are ranked by the signal-to-noise ratio of a layer's output when only that layer is int8, over at most `images`
    images. Each layer runs in float and in int8, both on the output of the float layers before it, so one pass over the
    images ranks all layers.
    """
    ov = import_openvino()
    ops = ov.opset13

    def mean_square(node: Any) -> Any:
        return ops.reduce_mean(ops.multiply(node, node), [0, 1, 2, 3])

    model = equalised(model, calibration)
    encoder = _encoder(_read(model))
    layers = {name: node for name, node in encoder.items() if node.get_type_name() in _CONVOLUTIONS}
    graph = _quantise(_read(model), calibration, (), percentile, correct_bias=False)
    nodes = {node.get_friendly_name(): node for node in graph.get_ordered_ops()}
    outputs = []
    for name, layer in layers.items():
        quantised = nodes[name]
        readers = quantised.output(0).get_target_inputs()
        source = quantised.input_value(0)
        if source.get_node().get_type_name() == "FakeQuantize":
            source = source.get_node().input_value(0)
        convolution = ops.convolution if layer.get_type_name() == "Convolution" else ops.group_convolution
        exact = convolution(source, layer.input_value(1), **layer.get_attributes())
        for reader in readers:
            reader.replace_source_output(exact.output(0))
        outputs += [mean_square(exact), mean_square(ops.subtract(quantised, exact))]
    for node in nodes.values():  # all nodes except the int8 convolutions read float maps
        if node.get_type_name() == "FakeQuantize":
            for reader in node.output(0).get_target_inputs():
                if reader.get_node().get_friendly_name() not in layers:
                    reader.replace_source_output(node.input_value(0))
    noise = ov.Model(outputs, graph.get_parameters(), "noise")
    both = ov.Core().compile_model(noise, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    sums = sum(np.array(list(both([image[None]]).values())) for image in evenly_spread(calibration, images))
    signal, noise = np.reshape(sums, (len(layers), 2)).T
    least = np.finfo(np.float32).tiny  # layers that are exact in int8, or always 0, come last
    ratios = np.maximum(signal, least) / np.maximum(noise, least)
    names = list(layers)
    return [names[number] for number in np.argsort(ratios, kind="stable")]


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


def _quantise(
    graph: Any, images: NDArray[np.uint8], keep: Sequence[str], percentile: float | None, *, correct_bias: bool = True
) -> Any:
    nncf = import_nncf()
    encoder = _encoder(graph).keys()
    names = {node.get_friendly_name() for node in graph.get_ordered_ops()}
    products = [node for node in _encoder(graph).values() if node.get_type_name() == "MatMul"]
    unknown = sorted(set(keep) - encoder)
    if unknown:
        raise ModelError(f"expected layers of the encoder to keep in float, found {', '.join(unknown)}; "
                         f"sensitive_layers names them")  # fmt: skip
    ranges = nncf.quantization.range_estimator
    options = nncf.AdvancedQuantizationParameters(
        disable_bias_correction=not correct_bias,
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
            ignored_scope=nncf.IgnoredScope(names=sorted(names - encoder | set(keep)), validate=False),
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
        for file in (weights, xml):
            with replacing(path.with_suffix(file.suffix)) as temporary:
                shutil.copyfile(file, temporary)
