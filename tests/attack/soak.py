"""Run `cbmir serve` and `cbmir pacs node` for an hour under normal and hostile load: `make soak`, by hand.

    python tests/attack/soak.py MODEL GALLERY IMAGES [--seconds 3600] [-o soak/soak.json]

Normal load: two HTTP clients, together one analysis per second, and a sender with a study every three seconds.
Hostile load, a fifth of all requests: bombs, broken files, malformed requests, idle and aborted connections.
It fails if a promise is not kept:

- every study that the node acknowledged is answered, with a single UID;
- at the end, the memory of both, with their workers, is within 10% of that after ten minutes (a sixth of the time);
- no HTTP answer takes longer than twice the deadline, and all answers to normal requests are right.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from pynetdicom import AE, AllStoragePresentationContexts, evt

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(place) for place in (HERE, HERE.parent / "helpers", HERE.parent)]

from hostile import BOMBS, dicom_scan_bomb  # noqa: E402
from node import sent, study_of  # noqa: E402
from service import REQUESTS, said  # noqa: E402

from broken_files import broken_data_sets, broken_files  # noqa: E402
from cbmir.files import write_json  # noqa: E402
from cbmir.machine import describe_machine  # noqa: E402
from http_service import Service  # noqa: E402
from pacs_rig import CR, NodeProcess, make_radiograph, node_process, store, wait_for  # noqa: E402
from process_memory import resident_tree  # noqa: E402

DEADLINE = 30.0  # seconds: the default of `cbmir serve --timeout`
MOST_GROWTH = 1.10
SAMPLE = 10.0  # seconds between two memory measurements
HTTP_EVERY, NODE_EVERY, HOSTILE_EVERY = 1.0, 3.0, 3.0


@dataclass
class Log:
    """A record of requests and answers."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)  # seconds by kind of request
    wrong: list[str] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)  # good studies -> time
    reports: dict[str, set[str]] = field(default_factory=dict)  # study -> UIDs of its reports
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # seconds, MiB of serve, MiB of the node
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, outcome: str, seconds: float) -> None:
        with self.lock:
            self.counts[f"{what}: {outcome}"] += 1
            self.slowest[what] = max(self.slowest.get(what, 0.0), seconds)

    def take_report(self, event: Any) -> int:
        """As the archive, record which study has a report, and when."""
        study, uid = str(event.dataset.StudyInstanceUID), str(event.dataset.SOPInstanceUID)
        if study in self.acknowledged and study not in self.reports:
            self.note("report", "sent", time.monotonic() - self.acknowledged[study])
        with self.lock:
            self.reports.setdefault(study, set()).add(uid)
        return 0x0000


@dataclass
class Load:
    """The requests of all kinds, and their targets."""

    service: Service
    node: NodeProcess
    pictures: list[Any]
    log: Log
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._bombs = cycle([(name, make()) for name, make in BOMBS.items()])
        self._files = cycle(list(broken_files(200, seed=5)))
        self._data_sets = cycle(list(broken_data_sets(200, seed=6)))
        self._requests = cycle([*REQUESTS.items()])
        self._idle: list[socket.socket] = []

    def every(self, seconds: float, *acts: Callable[[int], str]) -> threading.Thread:
        """Repeat the acts until the end, `seconds` apart, and record the outcome of each."""

        def run() -> None:
            due = time.monotonic()
            for number, act in enumerate(cycle(acts), 1):
                if self.over.wait(max(0.0, due - time.monotonic())):
                    return
                start = time.monotonic()
                due = max(due + seconds, start - seconds)
                what = act.__name__.replace("_", " ")
                try:
                    self.log.note(what, act(number), time.monotonic() - start)
                except Exception as error:  # noqa: BLE001 - reported at the end
                    self.log.wrong.append(f"{what} {number}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def post(self, data: bytes) -> httpx.Response:
        url = f"{self.service.url}/v1/analyze"
        start = time.monotonic()
        answer = httpx.post(url, content=data, timeout=4 * DEADLINE, trust_env=False)
        self.log.slowest["HTTP"] = max(self.log.slowest.get("HTTP", 0.0), time.monotonic() - start)
        if answer.status_code >= 500 and answer.status_code != 503:
            self.log.wrong.append(f"an answer of {answer.status_code}")
        return answer

    def good_request(self, number: int) -> str:
        stream = io.BytesIO()
        Image.fromarray(self.pictures[number % len(self.pictures)]).save(stream, "PNG", compress_level=1)
        answer = self.post(stream.getvalue())
        if answer.status_code == 200 and not answer.json()["findings"]:
            self.log.wrong.append("an answer without findings")
        return str(answer.status_code)

    def good_study(self, number: int) -> str:
        data = make_radiograph(self.pictures[number % len(self.pictures)], study=number)
        (status,) = sent(self.node, [data])
        if status == 0x0000:
            self.log.acknowledged[study_of(data)] = time.monotonic()
        return f"{status:#06x}"

    def bomb(self, _: int) -> str:
        name, data = next(self._bombs)
        return f"{name}: {self.post(data).status_code}"

    def broken_file(self, _: int) -> str:
        return str(self.post(next(self._files)[1]).status_code)

    def malformed_request(self, _: int) -> str:
        name, (data, _) = next(self._requests)
        return f"{name}: {said(self.service, data).decode() or 'cut'}"

    def broken_data_set(self, _: int) -> str:
        _, syntax, data = next(self._data_sets)
        ae = AE(ae_title="SENDER")
        ae.add_requested_context(CR, syntax)
        association = ae.associate("127.0.0.1", self.node.port, ae_title="CBMIR")
        if not association.is_established:
            return "no association"
        try:
            return f"{store(association, data, syntax):#06x}"
        finally:
            association.abort()

    def bomb_as_a_study(self, number: int) -> str:
        uid = f"1.2.826.0.1.3680043.10.2.{number}"
        (status,) = sent(self.node, [dicom_scan_bomb(SOPInstanceUID=uid, StudyInstanceUID=uid)])
        return f"{status:#06x}"

    def garbage(self, number: int) -> str:
        with socket.create_connection(("127.0.0.1", self.node.port), timeout=30) as one:
            one.sendall(random.Random(number).randbytes(5000))
        return "sent"

    def idle_connections(self, _: int) -> str:
        """Open 32 connections, which stay until the next 32 are opened."""
        for one in self._idle:
            one.close()
        self._idle = [socket.create_connection(("127.0.0.1", self.node.port), timeout=30) for _ in range(32)]
        return "opened"


def soak(model: str, gallery: str, images: list[Path], seconds: float) -> dict[str, Any]:
    """Run the load, and return the figures as JSON types."""
    log = Log()
    archive = AE(ae_title="ARCHIVE")
    archive.supported_contexts = AllStoragePresentationContexts
    given = ["--model", model, "--gallery", gallery]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        server = archive.start_server(("127.0.0.1", 0), block=False, evt_handlers=[(evt.EVT_C_STORE, log.take_report)])
        stack.callback(server.shutdown)
        words = [*given, "--port", "0", "--settle", "1", "--attempts", "2", "--state", str(folder / "state")]
        words += ["--store-to", f"ARCHIVE@127.0.0.1:{server.server_address[1]}"]
        service = stack.enter_context(Service.running(*given, "--timeout", f"{DEADLINE:g}"))
        node = stack.enter_context(node_process(folder / "node.log", "pacs", "node", *words))
        pictures = [np.asarray(Image.open(path).convert("L")) for path in images]
        load, start = Load(service, node, pictures, log), time.monotonic()
        stack.callback(load.over.set)
        senders = (
            load.broken_data_set,
            load.garbage,
            load.broken_data_set,
            load.bomb_as_a_study,
            load.idle_connections,
        )
        threads = [
            load.every(2 * HTTP_EVERY, load.good_request),
            load.every(2 * HTTP_EVERY, load.good_request),
            load.every(NODE_EVERY, load.good_study),
            load.every(2 * HOSTILE_EVERY, load.bomb, load.broken_file, load.malformed_request),
            load.every(2 * HOSTILE_EVERY, *senders),
        ]
        while (passed := time.monotonic() - start) < seconds:
            log.memory.append((round(passed, 1), resident_tree(service.process.pid), resident_tree(node.process.pid)))
            say(log, passed)
            for name, process in (("serve", service.process), ("the node", node.process)):
                if process.poll() is not None:
                    log.wrong.append(f"{name} ended: {process.returncode}")
                    seconds = 0
            load.over.wait(SAMPLE)
        load.over.set()
        for thread in threads:
            thread.join()
        spool = folder / "state" / "spool"
        wait_for(lambda: not any(spool.iterdir()), "the node's queue is empty", 900)
        letters = [json.loads(path.read_text())["reason"] for path in (folder / "state/dead-letters").glob("*.json")]
        log.counts["dead letters"] = len(letters)
        log.wrong += [reason for reason in letters if "unexpected" in reason]
        for name, process in (("serve", service.process), ("the node", node.process)):
            process.send_signal(signal.SIGTERM)
            code = process.wait(2 * DEADLINE)
            if code not in (0, -signal.SIGTERM):  # uvicorn raises the signal again when it ends
                log.wrong.append(f"{name} ended with {code} after SIGTERM")
    return judged(log)


def judged(log: Log) -> dict[str, Any]:
    """The figures, and whether each promise was kept."""
    seconds = log.memory[-1][0]
    unanswered = sorted(set(log.acknowledged) - set(log.reports))
    doubled = sorted(study for study in log.acknowledged if len(log.reports.get(study, ())) > 1)
    early, late = ([m for m in log.memory if at <= m[0] < at + 90] for at in (min(600, seconds / 6), seconds - 90))
    growth = {
        name: (statistics.median(m[which] for m in early), statistics.median(m[which] for m in late))
        for which, name in ((1, "serve"), (2, "node"))
    }
    kept = {
        "every acknowledged study answered": not unanswered and not doubled,
        "memory within 10%": all(after <= MOST_GROWTH * before for before, after in growth.values()),
        "no answer later than twice the deadline": log.slowest["HTTP"] <= 2 * DEADLINE,
        "nothing else wrong": not log.wrong,
    }
    return {
        "seconds": seconds, "kept": kept, "acknowledged": len(log.acknowledged), "unanswered": len(unanswered),
        "with two reports": len(doubled), "memory_mib": growth, "slowest_s": log.slowest, "deadline_s": DEADLINE,
        "counts": dict(sorted(log.counts.items())), "wrong": log.wrong[:20], "memory": log.memory,
    }  # fmt: skip


def say(log: Log, passed: float) -> None:
    """Print a line of progress."""
    _, serve, node = log.memory[-1]
    sys.stderr.write(
        f"{passed:5.0f} s  serve {serve:.0f} MiB  node {node:.0f} MiB  {log.counts.total()} sent, "
        f"{len(log.acknowledged)} studies acknowledged, {len(log.reports)} answered, {len(log.wrong)} wrong\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("gallery")
    parser.add_argument("images", type=Path, help="a folder of PNG files")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("-o", "--output", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended
    figures = soak(given.model, given.gallery, sorted(given.images.rglob("*.png"))[:40], given.seconds)
    if given.output:
        write_json(given.output, figures | {"machine": describe_machine()})
    sys.stdout.write(json.dumps({name: value for name, value in figures.items() if name != "memory"}, indent=1) + "\n")
    return int(not all(figures["kept"].values()))


if __name__ == "__main__":
    sys.exit(main())
