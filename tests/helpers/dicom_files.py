"""Make DICOM files of chest radiographs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRBigEndian, ExplicitVRLittleEndian

from cbmir.runtime.imaging.dicom_header import Tags
from cbmir.runtime.imaging.dicom_pixels import find_frame
from cbmir.runtime.imaging.dicom_reader import parse_dicom
from cbmir.runtime.imaging.radiograph import ImageLimits

SIDE = 64
STORED = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE)  # 12 bits, each value once
PATIENT = "SECRET^NAME"


def make_dicom(
    pixels: NDArray[Any] = STORED, *, syntax: str = ExplicitVRLittleEndian, frame: bytes | None = None, **tags: Any
) -> bytes:
    """A file of a chest radiograph, with native pixels or an encoded `frame`; None removes a tag."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = ComputedRadiographyImageStorage  # pydicom keeps the one in the data set
    bits = 8 * pixels.dtype.itemsize
    little = syntax != ExplicitVRBigEndian
    values = {
        "SOPClassUID": ComputedRadiographyImageStorage,
        "SOPInstanceUID": "1.2.3",
        "StudyInstanceUID": "1.2.4",
        "SeriesInstanceUID": "1.2.5",
        "PatientName": PATIENT,
        "PatientID": "SECRET-ID",
        "Modality": "CR",
        "BodyPartExamined": "CHEST",
        "ViewPosition": "PA",
        "PhotometricInterpretation": "MONOCHROME2",
        "SamplesPerPixel": 1,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "BitsAllocated": bits,
        "BitsStored": 12 if bits == 16 else 8,
        "HighBit": (12 if bits == 16 else 8) - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "WindowCenter": 2048,
        "WindowWidth": 4096,
        "PixelData": pixels.astype(pixels.dtype.newbyteorder("<" if little else ">")).tobytes(),
    }
    if frame is not None:
        values["PixelData"] = encapsulate([frame])
    values |= tags
    for keyword, value in values.items():
        if value is not None:
            setattr(dataset, keyword, value)
    if "PixelData" in dataset:
        dataset["PixelData"].VR = "OW" if bits == 16 and frame is None else "OB"
        dataset["PixelData"].is_undefined_length = frame is not None
    return file_bytes(dataset)


def file_bytes(dataset: Dataset, *, enforce: bool = True) -> bytes:
    """The file of a data set; with `enforce`, with a preamble and complete file meta information."""
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=enforce)
    return stream.getvalue()


def reread(dataset: Dataset) -> Dataset:
    """A data set as it is read from its file."""
    return dcmread(io.BytesIO(file_bytes(dataset)))


def lut_sequence(first: int, entries: list[int], bits: int, vr: str = "US", order: str = "<") -> list[Dataset]:
    item = Dataset()
    item.add_new("LUTDescriptor", vr, [len(entries), first, bits])
    item.add_new("LUTData", "OW", np.array(entries, f"{order}u2").tobytes())
    return [item]


def stored_values(path: Path) -> NDArray[np.float64]:
    """The stored values [H, W] of a file, whether of a chest or not."""
    dataset, buffer = parse_dicom(path.read_bytes(), path.name, ImageLimits())
    frame = find_frame(Tags(dataset, path.name), buffer)
    return frame.values()[frame.decode()]
