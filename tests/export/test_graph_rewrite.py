"""Rewriting a graph does not change its answers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from cbmir.export.graph_rewrite import bound_channels, first_layers, graph_bytes, read_graph

C = 6
#: BN y = gamma (x - mean) / sqrt(variance + 1e-5) + beta: rising and falling channels, flat ones above and below zero.
GAMMA = np.array([1.5, -0.7, 0, 0, 1e-3, -2], np.float32)
BETA = np.array([0.3, 0.2, 0.4, -0.4, -0.5, 1], np.float32)


def model(kernel: int, pads: int = 0) -> ModelProto:
    """x [N, 6, 8, 8] -> Split and Concat (no change) -> BN -> ReLU -> Conv -> y [N, 4, h, w]."""
    rng = np.random.default_rng(0)
    arrays = {
        "gamma": GAMMA, "beta": BETA, "mean": rng.normal(size=C), "variance": rng.uniform(0.5, 2, C),
        "weight": rng.normal(size=(4, C, kernel, kernel)), "bias": rng.normal(size=4),
    }  # fmt: skip
    nodes = [
        helper.make_node("Split", ["x"], ["left", "right"], axis=1, num_outputs=2),
        helper.make_node("Concat", ["left", "right"], ["joined"], axis=1),
        helper.make_node("BatchNormalization", ["joined", "gamma", "beta", "mean", "variance"], ["normed"]),
        helper.make_node("Relu", ["normed"], ["relu"]),
        helper.make_node("Conv", ["relu", "weight", "bias"], ["y"], pads=[pads] * 4),
    ]
    graph = helper.make_graph(
        nodes,
        "norms",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", C, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, None, None])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.helper.set_model_props(made, {"cbmir.card": "a card"})
    return made


def answer(made: ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).normal(scale=3, size=(2, C, 8, 8)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x})[0])


def bounded(source: ModelProto) -> ModelProto:
    graph = read_graph(source.SerializeToString())
    bound_channels(graph)
    return onnx.load_model_from_string(graph_bytes(graph))


def test_bounds_of_channels_are_batch_norm_and_relu() -> None:
    source = model(1)
    found = bounded(source)
    kinds = [node.op_type for node in found.graph.node]
    assert kinds == ["Split", "Concat", "Max", "Min", "Conv"]
    np.testing.assert_allclose(answer(found), answer(source), atol=1e-5)
    assert found.metadata_props == source.metadata_props
    assert {tensor.name for tensor in found.graph.initializer}.isdisjoint({"gamma", "mean", "weight"})


def test_a_padded_or_larger_convolution_is_left_alone() -> None:
    for source in (model(3), model(1, pads=1)):
        found = bounded(source)
        assert [node.op_type for node in found.graph.node] == [node.op_type for node in source.graph.node]
        np.testing.assert_array_equal(answer(found), answer(source))


@pytest.mark.parametrize(("count", "found"), [(0, ""), (1, "iCra"), (2, "iCraCp"), (3, "iCraCpCs"), (9, "iCraCpCs")])
def test_the_first_layers_by_hand(count: int, found: str) -> None:
    """C is a layer, every other letter a node of another kind."""
    assert "".join(first_layers("iCraCpCs", "C".__eq__, count)) == found
