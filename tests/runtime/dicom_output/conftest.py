"""A small clinic whose images are in a gallery, and a checker of DICOM objects."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset

from cbmir.card import ModelCard
from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.runtime import Finder, build_gallery, open_engine
from cbmir.runtime.dicom_output import Results, make_results
from dicom_files import make_dicom

PATIENT = "CLINIC-0001"
#: Texts from other patients' data in the gallery; no result may contain them.
SECRETS = ("ROEBUCK", "OTHER-ID", "1.2.826.0.1.999", "OTHERFOLDER", "OTHERREPORT", "OTHERSTUDY")
_ROOT = "1.2.826.0.1.1"
#: dciodvfy's names for the kinds of objects, which it prints for each object.
_IODS = ("Comprehensive3DSR", "SCImage", "KeyObjectSelectionDocument")


@dataclass(frozen=True, eq=False)
class Clinic:
    """A new radiograph of PATIENT from 2021 (`image`), and a `finder` with a gallery of earlier ones, a later one, and
    other patients'."""

    image: bytes
    finder: Finder
    folder: Path
    secrets: tuple[str, ...] = SECRETS

    def results(self, data: bytes | None = None, *, k: int = 10, **options: Any) -> Results:
        data = self.image if data is None else data
        return make_results(data, self.finder.analyze(data, k), self.finder, **options)


def radiograph(make_xray: Callable[..., Any], seed: int, patient: str, number: int, **tags: Any) -> bytes:
    """A 12-bit chest radiograph; its UIDs contain `number`."""
    own = {
        "SOPInstanceUID": f"{_ROOT}.{number}.3", "StudyInstanceUID": f"{_ROOT}.{number}.1",
        "SeriesInstanceUID": f"{_ROOT}.{number}.2", "PatientID": patient, "PatientName": "Muster^Erika",
        "PatientBirthDate": "19500102", "PatientSex": "F", "StudyDate": f"20{10 + number:02}0304",
        "StudyTime": "101112", "StudyID": f"S{number}", "AccessionNumber": f"A{number}",
        "ReferringPhysicianName": "Haus^Gregory", "InstanceNumber": "7", "SeriesNumber": "2",
    }  # fmt: skip
    return make_dicom(make_xray(seed).astype(np.uint16) * 16, **own | tags)


@pytest.fixture(scope="session")
def make_radiograph(make_xray: Callable[..., Any]) -> Callable[..., bytes]:
    """Make a `radiograph` of PATIENT from 2021. `tags` change it; None removes a tag."""

    def make(seed: int = 900, number: int = 11, **tags: Any) -> bytes:
        return radiograph(make_xray, seed, PATIENT, number, **tags)

    return make


@pytest.fixture(scope="session")
def clinic(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_card: ModelCard, make_xray: Callable[..., Any],
    make_radiograph: Callable[..., bytes],
) -> Iterator[Clinic]:  # fmt: skip
    """Five studies of PATIENT, from 2011 to 2014 and 2022, and twelve images of others, whose Nodule is uncertain.
    Read-only."""
    folder = tmp_path_factory.mktemp("clinic")
    rows = []

    def keep(name: str, data: bytes, patient: str, report: str, date: str, nodule: int | None = None) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        rows.append(Row(path, patient, (1, 0, nodule), split="train", view="PA", report=report, date=date))

    for number in (1, 2, 3, 4, 12):
        data = radiograph(make_xray, 800 + number, PATIENT, number)
        keep(f"own/{number}.dcm", data, PATIENT, "Own report.", f"20{10 + number:02}-03-04")
    for number in range(12):
        own = {
            "SOPInstanceUID": f"1.2.826.0.1.999.{number}.3", "StudyInstanceUID": f"1.2.826.0.1.999.{number}.1",
            "SeriesInstanceUID": f"1.2.826.0.1.999.{number}.2", "PatientName": "ROEBUCK^JANE", "StudyID": "OTHERSTUDY",
        }  # fmt: skip
        data = radiograph(make_xray, 700 + number, f"OTHER-ID-{number}", 1, **own)
        keep(
            f"OTHERFOLDER/ROEBUCK_{number}.dcm", data, f"OTHER-ID-{number}", "OTHERREPORT of ROEBUCK", "2015-01-01", -1
        )

    write_manifest(Manifest(tiny_card.labels, tuple(rows)), folder / "manifest.csv")
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(folder / "manifest.csv"), folder / "gallery")
    with Finder.open(tiny_model, folder / "gallery", threads=1) as finder:
        yield Clinic(make_radiograph(), finder, folder)


@pytest.fixture(scope="session")
def errors_of(require_pacs: Callable[..., None]) -> Callable[[Dataset, Path], list[str]]:
    """Check a data set with dicom3tools' `dciodvfy`, which reports these errors. The data set is written to `path`."""
    require_pacs("dciodvfy")

    def check(dataset: Dataset, path: Path) -> list[str]:
        dataset.save_as(path, enforce_file_format=True)
        told = subprocess.run(["dciodvfy", path], capture_output=True, text=True, check=False)
        lines = (told.stdout + told.stderr).splitlines()
        assert any(one in _IODS for one in lines), lines
        return [line for line in lines if line.startswith("Error")]

    return check
