"""Operations of a model, counted by hand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from cbmir.errors import ModelError
from cbmir.export.perf.machine import count_flops


def test_by_hand(tiny_model: Path) -> None:
    """A 5x5 convolution of 1 channel to 8 on 8x8 places, and 8 dimensions by 6 proxies."""
    assert count_flops(tiny_model) == 2 * (8 * 8 * 8 * 5 * 5) + 2 * 8 * 6


def test_groups_and_gemm(tmp_path: Path) -> None:
    """Each output of a grouped convolution sums over its own group; Gemm's weight may be transposed."""
    value, node = helper.make_tensor_value_info, helper.make_node
    weights = {"kernel": (6, 2, 3, 3), "flat": (7, 6 * 4 * 5), "plain": (7, 3)}
    zeros = [helper.make_tensor(name, TensorProto.FLOAT, dims, bytes(4 * _size(dims)), raw=True)
             for name, dims in weights.items()]  # fmt: skip
    nodes = [
        node("Conv", ["x", "kernel"], ["conv"], group=2, pads=[1, 1, 1, 1]),
        node("Flatten", ["conv"], ["row"]),
        node("Gemm", ["row", "flat"], ["seven"], transB=1),
        node("MatMul", ["seven", "plain"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["N", 4, 4, 5])], [value("y", TensorProto.FLOAT, ["N", 3])], zeros
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    assert count_flops(tmp_path / "m.onnx") == 2 * (6 * 4 * 5 * 2 * 3 * 3 + 120 * 7 + 7 * 3)


def _size(dims: tuple[int, ...]) -> int:
    size = 1
    for side in dims:
        size *= side
    return size


def test_a_graph_of_unknown_shapes_is_an_error(tmp_path: Path, tiny_model: Path) -> None:
    model = onnx.load(tiny_model)
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    product.input[1] = "nothing"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="the shape of MatMul cosine is not known"):
        count_flops(tmp_path / "model.onnx")
