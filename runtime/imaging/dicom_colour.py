"""DICOM images stored in colour that are really grey, such as screenshots and exports of X-rays: RGB, YBR, palettes.

They have no window: their samples are shown as they are (PS3.3 C.7.6.3.1.2). A picture in true colour is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.colour import APART, is_colourful
from cbmir.runtime.imaging.dicom_header import Tags
from cbmir.runtime.imaging.dicom_lookup_table import LookupTable, white_of
from cbmir.runtime.imaging.dicom_pixels import Frame

#: Photometric interpretations with three samples per pixel.
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
PALETTE = "PALETTE COLOR"
_LUMA = 0.299, 0.587, 0.114  # weights of red, green and blue (ITU-R BT.601), as for PNG


@dataclass(frozen=True, eq=False)
class ColourFrame:
    """A frame with three 8-bit samples per pixel, which is decoded to luma as a `Frame` is to its stored values."""

    frame: Frame
    colourful: DicomImageError  # the error for a picture in true colour

    @property
    def shape(self) -> tuple[int, int]:
        return self.frame.shape

    def values(self) -> NDArray[np.float64]:
        return np.arange(256.0)

    def decode(self, threads: int = 1) -> NDArray[np.uint8]:
        """Decode to luma, uint8 [H,W]. Raises `colourful`, or the frame's `damaged`."""
        picture = self.frame.decode_colour(threads)
        if is_colourful(picture):
            raise self.colourful
        return np.asarray(picture.convert("L"))

    def decode_halved(self, times: int) -> NDArray[Any] | None:
        return None


def read_palette(tags: Tags, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the luma 0..1 of stored values in a palette (PS3.3 C.7.6.3.1.5), and which of them are colourful."""
    tables = []
    for name in ("Red", "Green", "Blue"):
        keyword = f"{name}PaletteColorLookupTableDescriptor"
        descriptor, data = tags.value(keyword), tags.value(f"{name}PaletteColorLookupTableData")
        if descriptor is None or data is None:  # or they are segmented, which X-rays do not use
            raise tags.refusal(keyword, "expected a palette and its data", found="one without them")
        tables.append(LookupTable.parse(tags, keyword, descriptor, data))
    white = white_of(tables, tags, "RedPaletteColorLookupTableDescriptor")
    channels = np.stack([table.look_up(values) / white for table in tables])
    return np.array(_LUMA) @ channels, np.ptp(channels, axis=0) * 255 > APART
