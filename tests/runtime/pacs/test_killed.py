"""SIGKILL at every step of a job: acknowledged studies are answered under one UID each, perhaps sent twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pacs_rig import PLANTED, Receiver, node_process, send_all, wait_for

#: Points at which the process ends when it reaches them a second time: before (or after) one of these methods.
POINTS = {
    "file written, not in the queue": ("queue.DurableQueue", "_add", "before"),
    "in the queue, not acknowledged": ("intake.Intake", "take", "after"),
    "claimed": ("queue.DurableQueue", "kept", "before"),
    "analysed, results not kept": ("queue.DurableQueue", "keep", "before"),
    "results kept, not sent": ("queue.DurableQueue", "keep", "after"),
    "sent, not done": ("queue.DurableQueue", "done", "before"),
    "done": ("queue.DurableQueue", "done", "after"),
}
IN_CI = ("in the queue, not acknowledged", "sent, not done")
STUDIES = 4

_KILL = """
import importlib, os, signal, threading
module, _, name = {owner!r}.partition(".")
kind = getattr(importlib.import_module("cbmir.runtime.pacs." + module), name)
real, times, lock = getattr(kind, {method!r}), [], threading.Lock()
def killed(*given, **more):
    with lock:
        times.append(1)
        last = len(times) == 2
    if last and {when!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*given, **more)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(kind, {method!r}, killed)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", [p if p in IN_CI else pytest.param(p, marks=pytest.mark.release) for p in POINTS], ids=lambda p: p
)
def test_a_killed_process_loses_nothing(
    point: str, receiver: Receiver, radiograph: Callable[..., bytes], tiny_model: Path, tmp_path: Path
) -> None:
    options = [
        "pacs", "node", "--port", "0", "--model", str(tiny_model), "--state", str(tmp_path / "state"), "--settle", "0",
        "--store-to", f"ARCHIVE@127.0.0.1:{receiver.port}", "--workers", "1",
    ]  # fmt: skip
    files = [radiograph(study) for study in range(1, STUDIES + 1)]
    owner, method, when = POINTS[point]
    with node_process(tmp_path / "log", *options, before=_KILL.format(owner=owner, method=method, when=when)) as node:
        statuses = send_all(node.port, files, patience=10)
        assert node.process.wait(60) == -signal.SIGKILL
    assert statuses[0] == 0
    lost = [data for data, status in zip(files, statuses, strict=True) if status != 0]
    with node_process(tmp_path / "log", *options) as node:
        if lost:  # a sender without an answer sends again
            assert set(send_all(node.port, lost)) == {0}
        wait_for(lambda: not list((tmp_path / "state" / "spool").iterdir()), "all is done")
        assert node.end(signal.SIGTERM) == 0
    of_uid: dict[str, set[bytes]] = {}
    for report, data in zip(receiver.objects, receiver.files, strict=True):
        of_uid.setdefault(report.SOPInstanceUID, set()).add(data)
    assert len(of_uid) == STUDIES  # one per study
    assert all(len(contents) == 1 for contents in of_uid.values())  # reports sent twice are identical
    stopped = node.lines[-1]
    assert (stopped["message"], stopped["waiting"], stopped["dead_letters"]) == ("stopped", 0, 0)
    assert {report.StudyInstanceUID for report in receiver.objects} == _studies()


def _studies() -> set[str]:
    return {f"{PLANTED[2]}.{study}" for study in range(1, STUDIES + 1)}
