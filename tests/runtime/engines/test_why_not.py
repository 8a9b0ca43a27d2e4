"""Probing engines by running them, without raising, and the options of ONNX Runtime's providers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbmir.choices import ENGINES
from cbmir.errors import EngineError, MissingDependencyError, installing
from cbmir.runtime.engines import nvidia, openvino, ort, tensorrt
from cbmir.runtime.engines.nvidia import Gpu, current_gpu, find_tensorrt
from cbmir.runtime.engines.ort import PROVIDERS, OnnxEngine, provider_options
from cbmir.runtime.engines.registry import probe, why_not


def fake_ort(session: Callable[..., Any]) -> SimpleNamespace:
    """A fake ONNX Runtime that lists CUDA, and creates sessions with a function of the provider."""
    return SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        SessionOptions=SimpleNamespace,
        InferenceSession=lambda model, options, providers, enable_fallback: session(providers[0]),
        __version__="1.2.3",
    )


def session(provider: str, answer: float = 1.5) -> SimpleNamespace:
    return SimpleNamespace(get_providers=lambda: [provider], run=lambda names, feed: [np.array([answer], np.float32)])


def broken(provider: str) -> SimpleNamespace:
    raise RuntimeError("libcudnn.so.9: cannot open shared object file")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (session, ""),
        (lambda provider: session("CPUExecutionProvider"), "fell back to the CPU"),
        (broken, "RuntimeError: libcudnn"),
        (lambda provider: session(provider, answer=0.0), "returned"),
    ],
    ids=["works", "silent fallback", "raises", "wrong"],
)
def test_a_listed_provider_must_run_a_model(
    make: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", fake_ort(make))  # type: ignore[arg-type]
    assert why in why_not("onnxruntime-cuda")
    assert (why_not("onnxruntime-cuda") == "") == (why == "")
    assert "no TensorrtExecutionProvider" in why_not("onnxruntime-tensorrt")


@pytest.mark.parametrize(
    ("engine", "module", "extra"),
    [
        ("onnxruntime", "onnxruntime", "cpu"),
        ("onnxruntime-cuda", "onnxruntime", "gpu"),
        ("onnxruntime-tensorrt", "onnxruntime", "gpu"),
        ("openvino", "openvino", "openvino"),
    ],
)
def test_missing_packages_are_named_with_their_extra(
    engine: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    found = why_not(engine)
    assert found.startswith(f"{module} is not installed") and found.endswith(installing(extra))
    assert probe(engine)[0] == ""


@pytest.mark.parametrize(("devices", "why"), [(["CPU", "GPU"], ""), (["GPU"], "finds no CPU"), ([], "only nothing")])
def test_openvino_needs_its_cpu_plugin(devices: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(Core=lambda: SimpleNamespace(available_devices=devices), __version__="1.2.3")
    monkeypatch.setattr(openvino, "import_openvino", lambda: fake)
    assert why in why_not("openvino")
    assert (why_not("openvino") == "") == (why == "")


@pytest.mark.usefixtures("no_gpu")
def test_tensorrt_needs_a_gpu_then_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(nvidia, "importlib", SimpleNamespace(import_module=absent))
    assert "no NVIDIA GPU" in why_not("tensorrt")
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: Gpu("Card", "sm86", 1))
    assert why_not("tensorrt").endswith(installing("tensorrt", "tensorrt-rtx"))
    monkeypatch.setattr(tensorrt, "find_tensorrt", lambda: (SimpleNamespace(__version__="1.2.3"), "tensorrt-rtx"))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    assert "[tensorrt-rtx]" in why_not("tensorrt")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", SimpleNamespace())  # type: ignore[arg-type]
    assert why_not("tensorrt") == ""
    assert probe("tensorrt") == ("TensorRT for RTX 1.2.3", "")


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_broken_installations_do_not_raise(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> Any:
        raise ValueError("half installed")

    for module, name in ((ort, "require"), (openvino, "import_openvino"), (tensorrt, "current_gpu")):
        monkeypatch.setattr(module, name, explode)
    assert why_not(engine) == f"{engine} does not work: ValueError: half installed"
    assert probe(engine)[0] == ""


def test_an_absent_or_broken_flavour_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r'tensorrt is not installed.*extra "tensorrt"'):
        find_tensorrt("tensorrt")

    def breaks(name: str) -> Any:
        raise OSError("libnvinfer.so.10: cannot open shared object file")

    monkeypatch.setattr(nvidia, "importlib", SimpleNamespace(import_module=breaks))
    with pytest.raises(EngineError, match="tensorrt does not import: libnvinfer"):
        find_tensorrt()


@pytest.mark.parametrize("status", [0, 100])
def test_the_gpu_is_described_by_its_driver(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake driver returns values through pointers, as CUDA's does; 100 is CUDA_ERROR_NO_DEVICE."""

    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802  the names are CUDA's
            return status

        def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
            device._obj.value = 7
            return 0

        def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
            assert device.value == 7
            name.value = b"Some Card"
            return 0

        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
            value._obj.value = {75: 8, 76: 6}[attribute]
            return 0

        def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:  # noqa: N802
            size._obj.value = 24 << 30
            return 0

    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: Driver())
    if status:
        with pytest.raises(EngineError, match="cuInit: CUDA error 100"):
            current_gpu()
    else:
        assert current_gpu() == Gpu("Some Card", "sm86", 24 << 30)


CUDA = {
    "device_id": "0", "arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": str(4 << 30),
    "cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0",
}  # fmt: skip
TENSORRT = {
    "device_id": "0", "trt_fp16_enable": "0", "trt_max_workspace_size": str(1 << 30),
    "trt_profile_min_shapes": "image:1x1x224x224", "trt_profile_opt_shapes": "image:8x1x224x224",
    "trt_profile_max_shapes": "image:32x1x224x224",
}  # fmt: skip
CPU = ("CPUExecutionProvider", dict[str, str]())


def test_provider_options_keep_memory_and_float32() -> None:
    options = {"size": 224, "memory": 8 << 30}
    assert provider_options("onnxruntime") == [CPU]
    assert provider_options("onnxruntime-cuda", **options) == [("CUDAExecutionProvider", CUDA), CPU]
    assert provider_options("onnxruntime-tensorrt", **options) == [
        ("TensorrtExecutionProvider", TENSORRT), ("CUDAExecutionProvider", CUDA), CPU,
    ]  # fmt: skip
    assert [name for name, _ in provider_options("onnxruntime-tensorrt")] == PROVIDERS["onnxruntime-tensorrt"]


def test_half_precision_is_used_only_on_request() -> None:
    half = dict(provider_options("onnxruntime-tensorrt", precision="float16", size=224, memory=8 << 30))
    assert half["TensorrtExecutionProvider"] == TENSORRT | {"trt_fp16_enable": "1"}
    assert half["CUDAExecutionProvider"] == CUDA


def test_tensorrt_keeps_engines_and_timings_in_the_cache(tmp_path: Path) -> None:
    kept = dict(provider_options("onnxruntime-tensorrt", size=224, memory=8 << 30, cache=tmp_path))
    assert kept["TensorrtExecutionProvider"] == TENSORRT | {
        "trt_engine_cache_enable": "1", "trt_engine_cache_path": str(tmp_path),
        "trt_timing_cache_enable": "1", "trt_timing_cache_path": str(tmp_path),
    }  # fmt: skip
    assert kept["CUDAExecutionProvider"] == CUDA


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_a_gpu_session_gets_its_options_and_one_cache_per_model(
    mode: Any, tiny_model: Path, make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for TensorRT: the sessions are real, their list of providers is not."""
    import onnxruntime

    given: list[list[tuple[str, dict[str, str]]]] = []
    real = onnxruntime.InferenceSession

    def opened(path: str, options: Any, providers: list[tuple[str, dict[str, str]]], **rest: Any) -> Any:
        session = real(path, options, providers=["CPUExecutionProvider"])
        given.append(providers)
        monkeypatch.setattr(session, "get_providers", lambda: [name for name, _ in providers])
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    monkeypatch.setattr(ort, "current_gpu", lambda: Gpu("Some Card", "sm86", 8 << 30))
    monkeypatch.setattr(ort, "loaded_tensorrt", lambda: "101300")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    folders = set()
    for model in (tiny_model, make_tiny_model(tmp_path / "other.onnx", seed=1)):
        with OnnxEngine(model, engine="onnxruntime-tensorrt", threads=2, mode=mode, cache=tmp_path) as engine:
            assert engine.run(np.zeros((3, 1, 32, 32), np.uint8)).scores.shape == (3, 3)
            health = engine.health()
        assert (health.engine, health.device) == ("onnxruntime-tensorrt", "cuda:0")
        assert "NVIDIA_TF32_OVERRIDE=0" in health.warnings[0]
        read, run = given
        assert [name for name, _ in read] == ["CPUExecutionProvider"]
        assert [name for name, _ in run] == PROVIDERS["onnxruntime-tensorrt"]
        folder = Path(run[0][1]["trt_engine_cache_path"])
        assert folder.parent == tmp_path / "onnxruntime-tensorrt"
        assert folder.name.endswith(f"-Some_Card-{onnxruntime.__version__}_101300-float32")
        folders.add(folder)
        given.clear()
    assert len(folders) == 2
