"""The engine: what it computes, what it refuses, and that a provider is never swapped in silence."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import CardError, EngineError, ModelError
from cbmir.runtime import open_engine
from cbmir.runtime.engine import available_threads

Make = Callable[..., Path]


@pytest.fixture
def batch() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (70, 1, 32, 32), dtype=np.uint8)


def test_outputs_follow_the_method(tiny_model: Path, batch: np.ndarray) -> None:
    """The embedding is the normed mean of the feature map; a score is the best proxy's Gaussian similarity."""
    with open_engine(tiny_model, threads=1) as engine:
        outputs = engine.run(batch[:5], feature_map=True)
        card, head = engine.card, engine.head.astype(np.float64)
    assert outputs.feature_map is not None
    assert outputs.feature_map.shape == (5, 8, 8, 8)
    mean = outputs.feature_map.astype(np.float64).mean(axis=(2, 3))
    embedding = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(outputs.embedding, embedding, atol=1e-6)
    for n in range(5):
        for j in range(3):
            squared = ((embedding[n] - head[2 * j : 2 * j + 2]) ** 2).sum(axis=1)
            assert outputs.scores[n, j] == pytest.approx(np.exp(-squared / (2 * card.sigma**2)).max(), abs=1e-5)


def test_large_batches_run_in_pieces_with_the_same_answers(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        together = engine.run(batch)
        single = [engine.run(batch[n : n + 1]).embedding[0] for n in range(len(batch))]
    assert together.embedding.shape == (70, 8)
    assert together.scores.shape == (70, 3)
    assert together.feature_map is None
    np.testing.assert_allclose(together.embedding, single, atol=1e-6)


def test_a_view_that_is_not_contiguous_is_taken(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        np.testing.assert_array_equal(engine.run(batch[::-7]).scores, engine.run(batch[::-7].copy()).scores)


@pytest.mark.parametrize("feature_map", [False, True])
def test_an_empty_batch_gives_empty_outputs(tiny_model: Path, batch: np.ndarray, feature_map: bool) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        outputs = engine.run(batch[:0], feature_map=feature_map)
    assert outputs.embedding.shape == (0, 8)
    assert outputs.scores.shape == (0, 3)
    assert (outputs.feature_map is None) != feature_map


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 1, 32, 32), np.float32), np.zeros((1, 32, 32), np.uint8), np.zeros((1, 1, 31, 32), np.uint8)]
)
def test_a_wrong_batch_is_refused(tiny_model: Path, wrong: np.ndarray) -> None:
    with (
        open_engine(tiny_model, threads=1) as engine,
        pytest.raises(EngineError, match=r"uint8 \[N, 1, 32, 32\], found"),
    ):
        engine.run(wrong)


def test_a_closed_engine_says_so(tiny_model: Path, batch: np.ndarray) -> None:
    engine = open_engine(tiny_model, threads=1)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch[:1])


def test_eight_threads_share_one_session(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=1) as engine, ThreadPoolExecutor(8) as pool:
        expected = [engine.run(image[None]).embedding for image in batch]
        found = list(pool.map(lambda image: engine.run(image[None]).embedding, batch))
    np.testing.assert_array_equal(found, expected)


def test_health_tells_what_runs(tiny_model: Path) -> None:
    with open_engine(tiny_model) as engine:
        health = engine.health()
    assert (health.engine, health.requested, health.provider, health.device) == ("onnxruntime", "cpu", "cpu", "cpu")
    assert health.threads == available_threads() >= 1
    assert (health.precision, health.warnings) == ("float32", ())


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_is_not_there_is_an_error(tiny_model: Path, provider: str) -> None:
    with pytest.raises(EngineError, match=rf"'{provider}' was asked for.*installed: cpu.*cbmir\[gpu\]"):
        open_engine(tiny_model, provider=provider)


@pytest.mark.usefixtures("cpu_only")
def test_a_fall_back_that_is_allowed_is_told(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cbmir"):
        engine = open_engine(tiny_model, provider="cuda", allow_fallback=True)
    health = engine.health()
    engine.close()
    assert (health.requested, health.provider, health.device) == ("cuda", "cpu", "cpu")
    assert "Running on cpu instead" in health.warnings[0]
    assert caplog.messages == list(health.warnings)


def test_a_provider_that_is_installed_but_does_not_load_is_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime with CUDA, on a machine without a driver, either raises or goes on without CUDA: never silently."""
    import onnxruntime

    real = onnxruntime.InferenceSession

    def without_driver(path: str, options: object, providers: tuple[str, ...], **rest: object) -> object:
        if providers[0] == "CUDAExecutionProvider":
            raise RuntimeError("CUDA failure 35: driver version is insufficient")
        return real(path, options, providers=providers, **rest)

    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(onnxruntime, "InferenceSession", without_driver)
    with pytest.raises(EngineError, match="CUDA failure 35"):
        open_engine(tiny_model, provider="cuda")
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda path, options, **_: real(path, options, providers=["CPUExecutionProvider"]),
    )
    with pytest.raises(EngineError, match="'cuda' was asked for"):
        open_engine(tiny_model, provider="cuda")


@pytest.mark.parametrize("options", [{"provider": "gpu"}, {"threads": 0}])
def test_wrong_options_are_refused(tiny_model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="expected"):
        open_engine(tiny_model, **options)


def test_what_is_no_model_file_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    data = tiny_model.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("this is not a model")
    (tmp_path / "model.pt").write_bytes(data)
    (tmp_path / "folder.onnx").mkdir()
    for name in ("cut.onnx", "empty.onnx", "text.onnx", "model.pt", "folder.onnx", "missing.onnx"):
        with pytest.raises(ModelError, match=name):
            open_engine(tmp_path / name)


def test_onnx_runtime_prints_nothing(tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(ModelError):
        open_engine(tmp_path / "text.onnx")
    with open_engine(tiny_model, threads=1) as engine:
        engine.run(np.zeros((1, 1, 32, 32), np.uint8))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"cbmir.card": None}, "expected a model card inside"),
        ({"cbmir.card": "{}"}, "expected a cbmir model card"),
        ({"cbmir.card": '{"schema": 99}'}, "schema 99"),
        ({"cbmir.head": None}, "found 0 bytes"),
        ({"cbmir.head": "###"}, "expected base64"),
        ({"cbmir.head": base64.b64encode(bytes(64)).decode()}, r"float32 \[8, 8\] \(256 bytes\), found 64"),
        ({"cbmir.head": base64.b64encode(np.full(64, np.nan, "<f4").tobytes()).decode()}, "NaN"),
    ],
)
def test_a_model_without_a_usable_card_or_head_is_refused(
    tmp_path: Path, make_tiny_model: Make, metadata: dict[str, Any], message: str
) -> None:
    path = make_tiny_model(tmp_path / "model.onnx", metadata=metadata)
    with pytest.raises(CardError, match=message):
        open_engine(path)


def test_a_graph_that_contradicts_its_card_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    import onnx

    def changed(change: Callable[[Any], None]) -> Path:
        model = onnx.load(tiny_model)
        change(model.graph)
        path = tmp_path / "changed.onnx"
        onnx.save(model, path)
        return path

    def set_size(graph: Any) -> None:
        graph.input[0].type.tensor_type.shape.dim[2].dim_value = 64
        graph.output[2].type.tensor_type.shape.dim[2].dim_value = 16

    def fix_batch(graph: Any) -> None:
        for node in (*graph.input, *graph.output):
            node.type.tensor_type.shape.dim[0].dim_value = 1

    with pytest.raises(ModelError, match=r"expected image tensor\(uint8\) \[any, 1, 32, 32\]"):
        open_engine(changed(set_size))
    with pytest.raises(ModelError, match="open batch size"):
        open_engine(changed(fix_batch))
    with pytest.raises(ModelError, match="outputs embedding, scores, feature_map, found image, embedding, scores;"):
        open_engine(changed(lambda graph: graph.output.pop()))


def test_outputs_that_are_not_finite_are_an_error(tmp_path: Path, tiny_model: Path) -> None:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(tiny_model)
    kernel = next(t for t in model.graph.initializer if t.name == "kernel")
    kernel.CopyFrom(numpy_helper.from_array(np.full((8, 1, 5, 5), np.inf, np.float32), "kernel"))
    onnx.save(model, tmp_path / "overflow.onnx")
    with open_engine(tmp_path / "overflow.onnx", threads=1) as engine, pytest.raises(EngineError, match="overflows"):
        engine.run(np.full((1, 1, 32, 32), 255, np.uint8))
