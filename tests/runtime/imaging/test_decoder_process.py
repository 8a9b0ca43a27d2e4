"""Decoder processes: the same answers as in process, and decoders that hang or crash."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import DecodingError, ImageError, NotReadyError, WorkerError
from cbmir.runtime import ImageLimits, Radiograph, read_image
from cbmir.runtime.imaging import decoder_process as module
from cbmir.runtime.imaging.decoder_process import DecoderPool

pytest.importorskip("imagecodecs")  # encodes some of the files
from broken_files import whole_files

if sys.platform != "linux":
    pytest.skip("signals and /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    with DecoderPool(1) as opened:
        yield opened


def outcome(read: Callable[..., Radiograph], data: Any, **options: Any) -> tuple[Any, ...]:
    try:
        radiograph = read(data, **options)
    except ImageError as error:
        return type(error), str(error), error.reason
    greys = None if radiograph.greys is None else radiograph.greys.tobytes()
    about = {name: value for name, value in vars(radiograph).items() if name not in ("stored", "greys", "values")}
    kinds = [warning.kind for warning in radiograph.warnings]
    values = radiograph.values and {**vars(radiograph.values), "of_stored": radiograph.values.of_stored.tobytes()}
    return radiograph.stored.dtype, radiograph.stored.tolist(), greys, values, about, kinds


def stopped(pool: DecoderPool) -> int:
    """Stop the pool's process, so that it no longer answers. Returns its pid."""
    (process,) = pool._processes
    process.wait_until_ready()
    os.kill(process._child.pid, signal.SIGSTOP)
    return process._child.pid


def test_each_kind_of_file_gives_the_same_image(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    files = whole_files() | {"none": b"no image", "cut.png": whole_files()["x.png"][:-100]}
    expected = {name: outcome(read_image, data, intensity="minmax") for name, data in files.items()}
    for plugin in ("is_dicom", "_read_picture"):
        monkeypatch.delattr(f"cbmir.runtime.imaging.reader.{plugin}")
    for name, data in files.items():
        assert outcome(pool.read, data, intensity="minmax") == expected[name], name


def test_a_path_and_an_array(pool: DecoderPool, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(whole_files()["x.png"])
    for source in (tmp_path / "x.png", tmp_path / "none.png", np.arange(4096, dtype=np.uint16).reshape(64, 64)):
        assert outcome(pool.read, source) == outcome(read_image, source)
    assert outcome(pool.read, whole_files()["x.png"], limits=ImageLimits(max_pixels=10))[2] == "size"


def test_memory_is_reused_only_after_the_image_is_deleted(pool: DecoderPool) -> None:
    """An image outlives later ones. Once all are gone, each process holds memory for at most one file."""
    files = [whole_files()[name] for name in ("explicit.dcm", "x.png", "x.jpg")]
    images = [pool.read(data) for data in files]
    assert [image.stored.tolist() for image in images] == [read_image(data).stored.tolist() for data in files]
    assert not pool._memories
    del images
    gc.collect()
    assert len(pool._memories) == 1
    for data in files:
        pool.read(data)
    assert len(pool._memories) == 1


@pytest.mark.parametrize("name", ["x.png", "none"])
def test_large_memory_is_not_kept(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """This holds for an image and for a refused file."""
    monkeypatch.setattr(module, "_KEPT", 1)
    pool._memories.clear()
    outcome(pool.read, whole_files().get(name, b"no image"))
    gc.collect()
    assert not pool._memories


def test_a_decoder_that_cannot_be_replaced_is_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    data = whole_files()["x.png"]
    with DecoderPool(1) as pool:
        with monkeypatch.context() as patch:
            os.kill(stopped(pool), signal.SIGKILL)
            patch.setattr(module.subprocess, "Popen", Popen())
            for _ in range(2):
                with pytest.raises((DecodingError, NotReadyError)):
                    pool.read(data)
            with pytest.raises(NotReadyError, match="Resource temporarily unavailable; try again"):
                pool.read(data)
        assert outcome(pool.read, data) == outcome(read_image, data)


class Popen:
    def __call__(self, *_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_decoder_that_does_not_answer_is_killed_and_the_next_file_is_read(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = whole_files()["x.png"]
    pid = stopped(pool)
    monkeypatch.setattr(pool, "_seconds", 0.0)
    with pytest.raises(DecodingError, match=r"image: .* within 0 s, found a file that takes longer"):
        pool.read(good)
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.undo()
    assert pool.read(good).sha256 == read_image(good).sha256


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_whole_process_group_stop_no_decoder(pool: DecoderPool, number: signal.Signals) -> None:
    """A terminal or a supervisor sends them; SIGHUP reloads the model of `cbmir serve`."""
    pid = stopped(pool)
    os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    assert outcome(pool.read, whole_files()["x.png"]) == outcome(read_image, whole_files()["x.png"])
    assert {process._child.pid for process in pool._processes} == {pid}


def test_a_decoder_that_crashes(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = stopped(pool)
    asked = module._Process.ask

    def ask(*question: Any) -> None:
        asked(*question)
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)

    with monkeypatch.context() as patch:
        patch.setattr(module._Process, "ask", ask)
        with pytest.raises(DecodingError, match=r"a file whose decoder crashed \(SIGSEGV\)"):
            pool.read(whole_files()["x.png"])
    (process,) = pool._processes
    process.wait_until_ready()
    process._child.kill()  # as Linux does to an idle process when memory runs out
    process._child.wait()
    pool.read(whole_files()["x.png"])


def test_an_interrupted_reader_leaves_no_answer_to_the_next(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module._Process, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.read(whole_files()["x.png"])
    assert pool.read(whole_files()["x.jpg"]).sha256 == read_image(whole_files()["x.jpg"]).sha256


def test_closing_ends_a_hanging_decoder() -> None:
    pool = DecoderPool(1)
    pid = stopped(pool)
    errors: list[Exception] = []

    def read() -> None:
        try:
            pool.read(whole_files()["x.png"])
        except NotReadyError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    pool.close()
    thread.join()
    assert len(errors) == 1
    assert not Path(f"/proc/{pid}").exists()
    pool.close()


def test_lack_of_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "decode_image", decode)
    memory = module._Memory()
    memory.write(b"data")
    error = module._answer(memory.fileno(), "image", 4, {})
    assert isinstance(error, DecodingError)
    assert "at most 4 GiB to decode" in str(error)


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match=r"did not start: it ended \(exit code 1\)"):
        DecoderPool(2)


def test_windows_reads_in_the_same_process_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(module.subprocess, "Popen")
    with DecoderPool(2) as pool:
        monkeypatch.undo()
        assert outcome(pool.read, whole_files()["x.png"]) == outcome(read_image, whole_files()["x.png"])
    assert "without limits of time and memory" in caplog.text


SCRIPT = """
import sys
from cbmir.runtime.imaging.decoder_process import DecoderPool
pool = DecoderPool(2)
print("ready", flush=True)
sys.stdin.read()
"""


def test_no_decoder_outlives_a_killed_parent_and_none_imports_an_engine() -> None:
    """The decoders inherit this end of stderr, so `communicate` only returns once all of them are gone."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        loaded = Path(f"/proc/{children[0]}/maps").read_text()
        assert not any(name in loaded for name in ("onnxruntime", "openvino", "torch", "usearch"))
        os.kill(int(children[0]), signal.SIGTERM)  # as a supervisor may send it to all
        process.kill()
        _, errors = process.communicate(timeout=120)
    assert errors == ""
