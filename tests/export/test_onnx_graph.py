"""The ONNX graph: inputs and outputs that the runtime expects, every kind of head, any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from cbmir.card import ModelCard
from cbmir.errors import EncoderError, EngineError
from cbmir.export.onnx_graph import fold_batch_norm, to_onnx
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engines.ort import OnnxEngine
from cbmir.training.encoders.encoder import build_encoder
from cbmir.training.model import LinearHead, ProxyHead, RetrievalModel

DIM = 16


def small_encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 5, 4, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, DIM, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*layers)


def card_for(head: ProxyHead | LinearHead, **changes: Any) -> ModelCard:
    facts: dict[str, Any] = {
        "labels": LabelSet(("Effusion", "Mass", "Nodule")),
        "preprocess": PreprocessSpec.for_image_size(32),
        "encoder": "small",
        "embedding_dim": DIM,
        "head": head.kind,
        "sigma": 0.7,
        "proxies_per_class": getattr(head, "counts", ()),
        "negative_proxies": len(getattr(head, "counts", ())) == 4,
        "thresholds": (0.5, None, 0.25),
        "calibration": (None, None, None),
        "fingerprint": "small-0",
        "licence": "CC0-1.0",
    }
    return ModelCard(**facts | changes)


def batch(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, (size, 1, 32, 32), dtype=np.uint8)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(ProxyHead(DIM, (1, 3, 2), 3), id="proxy, unequal counts, no negative class"),
        pytest.param(LinearHead(DIM, 3), id="linear"),
    ],
)
def test_heads(head: ProxyHead | LinearHead, tmp_path: Path) -> None:
    """The proxy head with a negative class is tested with `tiny_run`."""
    model = RetrievalModel(small_encoder(), head).eval()
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, card_for(head)))
    with OnnxEngine(path, threads=1) as engine:
        assert engine.card == card_for(head, versions={"onnx": onnx.__version__})
        np.testing.assert_array_equal(engine.head, head.rows().numpy())
        for size in (1, 2, 7, 32):
            found = engine.run(batch(size), feature_map=True)
            with torch.inference_mode():
                embedding, scores, feature_map = model(torch.from_numpy(batch(size)))
            np.testing.assert_allclose(found.embedding, embedding, atol=1e-6)
            np.testing.assert_allclose(found.scores, scores, atol=1e-6)
            assert found.feature_map is not None and found.feature_map.shape == (size, DIM, 8, 8)
            np.testing.assert_allclose(found.feature_map, feature_map, atol=1e-5)


def test_a_projection_of_two_stages(two_stage_model: RetrievalModel, tmp_path: Path) -> None:
    model, path = two_stage_model, tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, card_for(LinearHead(DIM, 3))))
    with OnnxEngine(path, threads=1) as engine:
        for size in (1, 7):
            found = engine.run(batch(size), feature_map=True)
            with torch.inference_mode():
                expected = model(torch.from_numpy(batch(size)))
            for own, other in zip((found.embedding, found.scores, found.feature_map), expected, strict=True):
                np.testing.assert_allclose(own, other, atol=1e-5)
            assert found.feature_map is not None and found.feature_map.shape == (size, DIM, 8, 8)
    graph = onnx.load(path).graph
    assert "Shape" not in {node.op_type for node in graph.node}


def test_scores_by_hand(tiny_export: Path) -> None:
    """score_j = max_i exp(-(2 - 2 cos) / 2 sigma^2), computed from the head in the metadata without negative class."""
    with OnnxEngine(tiny_export / "model.onnx", threads=1) as engine:
        answer = engine.run(batch(5))
        card, head = engine.card, engine.head
    assert card.negative_proxies and card.proxies_per_class == (2, 2, 2, 2) and head.shape == (8, 512)
    similarity = np.exp(-(2 - 2 * answer.embedding.astype(np.float64) @ head.T) / (2 * card.sigma**2))
    np.testing.assert_allclose(answer.scores, similarity.reshape(5, 4, 2).max(axis=2)[:, :3], atol=1e-6)


@pytest.mark.parametrize("name", ["model.onnx", "model.fp16.onnx"])
def test_file_contract(name: str, tiny_export: Path) -> None:
    model = onnx.load(tiny_export / name)
    onnx.checker.check_model(model, full_check=True)
    graph = model.graph
    # TensorRT's parser only allows Cast on a uint8 input.
    assert graph.node[0].op_type == "Cast" and graph.node[0].input[0] == "image"
    assert [node.op_type for node in graph.node if "image" in node.input] == ["Cast"]
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    (image,) = graph.input
    assert image.name == "image" and image.type.tensor_type.elem_type == TensorProto.UINT8
    assert [output.name for output in graph.output] == ["embedding", "scores", "feature_map"]
    for value in (image, *graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "N"
    assert all(output.type.tensor_type.elem_type == TensorProto.FLOAT for output in graph.output)
    assert {entry.key for entry in model.metadata_props} == {"cbmir.card", "cbmir.head"}
    # The exporter stores a stack trace with each node; the file must not contain local paths.
    assert b".py" not in (tiny_export / name).read_bytes()
    assert not list(tiny_export.glob("*.data"))


def test_only_the_encoder_is_in_half_precision(tiny_export: Path) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load(tiny_export / "model.fp16.onnx"))
    graph = model.graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    by_operator: dict[str, set[int]] = {}
    for node in graph.node:
        by_operator.setdefault(node.op_type, set()).update(kinds[name] for name in node.output)
    assert by_operator["Conv"] == {TensorProto.FLOAT16}
    for operator in ("ReduceMean", "ReduceL2", "MatMul", "Exp"):
        assert by_operator[operator] == {TensorProto.FLOAT}, operator
    sizes = [(tiny_export / name).stat().st_size for name in ("model.onnx", "model.fp16.onnx")]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.02)


def test_fp16_leaves_the_model_alone_and_overflow_is_detected(tmp_path: Path) -> None:
    head = LinearHead(DIM, 3)
    model = RetrievalModel(small_encoder(), head).eval()
    with torch.no_grad():
        model.encoder[3].weight.mul_(3e5)  # type: ignore[index, operator, union-attr]
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, card_for(head), "float16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with OnnxEngine(path, threads=1) as engine, pytest.raises(EngineError, match=r"float16.*overflows"):
        engine.run(batch(2), feature_map=True)


def sensitive_encoder(*, traceable: bool) -> nn.Module:
    """BatchNorm subtracts a large mean and divides by a small deviation: earlier rounding loses most of the signal."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, DIM, 5, 4, 2), nn.BatchNorm2d(DIM)
            nn.init.constant_(self.conv.bias, 64.03)  # type: ignore[arg-type]
            nn.init.constant_(self.norm.running_mean, 64.0)  # type: ignore[arg-type]
            nn.init.constant_(self.norm.running_var, 1e-3)  # type: ignore[arg-type]

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            if not traceable and len(image.shape) != 4:  # torch.fx stops here
                raise ValueError
            out: torch.Tensor = self.norm(self.conv(image)).relu()
            return out

    torch.manual_seed(0)
    return Encoder()


@pytest.mark.parametrize("traceable", [True, False])
def test_fp16_folds_batch_norm_before_it_rounds(traceable: bool, tmp_path: Path) -> None:
    head = LinearHead(DIM, 3)
    model = RetrievalModel(sensitive_encoder(traceable=traceable), head).eval()
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, card_for(head), "float16"))
    with OnnxEngine(path, threads=1) as engine, torch.inference_mode():
        found = engine.run(batch(8), feature_map=True).feature_map
        expected = model(torch.from_numpy(batch(8)))[2].numpy()
    assert found is not None
    error = np.abs(found - expected).max() / expected.max()
    assert error < 2e-3  # at least 5e-3 if rounded values are folded


def test_an_encoder_that_cannot_be_exported() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, DIM, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.conv(image)
            return out if out.sum() > 0 else -out  # depends on values, so it is not one graph

    head = LinearHead(DIM, 3)
    with pytest.raises(EncoderError, match=r"small.*cannot translate it to ONNX"):
        to_onnx(RetrievalModel(Loops(), head), card_for(head))


@pytest.mark.release
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_densenet121(precision: Any, tmp_path: Path) -> None:
    from cbmir.export.parity import LIMITS, Cases, measure_parity
    from cbmir.runtime import Outputs
    from cbmir.training.encoders.encoder import build_encoder
    from cbmir.training.evaluate import embed

    torch.manual_seed(0)
    encoder, dim = build_encoder("densenet121")
    head = ProxyHead(dim, (2, 2, 2, 2), 3)
    model = RetrievalModel(encoder, head)
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, card_for(head, embedding_dim=dim), precision))
    with OnnxEngine(path, threads=1) as engine:
        found = engine.run(batch(32), feature_map=True)
    labels = np.random.default_rng(0).integers(0, 2, (32, 3)).astype(np.float32)
    cases = Cases(32, labels, [f"p{n}" for n in range(32)], (0.5, 0.5, 0.5))
    parity = measure_parity(Outputs(*embed(model, [batch(32)])), found, cases, LIMITS[precision])
    assert not [text for text in parity.failures if "cosine" in text or "scores" in text]  # noise has no neighbours


def random_norms(encoder: nn.Module) -> nn.Module:
    """Give BatchNorms random statistics, as after training."""
    generator = torch.Generator().manual_seed(0)
    for norm in encoder.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
                assert tensor is not None
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
            assert norm.running_var is not None
            norm.running_var.mul_(0.5 + torch.rand(norm.running_var.shape, generator=generator))
    return encoder.eval()


@pytest.mark.parametrize("name", ["resnet18", "timm:tf_efficientnet_lite0"])  # torch.fx cannot trace the second
def test_norms_are_folded_into_their_convolutions(name: str) -> None:
    encoder = random_norms(build_encoder(name)[0])
    folded = fold_batch_norm(encoder, 64)
    image = torch.rand(2, 1, 64, 64) * 2 - 1
    with torch.inference_mode():
        expected, found = encoder(image), folded(image)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    norms = [norm for norm in folded.modules() if isinstance(norm, nn.BatchNorm2d)]
    assert len(norms) > 15 and all(norm.eps == 0 and norm.running_mean.abs().max() == 0 for norm in norms)


def test_a_convolution_that_is_read_twice_is_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            made = self.conv(image)
            return made + torch.as_tensor(self.norm(made))

    encoder = random_norms(Twice())
    assert fold_batch_norm(encoder, 32) is encoder
