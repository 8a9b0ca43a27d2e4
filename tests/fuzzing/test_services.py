"""Broken files sent to the HTTP service and the node: each is answered, both stay up, memory stays flat."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

pytest.importorskip("imagecodecs")  # encodes some of the files
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pynetdicom = pytest.importorskip("pynetdicom")

from broken_files import broken_data_sets, broken_files  # noqa: E402
from cbmir.runtime import Finder  # noqa: E402
from cbmir.runtime.hot_reload import ReloadableFinder  # noqa: E402
from cbmir.runtime.pacs.intake import Intake  # noqa: E402
from cbmir.runtime.pacs.jobs import DEAD_LETTERS, ResultObject  # noqa: E402
from cbmir.runtime.pacs.queue import DurableQueue  # noqa: E402
from cbmir.runtime.pacs.storage_scp import StorageScp  # noqa: E402
from cbmir.runtime.pacs.worker import Workers  # noqa: E402
from dicom_files import make_dicom  # noqa: E402
from http_service import Service  # noqa: E402
from pacs_rig import CR, make_radiograph, send_all, store, wait_for  # noqa: E402
from process_memory import resident  # noqa: E402

pytestmark = pytest.mark.slow

WARM, COUNT = 60, 200
#: MiB by which caches and the allocator may grow after the first files.
GROWTH = 64


@pytest.fixture(scope="module")
def live(tiny_model: Path, tiny_gallery: Path) -> Iterator[ReloadableFinder]:
    with ReloadableFinder(lambda: Finder.open(tiny_model, tiny_gallery, threads=1)) as opened:
        yield opened


def test_the_http_service(tiny_model: Path, tiny_gallery: Path) -> None:
    """It runs as in production: in its own process, with a socket."""
    statuses: Counter[int] = Counter()
    given = ("--model", str(tiny_model), "--gallery", str(tiny_gallery))
    with (
        Service.running(*given) as service,
        httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client,
    ):
        for number, (name, data) in enumerate(broken_files(COUNT, seed=1)):
            if number == WARM:
                before = resident(service.process.pid)
            answer = client.post("/v1/analyze", content=data, headers={"content-type": "application/octet-stream"})
            statuses[answer.status_code] += 1
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (name, answer.text)
            assert "SECRET" not in answer.text, name
            kind = "application/json" if answer.status_code == 200 else "application/problem+json"
            assert answer.headers["content-type"] == kind, name
        assert resident(service.process.pid) - before < GROWTH
        assert client.get("/health").status_code == 200
        assert client.post("/v1/analyze", content=make_dicom()).status_code == 200
    assert sum(statuses.values()) == COUNT
    assert statuses[200] > 3
    assert statuses[422] > 20


class Archive:
    """A destination that collects results."""

    def __init__(self) -> None:
        self.sent: list[ResultObject] = []

    def send(self, results: Sequence[ResultObject]) -> None:
        self.sent += results


def test_the_node(
    live: ReloadableFinder, tmp_path: Path, make_xray: Callable[..., NDArray[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Every C-STORE gets a status, every job ends, and good files afterwards get reports."""
    archive, statuses = Archive(), Counter[int]()
    with DurableQueue(tmp_path / "queue", quiet=0, attempts=1, first_delay=0) as queue:
        workers = Workers(queue, live, archive, count=1)
        node = StorageScp(Intake(queue, live), port=0)
        workers.start()
        node.start()
        try:
            broken = list(broken_data_sets(COUNT, seed=2))
            ae = pynetdicom.AE(ae_title="SENDER")
            for syntax in sorted({syntax for _, syntax, _ in broken}):
                ae.add_requested_context(CR, syntax)
            association = ae.associate("127.0.0.1", node.port, ae_title="CBMIR")
            assert association.is_established
            assert len(association.accepted_contexts) == len(ae.requested_contexts)
            for number, (_, syntax, data) in enumerate(broken):
                if number == WARM:
                    wait_for(lambda: len(queue) == 0, "the first files")
                    before = resident(os.getpid())
                statuses[store(association, data, syntax)] += 1
            wait_for(lambda: len(queue) == 0, "the queue's end")
            assert resident(os.getpid()) - before < GROWTH
            association.release()
            good = make_radiograph(make_xray(500))
            reports = sum(made.kind == "sr" for made in archive.sent)
            assert send_all(node.port, [good]) == [0]
            wait_for(lambda: sum(made.kind == "sr" for made in archive.sent) == reports + 1, "the good file's report")
        finally:
            node.stop()
            workers.stop()
        reasons = [json.loads(path.read_text())["reason"] for path in (queue.folder / DEAD_LETTERS).glob("*.json")]
        assert not any("unexpected" in reason for reason in reasons)  # only refused or damaged
    assert sum(statuses.values()) == COUNT
    assert set(statuses) <= {0x0000, 0x0122, 0xA900, 0xC000}
    assert statuses[0x0000] > 20
    assert statuses[0xC000] + statuses[0xA900] > 20
    assert "SECRET" not in caplog.text
