"""Which file is opened by which engine, and that what was asked for is what runs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cbmir.errors import EngineError, ModelError
from cbmir.runtime import open_engine, opening

Opened = list[tuple[str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opened]:
    """Let only these engines work here, and note which file is opened by which."""

    def only(*engines: str) -> Opened:
        opened: Opened = []
        real = opening._open

        def note(file: Path, name: str, *rest: object) -> object:
            opened.append((file.name, name))
            return real(tiny, "onnxruntime", *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(opening, "_why_not", lambda file, name: "" if name in engines else f"there is no {name}")
        monkeypatch.setattr(opening, "_open", note)
        return opened

    tiny = Path()

    def with_model(model: Path, *engines: str) -> Opened:
        nonlocal tiny
        tiny = model
        return only(*engines)

    return with_model


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """An export's folder with a file of each kind (all of them the tiny model: only their names count here)."""
    path = tmp_path / "models"
    path.mkdir()
    for ending in (".onnx", ".fp16.onnx", ".int8.onnx", ".openvino-bf16.xml", ".openvino-int8.xml", ".sm86.plan"):
        shutil.copy(tiny_model, path / f"model{ending}")
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
def test_a_folder_gives_its_fastest_file_that_runs_here(
    engines: tuple[str, ...], expected: tuple[str, str], folder: Path, tiny_model: Path,
    here: Callable[..., Opened], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    opened = here(tiny_model, *engines)
    with caplog.at_level(logging.INFO, "cbmir"), open_engine(folder) as engine:
        assert opened == [expected]
        reason = engine.health().reason
    assert reason.startswith(f"{expected[1]} runs {expected[0]}")
    assert ("not tensorrt (model.sm86.plan): there is no tensorrt" in reason) != (expected[1] == "tensorrt")
    assert f"Engine: {reason}." in caplog.messages


def test_an_engine_that_is_named_takes_its_own_file_of_a_folder(
    folder: Path, tiny_model: Path, here: Callable[..., Opened]
) -> None:
    opened = here(tiny_model, "openvino", "onnxruntime", "onnxruntime-cuda")
    for name in ("openvino", "onnxruntime"):
        open_engine(folder, engine=name).close()
    assert opened == [("model.openvino-bf16.xml", "openvino"), ("model.onnx", "onnxruntime")]
    (folder / "model.sm86.plan").unlink()
    with pytest.raises(ModelError, match="no file in this folder is for engine tensorrt"):
        open_engine(folder, engine="tensorrt")


def test_a_file_is_run_as_it_is(folder: Path, tiny_model: Path, here: Callable[..., Opened]) -> None:
    opened = here(tiny_model, "openvino", "onnxruntime", "onnxruntime-cuda")
    for name in ("model.onnx", "model.int8.onnx", "model.openvino-int8.xml"):
        open_engine(folder / name).close()
    assert opened == [
        ("model.onnx", "onnxruntime-cuda"), ("model.int8.onnx", "onnxruntime"), ("model.openvino-int8.xml", "openvino"),
    ]  # fmt: skip


def test_folders_that_cannot_be_chosen_from(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
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


def test_an_engine_that_is_not_here_is_an_error(tiny_model: Path, here: Callable[..., Opened]) -> None:
    opened = here(tiny_model, "onnxruntime")
    for name in ("onnxruntime-cuda", "onnxruntime-tensorrt", "openvino"):
        with pytest.raises(EngineError, match=f"engine {name} was asked for, but cannot be used here: there is no"):
            open_engine(tiny_model, engine=name)
    assert opened == []


def test_a_fall_back_that_is_allowed_is_told(
    tiny_model: Path, here: Callable[..., Opened], caplog: pytest.LogCaptureFixture
) -> None:
    here(tiny_model, "onnxruntime")
    with open_engine(tiny_model, engine="onnxruntime-cuda", allow_fallback=True) as engine:
        health = engine.health()
    assert (health.requested, health.engine, health.device) == ("onnxruntime-cuda", "onnxruntime", "cpu")
    assert "Running on onnxruntime instead" in health.warnings[0]
    assert list(health.warnings) == [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_what_cannot_be_asked_for(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match="expected an engine of auto, onnxruntime"):
        open_engine(tiny_model, engine="cuda")
    with pytest.raises(EngineError, match=r"is run by onnxruntime-cuda or .*, not by tensorrt"):
        open_engine(tiny_model, engine="tensorrt")


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
