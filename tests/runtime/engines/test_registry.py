"""The choice of file and engine; a requested engine is the one that runs."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cbmir.errors import EngineError, ModelError, installing
from cbmir.runtime import open_engine
from cbmir.runtime.engines import openvino, registry
from cbmir.runtime.engines.registry import ending, model_files, stem

Opened = list[tuple[str, str]]


@pytest.fixture
def only_engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """Let only these engines work here, and record which engine opens which file."""

    def only(*engines: str) -> Opened:
        opened: Opened = []
        real = registry._open

        def note(file: Path, name: str, *rest: object) -> object:
            opened.append((file.name, name))
            return real(tiny, "onnxruntime", *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(registry, "_why_not", lambda file, name: "" if name in engines else f"there is no {name}")
        monkeypatch.setattr(registry, "_open", note)
        return opened

    tiny = Path()

    def with_model(model: Path, *engines: str) -> Opened:
        nonlocal tiny
        tiny = model
        return only(*engines)

    return with_model


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """An export folder with a file of each kind (all contain the tiny model: only the names matter here)."""
    path = tmp_path / "models"
    path.mkdir()
    for end in (".onnx", ".fp16.onnx", ".int8.onnx", ".openvino-bf16.xml", ".openvino-int8.xml", ".sm86.plan"):
        shutil.copy(tiny_model, path / f"model{end}")
    (path / "parity.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (("tensorrt", "onnxruntime-cuda", "openvino", "onnxruntime"), ("model.sm86.plan", "tensorrt")),
        (("onnxruntime-cuda", "openvino", "onnxruntime"), ("model.fp16.onnx", "onnxruntime-cuda")),
        (("openvino", "onnxruntime"), ("model.openvino-bf16.xml", "openvino")),
        (("onnxruntime",), ("model.onnx", "onnxruntime")),
    ],
)
def test_the_fastest_file_of_a_folder_that_runs_here_is_opened(
    engines: tuple[str, ...], expected: tuple[str, str], folder: Path, tiny_model: Path,
    only_engines: Callable[..., Opened], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    opened = only_engines(tiny_model, *engines)
    with caplog.at_level(logging.INFO, "cbmir"), open_engine(folder) as engine:
        assert opened == [expected]
        reason = engine.health().reason
    assert reason.startswith(f"{expected[1]} runs {expected[0]}")
    assert ("not tensorrt (model.sm86.plan): there is no tensorrt" in reason) != (expected[1] == "tensorrt")
    assert f"Engine: {reason}." in caplog.messages


@pytest.mark.usefixtures("no_gpu")
def test_a_bfloat16_file_is_skipped_without_hardware_support(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OldProcessor:
        available_devices = ("CPU",)

        def get_property(self, device: str, name: str) -> object:
            return {"OPTIMIZATION_CAPABILITIES": ["FP32", "INT8"], "FULL_DEVICE_NAME": "Old"}[name]

    monkeypatch.setattr(openvino, "import_openvino", lambda: SimpleNamespace(Core=OldProcessor, __version__="1"))
    for name in ("model.onnx", "model.openvino-bf16.xml"):
        shutil.copy(tiny_model, tmp_path / name)
    with open_engine(tmp_path) as engine:
        health = engine.health()
    assert health.engine == "onnxruntime"
    assert "not openvino (model.openvino-bf16.xml): expected a processor with bfloat16 arithmetic" in health.reason
    with pytest.raises(EngineError, match=r"engine openvino was requested, .* found Old"):
        open_engine(tmp_path, engine="openvino")


@pytest.mark.usefixtures("no_gpu")
def test_if_nothing_works_every_reason_is_given(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError) as error:
        open_engine(tiny_model)
    first, *others = str(error.value).split("; not ")
    assert first.startswith(f"{tiny_model}: no engine for it works here: not onnxruntime (tiny.onnx): onnxruntime")
    assert first.endswith(installing("cpu"))
    assert [other.split(" ")[0] for other in others] == ["onnxruntime-cuda", "openvino"]
    (folder / "model.sm86.plan").unlink()
    with pytest.raises(EngineError, match=r"works here: not onnxruntime \(model\.onnx\): "):
        open_engine(folder)


def test_auto_skips_engines_that_compile_for_minutes(tiny_model: Path, only_engines: Callable[..., Opened]) -> None:
    opened = only_engines(tiny_model, "onnxruntime-tensorrt")
    with pytest.raises(EngineError, match="no engine for it works here"):
        open_engine(tiny_model)
    open_engine(tiny_model, engine="onnxruntime-tensorrt").close()
    assert opened == [("tiny.onnx", "onnxruntime-tensorrt")]


def test_model_files(tmp_path: Path) -> None:
    names = ("a.b.onnx", "a.b.fp16.onnx", "a.b.openvino-bf16.xml", "a.small.plan", "a.small.sm120.plan")
    for name in (*names, "a.b.openvino-bf16.bin", ".a.onnx", "parity.json"):
        (tmp_path / name).touch()
    files = {file.name: file for file in model_files(tmp_path)}
    assert sorted(files) == sorted(names)
    assert [ending(files[name]) for name in names] == [".onnx", ".fp16.onnx", ".openvino-bf16.xml", ".plan", ".plan"]
    assert [stem(files[name]) for name in names] == ["a.b", "a.b", "a.b", "a.small", "a.small"]
    assert stem(Path("other.xml")) == "other"


def test_a_named_engine_opens_its_own_file_of_a_folder(
    folder: Path, tiny_model: Path, only_engines: Callable[..., Opened]
) -> None:
    opened = only_engines(tiny_model, "openvino", "onnxruntime", "onnxruntime-cuda")
    for name in ("openvino", "onnxruntime"):
        open_engine(folder, engine=name).close()
    assert opened == [("model.openvino-bf16.xml", "openvino"), ("model.onnx", "onnxruntime")]
    (folder / "model.sm86.plan").unlink()
    with pytest.raises(ModelError, match="no file in this folder is for engine tensorrt"):
        open_engine(folder, engine="tensorrt")


def test_a_named_engine_without_a_file_of_its_own_opens_the_onnx_file_of_a_folder(
    folder: Path, tiny_model: Path, only_engines: Callable[..., Opened]
) -> None:
    opened = only_engines(tiny_model, "openvino", "onnxruntime-tensorrt")
    (folder / "model.openvino-bf16.xml").unlink()
    for name in ("openvino", "onnxruntime-tensorrt"):
        open_engine(folder, engine=name).close()
    assert opened == [("model.onnx", "openvino"), ("model.onnx", "onnxruntime-tensorrt")]
    only_engines(tiny_model, "onnxruntime")
    with open_engine(folder, engine="openvino", allow_fallback=True) as engine:
        assert "Running on onnxruntime instead" in engine.health().warnings[0]


def test_a_given_file_is_opened_as_it_is(folder: Path, tiny_model: Path, only_engines: Callable[..., Opened]) -> None:
    opened = only_engines(tiny_model, "openvino", "onnxruntime", "onnxruntime-cuda")
    for name in ("model.onnx", "model.int8.onnx", "model.openvino-int8.xml"):
        open_engine(folder / name).close()
    assert opened == [
        ("model.onnx", "onnxruntime-cuda"), ("model.int8.onnx", "onnxruntime"), ("model.openvino-int8.xml", "openvino"),
    ]  # fmt: skip


def test_unusable_folders(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="expected the files of one model, found none"):
        open_engine(tmp_path / "empty")
    shutil.copy(tiny_model, folder / "other.onnx")
    with pytest.raises(ModelError, match="found model, other; name a file"):
        open_engine(folder)
    only_int8 = tmp_path / "int8"
    only_int8.mkdir()
    shutil.copy(tiny_model, only_int8 / "model.int8.onnx")
    with pytest.raises(ModelError, match="an int8 file is opened by its name"):
        open_engine(only_int8)


def test_an_unavailable_engine_is_an_error(tiny_model: Path, only_engines: Callable[..., Opened]) -> None:
    opened = only_engines(tiny_model, "onnxruntime")
    for name in ("onnxruntime-cuda", "onnxruntime-tensorrt", "openvino"):
        with pytest.raises(EngineError, match=f"engine {name} was requested, but cannot be used here: there is no"):
            open_engine(tiny_model, engine=name)
    assert opened == []


def test_an_allowed_fallback_is_reported(
    tiny_model: Path, only_engines: Callable[..., Opened], caplog: pytest.LogCaptureFixture
) -> None:
    only_engines(tiny_model, "onnxruntime")
    with open_engine(tiny_model, engine="onnxruntime-cuda", allow_fallback=True) as engine:
        health = engine.health()
    assert (health.requested, health.engine, health.device) == ("onnxruntime-cuda", "onnxruntime", "cpu")
    assert "Running on onnxruntime instead" in health.warnings[0]
    assert list(health.warnings) == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_falls_back_to_its_onnx_file(
    folder: Path, tiny_model: Path, only_engines: Callable[..., Opened]
) -> None:
    opened = only_engines(tiny_model, "onnxruntime")
    with open_engine(folder, engine="openvino", allow_fallback=True) as engine:
        assert "engine openvino was requested, but cannot be used: there is no openvino" in engine.health().warnings[0]
    assert opened == [("model.onnx", "onnxruntime")]
    with pytest.raises(EngineError, match="engine openvino was requested, but"):
        open_engine(folder / "model.openvino-bf16.xml", engine="openvino", allow_fallback=True)


def test_invalid_engines(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="expected an engine among auto, onnxruntime"):
        open_engine(tiny_model, engine="cuda")
    with pytest.raises(EngineError, match=r"runs on onnxruntime-cuda or .*, not on tensorrt"):
        open_engine(tiny_model, engine="tensorrt")


def test_invalid_model_files_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    data = tiny_model.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("this is not a model")
    (tmp_path / "model.pt").write_bytes(data)
    (tmp_path / "folder.onnx").mkdir()
    for name in ("cut.onnx", "empty.onnx", "text.onnx", "model.pt", "folder.onnx", "missing.onnx"):
        with pytest.raises(ModelError, match=name):
            open_engine(tmp_path / name)
