"""Shared by the tests of the node: an open model, a receiver, and Orthanc in its own network namespace."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import logging
import os
import socket
import struct
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from archive_in_memory import Archive
from cbmir.runtime.finder import Finder
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.logs import JsonFormatter
from cbmir.runtime.pacs import polling
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.queue import DurableQueue
from pacs_rig import PLANTED, Orthanc, Receiver, answers, make_radiograph, orthanc_plugin, receiving, wait_for
from queue_rig import Clock, timed_queue


@pytest.fixture(scope="session")
def radiograph(make_xray: Callable[..., NDArray[Any]]) -> Callable[..., bytes]:
    """Make a CR file, with different content for each study and image."""
    return lambda study=1, image=1, **tags: make_radiograph(make_xray(1000 * study + image), study, image, **tags)


@pytest.fixture(scope="session")
def live(tiny_model: Path, tiny_gallery: Path) -> Iterator[ReloadableFinder]:
    """An open finder with the tiny model and gallery."""
    with ReloadableFinder(lambda: Finder.open(tiny_model, tiny_gallery, threads=1)) as opened:
        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(tmp_path: Path, clock: Clock) -> Iterator[DurableQueue]:
    with timed_queue(tmp_path / "queue", clock) as opened:
        yield opened


@pytest.fixture
def intake(queue: DurableQueue, live: ReloadableFinder) -> Intake:
    return Intake(queue, live)


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Archive:
    """A PACS in memory. The follower's clock advances an hour per reading, so unreadable images are always retried."""
    monkeypatch.setattr(polling, "monotonic", partial(next, count(0, 3600)))
    return Archive()


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """The log as the node formats it. Patient data in it fails the test."""
    formatters = [(handler, handler.formatter) for handler in logging.getLogger().handlers]
    caplog.set_level(logging.DEBUG, "cbmir")
    caplog.handler.setFormatter(JsonFormatter())
    yield lambda: caplog.text
    assert not any(text in caplog.text for text in PLANTED)
    logging.captureWarnings(False)
    for handler, formatter in formatters:
        handler.setFormatter(formatter)


@pytest.fixture(autouse=True)
def _close_sockets() -> Iterator[None]:
    """Collect the sockets that pynetdicom, as an SCU, does not close after the peer has closed them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An archive `ARCHIVE` that accepts everything by C-STORE."""
    with receiving() as opened:
        yield opened


# -- Orthanc in its own network namespace

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


@pytest.fixture(scope="module")
def network_namespace() -> Iterator[None]:
    """A network namespace for this thread and the processes it starts, since Orthanc listens on all addresses."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            why = f"no network namespace can be made here ({os.strerror(ctypes.get_errno())})"
            if os.environ.get("CBMIR_REQUIRE_PACS") == "1":
                pytest.fail(f"{why}; required with CBMIR_REQUIRE_PACS=1")
            pytest.skip(why)
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)


@pytest.fixture
def orthanc(network_namespace: None, require_pacs: Callable[..., None], tmp_path: Path) -> Iterator[Orthanc]:
    """Debian's Orthanc with its DICOMweb plugin and an empty database, in a network namespace."""
    plugin = orthanc_plugin()
    require_pacs("Orthanc", "storescu", "dcmsend", "echoscu", str(plugin))
    http, dicom, node = 8042, 4242, 11112
    settings = {
        "Name": "tests", "StorageDirectory": str(tmp_path / "storage"), "IndexDirectory": str(tmp_path / "storage"),
        "HttpPort": http, "DicomPort": dicom, "DicomAet": "ORTHANC", "RemoteAccessAllowed": False,
        "Plugins": [str(plugin)], "DicomWeb": {"Enable": True, "Root": "/dicom-web/"}, "StableAge": 1,
        "DicomModalities": {"cbmir": ["CBMIR", "127.0.0.1", node]}, "DicomAlwaysAllowStore": True,
    }  # fmt: skip
    (tmp_path / "orthanc.json").write_text(json.dumps(settings))
    log = tmp_path / "orthanc.log"
    running = Orthanc(f"http://127.0.0.1:{http}", dicom, node, log)
    with (
        log.open("w") as out,
        subprocess.Popen(["Orthanc", str(tmp_path / "orthanc.json")], stdout=out, stderr=out) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or answers(running), "Orthanc starts")
            assert process.poll() is None, log.read_text()
            yield running
        finally:
            process.terminate()
            process.wait(30)
