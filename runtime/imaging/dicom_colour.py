"""DICOM images in colour that are grey in fact, as screenshots and exports of X-rays are: RGB, its relatives, palettes.

They have no window: their samples are what is seen (PS3.3 C.7.6.3.1.2). A picture in true colour is refused.
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

#: Photometric interpretations of three samples a pixel.
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
PALETTE = "PALETTE COLOR"
_LUMA = 0.299, 0.587, 0.114  # of red, green and blue: ITU-R BT.601, as for PNG


@dataclass(frozen=True, eq=False)
class ColourFrame:
    """A frame of three samples of 8 bits a pixel, decoded to luma as a `Frame` is to its stored values."""

    frame: Frame
    colourful: DicomImageError  # what to raise for a picture in true colour

    @property
    def shape(self) -> tuple[int, int]:
        return self.frame.shape

    def values(self) -> NDArray[np.float64]:
        return np.arange(256.0)

    def decode(self, threads: int = 1) -> NDArray[np.uint8]:
        """Luma, uint8 [H,W]. Raises `colourful`, or the frame's `damaged`."""
        picture = self.frame.decode_colour(threads)
        if is_colourful(picture):
            raise self.colourful
        return np.asarray(picture.convert("L"))

    def decode_halved(self, times: int) -> NDArray[Any] | None:
        return None


def read_palette(tags: Tags, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What a palette (PS3.3 C.7.6.3.1.5) makes of stored values: luma 0..1, and which of them are colourful."""
    tables = []
    for name in ("Red", "Green", "Blue"):
        keyword = f"{name}PaletteColorLookupTableDescriptor"
        descriptor, data = tags.value(keyword), tags.value(f"{name}PaletteColorLookupTableData")
        if descriptor is None or data is None:  # or a segmented one, which X-rays do not have
            raise tags.refusal(keyword, "expected a palette and its data", found="one without them")
        tables.append(LookupTable.parse(tags, keyword, descriptor, data))
    white = white_of(tables, tags, "RedPaletteColorLookupTableDescriptor")
    channels = np.stack([table.look_up(values) / white for table in tables])
    return np.array(_LUMA) @ channels, np.ptp(channels, axis=0) * 255 > APART
