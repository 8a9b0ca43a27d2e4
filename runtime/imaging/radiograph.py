"""The grey image that every reader returns, limits for images, and grey levels from the range of stored values."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import BlankImageError, ImageSizeError, NotAnImageError
from cbmir.preprocessing import PERCENTILES
from cbmir.runtime.imaging.image_warning import ImageWarning

# `warnings.catch_warnings` changes the state of the process: two threads inside it would undo each other's changes.
_ONE_AT_A_TIME = threading.Lock()
#: The text in files of `cbmir data phantom`: Source in PNG, Manufacturer in DICOM.
PHANTOM = "cbmir phantom"
_AT_ONCE = 2**15  # values per look-up: NumPy converts them to 8-byte indices, which should fit into the cache
_COUNTED_AT_ONCE = 2**18
_LITTLE_CONTRAST = 32  # grey levels between the 1st and the 99th percentile: a 12-bit image saved as 16 bits has 16


@dataclass(frozen=True)
class ImageLimits:
    """Limits of images that are read: sides and area in pixels, the ratio of long to short side, the file size."""

    max_pixels: int = 50_000_000  # the largest detectors have fewer than 20 million
    min_side: int = 32
    max_aspect: float = 4.0
    max_bytes: int = 512 * 2**20

    @property
    def max_inflated(self) -> int:
        """The most bytes that a deflated data set may inflate to: the largest 16-bit image and a long header."""
        return 2 * self.max_pixels + 16 * 2**20

    def check_bytes(self, size: int, name: str) -> None:
        """Raise NotAnImageError if a file of `size` bytes is too large; `name` is for the message."""
        if size > self.max_bytes:
            raise NotAnImageError(
                f"{name}: expected at most {self.max_bytes:,} bytes, found {size:,}; no X-ray needs so many"
            )

    def check_size(self, width: int, height: int, name: str) -> None:
        """Raise ImageSizeError if an image of `width` x `height` pixels is too small, too large or too elongated."""
        found = f"found {width}x{height}"
        if min(width, height) < self.min_side:
            raise ImageSizeError(f"{name}: expected at least {self.min_side} pixels per side, {found}")
        if width * height > self.max_pixels:
            raise ImageSizeError(
                f"{name}: expected at most {self.max_pixels:,} pixels, {found}; make the image smaller"
            )
        if max(width, height) > self.max_aspect * min(width, height):
            raise ImageSizeError(
                f"{name}: expected sides in a ratio of at most {self.max_aspect:g}:1, {found}; crop it to the X-ray"
            )


@dataclass(frozen=True)
class Reduction:
    """How an image was reduced while decoding: its [i,j] is [step * i, step * j] of the full image, `shape` [H,W]."""

    step: int
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Values:
    """The meaning of stored values, and the linear window through which `Radiograph.greys` shows them.

    Attributes:
        of_stored: float32 [256] or [65536], the meaning of each stored value; NaN for padding, which is black.
        low: The value that the window shows as black, or as white if `inverted`.
        high: The value at the window's other end.
        inverted: The lowest values are white (MONOCHROME1).
        edge: DICOM's window width minus (high - low), 0 or 1 (PS3.3 C.11.2.1.2.1).
    """

    of_stored: NDArray[np.float32]
    low: float
    high: float
    inverted: bool = False
    edge: int = 0


@dataclass(frozen=True)
class Spacing:
    """The distance in millimetres between the file's pixels: from a row to the one below, and from a column to the one
    on the right. `where` describes the plane in which it applies; empty means in the patient, as calibrated."""

    row: float
    column: float
    where: str


@dataclass(frozen=True, eq=False)
class Radiograph:
    """One grey image, from any format. Texts are empty if unknown.

    Attributes:
        stored: uint8 or uint16 [H,W].
        sha256: Hex digest of the file's bytes, or of the array's.
        study_id: Study Instance UID.
        view: PA, AP or LATERAL.
        warnings: Sentences for the user, without a patient's name or ID; each has a `kind`.
        greys: uint8 [256] or [65536], the grey of each stored value; None if the stored values are the grey values.
        values: The meaning of stored values; None unless a linear window turned them into `greys`.
        spacing: None if the file does not say how large a pixel is.
        sides: The patient's sides at the left and right edge, RL or LR; empty if unknown.
        is_phantom: The file says that `cbmir data phantom` drew it (`PHANTOM`).
        reduction: None unless `stored` is smaller than the image in the file.
        date: The study's date, YYYY-MM-DD.
        intensity: The policy behind `greys` (PreprocessSpec).
    """

    stored: NDArray[np.uint8] | NDArray[np.uint16]
    name: str
    sha256: str
    patient_id: str = ""
    study_id: str = ""
    view: str = ""
    warnings: tuple[ImageWarning, ...] = ()
    greys: NDArray[np.uint8] | None = None
    reduction: Reduction | None = None
    sop_instance_uid: str = ""
    date: str = ""
    intensity: str = "header"
    values: Values | None = None
    spacing: Spacing | None = None
    sides: str = ""
    is_phantom: bool = False

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """uint8 [H,W], 0..255, air dark and bone bright (as in DICOM's MONOCHROME2); computed on first use."""
        pixels: NDArray[np.uint8] | None = self.__dict__.get("_pixels")
        if pixels is None:  # no cached_property: before Python 3.12 all instances share one lock
            pixels = self.__dict__["_pixels"] = look_up(self.greys, self.stored)
        return pixels

    def with_pixels(self, pixels: NDArray[np.uint8]) -> Radiograph:
        """Return the same radiograph with other pixels uint8 [H,W], such as resized ones."""
        return replace(self, stored=pixels, greys=None, reduction=None, values=None, spacing=None)


def look_up(greys: NDArray[np.uint8] | None, stored: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the grey values of stored values [H,W], uint8 [H,W]; `stored` itself if `greys` is None."""
    if greys is None:
        return stored
    pixels = np.empty(stored.shape, np.uint8)
    rows = max(1, _AT_ONCE // stored.shape[1])
    for start in range(0, len(stored), rows):
        # mode "raise" would first copy `out`; no index is out of range
        np.take(greys, stored[start : start + rows], out=pixels[start : start + rows], mode="clip")
    return pixels


def check_contrast(stored: NDArray[Any], greys: NDArray[np.uint8] | None, name: str) -> tuple[ImageWarning, ...]:
    """Raise BlankImageError if a radiograph has the same grey everywhere; warn if nearly all greys are similar."""
    beyond = 0.01 * stored.size
    for rows in (stored[::8], stored):
        counts = Image.fromarray(look_up(greys, np.ascontiguousarray(rows))).histogram()
        # If some rows already hold 1% of all pixels up to `low`, and from `high` on, the other rows change nothing.
        low, high = np.searchsorted(np.cumsum(counts), [beyond, rows.size - beyond])
        if high - low >= _LITTLE_CONTRAST:
            return ()
    if max(counts) == stored.size:
        raise BlankImageError(f"{name}: expected an X-ray, found the grey value {low} (of 255) everywhere")
    sentence = (
        f"little contrast: nearly all grey values lie within {low}..{high} of 0..255; save the image with a window "
        f"that fits it"
    )
    return (ImageWarning("little contrast", sentence),)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect this thread's warnings. Threads wait for each other here, so nothing slow belongs inside."""
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


def counted(stored: NDArray[Any], patterns: int) -> NDArray[np.int64]:
    """Count the pixels of uint8 or uint16 [H,W] with each of the values 0 to `patterns` - 1, int64 [patterns]."""
    counts = np.zeros(patterns, np.int64)
    flat = stored.ravel()
    for start in range(0, flat.size, _COUNTED_AT_ONCE):
        counts += np.bincount(flat[start : start + _COUNTED_AT_ONCE], minlength=patterns)
    return counts


def spread(
    values: NDArray[np.float64], counts: NDArray[np.int64], intensity: str
) -> tuple[NDArray[np.float64], float, float]:
    """Spread `values` [n], which occur `counts` [n] times, over 0..1 from the lowest to the highest. Returns the result
    and these two values.

    With `percentile`, the two are nearest ranks: the lowest values that 1% and 99% of the pixels do not exceed.
    """
    present = np.flatnonzero(counts)
    order = present[np.argsort(values[present], kind="stable")]
    low, high = values[order[0]], values[order[-1]]
    if intensity == "percentile":
        below = np.cumsum(counts[order])
        low, high = (values[order[np.searchsorted(below, below[-1] * percent / 100)]] for percent in PERCENTILES)
    return np.clip((values - low) / (high - low or 1.0), 0, 1), float(low), float(high)


def greys_of(stored: NDArray[Any], bits: int, intensity: str) -> tuple[NDArray[np.uint8] | None, Values | None]:
    """Return the grey of each value of uint8 or uint16 [H,W], uint8 [256] or [65536], and its window. With "header",
    the window is the full range of `bits`. Both are None if the values already are greys."""
    if intensity == "header" and stored.dtype == np.uint8:
        return None, None
    values = np.arange(2 ** (8 * stored.dtype.itemsize), dtype=np.float64)
    low, high = 0.0, 2.0**bits - 1
    grey = np.minimum(values, high) / high
    if intensity != "header":
        grey, low, high = spread(values, counted(stored, len(values)), intensity)
    return np.rint(grey * 255).astype(np.uint8), Values(values.astype(np.float32), low, high)
