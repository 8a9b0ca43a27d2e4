"""The parts of benchmarks/gpu.sh that run on a CPU: plan, arguments, parity of this machine's engines, and table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NO_CARD = (False, "No card")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/gpu.py, on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("gpu")
    monkeypatch.setattr(module, "find_card", lambda: NO_CARD)
    return module


@pytest.fixture
def steps(gpu: Any) -> Any:
    return importlib.import_module("gpu_steps")


def run(gpu: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    return int(gpu.main())


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    command = ["bash", str(FOLDER / "gpu.sh"), "--dry-run", "--out", str(tmp_path / "out")]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would run parity" in done.stdout
    assert f"Would write {tmp_path}/out/gpu.md" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_card_makes_it_run_every_step(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(gpu, monkeypatch, "--dry-run") == 0
    assert "Would run engines" not in capsys.readouterr().out
    monkeypatch.setattr(gpu, "find_card", lambda: (True, "Card X, 580.1, 24000 MiB"))
    assert run(gpu, monkeypatch, "--dry-run") == 0
    text = capsys.readouterr().out
    assert text.startswith("Card X, 580.1")
    assert [step for step in gpu.STEPS if f"Would run {step}:" in text] == list(gpu.STEPS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minutes", "9"), "more than 0 and at most 8"),
        (("--minutes", "0"), "more than 0 and at most 8"),
        (("--wheels", "nowhere"), "expected a folder of wheels"),
        (("--model", "nowhere.onnx"), "expected a model file"),
        (("--colour",), "unrecognized arguments"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...],
    words: str,
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(gpu, monkeypatch, *arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_missing_packages_are_installed_from_the_wheels(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "is_installed", lambda module: module != "torch")
    assert run(gpu, monkeypatch, "--out", tmp_path / "out") == 2
    assert "Missing: torch. Install them, or give a folder of wheels" in capsys.readouterr().out
    commands: list[list[str]] = []

    def install(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(gpu.subprocess, "run", install)
    assert run(gpu, monkeypatch, "--out", tmp_path / "out", "--wheels", tmp_path) == 2
    assert commands == [
        [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path), "torch"]
    ]  # fmt: skip


def test_the_engines_of_a_cpu_are_compared(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent / "src"))
    assert run(gpu, monkeypatch, "--out", tmp_path / "out", "--model", tiny_model) == 0
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert (found["card"], found["failed"]) == ("No card", [])
    checks = [row for row in found["rows"] if "engine" in row]
    assert checks[0] == {
        "step": "parity", "engine": "onnxruntime", "file": "model.onnx", "error": 0.0, "score_difference": 0.0,
        "overlap": 1.0, "within": True,
    }  # fmt: skip
    assert not any("ms" in row for row in found["rows"])
    table = (tmp_path / "out" / "gpu.md").read_text()
    assert table in capsys.readouterr().out
    assert "| onnxruntime | model.onnx | 0.0e+00 |" in table


def test_a_step_that_hangs_or_fails_does_not_stop_the_others(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    def never(command: list[str], timeout: float, check: bool) -> SimpleNamespace:
        assert 0 < timeout <= 120
        if "export" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(gpu.subprocess, "run", never)
    assert run(gpu, monkeypatch, "--out", tmp_path, "--model", tiny_model) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["failed"] == ["export", "parity"]


def test_the_table_has_every_figure(gpu: Any) -> None:
    rows = [
        {"step": "machine", "name": "attained bf16 peak", "value": "700 TFLOP/s"},
        {"step": "parity", "engine": "tensorrt", "file": "model.sm90.plan", "error": 0.002, "score_difference": 0.5,
         "overlap": 0.9, "within": False},
        {"step": "torch", "name": "PyTorch eager, float32", "batch": 1, "ms": 9.876},
        {"step": "torch", "name": "PyTorch eager, float32", "batch": 128, "problem": "out of memory"},
        {"step": "training", "name": "training DenseNet121", "value": "900 images/s"},
    ]  # fmt: skip
    text = gpu.table("Card X", rows, ["compile"])
    for line in (
        "# Card X",
        "attained bf16 peak: 700 TFLOP/s",
        "| tensorrt | model.sm90.plan | 2.0e-03 | 5.0e-01 | 90% | NO |",
        "| PyTorch eager, float32 | 9.88 |  |  | failed |",
        "training DenseNet121: 900 images/s",
        "PyTorch eager, float32: out of memory",
        "compile: failed or out of time",
    ):
        assert line in text.splitlines()


def test_the_error_is_a_share_of_the_distance_between_images(steps: Any) -> None:
    """Two images are 2 apart, and one of them moves by 0.1: 0.1 / 2."""
    reference = SimpleNamespace(embedding=np.array([[1.0, 0.0], [-1.0, 0.0]]), scores=np.array([[0.5], [0.25]]))
    found = SimpleNamespace(embedding=np.array([[1.0, 0.1], [-1.0, 0.0]]), scores=np.array([[0.5], [0.375]]))
    assert steps.differences(reference, found) == (pytest.approx(0.05), 0.125)


def test_a_configuration_that_fails_is_a_row(steps: Any) -> None:
    def fails() -> list[float]:
        raise RuntimeError("out of memory")

    assert steps.timed("name", 8, fails) == {"name": "name", "batch": 8, "problem": "out of memory"}
    row = steps.timed("name", 8, lambda: [4.0, 2.0, 9.0])
    assert row == {"name": "name", "batch": 8, "ms": 4.0, "images_per_second": 2000.0, "runs": 3}
