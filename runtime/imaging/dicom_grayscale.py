"""The chain of look-up tables that turns a DICOM object's stored values into grey.

Stored value -> modality LUT or rescale -> VOI LUT or window -> inverted if MONOCHROME1 (DICOM PS3.3 C.7.6.3.1.2,
C.11.1, C.11.2), computed once for each possible stored value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DicomImageError
from cbmir.runtime.imaging.colour import MANY
from cbmir.runtime.imaging.dicom_colour import COLOURS, PALETTE, read_palette
from cbmir.runtime.imaging.dicom_header import Tags, tag_name
from cbmir.runtime.imaging.dicom_lookup_table import LookupTable, white_of
from cbmir.runtime.imaging.radiograph import Values, counted, spread


@dataclass(frozen=True, eq=False)
class Chain:
    """The steps from each bit pattern that the pixels' type can hold to its grey; entry i is for pattern i.

    `stored` is the pattern's stored value. `voi` is 0..1, or None if it depends on the values that occur; `voi_name`
    names the tags that `voi` comes from, and `linear` is their window if it is linear.
    """

    stored: NDArray[np.float64]
    modality: NDArray[np.float64]
    voi: NDArray[np.float64] | None
    voi_name: str
    padding: NDArray[np.bool_]
    inverted: bool
    intensity: str
    colourful: NDArray[np.bool_] | None = None  # which patterns are colourful in a palette
    linear: tuple[float, float, int] | None = None  # as in Values: low, high, edge

    @classmethod
    def of(cls, tags: Tags, values: NDArray[np.float64], intensity: str) -> Chain:
        """Build the chain for `values`, the stored value of each bit pattern. `intensity` is as in PreprocessSpec."""
        photometric = tags.text("PhotometricInterpretation").upper()
        if photometric in (*COLOURS, PALETTE):
            return cls._of_colour(tags, values, intensity, photometric)
        modality = _modality(tags, values)
        inverted = photometric == "MONOCHROME1"
        shape = tags.text("PresentationLUTShape").upper()
        if shape == ("IDENTITY" if inverted else "INVERSE"):  # PS3.3 C.8.11.3: the two must agree
            sentence = f"contradicts {tag_name('PhotometricInterpretation')}, which takes precedence"
            tags.warn("contradictory polarity", f"{tag_name('PresentationLUTShape')} {sentence}")
        voi, name, linear = _voi(tags, modality) if intensity == "header" else (None, "", None)
        return cls(values, modality, voi, name, _padding(tags, values), inverted, intensity, linear=linear)

    @classmethod
    def _of_colour(cls, tags: Tags, values: NDArray[np.float64], intensity: str, photometric: str) -> Chain:
        """Build the chain for luma, or for a palette's stored values."""
        sentence = f"is {photometric}, but the image is grey: read as a picture, without windows"
        tags.warn("stored in colour", f"{tag_name('PhotometricInterpretation')} {sentence}")
        colourful, luma = None, values / 255
        padding = np.zeros(len(values), dtype=bool)
        if photometric == PALETTE:
            (luma, colourful), padding = read_palette(tags, values), _padding(tags, values)
        return cls(
            values, luma, luma if intensity == "header" else None, photometric, padding, False, intensity, colourful
        )

    @property
    def averages(self) -> bool:
        """Whether the chain may be applied to averages of stored values: no padding, no palette, and a known range."""
        return self.voi is not None and self.colourful is None and not self.padding.any()

    def greys(self, stored: NDArray[Any], tags: Tags) -> tuple[NDArray[np.uint8], Values | None]:
        """Return the grey of each pattern in an image `stored` [H,W], uint8, bone bright; and its Values if linear."""
        grey, linear = self.voi, self.linear
        if self.colourful is not None:
            counts = self._counts(stored)
            if counts[self.colourful].sum() > MANY * counts.sum():
                raise tags.refusal("PhotometricInterpretation", "expected a grey image")
        if grey is None:
            counts = self._counts(stored)
            if not counts.any():
                raise tags.refusal("PixelPaddingValue", "expected pixels besides the padding")
            if not np.isfinite(np.ptp(self.modality[counts > 0])):
                raise tags.refusal("RescaleSlope", "expected a number that keeps values finite")
            grey, low, high = spread(self.modality, counts, self.intensity)
            linear = low, high, 0
        if self.inverted:
            grey = 1 - grey
        grey = np.where(self.padding, 0, grey)  # outside the image: as dark as air
        values = np.where(self.padding, np.nan, self.modality).astype(np.float32)
        behind = None if linear is None else Values(values, linear[0], linear[1], self.inverted, linear[2])
        return np.rint(grey * 255).astype(np.uint8), behind

    def check_shown(self, stored: NDArray[Any], greys: NDArray[np.uint8], tags: Tags) -> None:
        """Raise DicomImageError if a window or LUT misses all values, so that it shows several as one grey."""
        if self.voi is None:
            return
        for rows in (stored[::64], stored):
            present = self._counts(rows) > 0
            values, meant = self.stored[present], self.modality[present]
            if len(np.unique(greys[present])) > 1:
                return
        if len(np.unique(meant)) > 1:
            rescaled = "" if np.array_equal(values, meant) else f", which stand for {meant.min():g} to {meant.max():g}"
            raise DicomImageError(
                f"{tags.name}: {self.voi_name} would show the whole image as one grey: its stored values are "
                f"{values.min():g} to {values.max():g}{rescaled}; correct the tag, or read by intensity 'minmax'",
                self.voi_name.split()[0],
            )

    def _counts(self, stored: NDArray[Any]) -> NDArray[np.int64]:
        """Count the pixels with each bit pattern, without the padding."""
        counts = counted(stored, len(self.modality))
        counts[self.padding] = 0
        return counts


def _padding(tags: Tags, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which stored values are padding (PS3.3 C.7.5.1.1.2): one, or a range."""
    value = tags.number("PixelPaddingValue")
    if value is None:
        return np.zeros(len(values), dtype=bool)
    limit = tags.number("PixelPaddingRangeLimit")
    ends = np.array([value, value if limit is None else limit])
    # Convert the ends to the pixels' own type: they may have been written as signed or unsigned.
    raised = np.where(ends < values.min(), ends + 2**16, ends)
    ends = np.where((values.min() < 0) & (ends > values.max()), ends - 2**16, raised)
    inside: NDArray[np.bool_] = (values >= ends.min()) & (values <= ends.max())
    return inside


def _modality(tags: Tags, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Apply the modality LUT, or rescale slope and intercept (PS3.3 C.11.1)."""
    if table := LookupTable.of_sequence(tags, "ModalityLUTSequence"):  # its entries are values: bits do not matter
        return table.look_up(values)
    slope, intercept = tags.number("RescaleSlope"), tags.number("RescaleIntercept")
    if slope is not None and (slope == 0 or not math.isfinite(slope)):
        raise tags.refusal("RescaleSlope", "expected a number other than 0")
    if intercept is not None and not math.isfinite(intercept):
        raise tags.refusal("RescaleIntercept", "expected a finite number")
    return values * (1.0 if slope is None else slope) + (intercept or 0.0)


def _voi(
    tags: Tags, values: NDArray[np.float64]
) -> tuple[NDArray[np.float64] | None, str, tuple[float, float, int] | None]:
    """Apply the VOI LUT or the first usable window (PS3.3 C.11.2). Returns 0..1, its name, and `Chain.linear`; without
    either, None and a warning."""
    if table := LookupTable.of_sequence(tags, "VOILUTSequence"):
        return table.look_up(values) / white_of([table], tags, "VOILUTSequence"), tag_name("VOILUTSequence"), None
    function = tags.text("VOILUTFunction").upper() or "LINEAR"
    if function not in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        tags.warn("unknown window function", f"{tag_name('VOILUTFunction')} is unknown: taken as LINEAR")
        function = "LINEAR"
    centres, widths = tags.numbers("WindowCenter"), tags.numbers("WindowWidth")
    for number, (centre, width) in enumerate(zip(centres, widths, strict=False)):
        if math.isfinite(centre) and math.isfinite(width) and (width >= 1 or (width > 0 and function != "LINEAR")):
            if number:
                sentence = f"{tag_name('WindowWidth')}: window {number + 1} is used, since those before it are invalid"
                tags.warn("invalid window skipped", sentence)
            name = f"{tag_name('WindowCenter')} {centre:g} with {tag_name('WindowWidth')} {width:g}"
            edge, low = int(function == "LINEAR"), centre - width / 2
            linear = None if function == "SIGMOID" else (low, low + width - edge, edge)
            return window(values, centre, width, function), name, linear
    why = "holds no valid window" if centres or widths else "is missing, and there is no VOI LUT"
    tags.warn("no window", f"{tag_name('WindowWidth')} {why}: grey runs from the lowest to the highest value present")
    return None, "", None


def window(values: NDArray[np.float64], centre: float, width: float, function: str = "LINEAR") -> NDArray[np.float64]:
    """Apply a window, to 0..1: LINEAR (PS3.3 C.11.2.1.2.1), LINEAR_EXACT (C.11.2.1.3.2) or SIGMOID (C.11.2.1.3.1)."""
    if function == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700)))
    if function == "LINEAR":
        centre, width = centre - 0.5, width - 1
    if width == 0:
        return (values > centre).astype(np.float64)
    return np.clip((values - centre) / width + 0.5, 0, 1)
