"""A real Orthanc in a network namespace: images are sent by storescu and dcmsend, reports are found by QIDO-RS.

In the end each study of a chest has one SR, and that of the hip has no SR: by C-STORE, by the change feed, by QIDO
polling, and with a node that is killed in between.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydicom import dcmread

from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.runtime import build_gallery, open_engine
from pacs_rig import PLANTED, NodeProcess, Orthanc, node_process, wait_for

#: Files of ../shared/dicom in different transfer syntaxes. Only the hip gets no report.
PLAIN = ("chest_mono1_10bit_explicit.dcm", "dx_thorax_mono1_8bit_small.dcm")
COMPRESSED = (
    "derived_chest_mono1_10bit_rle.dcm", "derived_chest_mono1_10bit_j2k_lossless.dcm",
    "derived_chest_mono1_10bit_jpegls_lossless.dcm", "rsna_nih_jpegbaseline_mono2.dcm",
)  # fmt: skip
HIP = "nonchest_hip_rg2_jpegls_lossless_10bit.dcm"


@dataclass(frozen=True)
class Studies:
    """Files that are one study each; file name -> Study Instance UID."""

    plain: list[Path]
    compressed: list[Path]
    chests: dict[str, str]
    hip: str

    @property
    def all(self) -> list[str]:
        return [*self.chests.values(), self.hip]


def copied(shared: Path, folder: Path, names: Sequence[str]) -> Studies:
    """Copy real images, each with a new study and a planted patient, since several have the same UIDs."""
    folder.mkdir()
    uids = {}
    for name in names:
        dataset = dcmread(shared / "dicom" / name)
        root = f"{PLANTED[2]}.9.{len(uids)}"
        dataset.PatientName, dataset.PatientID, dataset.StudyDate = PLANTED[0], PLANTED[1], "20200102"
        dataset.StudyInstanceUID = uids[name] = root
        dataset.SeriesInstanceUID, dataset.SOPInstanceUID = f"{root}.1", f"{root}.2"
        dataset.file_meta.MediaStorageSOPInstanceUID = f"{root}.2"
        dataset.save_as(folder / name)
    hip = uids.pop(HIP)
    plain = [folder / name for name in names if name in PLAIN]
    return Studies(plain, [folder / name for name in names if name not in PLAIN], uids, hip)


@pytest.fixture
def studies(shared: Path, tmp_path: Path) -> Studies:
    """An uncompressed study, a compressed one, and the hip."""
    return copied(shared, tmp_path / "images", [PLAIN[1], COMPRESSED[0], HIP])


@pytest.fixture
def all_studies(shared: Path, tmp_path: Path) -> Studies:
    return copied(shared, tmp_path / "images", [*PLAIN, *COMPRESSED, HIP])


def send_with_dcmtk(studies: Studies, title: str, port: int) -> None:
    """Send uncompressed files with storescu, and compressed ones unchanged with dcmsend."""
    run("storescu", "-aec", title, "127.0.0.1", str(port), *map(str, studies.plain))
    run("dcmsend", "-aec", title, "--decompress-never", "127.0.0.1", str(port), *map(str, studies.compressed))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"


def reports(orthanc: Orthanc, studies: Studies) -> dict[str, list[str]]:
    """Study -> the SOP Instance UIDs of its SRs."""
    return {uid: orthanc.instances(uid, "SR") for uid in studies.all}


def check_reports(orthanc: Orthanc, studies: Studies, node: NodeProcess) -> None:
    """Wait until each chest has a report and the hip was refused, then check that there is exactly one per chest."""
    wait_for(lambda: all(orthanc.instances(uid, "SR") for uid in studies.chests.values()), "a report for each chest")
    wait_for(lambda: any(line["message"] == "refused" for line in node.lines), "the hip is refused")
    found = reports(orthanc, studies)
    assert {uid: len(uids) for uid, uids in found.items()} == {uid: int(uid != studies.hip) for uid in studies.all}
    check_log(node)


def check_log(node: NodeProcess) -> None:
    text = node.log.read_text()
    assert not any(secret in text for secret in PLANTED)
    assert "Traceback" not in text


@pytest.fixture
def options(tiny_model: Path, tiny_gallery: Path, tmp_path: Path) -> list[str]:
    return [
        "--model", str(tiny_model), "--gallery", str(tiny_gallery), "--state", str(tmp_path / "state"),
        "--settle", "0.2",
    ]  # fmt: skip


@pytest.fixture
def node_options(options: list[str], orthanc: Orthanc) -> list[str]:
    return [
        "pacs", "node", "--port", str(orthanc.node_port), "--allow-calling", "STORESCU", "--allow-calling", "DCMSEND",
        "--allow-calling", "ECHOSCU", "--allow-calling", "ORTHANC",
        "--store-to", f"ORTHANC@127.0.0.1:{orthanc.dicom_port}", *options,
    ]  # fmt: skip


@pytest.mark.slow
def test_by_c_store(orthanc: Orthanc, all_studies: Studies, node_options: list[str], tmp_path: Path) -> None:
    studies = all_studies
    send_with_dcmtk(studies, "ORTHANC", orthanc.dicom_port)
    with node_process(tmp_path / "node.log", *node_options) as node:
        run("echoscu", "-aec", "CBMIR", "127.0.0.1", str(orthanc.node_port))
        send_with_dcmtk(studies, "CBMIR", orthanc.node_port)
        check_reports(orthanc, studies, node)
        before = reports(orthanc, studies)
        send_with_dcmtk(studies, "CBMIR", orthanc.node_port)  # again: all of them are known
        # Orthanc sends the whole study back, including reports: no loop.
        (study,) = [s for s in orthanc.get("/studies?expand") if s["MainDicomTags"]["StudyInstanceUID"] in before][:1]
        orthanc.post("/modalities/cbmir/store", study["ID"])
        known = [line for line in node.lines if line["message"] in ("known", "own result")]
        assert len(known) == 7 + 2
        assert node.end(signal.SIGTERM) == 0
        assert reports(orthanc, studies) == before
        check_log(node)


@pytest.fixture
def gallery_of_priors(tiny_model: Path, studies: Studies, tmp_path: Path) -> Path:
    """A gallery with the patient's first image."""
    rows = (Row(studies.plain[0], PLANTED[1], (1, 0, None), split="train"),)
    with open_engine(tiny_model, threads=1) as engine:
        write_manifest(Manifest(engine.card.labels, rows), tmp_path / "priors.csv")
        build_gallery(engine, read_manifest(tmp_path / "priors.csv"), tmp_path / "priors")
    return tmp_path / "priors"


@pytest.mark.slow
def test_by_the_change_feed(
    orthanc: Orthanc, studies: Studies, options: list[str], gallery_of_priors: Path, tmp_path: Path
) -> None:
    send_with_dcmtk(studies, "ORTHANC", orthanc.dicom_port)
    follow = ["pacs", "follow", "--orthanc", orthanc.url, "--since", "0", "--interval", "0.2", *options]
    with node_process(tmp_path / "follow.log", *follow) as node:
        check_reports(orthanc, studies, node)
        # Its reports changed the studies: checking these again finds nothing new.
        newest = orthanc.get("/changes?last")["Last"]
        wait_for(lambda: _is_quiet_since(orthanc, newest), "the studies are stable again")
        assert node.end(signal.SIGTERM) == 0
    options[options.index("--gallery") + 1] = str(gallery_of_priors)
    more = ("--interval", "0.2", "--sr", "--sc", "--kos")
    with node_process(tmp_path / "follow.log", *follow[:4], *more, *options) as node:
        extra = studies.plain[0].with_name("late.dcm")
        late = dcmread(studies.plain[0])
        late.StudyInstanceUID, late.SOPInstanceUID = f"{PLANTED[2]}.10", f"{PLANTED[2]}.10.1"
        late.file_meta.MediaStorageSOPInstanceUID = late.SOPInstanceUID
        late.save_as(extra)
        run("storescu", "-aec", "ORTHANC", "127.0.0.1", str(orthanc.dicom_port), str(extra))
        wait_for(lambda: orthanc.instances(late.StudyInstanceUID, "KO"), "a selection of priors for the late one")
        assert [len(orthanc.instances(late.StudyInstanceUID, kind)) for kind in ("SR", "OT")] == [1, 1]
        (prior,) = (studies.chests[path.name] for path in studies.plain)
        assert orthanc.instances(prior, "KO") == []  # its study stays unchanged
        assert node.end(signal.SIGTERM) == 0
        assert sum(line["message"] == "done" for line in node.lines) == len(studies.chests) + 1
        check_log(node)


def _is_quiet_since(orthanc: Orthanc, number: int) -> bool:
    changes = orthanc.get(f"/changes?since={number}&limit=1000")["Changes"]
    stable = sum(change["ChangeType"] == "StableStudy" for change in changes)
    return stable > 0 or orthanc.get("/changes?last")["Last"] == number


@pytest.mark.slow
def test_by_qido(orthanc: Orthanc, studies: Studies, options: list[str], tmp_path: Path) -> None:
    send_with_dcmtk(studies, "ORTHANC", orthanc.dicom_port)
    follow = ["pacs", "follow", "--dicomweb", f"{orthanc.url}/dicom-web", "--since", "1990-01-01", "--interval", "0.2"]
    with node_process(tmp_path / "follow.log", *follow, *options) as node:
        check_reports(orthanc, studies, node)
        assert node.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_killed_in_the_middle(orthanc: Orthanc, studies: Studies, node_options: list[str], tmp_path: Path) -> None:
    send_with_dcmtk(studies, "ORTHANC", orthanc.dicom_port)
    with node_process(tmp_path / "node.log", *node_options) as node:
        send_with_dcmtk(studies, "CBMIR", orthanc.node_port)
        wait_for(lambda: any(line["message"] == "done" for line in node.lines), "it is in the middle")
        node.end(signal.SIGKILL)
    with node_process(tmp_path / "node.log", *node_options) as node:
        check_reports(orthanc, studies, node)
        assert node.end(signal.SIGTERM) == 0
