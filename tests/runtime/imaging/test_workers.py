"""Reading many images with worker processes: order, bounds, errors, crashes and interruptions."""

from __future__ import annotations

import functools
import logging
import operator
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import ImageError, NotAnImageError, UserError, WorkerError
from cbmir.runtime import Finder, read_image
from cbmir.runtime.imaging import workers as bulk
from cbmir.runtime.imaging.workers import AHEAD, FEW, work_through

# A worker can only call importable functions, so these tests use Python's own.


def test_results_are_in_order_and_read_ahead_is_limited() -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for number in range(500):
            taken += 1
            yield number

    most = 0
    for answered, result in enumerate(work_through(operator.neg, source(), workers=2)):
        assert result == -answered
        most = max(most, taken - answered)
    assert taken == 500
    assert most == AHEAD


@pytest.mark.parametrize(("count", "workers", "processes"), [(FEW - 1, None, 0), (FEW, None, 3), (5, 0, 0), (5, 2, 2)])
def test_processes_are_started_only_if_they_pay_off(
    monkeypatch: pytest.MonkeyPatch, count: int, workers: int | None, processes: int
) -> None:
    started: list[int] = []

    def recorded(function: Callable[[int], int], items: Iterator[int], number: int) -> Iterator[int]:
        started.append(number)
        yield from map(function, items)

    monkeypatch.setattr(bulk, "available_threads", lambda: 3)
    monkeypatch.setattr(bulk, "_by_processes", recorded)
    assert list(work_through(operator.neg, range(count), workers=workers)) == [-n for n in range(count)]
    assert started == ([processes] if processes else [])


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(UserError, match="found -1"):
        work_through(operator.neg, [1], workers=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_error_is_a_result_and_any_other_stops_the_work(workers: int) -> None:
    good = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    first, second, third = work_through(read_image, [good, b"no image", good], workers=workers)
    assert isinstance(second, NotAnImageError)
    assert not isinstance(first, ImageError)
    assert not isinstance(third, ImageError)
    assert np.array_equal(first.pixels, read_image(good).pixels)
    with pytest.raises(ZeroDivisionError):
        list(work_through(functools.partial(operator.truediv, 1), [1, 0], workers=workers))


def test_workers_log_to_this_process_and_import_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    code = "(__import__('logging').getLogger('cbmir.x').warning('%d read', 3), __import__('warnings').warn('odd'), 5)"
    loaded = "__import__('cbmir.runtime.finder') and sorted(__import__('sys').modules)"
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a new worker
        answers = list(work_through(eval, [code, loaded], workers=1))
    assert answers[0] == (None, None, 5)
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("cbmir.x", logging.WARNING), ("py.warnings", logging.WARNING),
    ]  # fmt: skip
    assert caplog.records[0].getMessage() == "3 read"
    assert "odd" in caplog.records[1].getMessage()
    assert not {"torch", "onnxruntime", "openvino", "usearch"} & set(answers[1])


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_that_dies_is_a_typed_error() -> None:
    with pytest.raises(WorkerError, match=r"SIGKILL.*memory.*fewer workers"):
        list(work_through(signal.raise_signal, [signal.SIGKILL] * 3, workers=2))
    with pytest.raises(WorkerError, match=r"exit code 7.*__main__"):
        list(work_through(os._exit, [7], workers=1))


SCRIPT = """
import operator, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started the tests may have ignored
from cbmir.runtime.imaging.workers import work_through
for answer in work_through(operator.neg, range(1000), workers=1):
    if answer == 0:
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_parent(number: signal.Signals) -> None:
    """The workers inherit this end of the pipe, so `communicate` only returns once all of them are gone."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.kill()
        _, errors = process.communicate(timeout=120)
    assert process.returncode == -number
    assert errors.count("Traceback") == (number == signal.SIGINT)


def test_embed_many(tiny_model: Path, tiny_manifest: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> None:
    paths = [tiny_manifest.parent / f"image_{number:02}.png" for number in range(24)]
    images = [*paths, tiny_manifest, *(make_xray(number) for number in range(30)), b"nothing"]
    with Finder.open(tiny_model, threads=1) as finder:
        results = list(finder.embed_many(iter(images), workers=0))
        assert [position for position, result in enumerate(results) if isinstance(result, ImageError)] == [24, 55]
        embeddings = np.stack([result for result in results if not isinstance(result, ImageError)])
        expected = finder.embed([*paths, *images[25:55]])
        np.testing.assert_allclose(embeddings, expected, atol=1e-6)
        by_workers = [result for result in finder.embed_many(images, workers=2) if not isinstance(result, ImageError)]
        assert np.array_equal(embeddings, by_workers)
        assert list(finder.embed_many([])) == []
        with pytest.raises(UserError, match="found a single one"):
            finder.embed_many(paths[0])  # type: ignore[arg-type]
