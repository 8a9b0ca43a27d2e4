"""Attacks on `cbmir pacs node`, which runs in its own process and sends reports to an archive in this one."""

from __future__ import annotations

import math
import random
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from itertools import count as numbers
from pathlib import Path

from conftest import tiny_xray
from hostile import dicom_scan_bomb
from lab import Lab, attack, unless
from pydicom import dcmread
from pynetdicom import AE, _config
from service import ended

from broken_files import broken_data_sets
from pacs_rig import CR, NodeProcess, Receiver, make_radiograph, node_process, receiving, send_all, store, wait_for
from process_memory import resident_tree

_config.LOG_HANDLER_LEVEL = "none"
PLACES = 4  # for senders, in the nodes of these tests
_STUDY = numbers(1)
STATUSES = {0x0000, 0x0122, 0xA700, 0xA900, 0xC000}


@contextmanager
def running(lab: Lab, archive: Receiver, state: Path, *options: str) -> Iterator[NodeProcess]:
    words = ["pacs", "node", "--port", "0", "--model", str(lab.model), "--settle", "0", "--attempts", "2"]
    words += ["--state", str(state), "--store-to", f"ARCHIVE@127.0.0.1:{archive.port}", *options]
    with node_process(state.with_name("log"), *words) as node:
        yield node


def radiographs(count: int) -> list[bytes]:
    """One radiograph for each of `count` new studies."""
    return [make_radiograph(tiny_xray(number), study=number) for number, _ in zip(_STUDY, range(count), strict=False)]


def sent(node: NodeProcess, files: list[bytes]) -> list[int]:
    """Send files, and return their statuses; -1 for all if there is no association or it breaks."""
    try:
        return send_all(node.port, files, patience=30)
    except (AssertionError, OSError):
        return [-1] * len(files)


def settled(state: Path, seconds: float = 120) -> str:
    """Wait until the queue is empty. Returns "", or the reason why it is not."""
    try:
        wait_for(lambda: not any((state / "spool").iterdir()), "the queue is empty", seconds)
    except AssertionError as error:
        return str(error)
    return ""


def study_of(data: bytes) -> str:
    return str(dcmread(BytesIO(data), stop_before_pixels=True).StudyInstanceUID)


@attack(8, whole=True)
def kills_of_the_node(lab: Lab, count: int) -> Iterator[str]:
    """SIGKILL while studies arrive, twelve for each kill: every acknowledged study is answered, always under one
    UID."""
    rng, state = random.Random(5), lab.new() / "state"
    acknowledged: set[str] = set()
    with receiving() as archive:
        for number in range(count + 1):
            with running(lab, archive, state, "--attempts", "12") as node:  # a kill counts as an attempt of a job
                timer = threading.Timer(rng.uniform(0.05, 1.5), node.process.kill)
                if number < count:
                    timer.start()
                files = radiographs(12 if number < count else 1)
                for data, status in zip(files, sent(node, files), strict=True):
                    if status == 0:
                        acknowledged.add(study_of(data))
                if number < count:
                    node.process.wait(60)
                else:
                    yield settled(state)
                    yield ended(node.process)
        reports = defaultdict(set)
        for report in archive.objects:
            reports[str(report.StudyInstanceUID)].add(str(report.SOPInstanceUID))
    for study in acknowledged:
        yield unless(len(reports[study]) == 1, f"{len(reports[study])} reports on a study that was acknowledged")


@attack(200)
def broken_data_sets_to_the_node(lab: Lab, count: int) -> Iterator[str]:
    """Data sets that were cut, flipped or spliced: each gets a status, each job ends, and a good study is answered
    afterwards. Memory stays flat."""
    state = lab.new() / "state"
    with receiving() as archive, running(lab, archive, state) as node:
        broken = list(broken_data_sets(count, seed=12))
        ae = AE(ae_title="SENDER")
        for syntax in sorted({syntax for _, syntax, _ in broken}):
            ae.add_requested_context(CR, syntax)
        association = ae.associate("127.0.0.1", node.port, ae_title="CBMIR")
        assert association.is_established
        warm = 0.0
        for number, (name, syntax, data) in enumerate(broken):
            if number == count // 3:
                warm = resident_tree(node.process.pid)
            status = store(association, data, syntax)
            yield unless(status in STATUSES, f"{name}: {status:#06x}")
        association.release()
        yield settled(state)
        yield unless((grown := resident_tree(node.process.pid) - warm) < 300, f"memory grew by {grown:.0f} MiB")
        yield from good_study(node, archive)


def good_study(node: NodeProcess, archive: Receiver, seconds: float = 60) -> Iterator[str]:
    """Check that a good study is acknowledged and answered."""
    (data,) = radiographs(1)
    start, study = time.monotonic(), study_of(data)
    yield unless(sent(node, [data]) == [0], "a good study was not taken")
    try:
        wait_for(lambda: study in {str(one.StudyInstanceUID) for one in archive.objects}, "its report", seconds)
    except AssertionError as error:
        yield str(error)
    else:
        yield unless(time.monotonic() - start < seconds, "its report was late")


@attack(4)
def bombs_at_the_node(lab: Lab, count: int) -> Iterator[str]:
    """DICOM files of 3,000 scans are refused or become dead letters. A good study is still answered within a minute,
    memory stays under 3 GiB, and SIGTERM ends the node."""
    state = lab.new() / "state"
    with receiving() as archive, running(lab, archive, state) as node:
        for number in range(max(count // 2, 1)):
            uid = f"1.2.826.0.1.3680043.10.3.{number}"
            (status,) = sent(node, [dicom_scan_bomb(SOPInstanceUID=uid, StudyInstanceUID=uid)])
            yield unless(status in STATUSES, f"{status:#06x}")
        yield from good_study(node, archive)
        yield unless((used := resident_tree(node.process.pid)) < 3072, f"{used:.0f} MiB")
        yield ended(node.process)


@attack(6)
def idle_connections(lab: Lab, count: int) -> Iterator[str]:
    """A hundred silent connections to a node with four places, again and again: a sender still gets in, within five
    seconds more than without them."""

    def seconds() -> float:
        start = time.monotonic()
        (status,) = sent(node, radiographs(1))
        return time.monotonic() - start if status == 0 else math.inf

    with receiving() as archive, running(lab, archive, lab.new() / "state", "--max-associations", str(PLACES)) as node:
        for _ in range(count):
            before = seconds()
            idle = [socket.create_connection(("127.0.0.1", node.port), timeout=30) for _ in range(100)]
            beside = seconds()
            for one in idle:
                one.close()
            yield unless(beside < before + 5, f"{beside:.0f} s, without them {before:.0f} s")


@attack(200, whole=True)
def flood_of_associations(lab: Lab, count: int) -> Iterator[str]:
    """Fifty senders at once, more than there are places: every study that was acknowledged is answered, and a good
    study afterwards."""
    state = lab.new() / "state"
    with receiving() as archive, running(lab, archive, state, "--max-associations", str(PLACES)) as node:
        files = radiographs(count)
        with ThreadPoolExecutor(50) as pool:
            statuses = [one for (one,) in pool.map(lambda data: sent(node, [data]), files)]
        yield settled(state)
        answered = {str(report.StudyInstanceUID) for report in archive.objects}
        for data, status in zip(files, statuses, strict=True):
            yield unless(status != 0 or study_of(data) in answered, "a study was acknowledged and not answered")
        yield unless(statuses.count(0) > 0, "none was let in")
        yield from good_study(node, archive)


@attack(3)
def other_content_under_one_uid(lab: Lab, count: int) -> Iterator[str]:
    """A second object with the same SOP Instance UID and other content: the log has a warning, and no report replaces
    the first one."""
    state = lab.new() / "state"
    with receiving() as archive, running(lab, archive, state) as node:
        for _ in range(count):
            study, before = next(_STUDY), len(archive.objects)
            for seed in (1, 2):
                sent(node, [make_radiograph(tiny_xray(seed), study=study)])
                settled(state)
            reports = archive.objects[before:]
            uids = [str(report.SOPInstanceUID) for report in reports]
            warned = any("was received again with other content" in line.get("message", "") for line in node.lines)
            yield unless(
                warned and len(set(uids)) == len(uids) == 2,
                f"{len(uids)} reports, {len(set(uids))} UIDs, warned: {warned}",
            )
        node.end(signal.SIGTERM)
