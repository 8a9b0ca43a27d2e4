"""Data in the header of a publisher's DICOM file, read without its pixels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import ImageError, ManifestError, require
from cbmir.input_file import open_input
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged, read_errors
from cbmir.runtime.imaging.dicom_reader import parse_header


@dataclass(frozen=True)
class ImageHeader:
    """Patient and view, empty if unknown, and size in pixels."""

    patient_id: str
    view: str
    width: int
    height: int


def is_dicom_file(path: Path) -> bool:
    """Return whether a file is DICOM, by its extension."""
    return path.suffix.lower() in (".dcm", ".dicom")


def read_header(path: Path) -> ImageHeader:
    """Read the header of a DICOM file. Raises ManifestError if it cannot be read."""
    require("pydicom", "dicom")
    errors: tuple[type[Exception], ...] = (*read_errors(), ImageError, OSError, AttributeError, TypeError, ValueError)
    try:
        with warnings.catch_warnings(), pydicom_unlogged(), open_input(path) as stream:
            warnings.simplefilter("ignore")
            dataset = parse_header(stream, str(path))
            view = str(dataset.get("ViewPosition") or "").strip().upper()
            return ImageHeader(
                str(dataset.get("PatientID") or "").strip(), view if view in ("PA", "AP") else "",
                int(dataset.Columns), int(dataset.Rows),
            )  # fmt: skip
    except errors as error:
        raise ManifestError(
            f"{path}: expected a DICOM file with an image, found one that cannot be read ({type(error).__name__})"
        ) from None
