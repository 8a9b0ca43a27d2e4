"""`cbmir export` and `cbmir parity`: arguments, output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbmir import export
from cbmir.export import ExportOptions, ParityLimits
from cbmir.export import export as export_module
from cbmir.runtime.models.catalog import model_file
from command_line import run

Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("quick_graph")


def test_export(tiny_run: Path, tmp_path: Path, capfd: Captured) -> None:
    assert run("export", tiny_run, "-o", f"{tmp_path}/models/", "--fp16") == 0
    printed = capfd.readouterr()
    paths = [tmp_path / "models" / name for name in ("model.onnx", "model.fp16.onnx")]
    assert printed.out.splitlines() == [str(path) for path in paths]
    said = printed.err.splitlines()
    assert [line.split(",")[0] for line in said] == ["model.onnx: float32", "model.fp16.onnx: float16"]
    assert "top-10 neighbours unchanged" in said[1] and "cosine min" in said[1]
    assert all(path.is_file() for path in paths)


def test_a_file(tiny_export: Path, tiny_manifest: Path, tmp_path: Path, capfd: Captured) -> None:
    wanted = ("--openvino", "int8", "--images", tiny_manifest, "--accept-parity-loss")
    assert run("export", tiny_export / "model.onnx", "-o", f"{tmp_path}/more/", *wanted) == 0
    assert capfd.readouterr().out.splitlines() == [str(tmp_path / "more" / "model.openvino-int8.xml")]
    for model, words in (
        (tiny_export / "model.onnx", "give --openvino, --int8 or --tensorrt"),
        (tmp_path / "none.onnx", "none.onnx: no such file."),
        (tmp_path / "more", "found a folder of model files"),
    ):
        assert run("export", model, "-o", tmp_path, "--images", tiny_manifest) == 2
        assert words in capfd.readouterr().err


def test_the_starter_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(export, "export_file", lambda model, *_: asked.append(model) or [])
    assert run("export", "starter", "-o", tmp_path, "--int8") == 0
    assert asked == [model_file("starter")]


def test_errors(tiny_run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("export", tmp_path / "none", "-o", tmp_path / "model.onnx") == 2
    assert "expected a folder made by 'cbmir train'" in capsys.readouterr().err
    assert run("export", tiny_run, "-o", tmp_path, "--images", tmp_path / "none.csv") == 2
    assert "no such manifest" in capsys.readouterr().err
    monkeypatch.setitem(export_module.LIMITS, "float32", ParityLimits(cosine=1.1))
    assert run("export", tiny_run, "-o", tmp_path / "model.onnx") == 1
    assert "Error: " in capsys.readouterr().err and not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        (("--target", "sm86"), "--tensorrt"),
        (("--max-batch", 8), "--tensorrt"),
        (("--calibrate", "manifest.csv"), "--int8 or --openvino int8"),
        (("--calibration-images", 8), "--int8 or --openvino int8"),
        (("--calibration-percentile", 99.9, "--openvino", "bf16"), "--int8 or --openvino int8"),
    ],
)
def test_options_without_their_target_are_refused(
    given: tuple[object, ...], needs: str, tiny_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert run("export", tiny_run, "-o", tmp_path, *given) == 2
    assert f"{given[0]} is for {needs}." in capsys.readouterr().err


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ExportOptions] = []

    def note(folder: Path, output: str, options: ExportOptions) -> list[Path]:
        asked.append(options)
        return []

    monkeypatch.setattr(export, "export_run", note)
    of_plans = ("--tensorrt", "--target", "sm86, sm89,sm86", "--max-batch", 8)
    assert run("export", tmp_path, "-o", tmp_path, *of_plans, "--openvino", "int8", "--calibration-images", 5) == 0
    assert asked == [ExportOptions(targets=("sm86", "sm89"), max_batch=8, openvino=("int8",), calibration_images=5)]


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
