"""Load-test a DICOM node: send studies over several associations, check that none is lost, and measure speed.

    python benchmarks/pacs.py --model model.onnx                     1,000 studies of 1024x1024 from 4 associations
    python benchmarks/pacs.py --model model.onnx --gallery gallery --size 2500 -o docs/pacs/bench.json
    python benchmarks/pacs.py --model tiny.onnx --size 64            the node itself: a small model takes no time

The node is `cbmir pacs node` in its own process. This process sends the studies, and is the archive that receives the
reports. It measures two latencies, until the node acknowledges an image (which is then on disk) and until its report
arrives, and the node's CPU time per image, which does not depend on other load. It fails if an image is refused or does
not get exactly one report. Images are a lung-like gradient with noise, 12 bits, uncompressed.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import click
import numpy as np
from pydicom import Dataset, dcmread
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian
from pynetdicom import AE, AllStoragePresentationContexts, _config, evt

from cbmir.files import write_json
from cbmir.machine import describe_machine
from cbmir.training.phantom.files import write_dicom
from cbmir.training.phantom.patients import describe

_PATIENCE = 600.0  # seconds without a report until the rest counts as lost


@dataclass
class Archive:
    """A receiver of reports, with the time of each study's first one."""

    arrived: dict[str, float] = field(default_factory=dict)
    reports: Counter[str] = field(default_factory=Counter)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, event: Any) -> int:
        with self.changed:
            study = str(event.dataset.StudyInstanceUID)
            self.arrived.setdefault(study, time.monotonic())
            self.reports[study] += 1
            self.changed.notify_all()
        return 0x0000

    def wait(self, count: int) -> None:
        """Wait until `count` studies have a report, or none has arrived for `_PATIENCE` seconds."""
        with self.changed:
            while len(self.arrived) < count:
                before = len(self.arrived)
                if not self.changed.wait(_PATIENCE) and len(self.arrived) == before:
                    return


def radiograph(study: int, size: int) -> Dataset:
    """Make a CR object of `size` x `size` pixels in its own study."""
    shade = np.hypot(*np.meshgrid(*[np.linspace(-1, 1, size)] * 2)) * 0.6
    grey = np.clip(shade + 0.2 * np.random.default_rng(study).random((size, size)), 0, 1)
    file = BytesIO()
    phantom = replace(next(describe(1)), patient_id=f"phantom-{study}")
    write_dicom(file, grey, phantom, seed=study, inverted=False)  # type: ignore[arg-type]
    return dcmread(BytesIO(file.getvalue()))


def send(port: int, studies: range, size: int) -> dict[str, tuple[float, float]]:
    """Send studies over one association. Returns when each was started and acknowledged."""
    ae = AE(ae_title="BENCH")
    ae.add_requested_context(ComputedRadiographyImageStorage, ExplicitVRLittleEndian)
    association = ae.associate("127.0.0.1", port, ae_title="CBMIR")
    if not association.is_established:
        raise click.ClickException("the node did not accept the association")
    times = {}
    for study in studies:
        image = radiograph(study, size)
        began = time.monotonic()
        status = association.send_c_store(image).get("Status")
        if status != 0x0000:
            raise click.ClickException(f"the node answered an image with status {status}")
        times[str(image.StudyInstanceUID)] = (began, time.monotonic())
    association.release()
    return times


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    values = 1000 * np.array(seconds)
    names = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(values, q)), 1) for name, q in names.items()}


def bench(command: list[str], studies: int, associations: int, size: int) -> dict[str, Any]:
    """Send all studies, wait for all reports, and stop the node. Returns the figures."""
    archive = Archive()
    _config.LOG_HANDLER_LEVEL = "none"
    ae = AE(ae_title="ARCHIVE")
    ae.supported_contexts = AllStoragePresentationContexts
    ae.maximum_associations = 64
    server = ae.start_server(("127.0.0.1", 0), block=False, evt_handlers=[(evt.EVT_C_STORE, archive.take)])
    assert server is not None
    command = [*command, "--store-to", f"ARCHIVE@127.0.0.1:{server.server_address[1]}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            port = int(node.stdout.readline().split()[0].rpartition(":")[2])
            parts = [range(first, studies, associations) for first in range(associations)]
            began = time.monotonic()
            with ThreadPoolExecutor(associations) as pool:
                sent = dict(item for part in pool.map(lambda p: send(port, p, size), parts) for item in part.items())
            acknowledged = time.monotonic() - began
            archive.wait(studies)
            answered = time.monotonic() - began
            node.send_signal(signal.SIGTERM)
            code = node.wait(120)
        finally:
            node.kill()
            server.shutdown()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # including its start
    lost = studies - len(archive.arrived)
    doubled = sum(count > 1 for count in archive.reports.values())
    if lost or doubled or code:
        raise click.ClickException(f"{lost} studies without a report, {doubled} with several; the node's code: {code}")
    return {
        "studies": studies,
        "associations": associations,
        "size": size,
        "lost": lost,
        "acknowledged_per_s": round(studies / acknowledged, 1),
        "answered_per_s": round(studies / answered, 1),
        "node_cpu_ms": round(1000 * (used.ru_utime + used.ru_stime) / studies, 1),
        "acknowledge_ms": percentiles([end - start for start, end in sent.values()]),
        "answer_ms": percentiles([archive.arrived[uid] - start for uid, (start, _) in sent.items()]),
    }


@click.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path), help="A model file.")
@click.option("--gallery", type=click.Path(exists=True), help="A gallery's folder.  [default: none]")
@click.option("--studies", default=1000, show_default=True)
@click.option("--associations", default=4, show_default=True)
@click.option("--size", default=1024, show_default=True, help="Pixels per side.")
@click.option("--workers", default=2, show_default=True, help="As the node's option.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    model: Path, gallery: str | None, studies: int, associations: int, size: int, workers: int, output: Path | None
) -> None:
    """Start a node, send it studies, and check that each is answered."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "cbmir", "-q", "pacs", "node", "--port", "0", "--state", f"{folder}/state",
            "--model", str(model), "--settle", "0", "--workers", str(workers),
        ]  # fmt: skip
        command += ["--gallery", gallery] if gallery else []
        measured = bench(command, studies, associations, size)
    for name, value in measured.items():
        click.echo(f"{name:>20}  {value}")
    if output is not None:
        write_json(output, measured | {"model": model.name, "workers": workers, "machine": describe_machine()})


if __name__ == "__main__":
    main()
