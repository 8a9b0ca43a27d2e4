"""A phantom as a DICOM object: Computed Radiography Image Storage (PS3.3, A.2), 12 bit with a window."""

from __future__ import annotations

import hashlib
from datetime import date, timedelta
from pathlib import Path

import numpy as np

from cbmir.errors import require
from cbmir.training.phantom.anatomy import Array
from cbmir.training.phantom.patients import Phantom

_CR_IMAGE_STORAGE = "1.2.840.10008.5.1.4.1.1.1"
_EXPLICIT_VR_LITTLE_ENDIAN = "1.2.840.10008.1.2.1"
# Stored values of black and white; the window of PS3.3, C.11.2.1.2 that maps just these to the display's ends.
_LOW, _HIGH = 200, 3800
_WINDOW_CENTER, _WINDOW_WIDTH = (_LOW + _HIGH) / 2 + 0.5, _HIGH - _LOW + 1


def write_dicom(path: Path, grey: Array, phantom: Phantom, *, seed: int, inverted: bool) -> None:
    """Write `grey` (f32[H, W] in [0, 1], air dark) as MONOCHROME2, or as MONOCHROME1 when `inverted`.

    Everything in the file follows from the phantom and the seed, UIDs included (PS3.5, B.2: 2.25 and an integer).
    Raises MissingDependencyError without pydicom.
    """
    pydicom = require("pydicom", "dicom")
    stored = np.rint(_LOW + (_HIGH - _LOW) * (1 - grey if inverted else grey)).astype("<u2")
    study = f"{phantom.patient_id}-{phantom.study}"
    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID = _CR_IMAGE_STORAGE
    meta.MediaStorageSOPInstanceUID = _uid(seed, study, "instance")
    meta.TransferSyntaxUID = _EXPLICIT_VR_LITTLE_ENDIAN
    ds = pydicom.Dataset()
    ds.file_meta = meta
    ds.ImageType = ["DERIVED", "PRIMARY"]
    ds.SOPClassUID = meta.MediaStorageSOPClassUID
    ds.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    ds.StudyInstanceUID = _uid(seed, study, "study")
    ds.SeriesInstanceUID = _uid(seed, study, "series")
    ds.StudyDate = study_date(phantom).strftime("%Y%m%d")
    ds.StudyTime = "120000"
    ds.Modality = "CR"
    ds.Manufacturer = "cbmir"
    ds.PatientName = f"Phantom^{phantom.patient_id.removeprefix('phantom-')}"
    ds.PatientID = phantom.patient_id
    ds.StudyID = study
    ds.SeriesNumber = ds.InstanceNumber = 1
    ds.BodyPartExamined = "CHEST"
    ds.ViewPosition = phantom.view
    ds.PatientOrientation = ["L", "F"]  # rows run to the patient's left, columns to the feet
    ds.ImageComments = "synthetic phantom, not a patient"
    for keyword in ("AccessionNumber", "ReferringPhysicianName", "PatientBirthDate", "PatientSex", "Laterality"):
        setattr(ds, keyword, "")
    ds.BurnedInAnnotation = "NO"
    ds.SamplesPerPixel = 1
    ds.PhotometricInterpretation = "MONOCHROME1" if inverted else "MONOCHROME2"
    ds.Rows, ds.Columns = stored.shape
    ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 16, 12, 11, 0
    ds.WindowCenter, ds.WindowWidth = _WINDOW_CENTER, _WINDOW_WIDTH
    ds.PixelData = stored.tobytes()
    ds["PixelData"].VR = "OW"
    ds.save_as(path, enforce_file_format=True)


def study_date(phantom: Phantom) -> date:
    """Of a phantom's study, in its file and in the manifest: a patient's studies are 90 days apart."""
    return date(2020, 1, 1) + timedelta(days=90 * phantom.study)


def _uid(seed: int, study: str, kind: str) -> str:
    digest = hashlib.sha256(f"cbmir phantom {seed} {study} {kind}".encode()).digest()
    return f"2.25.{int.from_bytes(digest[:16], 'big')}"
