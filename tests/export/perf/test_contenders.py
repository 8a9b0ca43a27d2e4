"""Handwritten PyTorch as a contender of `cbmir speed`, and the number of a model's operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from cbmir.errors import MissingDependencyError, ModelError
from cbmir.export.perf.contenders import MatrixPeak, count_flops, peer_contenders
from cbmir.runtime import open_engine


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_peer_is_the_cards_architecture(tiny_export: Path) -> None:
    with open_engine(tiny_export / "model.onnx", threads=1) as engine:
        card = engine.card
    for peer, layout in zip(peer_contenders([], card, ["torch"], 1), ("NCHW", "channels_last"), strict=True):
        answer, health = peer.open()
        embedding = answer(np.random.default_rng(0).integers(0, 256, (3, 1, 32, 32), dtype=np.uint8))
        assert embedding.shape == (3, card.embedding_dim) and embedding.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), 1, atol=1e-5)
        assert (health.engine, health.precision, health.threads) == ("torch", "float32", 1)
        assert health.reason == f"eager, {layout}, random weights"
        assert not peer.has_weights


def test_the_peer_of_a_student_has_its_projection(tiny_export: Path) -> None:
    with open_engine(tiny_export / "model.onnx", threads=1) as engine:
        card = engine.card.with_(embedding_dim=24, training={"distilled_from": {}})
    answer, _ = next(peer_contenders([], card, ["torch"], 1)).open()
    assert answer(np.zeros((1, 1, 32, 32), np.uint8)).shape == (1, 24)


def test_without_torch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        card = engine.card
    monkeypatch.setitem(sys.modules, "torch", None)
    for contender in (*peer_contenders([], card, ["torch"], 1), MatrixPeak("peak", 1, "float32")):
        with pytest.raises(MissingDependencyError, match=r"\.\[train\]"):
            contender.open()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_peak_multiplies_as_much_as_the_model(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    real = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert str(left.dtype) == str(right.dtype) == str(out.dtype) == f"torch.{precision}"
        done.append(2 * left.shape[0] * left.shape[1] * right.shape[1])
        return real(left, right, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    answer, health = MatrixPeak("peak", 10**9, precision, threads=1).open()  # type: ignore[arg-type]
    answer(np.zeros((3, 1, 8, 8), np.uint8))
    assert done == [pytest.approx(1e9, rel=2e-3)] * 3
    assert health.precision == precision


def test_flops_by_hand(tiny_model: Path) -> None:
    """The model has a 5x5 convolution from 1 to 8 channels at 8x8 positions, and 8 dimensions by 6 proxies."""
    assert count_flops(tiny_model) == 2 * (8 * 8 * 8 * 5 * 5) + 2 * 8 * 6


def test_flops_of_groups_and_gemm(tmp_path: Path) -> None:
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
