"""`cbmir pacs node` as a process: signals, reloading a model, and refusals at the start."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from cbmir.cli.commands import pacs
from cbmir.errors import CbmirError, PacsError, QueueError, UserError, WorkerError
from cbmir.process import SIGNALS
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import jobs, service
from cbmir.runtime.pacs.jobs import Arrival
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED, NodeProcess, Receiver, node_process, send_all, wait_for


def has_logged(node: NodeProcess, message: str) -> bool:
    return any(line["message"].startswith(message) for line in node.lines)


def test_from_start_to_stop(
    receiver: Receiver, radiograph: Callable[..., bytes], tiny_model: Path, make_tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Images before and after a reload, a model that does not open, and jobs left at the end."""
    model = tmp_path / "model.onnx"
    shutil.copy(tiny_model, model)
    options = [
        "-vv", "pacs", "node", "--port", "0", "--model", str(model), "--state", str(tmp_path / "state"),
        "--store-to", f"ARCHIVE@127.0.0.1:{receiver.port}", "--settle", "0", "--sr", "--sc",
        "--allow-calling", "SENDER",
    ]  # fmt: skip
    with node_process(tmp_path / "log", *options) as node:
        assert node.first_line.startswith("CBMIR@127.0.0.1:")
        assert send_all(node.port, [radiograph(1)]) == [0]
        first = receiver.wait(2)
        assert {one.Modality for one in first} == {"SR", "OT"}

        model.write_bytes(b"no model")
        node.process.send_signal(signal.SIGHUP)
        wait_for(lambda: has_logged(node, "not reloaded"), "the bad model is refused")
        assert send_all(node.port, [radiograph(2)]) == [0]
        receiver.wait(4)

        model.unlink()
        make_tiny_model(model, seed=1, fingerprint="tiny-1")
        node.process.send_signal(signal.SIGHUP)
        wait_for(lambda: has_logged(node, "reloaded"), "the new model is there")
        assert send_all(node.port, [radiograph(1)]) == [0]  # only known to the old model
        again = [one for one in receiver.wait(6)[4:] if one.Modality == "SR"]
        assert again[0].PredecessorDocumentsSequence[0].StudyInstanceUID == f"{PLANTED[2]}.1"

        assert node.end(signal.SIGTERM) == 0
        assert node.lines[-1]["message"] == "stopped"
        text = (tmp_path / "log").read_text()
        assert not any(secret in text for secret in PLANTED)
        assert "Traceback" not in text


@pytest.mark.slow
def test_waiting_jobs_are_done_after_a_restart(
    receiver: Receiver, radiograph: Callable[..., bytes], tiny_model: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(bytes(range(32)).hex())
    options = ["pacs", "node", "--port", "0", "--model", str(tiny_model), "--state", str(tmp_path / "state")]
    options += ["--pseudonyms", str(key)]  # which imports numpy early
    held = sum(1 << (number - 1) for number in SIGNALS)
    with node_process(tmp_path / "log", *options, "--settle", "3600") as node:
        assert send_all(node.port, [radiograph(1), radiograph(2)]) == [0, 0]
        # A signal delivered to any thread except the first, which waits for it, would end the process.
        masks = list[int]()
        for task in Path(f"/proc/{node.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # an association's thread may just have ended
                if task.name != task.parts[2]:
                    masks.append(int(re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text())[0], 16))
        assert masks
        assert all(mask & held == held for mask in masks)
        assert node.end(signal.SIGINT) == 0
        assert node.lines[-1]["waiting"] == 2
    for file in (tmp_path / "state" / "spool").iterdir():
        assert not any(text in file.name for text in PLANTED)
    status = json.loads((tmp_path / "state" / service.STATUS).read_text())
    assert status.keys() == {"time", "waiting", "unsent", "oldest_s", "dead_letters", "reused_uids", "refused"}


@pytest.mark.slow
def test_a_second_signal_ends_the_service_immediately(
    radiograph: Callable[..., bytes], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while it waits for a silent archive. The folder is the one from systemd's variable."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    with socket.create_server(("127.0.0.1", 0)) as archive:
        archive.settimeout(60)
        options = ["--store-to", f"ARCHIVE@127.0.0.1:{archive.getsockname()[1]}", "--settle", "0"]
        command = ["pacs", "node", "--port", "0", "--model", str(tiny_model), *options]
        with node_process(tmp_path / "log", *command) as node:
            assert send_all(node.port, [radiograph()]) == [0]
            connection, _ = archive.accept()
            with connection:
                node.process.send_signal(signal.SIGTERM)
                wait_for(lambda: has_logged(node, "stopping"), "it stops")
                assert node.end(signal.SIGTERM) == 128 + signal.SIGTERM
    with DurableQueue(tmp_path / "state") as queue:
        assert queue.state()["unsent"] == 1


# -- logs while it runs


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    with DurableQueue(tmp_path / "queue", quiet=0) as opened:
        yield opened


def test_waiting_jobs_are_always_reported(queue: DurableQueue, log: Callable[[], str]) -> None:
    idle = service._report(queue, None)
    assert service._report(queue, idle) == idle
    assert log().count("oldest_s") == 1  # nothing has changed
    queue.put(b"a file", Arrival("1.2", "1.2", "SENDER"), "model")
    for times in (2, 3):
        service._report(queue, service._report(queue, {}))
        assert log().count('"waiting": 1') >= times
    assert json.loads((queue.folder / service.STATUS).read_text())["waiting"] == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), QueueError("disk I/O error")])
def test_a_failed_status_report_stops_nothing(
    queue: DurableQueue, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(service, "write_json", fail)
    assert service._report(queue, {}) == {}
    assert "the queue failed" in log()


def test_a_dead_worker_ends_the_service(
    queue: DurableQueue, live: ReloadableFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_REPORT", 0.01)
    workers: Any = SimpleNamespace(alive=False)
    with pytest.raises(WorkerError, match="one has ended"):
        service._wait(queue, workers, live)


def test_a_hanging_reload_does_not_delay_the_end(
    queue: DurableQueue, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Hanging:
        generation = 2

        def reload(self) -> None:
            begun.set()
            assert go_on.wait(60)

    signals = iter([signal.SIGHUP, signal.SIGTERM])
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: SimpleNamespace(si_signo=next(signals)))
    workers: Any = SimpleNamespace(alive=True)
    live: Any = Hanging()
    service._wait(queue, workers, live)
    assert "reloaded" not in log()
    assert begun.wait(60)
    go_on.set()
    wait_for(lambda: "reloaded" in log(), "the thread ends")


# -- dead letters


def test_dead_letters_are_put_back(
    radiograph: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    with DurableQueue(state, quiet=0) as queue:
        queue.put(radiograph(), Arrival("1.2", "1.2", "SENDER"), "model")
        job = queue.claim()
        assert job is not None
        queue.bury(job, "no answer")
        monkeypatch.setattr(jobs, "WAIT", 0.05)
        in_use = CliRunner().invoke(pacs, ["retry", "--state", str(state)])
        assert isinstance(in_use.exception, QueueError)
    result = CliRunner().invoke(pacs, ["retry", "--state", str(state)])
    assert result.output == "1 dead letters are back in the queue, 0 stay\n"
    with DurableQueue(state) as queue:
        assert (len(queue), queue.state()["dead_letters"]) == (1, 0)
        assert queue.knows(f"{PLANTED[2]}.1.1")
    result = CliRunner().invoke(pacs, ["retry", "--state", str(state), "--json"])
    assert json.loads(result.output) == {"back": 0, "left": 0}


def test_dead_letters_of_a_missing_queue(tmp_path: Path) -> None:
    result = CliRunner().invoke(pacs, ["retry", "--state", str(tmp_path / "nowhere")])
    assert isinstance(result.exception, UserError)
    assert not (tmp_path / "nowhere").exists()


# -- refusals at the start


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["node", "--host", "0.0.0.0"], UserError, "--allow-any-calling"),
        (["node", "--aet", "SEVENTEEN_LETTERS"], PacsError, "expected an AE title"),
        (["node", "--store-to", "ARCHIVE"], PacsError, "AET@HOST:PORT"),
        (["follow", "--dicomweb", "nonsense"], PacsError, "expected the URL"),
    ],
)
def test_invalid_configurations_are_refused(
    arguments: list[str], error: type[CbmirError], says: str, tiny_model: Path, tmp_path: Path
) -> None:
    given = [*arguments, "--model", str(tiny_model), "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(pacs, given)
    assert isinstance(result.exception, error)
    assert says in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected one of --orthanc and --dicomweb"),
        (["--orthanc", "http://a", "--dicomweb", "http://b"], "expected one of --orthanc and --dicomweb"),
        (["--orthanc", "http://a", "--since", "2026-01-01"], "expected the number of a change"),
        (["--dicomweb", "http://a", "--since", "7"], "expected a day YYYY-MM-DD"),
    ],
)
def test_follow_requires_a_source(arguments: list[str], says: str, tiny_model: Path, tmp_path: Path) -> None:
    given = ["follow", *arguments, "--model", str(tiny_model), "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(pacs, given)
    assert result.exit_code == 2
    assert says in result.output
