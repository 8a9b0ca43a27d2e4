"""The engine for TensorRT plans. Refusals are real; tests that need a GPU use a fake of TensorRT and CUDA with host
memory, where the "plan" is a few lines of NumPy."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbmir.errors import CardError, EngineError, MissingDependencyError, ModelError
from cbmir.files import write_json
from cbmir.runtime import open_engine
from cbmir.runtime.engines import nvidia, tensorrt
from cbmir.runtime.engines.nvidia import Gpu
from cbmir.runtime.engines.tensorrt import PlanInfo, TensorRtEngine, read_plan_info, sidecar_of

WEIGHTS = np.random.default_rng(0).normal(size=(32 * 32, 8)).astype(np.float32)
SHAPES = {"image": (-1, 1, 32, 32), "embedding": (-1, 8), "scores": (-1, 3), "feature_map": (-1, 8, 2, 2)}


def answers(batch: np.ndarray) -> dict[str, np.ndarray]:
    """The model that the fake computes: in float64, so that the size of the batch does not change the last bit."""
    mean = batch.reshape(len(batch), -1) / 255 @ WEIGHTS.astype(np.float64)
    embedding = (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)
    return {
        "embedding": embedding,
        "scores": np.abs(embedding[:, :3]),
        "feature_map": np.repeat(mean, 4, axis=1).reshape(-1, 8, 2, 2).astype(np.float32),
    }


Status = IntEnum("Status", {"cudaSuccess": 0, "cudaErrorMemoryAllocation": 2})


class FakeCuda:
    """The part of `cuda.bindings.runtime` that the engine uses. Work on the stream runs immediately, or is recorded by
    a capture. `failing` maps a function to the index of the call that fails, or 0 for every call."""

    def __init__(self) -> None:
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
        self.cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
        self.calls: Counter[str] = Counter()
        self.copied: Counter[int] = Counter()
        self.failing: dict[str, int] = {}
        self.live: dict[int, Any] = {}  # created and not yet freed
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.recording: list[Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        functions: dict[str, Callable[..., Any]] = {
            "cudaStreamCreate": lambda: self._make("stream"),
            "cudaMallocHost": self._memory,
            "cudaMalloc": self._memory,
            "cudaMemcpyAsync": self._copy,
            "cudaStreamBeginCapture": self._begin,
            "cudaStreamEndCapture": self._end,
            "cudaGraphInstantiate": self._instantiate,
            "cudaGraphLaunch": self._launch,
            "cudaStreamSynchronize": self._wait,
            **dict.fromkeys(("cudaFreeHost", "cudaFree", "cudaStreamDestroy"), self._free),
            **dict.fromkeys(("cudaGraphDestroy", "cudaGraphExecDestroy"), self._free),
        }

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if self.failing.get(name, -1) in (0, self.calls[name]):
                return Status.cudaErrorMemoryAllocation, None
            value = functions[name](*arguments)
            return (Status.cudaSuccess,) if value is None else (Status.cudaSuccess, value)

        if name not in functions:
            raise AttributeError(name)
        return call

    def put(self, work: Callable[[], None]) -> None:
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def _make(self, thing: Any) -> int:
        handle = ctypes.addressof(thing) if isinstance(thing, ctypes.Array) else self.calls.total()
        assert handle not in self.live
        self.live[handle] = thing
        return handle

    def _free(self, handle: int) -> None:
        del self.live[handle]

    def _memory(self, size: int) -> int:
        return self._make((ctypes.c_uint8 * size)())

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self.copied[source] += 1
        self.put(lambda: ctypes.memmove(to, source, size) and None)

    def _begin(self, stream: int, mode: int) -> None:
        self.recording = []

    def _end(self, stream: int) -> int:
        handle = self._make("graph")
        self.graphs[handle], self.recording = self.recording or [], None
        return handle

    def _instantiate(self, graph: int, flags: int) -> int:
        handle = self._make("executable graph")
        self.graphs[handle] = self.graphs[graph]
        return handle

    def _launch(self, graph: int, stream: int) -> None:
        assert self.live[graph] == "executable graph"
        for work in self.graphs[graph]:
            work()

    def _wait(self, stream: int) -> None:
        assert self.recording is None, "a capture must not wait"


class FakeContext:
    def __init__(self, trt: FakeTensorRt, config: Any) -> None:
        self.trt, self.config, self.count, self.address = trt, config, 0, dict[str, int]()

    def set_tensor_address(self, name: str, address: int) -> None:
        self.address[name] = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.count = shape[0]
        return shape[1:] == SHAPES[name][1:]

    def is_stream_capturable(self, stream: int) -> bool:
        return self.trt.capturable

    def execute_async_v3(self, stream: int) -> bool:
        cuda, count = self.trt.cuda, self.count
        if self.trt.fails:
            self.trt.logger.log(1, "the card is on fire")
            return False

        def work() -> None:
            assert self.count == count, "a captured context was used for another batch"
            assert set(self.address) == set(SHAPES)
            image = np.array(view(self.address["image"], (count, 1, 32, 32), np.uint8))
            for name, answer in answers(image).items():
                view(self.address[name], answer.shape, np.float32)[:] = answer

        self.trt.executed.append(count)
        cuda.put(work)
        return True


def view(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


class FakeTensorRt:
    """TensorRT's module, its runtime and its only engine in one object."""

    __version__ = "1.2.3"
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")

    class ILogger:
        ERROR, WARNING = 1, 2

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.executed = cuda, list[int]()
        self.contexts: list[FakeContext] = []
        self.loads = self.capturable = True
        self.fails = False
        self.Runtime = self._runtime

    def _runtime(self, logger: Any) -> FakeTensorRt:
        self.logger = logger
        return self

    def deserialize_cuda_engine(self, data: bytes) -> FakeTensorRt | None:
        assert data == b"a plan"
        if not self.loads:
            self.logger.log(1, "version mismatch")
        return self if self.loads else None

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return SHAPES[name]

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace()

    def create_execution_context(self, config: Any = None) -> FakeContext:
        self.contexts.append(FakeContext(self, config))
        return self.contexts[-1]


@pytest.fixture
def plan_file(tiny_model: Path, tmp_path: Path) -> Path:
    """A plan of the fake TensorRT, for sm86 and batches up to 16 according to its sidecar."""
    path = tmp_path / "model.sm86.plan"
    path.write_bytes(b"a plan")
    with open_engine(tiny_model, threads=1) as engine:
        card, head = engine.card, engine.head
    sha = hashlib.sha256(b"a plan").hexdigest()
    write_json(sidecar_of(path), PlanInfo(card, head, "sm86", 16, "tensorrt-rtx", "1.2.3", sha, "0" * 64).to_json())
    return path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    """A machine with an sm86 GPU, CUDA and TensorRT for RTX 1.2.3."""
    cuda = FakeCuda()
    trt = FakeTensorRt(cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: Gpu("Card", "sm86", 24 << 30))
    monkeypatch.setattr(tensorrt, "find_tensorrt", lambda flavour="tensorrt-rtx": (trt, flavour))
    return trt


@pytest.fixture
def batch() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (38, 1, 32, 32), dtype=np.uint8)


def test_large_batches_are_split_with_the_right_answers(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    with TensorRtEngine(plan_file) as engine:
        outputs = engine.run(batch, feature_map=True)
        again = engine.run(batch[::-1], feature_map=True)
    expected = answers(batch)
    for name in ("embedding", "scores", "feature_map"):
        np.testing.assert_array_equal(getattr(outputs, name), expected[name])
        np.testing.assert_array_equal(getattr(again, name), expected[name][::-1])
    assert set(fake.executed) == {16, 6}  # 38 = 16 + 16 + 6


def test_fixed_batches_are_captured_once_and_replayed(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    calls = fake.cuda.calls
    with TensorRtEngine(plan_file) as engine:
        for count in (1, 16, 5, 1, 16, 7, 1):
            np.testing.assert_array_equal(engine.run(batch[:count]).embedding, answers(batch[:count])["embedding"])
        assert engine.health().warnings == ()
    assert calls["cudaStreamBeginCapture"] == calls["cudaGraphInstantiate"] == 2
    assert calls["cudaGraphLaunch"] == 5
    assert fake.executed == [1, 1, 16, 16, 5, 7]  # each captured size runs once to set up and once to capture
    # One context per captured size, with specialised kernels, and one for all other sizes.
    assert [hasattr(context.config, "dynamic_shapes_kernel_specialization_strategy") for context in fake.contexts] == [
        True, True, False,
    ]  # fmt: skip


def test_the_feature_map_is_copied_only_on_request(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    with TensorRtEngine(plan_file) as engine:
        assert engine.run(batch[:3]).feature_map is None
        address = fake.contexts[0].address["feature_map"]
        assert fake.cuda.copied[address] == 0
        assert engine.run(batch[:3], feature_map=True).feature_map is not None
        assert fake.cuda.copied[address] == 1


@pytest.mark.parametrize("how", ["capture", "plan"])
def test_a_failed_capture_is_reported(
    how: str, fake: FakeTensorRt, plan_file: Path, batch: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "capture":
        fake.cuda.failing["cudaGraphInstantiate"] = 0
    fake.capturable = how == "capture"
    with caplog.at_level(logging.WARNING, "cbmir"), TensorRtEngine(plan_file) as engine:
        for _ in range(2):
            np.testing.assert_array_equal(engine.run(batch[:1]).embedding, answers(batch[:1])["embedding"])
        (warning,) = engine.health().warnings
    assert "batches of 1 run kernel by kernel" in warning
    assert ("cudaGraphInstantiate failed with cudaErrorMemoryAllocation" in warning) == (how == "capture")
    assert caplog.messages == [warning]
    assert fake.cuda.live == {}


@pytest.mark.parametrize("function", ["cudaStreamCreate", "cudaMallocHost", "cudaMalloc"])
@pytest.mark.parametrize("nth", [1, 3])
def test_failures_while_opening_are_named_and_free_everything(
    function: str, nth: int, fake: FakeTensorRt, plan_file: Path
) -> None:
    if function == "cudaStreamCreate":
        nth = 1
    fake.cuda.failing[function] = nth
    with pytest.raises(EngineError, match=f"{function} failed with cudaErrorMemoryAllocation"):
        TensorRtEngine(plan_file)
    assert fake.cuda.live == {}


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaGraphLaunch"])
def test_failures_while_running_are_named(
    function: str, fake: FakeTensorRt, plan_file: Path, batch: np.ndarray
) -> None:
    with TensorRtEngine(plan_file) as engine:
        fake.cuda.failing[function] = 0
        with pytest.raises(EngineError, match=f"{function} failed"):
            engine.run(batch[: 1 if function == "cudaGraphLaunch" else 5])
    assert fake.cuda.live == {}


def test_messages_of_tensorrt_are_passed_on(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    with TensorRtEngine(plan_file) as engine:
        fake.fails = True
        with pytest.raises(EngineError, match="failed on a batch of 5: the card is on fire"):
            engine.run(batch[:5])
    fake.loads = False
    with pytest.raises(EngineError, match="cannot load the plan: version mismatch"):
        TensorRtEngine(plan_file)
    assert fake.cuda.live == {}


def test_close_frees_everything_and_may_be_called_again(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    engine = TensorRtEngine(plan_file)
    engine.run(batch)
    assert fake.cuda.live
    engine.close()
    engine.close()
    assert fake.cuda.live == {}
    with pytest.raises(EngineError, match="closed"):
        engine.run(batch)


def test_eight_threads_share_one_engine(fake: FakeTensorRt, plan_file: Path, batch: np.ndarray) -> None:
    with TensorRtEngine(plan_file) as engine, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: engine.run(batch[n : n + 1 + n % 3]).scores, range(36)))
    for n, scores in enumerate(found):
        np.testing.assert_array_equal(scores, answers(batch[n : n + 1 + n % 3])["scores"])


def test_health_reports_the_card_and_the_version(fake: FakeTensorRt, plan_file: Path) -> None:
    with TensorRtEngine(plan_file) as engine:
        health = engine.health()
    assert (health.engine, health.device, health.version) == ("tensorrt", "cuda:0 Card", "tensorrt-rtx 1.2.3")
    assert (health.requested, health.reason, health.precision) == ("tensorrt", "", "float32")
    assert (health.threads, health.mode) == (1, "latency")


def test_a_plan_of_another_gpu_or_version_is_refused(
    fake: FakeTensorRt, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "__version__", "1.3.0", raising=False)
    with pytest.raises(EngineError, match=r"built by tensorrt-rtx 1.2.3, and 1.3.0 is installed"):
        TensorRtEngine(plan_file)
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: Gpu("Other", "sm89", 1))
    with pytest.raises(EngineError, match=r"sm86, and this Other is sm89; export again with --target sm89"):
        TensorRtEngine(plan_file)
    assert fake.cuda.calls == Counter()


@pytest.mark.parametrize("target", ["sm86", "sm89", "sm90"])
def test_auto_opens_the_plan_for_this_gpu(
    target: str, fake: FakeTensorRt, plan_file: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = plan_file.with_name("model.sm89.plan")
    other.write_bytes(plan_file.read_bytes())
    facts = json.loads(sidecar_of(plan_file).read_text("utf-8"))
    write_json(sidecar_of(other), facts | {"target": "sm89"})
    plan_file.with_name("model.onnx").write_bytes(tiny_model.read_bytes())
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: Gpu("Card", target, 1))
    with open_engine(plan_file.parent, threads=1) as engine:
        health = engine.health()
    assert health.engine == ("onnxruntime" if target == "sm90" else "tensorrt")
    assert ("built for a GPU of compute capability sm86" in health.reason) == (target != "sm86")


def test_a_plan_for_a_flavour_that_is_not_installed_is_refused(
    fake: FakeTensorRt, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "find_tensorrt", nvidia.find_tensorrt)
    facts = json.loads(sidecar_of(plan_file).read_text("utf-8"))
    write_json(sidecar_of(plan_file), facts | {"flavour": "tensorrt"})
    with pytest.raises(EngineError, match=r"tensorrt is not installed.*\.\[tensorrt\]"):
        TensorRtEngine(plan_file)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_error_names_the_driver_and_the_extra(plan_file: Path) -> None:
    with pytest.raises(EngineError, match=r"model.sm86.plan cannot be run.*no NVIDIA GPU.*driver.*\.\[tensorrt\]"):
        TensorRtEngine(plan_file)
    with pytest.raises(EngineError, match="no NVIDIA GPU"):
        open_engine(plan_file)


def test_without_cuda_python_the_error_names_the_extra(
    fake: FakeTensorRt, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MissingDependencyError, match=r"\.\[tensorrt-rtx\]"):
        TensorRtEngine(plan_file)


def test_a_plan_that_does_not_match_its_sidecar_is_refused(plan_file: Path) -> None:
    plan_file.write_bytes(b"another plan")
    with pytest.raises(ModelError, match="SHA-256"):
        TensorRtEngine(plan_file)
    plan_file.unlink()
    with pytest.raises(ModelError, match="cannot read the plan"):
        TensorRtEngine(plan_file)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"target"', '"goal"'),
        lambda text: text.replace('"max_batch": 16', '"max_batch": "16"'),
        lambda text: text.replace('"schema": 2', '"schema": 99'),
        lambda text: text.replace('"cbmir.head": "', '"cbmir.head": "A'),
    ],
)
def test_a_damaged_sidecar_is_refused(change: Callable[[str], str], plan_file: Path) -> None:
    path = sidecar_of(plan_file)
    text = path.read_text("utf-8")
    assert change(text) != text
    path.write_text(change(text), "utf-8")
    with pytest.raises(CardError):
        read_plan_info(plan_file)


def test_a_missing_sidecar_is_refused(plan_file: Path) -> None:
    sidecar_of(plan_file).unlink()
    with pytest.raises(CardError, match=r"expected its card in model.sm86.plan.json"):
        TensorRtEngine(plan_file)
