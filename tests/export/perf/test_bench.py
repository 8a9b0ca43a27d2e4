"""Measuring speed: turns, ratios and medians computed by hand, and the processes of contenders."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import EngineError, ModelError
from cbmir.export.perf.bench import (
    Ratio,
    Times,
    bench,
    cosine_distances,
    ratio,
    summarise,
    synthetic_images,
    take_turns,
)
from cbmir.export.perf.contenders import (
    Answer,
    Contender,
    ModelContender,
    OnnxRuntimePeer,
    OpenVinoPeer,
    float32_file,
    model_contenders,
    peer_health,
)
from cbmir.export.perf.process import BenchProcess, RunningContender, serve, time_runs
from cbmir.runtime.engines.base import EngineHealth


@dataclass(frozen=True)
class Ending(Contender):
    """A contender whose process ends in the middle, as if killed for its memory."""

    def open(self) -> tuple[Answer, EngineHealth]:
        raise SystemExit(3)


@dataclass(frozen=True)
class Failing(Contender):
    def open(self) -> tuple[Answer, EngineHealth]:
        def answer(batch: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if len(batch) > 1:
                raise ValueError("no batches here")
            return np.ones((1, 2), np.float32)

        return answer, peer_health("none", "1", 1, "fails")


class Recorder:
    """A contender with turns of `times` seconds, which records the order of calls."""

    def __init__(self, name: str, calls: list[tuple[str, int, float]], times: list[float]) -> None:
        self.name, self.calls, self.times = name, calls, times

    def turn(self, batch: int, seconds: float) -> list[float]:
        self.calls.append((self.name, batch, seconds))
        return self.times


def test_contenders_take_turns_and_each_round_starts_with_a_different_one() -> None:
    calls: list[tuple[str, int, float]] = []
    times: Times = {}
    recorders = {name: Recorder(name, calls, [0.5]) for name in "abc"}
    take_turns({name: one.turn for name, one in recorders.items()}, (1, 8), 6.0, times, rounds=3)
    assert [call[:2] for call in calls] == [
        ("a", 1), ("b", 1), ("c", 1), ("a", 8), ("b", 8), ("c", 8),
        ("b", 1), ("c", 1), ("a", 1), ("b", 8), ("c", 8), ("a", 8),
        ("c", 1), ("a", 1), ("b", 1), ("c", 8), ("a", 8), ("b", 8),
    ]  # fmt: skip
    assert {seconds for *_, seconds in calls} == {2.0}
    assert times == {(batch, name): [[0.5]] * 3 for batch in (1, 8) for name in "abc"}


def test_measurements_are_kept_when_turns_are_stopped() -> None:
    class Stopped(Recorder):
        def turn(self, batch: int, seconds: float) -> list[float]:
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().turn(batch, seconds)

    calls: list[tuple[str, int, float]] = []
    times: Times = {}
    with pytest.raises(KeyboardInterrupt):
        take_turns({name: Stopped(name, calls, [0.1]).turn for name in "ab"}, (1,), 1.0, times)
    assert times == {(1, "a"): [[0.1]], (1, "b"): [[0.1], [0.1]]}


def test_a_turn_ends_with_its_time_and_does_not_count_its_first_run() -> None:
    now = 100.0
    lasting = iter([9.0, 2.0, 3.0, 4.0, 50.0])

    def run() -> None:
        nonlocal now
        now += next(lasting)

    assert time_runs(run, 8.0, clock=lambda: now) == [2.0, 3.0, 4.0]
    lasting = iter([9.0, 70.0])
    assert time_runs(run, 8.0, clock=lambda: now) == [70.0]


def test_ratio_by_round() -> None:
    """The rounds are 2, 3 and 4 times as fast, and the fourth has no partner. Percentiles are interpolated linearly."""
    assert ratio([10, 20, 10], [20, 60, 40, 1]) == Ratio(3.0, pytest.approx(2.2), pytest.approx(3.8))
    # If the whole machine slows down, the ratio does not change.
    assert ratio([10, 15], [20, 30]) == Ratio(2.0, 2.0, 2.0)


def test_summary() -> None:
    times: Times = {
        (8, "slow"): [[0.040, 0.060, 0.080], [0.120]],
        (8, "fast"): [[0.010, 0.030], [0.040]],
        (1, "fast"): [[0.001 * n for n in range(1, 101)]],
        (1, "slow"): [[0.101]],
        (2, "fast"): [[0.001]],  # interrupted before the baseline's turn
    }
    first, second, third, fourth = summarise(times, "slow")
    assert [(one.batch, one.contender) for one in (first, second, third, fourth)] == [
        (1, "fast"), (1, "slow"), (8, "fast"), (8, "slow"),
    ]  # fmt: skip
    assert first.milliseconds == pytest.approx(50.5)
    assert first.p99 == pytest.approx(99.01)
    assert first.images_per_second == pytest.approx(1000 / 50.5)
    assert first.ratio.median == pytest.approx(2.0)
    assert (first.runs, second.runs, second.p99) == (100, 1, None)
    # All runs are 10, 30 and 40 ms; per round it is 20 against 60, and 40 against 120.
    assert third.milliseconds == pytest.approx(30.0)
    assert third.images_per_second == pytest.approx(8 / 0.030)
    assert third.rounds == pytest.approx((20.0, 40.0))
    assert third.ratio == Ratio(pytest.approx(3.0), pytest.approx(3.0), pytest.approx(3.0))
    assert fourth.milliseconds == pytest.approx(70.0) and fourth.ratio == Ratio(1.0, 1.0, 1.0)


def test_cosine_distances_are_the_largest_to_the_first_with_an_embedding() -> None:
    first = np.array([[3, 4], [1, 0]], np.float32)
    other = np.array([[3, 4], [1, 1]], np.float32)
    found = cosine_distances({"random": None, "first": first, "other": other})
    assert found == {"random": None, "first": pytest.approx(0.0), "other": pytest.approx(1 - 0.5**0.5)}


def test_synthetic_images() -> None:
    images = synthetic_images(3, 40)
    assert images.shape == (3, 1, 40, 40) and images.dtype == np.uint8
    np.testing.assert_array_equal(images, synthetic_images(3, 40))
    assert not np.array_equal(images[0], images[1]) and images.std() > 20


def test_a_folder_gives_each_of_its_files(tmp_path: Path) -> None:
    names = ("model.sm86.plan", "model.openvino-bf16.xml", "model.openvino-bf16.bin", "model.onnx", "parity.json",
             "model.fp16.onnx", ".model.int8.onnx.1.part", ".half.onnx")  # fmt: skip
    for name in names:
        (tmp_path / name).touch()
    found = model_contenders([tmp_path], threads=2)
    assert [one.name for one in found] == [
        "model.onnx",
        "model.fp16.onnx",
        "model.sm86.plan",
        "model.openvino-bf16.xml",
    ]
    assert all(one.optional and one.threads == 2 for one in found)
    assert not any(one.optional for one in model_contenders([tmp_path / "model.onnx"]))
    assert float32_file([tmp_path / "model.openvino-bf16.xml"]) == tmp_path / "model.onnx"
    assert float32_file([tmp_path]) == tmp_path / "model.onnx"
    for name in ("run.2.openvino-bf16.xml", "run.2.onnx"):
        (tmp_path / name).touch()
    assert float32_file([tmp_path / "run.2.openvino-bf16.xml"]) == tmp_path / "run.2.onnx"


def test_contenders_have_distinct_names(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "model.onnx", tmp_path / "other" / "model.onnx"
    found = model_contenders([one, other, tmp_path / "x.onnx"], engines=("onnxruntime", "openvino"))
    assert len({each.name for each in found}) == 6
    assert [each.name for each in found[-2:]] == ["x.onnx onnxruntime", "x.onnx openvino"]
    found = model_contenders([tmp_path / "x.onnx"], modes=("latency", "throughput"))
    assert [(each.name, each.mode) for each in found] == [
        ("x.onnx latency", "latency"), ("x.onnx throughput", "throughput"),
    ]  # fmt: skip


def test_missing_files_and_batches_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="in this folder, found none"):
        model_contenders([tmp_path])
    with pytest.raises(ModelError, match=r"expected model\.onnx beside"):
        float32_file([tmp_path / "model.plan"])
    with pytest.raises(EngineError, match="batch sizes of at least 1"):
        bench([ModelContender("a", tmp_path)], 32, batches=(0,))
    with pytest.raises(EngineError, match="batch sizes of at least 1"):
        bench([], 32)


def test_a_bench(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There are two real contenders, and an optional file that cannot run."""
    broken = tmp_path / "broken.onnx"
    broken.write_text("this is not a model")
    contenders = [
        ModelContender("broken.onnx", broken, optional=True),
        ModelContender("tiny.onnx", tiny_model, threads=1),
        OnnxRuntimePeer("peer onnxruntime", tiny_model, threads=1),
    ]
    report = bench(contenders, 32, batches=(1, 3), seconds=0.01)
    assert "Left out broken.onnx" in caplog.text
    assert multiprocessing.active_children() == []
    assert report.finished and report.baseline == "tiny.onnx"
    assert [(one.name, one.health.engine, one.health.threads) for one in report.entrants] == [
        ("tiny.onnx", "onnxruntime", 1), ("peer onnxruntime", "onnxruntime", 1),
    ]  # fmt: skip
    for one in report.entrants:
        assert one.load_seconds > 0 and one.cosine_distance == pytest.approx(0, abs=1e-9)
        assert one.peak_memory_mb is None or 20 < one.peak_memory_mb < 2000
    assert {(one.batch, one.contender) for one in report.speeds} == {
        (batch, one.name) for batch in (1, 3) for one in contenders[1:]
    }
    for speed in report.speeds:
        assert len(speed.rounds) == 12 <= speed.runs and speed.ratio.low <= speed.ratio.median <= speed.ratio.high
        assert speed.images_per_second == pytest.approx(speed.batch / speed.milliseconds * 1000)
    assert json.loads(json.dumps(report.to_json()))["speeds"][0]["rounds"] == list(report.speeds[0].rounds)


def test_ctrl_c_keeps_measurements_and_leaves_no_process(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    real = BenchProcess.turn

    def turn(self: BenchProcess, batch: int, seconds: float) -> list[float]:
        nonlocal turns
        turns += 1
        if turns == stop_at:
            raise KeyboardInterrupt
        return real(self, batch, seconds)

    monkeypatch.setattr(BenchProcess, "turn", turn)
    contenders = [ModelContender(name, tiny_model, threads=1) for name in ("a", "b")]
    stop_at = 4
    report = bench(contenders, 32, batches=(1, 2), seconds=0.01)
    assert not report.finished
    assert sorted((one.batch, one.contender) for one in report.speeds) == [(1, "a"), (1, "b"), (2, "a")]
    turns, stop_at = 0, 2
    with pytest.raises(KeyboardInterrupt):
        bench(contenders, 32, batches=(1, 2), seconds=0.01)
    assert multiprocessing.active_children() == []


def test_errors_in_a_process_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        bench([ModelContender("gone", tmp_path / "gone.onnx")], 8)
    with pytest.raises(EngineError, match=r"ending: its process ended \(exit code 3\)"):
        bench([Ending("ending")], 8)
    with pytest.raises(EngineError, match="failing: ValueError: no batches here"):
        bench([Failing("failing")], 8, batches=(2,), seconds=0.01)
    with pytest.raises(EngineError, match="none of these files can run here"):
        bench([ModelContender("gone", tmp_path / "gone.onnx", optional=True)], 8)
    assert multiprocessing.active_children() == []


@dataclass(frozen=True)
class Raising(Contender):
    error: Exception

    def open(self) -> tuple[Answer, EngineHealth]:
        raise self.error


def test_a_process_ends_with_its_parent() -> None:
    images = synthetic_images(1, 8)
    ours, theirs = multiprocessing.Pipe()
    serve(theirs, "raising", partial(RunningContender, Raising("raising", OSError("no such library")), images, 1))
    assert str(ours.recv()) == "raising: OSError: no such library"
    ours.close()
    serve(theirs, "failing", partial(RunningContender, Failing("failing"), images, 1))


@pytest.mark.parametrize("peer", [OnnxRuntimePeer, OpenVinoPeer])
def test_peers_give_the_same_answers_as_the_engine(
    peer: type[OnnxRuntimePeer | OpenVinoPeer], tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    if peer is OpenVinoPeer:
        request.getfixturevalue("openvino")
    images = synthetic_images(3, 32)
    answer, health = peer("peer", tiny_model, threads=1).open()
    own, _ = ModelContender("own", tiny_model, threads=1).open()
    # Plain OpenVINO computes in bfloat16 if the processor supports it.
    np.testing.assert_allclose(answer(images), own(images), atol=1e-5 if health.precision == "float32" else 2e-2)
    assert (health.device, health.threads, health.mode) == ("cpu", 1, "latency")
