"""`cbmir speed`: arguments, output and exit codes."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import pytest

from cbmir.cli.speed import WIDTH, table, text
from cbmir.export.perf.bench import BenchReport, Entrant, Ratio, Speed
from cbmir.export.perf.contenders import MatrixPeak, peer_contenders, peer_health
from cbmir.export.perf.process import BenchProcess
from cbmir.runtime import open_engine
from command_line import run

Captured = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("openvino")
def test_json(tiny_model: Path, capsys: Captured) -> None:
    """One file runs in two engines, with plain OpenVINO as the baseline."""
    engines = ("--engine", "onnxruntime,openvino", "--against", "openvino")
    assert run("speed", tiny_model, *engines, "--batch", "3,1,3", "--threads", 1, "--seconds", 0.05, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "schema", "finished", "baseline", "seconds", "images", "machine", "entrants", "speeds"
    }  # fmt: skip
    assert (report["schema"], report["finished"], report["baseline"]) == (1, True, "peer openvino")
    names = ["tiny.onnx onnxruntime", "tiny.onnx openvino", "peer openvino"]
    assert [one["name"] for one in report["entrants"]] == names
    healths = [one["health"] for one in report["entrants"]]
    assert [health["engine"] for health in healths] == ["onnxruntime", "openvino", "openvino"]
    assert {"engine", "requested", "reason", "device", "precision", "threads", "mode", "version", "warnings"} == set(
        healths[0]
    )
    assert all(health["threads"] == 1 for health in healths)
    assert [one["batch"] for one in report["speeds"]] == [1, 1, 1, 3, 3, 3]
    for one in report["speeds"]:
        assert set(one) == {
            "batch", "contender", "milliseconds", "p99", "images_per_second", "ratio", "runs", "rounds"
        }  # fmt: skip
        assert one["contender"] in names and len(one["rounds"]) == 12
        assert (one["ratio"]["median"] == 1) == (one["contender"] == "peer openvino")
    for batch in (report["speeds"][:3], report["speeds"][3:]):
        assert sorted(one["milliseconds"] for one in batch) == [one["milliseconds"] for one in batch]
    assert all(abs(one["cosine_distance"]) < 1e-2 for one in report["entrants"])  # plain OpenVINO may use bfloat16


@pytest.mark.slow
def test_against_torch(tiny_export: Path, capsys: Captured) -> None:
    options = ("--against", "torch", "--batch", 1, "--threads", 1, "--seconds", 0.05)
    assert run("-q", "speed", tiny_export / "model.onnx", *options) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    for name in ("model.onnx", "peer torch", "peer torch channels_last"):
        assert len([line for line in lines if line.startswith(f"{name}  ")]) == 2
    assert lines[-1] == "ratio: speed relative to peer torch, by round"
    assert "Traceback" not in printed.err


def test_the_first_file_of_a_folder_may_be_unusable(tiny_model: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "model.onnx").write_text("this is not a model")
    (tmp_path / "model.fp16.onnx").write_bytes(tiny_model.read_bytes())
    assert run("speed", tmp_path, "--batch", 1, "--threads", 1, "--seconds", 0.05) == 0
    printed = capsys.readouterr()
    assert "ratio: speed relative to model.fp16.onnx" in printed.out
    assert "Left out model.onnx" in printed.err


def test_all_peers(tiny_model: Path) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        card = engine.card
    found = list(peer_contenders([tiny_model], card, ("onnxruntime", "torch", "openvino"), 2, peak=True))
    assert [one.name for one in found] == [
        "peer onnxruntime", "peer torch", "peer torch channels_last", "peer openvino", "peak float32", "peak bfloat16",
    ]  # fmt: skip
    assert [(one.precision, one.flops) for one in found if isinstance(one, MatrixPeak)] == [
        ("float32", 25696), ("bfloat16", 25696),
    ]  # fmt: skip


def test_ctrl_c_prints_what_was_measured(tiny_model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BenchProcess.turn
    turns = iter([real, real])

    def turn(self: BenchProcess, batch: int, seconds: float) -> list[float]:
        for each in turns:
            return each(self, batch, seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchProcess, "turn", turn)
    assert run("-q", "speed", tiny_model, "--batch", 1, "--threads", 1, "--seconds", 0.1) == 130
    assert capsys.readouterr().out.endswith("ratio: speed relative to tiny.onnx, by round; stopped early\n")
    assert multiprocessing.active_children() == []


def test_errors(tiny_model: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("speed", tmp_path / "none.onnx") == 2
    assert "no such model file" in capsys.readouterr().err
    assert run("speed", tiny_model, "--engine", "onnxruntime,fast") == 2
    assert "'fast' is not one of" in capsys.readouterr().err
    assert run("speed", tiny_model, "--batch", "0") == 2
    assert "--batch" in capsys.readouterr().err
    assert run("speed", tiny_model, "--engine", "tensorrt") == 2
    assert "tiny.onnx runs on" in capsys.readouterr().err
    (tmp_path / "model.onnx").write_text("this is not a model")
    assert run("speed", tmp_path, "--engine", "tensorrt") == 2
    assert "none of these files can run here: model.onnx runs on" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert run("speed", tiny_model, "--peak") == 2
    assert 'extra "export"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert run("speed", tiny_model, "--engine", "onnxruntime") == 2
    assert 'extra "cpu"' in capsys.readouterr().err


def test_the_table_fits_and_has_every_figure() -> None:
    health = peer_health("onnxruntime-tensorrt", "1", 128, "long")
    names = [f"{number}_a_model_of_a_very_long_name.openvino-bf16.xml throughput and more words" for number in (1, 2)]
    speeds = [
        Speed(128, names[0], 98765.432, None, 12345.6, Ratio(123.456, 100.0, 150.0), 12, (1.0,)),
        Speed(128, names[1], 1.0, 2.0, 0.1, Ratio(1.0, 1.0, 1.0), 12, (1.0,)),
    ]
    entrants = tuple(Entrant(name, health, 123.456, 12345.6, 1.2e-3) for name in names)
    lines = text(BenchReport(names[0], True, 3.0, entrants, tuple(speeds), images="")).splitlines()[3:-2]
    assert max(map(len, lines)) <= WIDTH == 100
    first, second = (line.split() for line in lines[1:3])
    assert first[-7:] == ["onnxruntime-tensorrt", "float32", "128", "latency", "123.46", "12346", "1e-03"]
    assert first[0] != second[0]
    assert lines[5].split()[-6:] == ["128", "98765.43", "-", "12345.6", "123.46", "100.00-150.00"]


def test_table() -> None:
    assert list(table(("name", "n", "x"), [("a", "b", "1.5"), ("abcde", "bb", "12.5")], words=2)) == [
        "name   n      x",
        "a      b    1.5",
        "abcde  bb  12.5",
    ]
