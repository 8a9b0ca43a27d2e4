"""The ONNX Runtime engine: results, use of threads and processes, and refusals."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.choices import MODES, Mode
from cbmir.errors import CardError, EngineError, ModelError
from cbmir.process import available_threads
from cbmir.runtime import open_engine
from cbmir.runtime.engines import ort
from cbmir.runtime.engines.base import Engine, Runner
from cbmir.runtime.engines.nvidia import Gpu
from cbmir.runtime.engines.ort import OnnxEngine

Make = Callable[..., Path]


@pytest.fixture
def batch() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (70, 1, 32, 32), dtype=np.uint8)


def test_outputs_follow_the_method(tiny_model: Path, batch: np.ndarray) -> None:
    """The embedding is the normalised mean of the feature map; a score is the best proxy's Gaussian similarity."""
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


def test_large_batches_are_split_with_the_same_answers(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        together = engine.run(batch)
        single = [engine.run(batch[n : n + 1]).embedding[0] for n in range(len(batch))]
    assert together.embedding.shape == (70, 8)
    assert together.scores.shape == (70, 3)
    assert together.feature_map is None
    np.testing.assert_allclose(together.embedding, single, atol=1e-6)


def test_a_view_that_is_not_contiguous_is_accepted(tiny_model: Path, batch: np.ndarray) -> None:
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


def test_a_closed_engine_raises_an_error(tiny_model: Path, batch: np.ndarray) -> None:
    engine = open_engine(tiny_model, threads=1)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch[:1])


def test_eight_threads_share_one_session(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=1) as engine, ThreadPoolExecutor(8) as pool:
        expected = [engine.run(image[None]).embedding for image in batch]
        found = list(pool.map(lambda image: engine.run(image[None]).embedding, batch))
    np.testing.assert_array_equal(found, expected)


def test_health(tiny_model: Path) -> None:
    with open_engine(tiny_model, engine="onnxruntime") as engine:
        health = engine.health()
    assert (health.engine, health.requested, health.device) == ("onnxruntime", "onnxruntime", "cpu")
    assert health.reason == "onnxruntime was requested"
    assert health.threads == available_threads() >= 1
    assert (health.precision, health.warnings) == ("float32", ())


class Recorder(Engine):
    """An engine that records the size of each piece and the threads of its runner."""

    def __init__(self, threads: int, mode: Mode, card: ModelCard) -> None:
        super().__init__(card, np.zeros((8, 8), np.float32), threads=threads, mode=mode)
        self.calls: list[tuple[int, int]] = []

    def _open(self, threads: int) -> Runner:
        def run(batch: np.ndarray, names: object) -> list[np.ndarray]:
            self.calls.append((threads, len(batch)))
            mean = batch.mean(axis=(1, 2, 3), dtype=np.float32)[:, None]
            return [mean.repeat(8, axis=1), mean.repeat(3, axis=1)]

        return run

    def _describe(self) -> tuple[str, str, str]:
        return "onnxruntime", "cpu", "0"


@pytest.mark.parametrize(
    ("mode", "count", "calls"),
    [
        ("auto", 1, [(3, 1)]),
        ("auto", 4, [(1, 1)] * 4),
        ("latency", 40, [(3, 32), (3, 8)]),
        ("throughput", 1, [(1, 1)]),
    ],
)
def test_the_mode_decides_whether_streams_are_used(
    mode: Mode, count: int, calls: list[tuple[int, int]], batch: np.ndarray, tiny_card: ModelCard
) -> None:
    with Recorder(3, mode, tiny_card) as engine:
        outputs = engine.run(batch[:count])
        assert sorted(engine.calls, reverse=True) == calls
    np.testing.assert_allclose(outputs.scores[:, 0], batch[:count].mean(axis=(1, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(("threads", "mode", "runs"), [(2, "throughput", "throughput"), (1, "throughput", "latency")])
def test_health_reports_the_actual_mode(threads: int, mode: Mode, runs: Mode, tiny_card: ModelCard) -> None:
    with Recorder(threads, mode, tiny_card) as engine:
        assert engine.health().mode == runs


def test_a_running_batch_finishes_when_the_engine_is_closed(tiny_card: ModelCard) -> None:
    """During the first image another thread closes the engine, before thousands of images are submitted."""
    closing: list[threading.Thread] = []

    class Closed(Recorder):
        def _open(self, threads: int) -> Runner:
            run, lock = super()._open(threads), threading.Lock()

            def run_and_close(batch: np.ndarray, names: Sequence[str]) -> Any:
                with lock:
                    if not closing:
                        closing.append(threading.Thread(target=self.close))
                        closing[0].start()
                return run(batch, names)

            return run_and_close

    engine = Closed(2, "auto", tiny_card)
    images = np.ones((5000, 1, 32, 32), np.uint8)
    outputs = engine.run(images)
    closing[0].join()
    np.testing.assert_array_equal(outputs.scores, np.ones((5000, 3), np.float32))
    with pytest.raises(EngineError, match="closed"):
        engine.run(images)


def test_one_thread_needs_no_streams(batch: np.ndarray, tiny_card: ModelCard) -> None:
    with Recorder(1, "auto", tiny_card) as engine:
        engine.run(batch[:4])
        assert engine.calls == [(1, 4)]


def test_streams_and_latency_give_the_same_answers(tiny_model: Path, batch: np.ndarray) -> None:
    answers = []
    for mode in MODES:
        with open_engine(tiny_model, threads=2, mode=mode) as engine:
            answers.append(engine.run(batch[:9], feature_map=True))
    for other in answers[1:]:
        np.testing.assert_allclose(other.embedding, answers[0].embedding, atol=1e-6)
        np.testing.assert_allclose(other.feature_map, answers[0].feature_map, atol=1e-4)


def test_warm_up(batch: np.ndarray, tiny_card: ModelCard) -> None:
    with Recorder(2, "auto", tiny_card) as engine:
        engine.warm_up()
        engine.warm_up(1, 3)
        assert sorted(engine.calls) == [(1, 1), (1, 1), (1, 1), (2, 1), (2, 1)]


def test_a_closed_engine_may_be_closed_again(tiny_model: Path, batch: np.ndarray) -> None:
    with open_engine(tiny_model, threads=2) as engine:
        engine.run(batch[:4])
        engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch[:4])


IN_A_PROCESS = """
import multiprocessing, sys
import numpy as np
from cbmir.errors import EngineError
from cbmir.runtime import open_engine

IMAGES = np.arange(4 * 32 * 32, dtype=np.uint8).reshape(4, 1, 32, 32)

def forked(engine, answers):
    try:
        engine.run(IMAGES)
    except EngineError as error:
        engine.close()
        answers.put(str(error))

def opened(name, path, answers):
    with open_engine(path, engine=name, threads=2) as engine:
        answers.put(engine.run(IMAGES).scores.tolist())

if __name__ == "__main__":
    method, name, path = sys.argv[1:]
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    engine = open_engine(path, engine=name, threads=2)
    expected = engine.run(IMAGES).scores.tolist()
    if method == "fork":
        process = context.Process(target=forked, args=(engine, answers))
        with engine._lock:  # as another thread may hold it just then
            process.start()
    else:
        process = context.Process(target=opened, args=(name, path, answers))
        process.start()
    answer = answers.get()
    process.join()
    assert engine.run(IMAGES).scores.tolist() == expected
    print(answer if method == "fork" else answer == expected)
"""


def in_a_process(method: str, engine: str, model: Path, tmp_path: Path) -> str:
    script = tmp_path / "processes.py"
    script.write_text(IN_A_PROCESS)
    done = subprocess.run(
        [sys.executable, script, method, engine, model], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.fixture(params=["onnxruntime", "openvino"])
def on_cpu(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino":
        request.getfixturevalue("openvino")
    return str(request.param)


def test_after_a_fork_the_child_must_open_its_own_engine(on_cpu: str, tiny_model: Path, tmp_path: Path) -> None:
    told = in_a_process("fork", on_cpu, tiny_model, tmp_path)
    assert "cannot be used after a fork; open the model in this process" in told


def test_a_spawned_process_opens_its_own_engine(on_cpu: str, tiny_model: Path, tmp_path: Path) -> None:
    assert in_a_process("spawn", on_cpu, tiny_model, tmp_path) == "True\n"


def test_an_engine_cannot_be_pickled(tiny_model: Path) -> None:
    with open_engine(tiny_model, threads=1) as engine, pytest.raises(EngineError, match="open the model there"):
        pickle.dumps(engine)


@pytest.mark.parametrize("options", [{"threads": 0}, {"mode": "fast"}])
def test_wrong_options_are_refused(tmp_path: Path, tiny_model: Path, options: dict[str, Any]) -> None:
    plan = tmp_path / "model.plan"
    plan.touch()
    for path in (tiny_model, plan):
        with pytest.raises(EngineError, match="expected"):
            open_engine(path, **options)


def test_a_failing_provider_does_not_fall_back_silently(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, ONNX Runtime with CUDA raises or continues on the CPU; the engine never does so silently."""
    import onnxruntime

    real = onnxruntime.InferenceSession
    monkeypatch.setattr(ort, "current_gpu", lambda: Gpu("a card", "sm86", 2**33))
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda path, options, **_: real(path, options, providers=["CPUExecutionProvider"]),
    )
    with pytest.raises(EngineError, match="'onnxruntime-cuda' was requested, but ONNX Runtime fell back to CPU"):
        OnnxEngine(tiny_model, engine="onnxruntime-cuda")


def test_threads_of_onnx_runtime_sleep_between_two_calls(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    options = []
    real = onnxruntime.InferenceSession

    def opened(path: str, given: Any, **more: Any) -> Any:
        options.append(given)
        return real(path, given, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    OnnxEngine(tiny_model, threads=2).close()
    assert [given.get_session_config_entry("session.intra_op.allow_spinning") for given in options] == ["0"]


def test_errors_of_the_gpu_are_distinguished_from_invalid_files(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    real = onnxruntime.InferenceSession

    def fails(path: str, options: Any, providers: list[tuple[str, dict[str, str]]], **rest: Any) -> Any:
        if providers[0][0] != "CPUExecutionProvider":
            raise RuntimeError("out of memory")
        return real(path, options, providers=providers, **rest)

    monkeypatch.setattr(ort, "current_gpu", lambda: Gpu("a card", "sm86", 2**33))
    monkeypatch.setattr(onnxruntime, "InferenceSession", fails)
    with pytest.raises(EngineError, match="cannot load it with CUDAExecutionProvider: out of memory"):
        OnnxEngine(tiny_model, engine="onnxruntime-cuda")
    (tmp_path / "text.onnx").write_text("this is not a model")
    with pytest.raises(ModelError, match="cannot load it with CPUExecutionProvider"):
        OnnxEngine(tmp_path / "text.onnx", engine="onnxruntime-cuda")


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

    with pytest.raises(ModelError, match=r"expected image uint8 \[any, 1, 32, 32\]"):
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
