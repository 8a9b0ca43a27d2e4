"""OpenVINO files: precision of layers, and the embedding space of int8 files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import ModelError, UserError
from cbmir.export.openvino import write_openvino
from cbmir.runtime.engines.openvino import OpenVinoEngine, import_openvino
from cbmir.runtime.engines.ort import OnnxEngine

Make = Callable[..., Path]
ov = import_openvino()
needs_bf16 = pytest.mark.skipif(
    "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
    reason="this processor has no bfloat16 arithmetic",
)


@pytest.fixture(scope="module")
def images(make_xray: Callable[..., NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Images uint8 [16, 1, 32, 32]."""
    return np.stack([make_xray(seed, 32)[None] for seed in range(16)])


@pytest.fixture(scope="module")
def resnet(tiny_export: Path) -> bytes:
    """The bytes of a float32 file: an untrained ResNet18 at 32x32 with proxies."""
    return (tiny_export / "model.onnx").read_bytes()


@pytest.fixture(scope="module")
def int8_file(tmp_path_factory: pytest.TempPathFactory, resnet: bytes, images: NDArray[np.uint8]) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.openvino-int8.xml"
    write_openvino(resnet, path, "int8", images)
    return path


def precisions(path: Path, hint: str) -> tuple[dict[str, str], dict[str, str]]:
    """The actual precision of each layer, reported by OpenVINO: the encoder's convolutions, and all of the head."""
    graph = ov.Core().read_model(path)
    compiled = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": hint}).get_runtime_model()
    facts = {
        node.get_friendly_name(): (node.rt_info["layerType"].astype(str), node.rt_info["runtimePrecision"].astype(str))
        for node in compiled.get_ordered_ops()
    }
    names = list(facts)
    after = max(i for i, name in enumerate(names) if facts[name][0] == "Convolution")
    head = {
        name: f"{kind} {precision}"
        for name, (kind, precision) in list(facts.items())[after + 1 :]
        if kind not in ("Const", "Output", "Input")
    }
    return {name: precision for name, (kind, precision) in facts.items() if kind == "Convolution"}, head


def scores_by_hand(embedding: NDArray[np.float32], head: NDArray[np.float32], sigma: float) -> NDArray[np.float64]:
    """score_j = max_i exp(-|v - p_ij|^2 / 2 sigma^2) of three classes with two proxies (see docs/method.md)."""
    proxies = head[:6].astype(np.float64).reshape(3, 2, -1)
    squares = ((embedding[:, None, None].astype(np.float64) - proxies) ** 2).sum(axis=3)
    return np.asarray(np.exp(-squares / (2 * sigma**2)).max(axis=2))


@needs_bf16
def test_bfloat16_is_for_the_encoder_and_float32_for_the_head(
    tmp_path: Path, resnet: bytes, images: NDArray[np.uint8]
) -> None:
    path = tmp_path / "model.openvino-bf16.xml"
    write_openvino(resnet, path, "bfloat16")
    convolutions, head = precisions(path, "bf16")
    assert set(convolutions.values()) == {"bf16"} and len(convolutions) == 20
    assert head and all(kind.endswith(" f32") for kind in head.values()), head
    assert not any(kind.startswith(("FullyConnected", "MatMul")) for kind in head.values())
    with OpenVinoEngine(path) as engine:
        outputs, card = engine.run(images, feature_map=True), engine.card
        np.testing.assert_allclose(
            outputs.scores, scores_by_hand(outputs.embedding, engine.head, card.sigma), atol=1e-5
        )
    np.testing.assert_allclose(np.linalg.norm(outputs.embedding, axis=1), 1, atol=1e-6)


@needs_bf16
def test_the_first_layers_stay_in_float(tmp_path: Path, resnet: bytes) -> None:
    path = tmp_path / "model.openvino-bf16.xml"
    write_openvino(resnet, path, "bfloat16", float_layers=4)
    compiled = ov.Core().compile_model(ov.Core().read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    found = [(fact["layerType"].astype(str), fact["runtimePrecision"].astype(str)) for fact in facts]
    kinds = [(kind, precision) for kind, precision in found if kind in ("Convolution", "Pooling")]
    assert kinds[:5] == [("Convolution", "f32"), ("Pooling", "f32"), *[("Convolution", "f32")] * 3]
    assert [precision for kind, precision in kinds if kind == "Convolution"] == ["f32"] * 4 + ["bf16"] * 16
    assert 'name="precise"' in path.read_text("utf-8")  # the form that OpenVINO 2026.0 knows


@needs_bf16
def test_without_the_rewriting_the_head_would_be_bfloat16(tmp_path: Path, resnet: bytes) -> None:
    """This shows why the head is rewritten: if OpenVINO changes its rule, that is no longer needed."""
    (tmp_path / "model.onnx").write_bytes(resnet)
    _, head = precisions(tmp_path / "model.onnx", "bf16")
    assert "FullyConnected bf16" in head.values()


def test_the_card_and_the_head_are_in_the_file(tmp_path: Path, resnet: bytes, int8_file: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(resnet)
    write_openvino(resnet, tmp_path / "model.xml", "bfloat16")
    with OnnxEngine(tmp_path / "model.onnx") as source, OpenVinoEngine(int8_file) as engine:
        card = source.card
        weights = hashlib.sha256(int8_file.with_suffix(".bin").read_bytes()).hexdigest()
        fingerprint = f"{card.fingerprint}-int8-openvino-{weights[:8]}"
        assert engine.card == card.with_(precision="int8", fingerprint=fingerprint)
        np.testing.assert_array_equal(engine.head, source.head)
    written = ov.Core().read_model(tmp_path / "model.xml").get_rt_info(["framework", "cbmir.card"]).astype(str)
    assert written == card.with_(precision="bfloat16").dumps()


@pytest.mark.usefixtures("exact_int8")
def test_int8_is_for_the_encoder_and_float32_for_the_head(
    tmp_path: Path, resnet: bytes, int8_file: Path, images: NDArray[np.uint8]
) -> None:
    convolutions, head = precisions(int8_file, "f32")
    assert set(convolutions.values()) <= {"i8", "u8"}
    assert head and all(kind.endswith(" f32") for kind in head.values()), head
    (tmp_path / "model.onnx").write_bytes(resnet)
    with OnnxEngine(tmp_path / "model.onnx") as exact, OpenVinoEngine(int8_file) as engine:
        expected, found = exact.run(images), engine.run(images)
        np.testing.assert_allclose(found.scores, scores_by_hand(found.embedding, engine.head, 0.7), atol=1e-5)
    assert 0.99 < (expected.embedding * found.embedding).sum(axis=1).min() < 0.999999


@pytest.mark.slow
def test_the_first_layers_and_residual_sums_stay_in_float(
    tmp_path: Path, resnet: bytes, images: NDArray[np.uint8]
) -> None:
    write_openvino(resnet, tmp_path / "model.xml", "int8", images, float_layers=3)
    assert quantised(tmp_path / "model.xml") == ([False] * 3 + [True] * 17, 0)


def quantised(path: Path) -> tuple[list[bool], int]:
    """For each convolution of an int8 file, whether it is quantised; and how many sums read rounded maps."""
    nodes = ov.Core().read_model(path).get_ordered_ops()

    def kinds(node: Any) -> list[str]:
        return [value.get_node().get_type_name() for value in node.input_values()]

    convolutions = [kinds(node)[1] != "Constant" for node in nodes if node.get_type_name() == "Convolution"]
    sums = [kinds(node) for node in nodes if node.get_type_name() == "Add"]
    return convolutions, sum("FakeQuantize" in found for found in sums)


def test_without_layers_in_float_all_convolutions_and_sums_are_quantised(int8_file: Path) -> None:
    convolutions, sums = quantised(int8_file)
    assert convolutions == [True] * 20 and sums == 8


def test_a_percentile_narrows_the_ranges(tmp_path: Path, make_tiny_model: Make, images: NDArray[np.uint8]) -> None:
    model = make_tiny_model(tmp_path / "model.onnx").read_bytes()

    def widest(percentile: float | None) -> float:
        write_openvino(model, tmp_path / "model.xml", "int8", images, percentile=percentile)
        nodes = ov.Core().read_model(tmp_path / "model.xml").get_ops()
        tops: list[Any] = [node.input_value(2).get_node() for node in nodes if node.get_type_name() == "FakeQuantize"]
        return max(float(top.get_data().max()) for top in tops)

    assert widest(80) < widest(99.9) <= widest(None)


def test_a_percentile_is_above_50(tmp_path: Path, resnet: bytes, images: NDArray[np.uint8]) -> None:
    with pytest.raises(UserError, match="percentile above 50"):
        write_openvino(resnet, tmp_path / "model.xml", "int8", images, percentile=0.99)


def test_int8_needs_images_and_leaves_nothing_half_written(tmp_path: Path, make_tiny_model: Make) -> None:
    model = make_tiny_model(tmp_path / "model.onnx").read_bytes()
    for none in (None, np.empty((0, 1, 32, 32), np.uint8)):
        with pytest.raises(ModelError, match="expected images to calibrate int8 on"):
            write_openvino(model, tmp_path / "model.xml", "int8", none)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    write_openvino(model, tmp_path / "model.xml", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", "model.onnx", "model.xml"]


def test_nothing_is_printed(
    tmp_path: Path, make_tiny_model: Make, images: NDArray[np.uint8], capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model.onnx").read_bytes()
    write_openvino(model, tmp_path / "model.xml", "int8", images)
    assert capfd.readouterr() == ("", "")
