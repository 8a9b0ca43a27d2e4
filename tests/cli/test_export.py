"""`cbmir export` and `cbmir parity`: what is typed, what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbmir.cli import main
from cbmir.export import Limits, exporting

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("quick_graph")


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_export(tiny_run: Path, tmp_path: Path, capfd: Captured) -> None:
    assert run("export", tiny_run, "-o", f"{tmp_path}/models/", "--fp16") == 0
    printed = capfd.readouterr()
    paths = [tmp_path / "models" / name for name in ("model.onnx", "model.fp16.onnx")]
    assert printed.out.splitlines() == [str(path) for path in paths]
    said = printed.err.splitlines()
    assert [line.split(",")[0] for line in said] == ["model.onnx: float32", "model.fp16.onnx: float16"]
    assert "top-10 neighbours unchanged" in said[1] and "cosine min" in said[1]
    assert all(path.is_file() for path in paths)


def test_errors(tiny_run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("export", tmp_path / "none", "-o", tmp_path / "model.onnx") == 2
    assert "expected a folder made by 'cbmir train'" in capsys.readouterr().err
    assert run("export", tiny_run, "-o", tmp_path, "--images", tmp_path / "none.csv") == 2
    assert "no such manifest" in capsys.readouterr().err
    monkeypatch.setitem(exporting.LIMITS, "float32", Limits(cosine=1.1))
    assert run("export", tiny_run, "-o", tmp_path / "model.onnx") == 1
    assert "Error: " in capsys.readouterr().err and not (tmp_path / "model.onnx").exists()


def test_what_belongs_together_is_asked_together(tiny_run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run("export", tiny_run, "-o", tmp_path, "--target", "sm86") == 2
    assert "--target is for --tensorrt" in capsys.readouterr().err


def test_parity(tiny_export: Path, tiny_manifest: Path, capfd: Captured) -> None:
    exact, half = tiny_export / "model.onnx", tiny_export / "model.fp16.onnx"
    assert run("parity", exact, half, tiny_manifest) == 0
    printed = capfd.readouterr().out
    assert "24, of which 4 are queries" in printed and "unchanged top-10 neighbours:" in printed
    assert run("parity", exact, half, tiny_manifest, "--json", "--tolerance", "cosine=1") == 1
    found = json.loads(capfd.readouterr().out)
    assert found["limits"]["cosine"] == 1 and found["failures"][0].startswith("cosine of the embeddings at least 1")
    assert run("parity", exact, exact.with_name("none.onnx"), tiny_manifest) == 2


def test_help_shows_an_example(capsys: Captured) -> None:
    assert run("export", "--help") == 0
    assert "cbmir export run -o model.onnx" in capsys.readouterr().out
