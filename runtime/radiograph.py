"""What every reader gives back, and the checks that all of them share."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import BlankImageError, ImageSizeError

# `warnings.catch_warnings` swaps state of the whole process: two threads inside it would undo each other's.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Limits:
    """What is read at all: image sides and area in pixels, `max_aspect` as long side over short side, file size."""

    max_pixels: int = 100_000_000
    min_side: int = 32
    max_aspect: float = 4.0
    max_bytes: int = 512 * 2**20

    def check_size(self, width: int, height: int, name: str) -> None:
        """Raise ImageSizeError for an image of `width` x `height` pixels that is too small, too large or too long."""
        found = f"found {width}x{height}"
        if min(width, height) < self.min_side:
            raise ImageSizeError(f"{name}: expected at least {self.min_side} pixels a side, {found}")
        if width * height > self.max_pixels:
            raise ImageSizeError(
                f"{name}: expected at most {self.max_pixels:,} pixels, {found}; make the image smaller"
            )
        if max(width, height) > self.max_aspect * min(width, height):
            raise ImageSizeError(
                f"{name}: expected sides in a ratio of at most {self.max_aspect:g}:1, {found}; crop it to the X-ray"
            )


@dataclass(frozen=True, eq=False)
class Radiograph:
    """One grey image, however it was stored.

    `pixels` is uint8 [H,W], 0..255, air dark and bone bright (DICOM's MONOCHROME2 sense). `name` is for messages.
    `sha256` is the hex digest of the file's bytes, or of the array's. `view` is PA, AP or empty (unknown). `warnings`
    are sentences for the user; like every error message they never hold a patient's name or ID.
    """

    pixels: NDArray[np.uint8]
    name: str
    sha256: str
    patient_id: str = ""
    study_id: str = ""
    view: str = ""
    warnings: tuple[str, ...] = ()


def check_not_blank(pixels: NDArray[np.uint8], name: str) -> None:
    """Raise BlankImageError where all of `pixels` (uint8 [H,W]) are one grey value."""
    if pixels.min() == pixels.max():
        raise BlankImageError(f"{name}: expected an X-ray, found the grey value {pixels.flat[0]} (of 255) everywhere")


@contextmanager
def collected_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings that a library raises within, so that none reaches the caller's filters. Thread-safe."""
    with _ONE_AT_A_TIME, warnings.catch_warnings(record=True) as collected:
        warnings.simplefilter("always")
        yield collected
