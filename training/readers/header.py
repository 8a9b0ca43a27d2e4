"""What the header of a publisher's DICOM file says, without its pixels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import ManifestError, require
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged, read_errors

_TAGS = ["PatientID", "ViewPosition", "Rows", "Columns"]


@dataclass(frozen=True)
class ImageHeader:
    """Patient and view, empty where the file does not say, and the size in pixels."""

    patient_id: str
    view: str
    width: int
    height: int


def is_dicom_file(path: Path) -> bool:
    """Whether a file is DICOM, by its ending."""
    return path.suffix.lower() in (".dcm", ".dicom")


def read_header(path: Path) -> ImageHeader:
    """The header of a DICOM file. Raises ManifestError where it cannot be read."""
    pydicom = require("pydicom", "dicom")
    errors: tuple[type[Exception], ...] = (*read_errors(), OSError, AttributeError, TypeError, ValueError)
    try:
        with warnings.catch_warnings(), pydicom_unlogged():
            warnings.simplefilter("ignore")
            dataset = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
            view = str(dataset.get("ViewPosition") or "").strip().upper()
            return ImageHeader(
                str(dataset.get("PatientID") or "").strip(), view if view in ("PA", "AP") else "",
                int(dataset.Columns), int(dataset.Rows),
            )  # fmt: skip
    except errors as error:
        raise ManifestError(
            f"{path}: expected a DICOM file with an image, found one that cannot be read ({type(error).__name__})"
        ) from None
