"""What every reader gives back, and the checks that all of them share."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import BlankImageError, ImageSizeError

# `warnings.catch_warnings` swaps state of the whole process: two threads inside it would undo each other's.
_ONE_AT_A_TIME = threading.Lock()
_LITTLE_CONTRAST = 32  # grey levels between the 1st and the 99th percentile: a 12-bit image saved as 16 bits has 16


@dataclass(frozen=True)
class Limits:
    """What is read at all: image sides and area in pixels, `max_aspect` as long side over short side, file size."""

    max_pixels: int = 50_000_000  # the largest detectors give less than 20 million
    min_side: int = 32
    max_aspect: float = 4.0
    max_bytes: int = 512 * 2**20

    @property
    def max_inflated(self) -> int:
        """Bytes that a compressed data set may grow to: the largest image, of 16 bits a pixel, and a long header."""
        return 2 * self.max_pixels + 16 * 2**20

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


def check_contrast(pixels: NDArray[np.uint8], name: str) -> tuple[str, ...]:
    """Raise BlankImageError where all of `pixels` (uint8 [H,W]) are one grey value; warn where most nearly are."""
    counts = np.bincount(pixels.ravel(), minlength=256)
    if counts.max() == pixels.size:
        raise BlankImageError(f"{name}: expected an X-ray, found the grey value {counts.argmax()} (of 255) everywhere")
    low, high = np.searchsorted(np.cumsum(counts), [0.01 * pixels.size, 0.99 * pixels.size])
    if high - low >= _LITTLE_CONTRAST:
        return ()
    return (
        f"little contrast: nearly all grey values lie within {low}..{high} of 0..255; save the image with a window "
        f"that fits it",
    )


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings that a library gives within, so that none reaches the caller's filters.

    Warnings of other threads are shown as ever. They wait for each other here: nothing slow belongs inside.
    """
    collected: list[str] = []
    thread = threading.get_ident()
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, *where: Any, **more: Any) -> None:
            if threading.get_ident() == thread:
                collected.append(str(message))
            else:
                show(message, *where, **more)

        warnings.showwarning = collect
        warnings.simplefilter("always")
        yield collected
