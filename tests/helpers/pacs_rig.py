"""Parts of a PACS for tests: radiographs, senders, a receiver, the node as a process, and Orthanc."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmread
from pynetdicom import AE, AllStoragePresentationContexts, evt
from pynetdicom.dimse_primitives import C_STORE

from dicom_files import make_dicom

#: Patient data of every radiograph made here, which must not appear in logs or file names.
PLANTED = ("PLANTED^NAME", "PLANTED-ID", "1.2.826.0.1.3680043.10.1")
CR = "1.2.840.10008.5.1.4.1.1.1"


def make_radiograph(pixels: NDArray[np.uint8], study: int = 1, image: int = 1, **tags: Any) -> bytes:
    """A CR file of grey values uint8 [H, W]; its UIDs contain study and image."""
    name, patient, root = PLANTED
    own = {
        "SOPInstanceUID": f"{root}.{study}.{image}", "StudyInstanceUID": f"{root}.{study}",
        "SeriesInstanceUID": f"{root}.{study}.0", "PatientName": name, "PatientID": patient, "StudyDate": "20260101",
        "StudyID": str(study), "SeriesNumber": 1, "InstanceNumber": image, "WindowCenter": 128, "WindowWidth": 256,
    }  # fmt: skip
    return make_dicom(pixels, **own | tags)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait until the condition is true, and return its value. Fails the test after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < until, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


@dataclass
class Receiver:
    """A storage SCP that keeps what it receives. Its first answers are `statuses`."""

    port: int = 0
    objects: list[Dataset] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def take(self, event: Any) -> int:
        with self.arrived:
            status = self.statuses.pop(0) if self.statuses else 0x0000
            if status == 0x0000:
                self.files.append(event.encoded_dataset())
                self.objects.append(dcmread(io.BytesIO(self.files[-1])))
            self.arrived.notify_all()
        return status

    def wait(self, count: int, seconds: float = 60.0) -> list[Dataset]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.objects) >= count, seconds), (
                f"{len(self.objects)} of {count} objects came within {seconds:g} s"
            )
            return list(self.objects)


@contextmanager
def receiving(port: int = 0, tls: Any = None) -> Iterator[Receiver]:
    """An archive `ARCHIVE` that accepts everything by C-STORE."""
    receiver = Receiver()
    ae = AE(ae_title="ARCHIVE")
    ae.supported_contexts = AllStoragePresentationContexts
    ae.require_called_aet = True
    server = ae.start_server(
        ("127.0.0.1", port), block=False, evt_handlers=[(evt.EVT_C_STORE, receiver.take)], ssl_context=tls
    )
    assert server is not None
    receiver.port = server.server_address[1]
    try:
        yield receiver
    finally:
        server.shutdown()


def send_all(
    port: int,
    files: Sequence[bytes],
    *,
    calling: str = "SENDER",
    called: str = "CBMIR",
    tls: Any = None,
    patience: float = 60,
) -> list[int]:
    """C-STORE files in one association. Returns their statuses, -1 for no answer within `patience` seconds."""
    datasets = [dcmread(io.BytesIO(data)) for data in files]
    ae = AE(ae_title=calling)
    ae.dimse_timeout = patience
    for dataset in datasets:
        if not any(c.abstract_syntax == dataset.SOPClassUID for c in ae.requested_contexts):
            ae.add_requested_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
    association = ae.associate("127.0.0.1", port, ae_title=called, tls_args=tls)
    assert association.is_established
    statuses = []
    for dataset in datasets:
        try:
            statuses.append(int(association.send_c_store(dataset).get("Status", -1)))
        except (RuntimeError, ValueError):
            statuses.append(-1)
    association.release()
    return statuses


def store(association: Any, data: bytes, syntax: str, uid: str = "1.2.3") -> int:
    """C-STORE bytes that need not be a data set, and return the status. pynetdicom only sends parsed data sets."""
    (context,) = (c for c in association.accepted_contexts if c.transfer_syntax[0] == syntax)
    request = C_STORE()
    request.MessageID, request.Priority = 1, 2
    request.AffectedSOPClassUID, request.AffectedSOPInstanceUID = CR, uid
    request.DataSet = io.BytesIO(data)
    association._reactor_checkpoint.clear()
    try:
        wait_for(lambda: association._is_paused, "the association's own thread")
        association.dimse.send_msg(request, context.context_id)
        _, answer = association.dimse.get_msg(block=True)
    finally:
        association._reactor_checkpoint.set()
    assert answer is not None
    return int(answer.Status)


@dataclass
class NodeProcess:
    """`cbmir pacs node` or `follow` in its own process."""

    process: subprocess.Popen[str]
    first_line: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.first_line.split()[0].rpartition(":")[2])

    def end(self, number: int, seconds: float = 60) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def node_process(log: Path, *arguments: str, before: str = "") -> Iterator[NodeProcess]:
    """Start `cbmir ARGUMENTS` and wait until it is ready; `before` is Python code that runs first in the process."""
    code = f"{before}\nfrom cbmir.cli import main\nimport sys\nmain(sys.argv[1:])"
    with (
        log.open("a") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            yield NodeProcess(process, line, log)
        finally:
            process.kill()


@dataclass(frozen=True)
class Orthanc:
    """A running Orthanc with the AE title `ORTHANC`, which knows the node `CBMIR` on `node_port`."""

    url: str
    dicom_port: int
    node_port: int
    log: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, text: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", text.encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def series(self, study_uid: str, modality: str) -> list[dict[str, Any]]:
        """The series of a modality in a study, by QIDO-RS."""
        found: list[dict[str, Any]] = self.get(f"/dicom-web/studies/{study_uid}/series?Modality={modality}")
        return found

    def instances(self, study_uid: str, modality: str) -> list[str]:
        """The SOP Instance UIDs of a modality in a study, by QIDO-RS."""
        return [
            instance["00080018"]["Value"][0]
            for series in self.series(study_uid, modality)
            for instance in self.get(
                f"/dicom-web/studies/{study_uid}/series/{series['0020000E']['Value'][0]}/instances"
            )
        ]


def orthanc_plugin() -> Path:
    """The path of the distribution's DICOMweb plugin for Orthanc; the first candidate if none exists."""
    places = [Path(folder) for folder in ("/usr/share/orthanc/plugins", "/usr/lib/orthanc/plugins")]
    found = [plugin for place in places for plugin in sorted(place.glob("libOrthancDicomWeb.so*"))]
    return found[0] if found else places[0] / "libOrthancDicomWeb.so"


def answers(orthanc: Orthanc) -> bool:
    """Whether Orthanc's REST API answers."""
    try:
        return bool(orthanc.get("/system"))
    except (urllib.error.URLError, ConnectionError):
        return False


def without(data: bytes, keyword: str) -> bytes:
    """Remove a tag from a DICOM file."""
    dataset, stream = dcmread(io.BytesIO(data)), io.BytesIO()
    del dataset[keyword]
    dataset.save_as(stream)
    return stream.getvalue()
