"""The conversion of a grey image into the model's input, for training and runtime.

The image is squashed to a square, as in the paper, and as NIH did to make its 1024x1024 files.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import NotAnImageError, UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.radiograph import Radiograph, Reduction, look_up
from cbmir.runtime.imaging.threads import together

#: Large images are resized in bands of `_BAND` pixels, so that looked-up pixels are still in the cache.
_BAND, _MOST_BANDS = 2**20, 8


def resize_square(pixels: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Resize uint8 [H,W] to uint8 [resize,resize] with Pillow's antialiased bilinear filter. Raises NotAnImageError."""
    square = Image.fromarray(_checked(pixels)).resize((spec.resize, spec.resize), Image.Resampling.BILINEAR)
    return np.array(square)


def centre_crop(square: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Return the centre [...,crop,crop] of uint8 [...,resize,resize], a view. Raises NotAnImageError for others."""
    if square.shape[-2:] != (spec.resize, spec.resize):
        raise NotAnImageError(
            f"preprocessing: expected [...,{spec.resize},{spec.resize}], found {list(square.shape)}; resize it first"
        )
    start = (spec.resize - spec.crop) // 2
    inner = slice(start, start + spec.crop)
    return square[..., inner, inner]


def preprocess(image: Radiograph | NDArray[np.uint8], spec: PreprocessSpec, *, threads: int = 1) -> NDArray[np.uint8]:
    """Convert a radiograph, or uint8 [H,W], to the model's input, uint8 [crop,crop].

    The result equals `centre_crop(resize_square(...))` within one grey level, but only the cropped part is resized.

    Args:
        spec: The model's preprocessing (`card.preprocess`).
        threads: How many threads work on a large image.

    Raises:
        NotAnImageError: An array of another type or number of axes.
        UserError: The radiograph was read with another intensity policy than that of `spec`.
    """
    radiograph = image if isinstance(image, Radiograph) else Radiograph(_checked(image), "array", "")
    if radiograph is image and radiograph.intensity != spec.intensity:
        raise UserError(
            f"{radiograph.name}: expected an image that was read by intensity {spec.intensity!r}, as the model was "
            f"trained; found {radiograph.intensity!r}; read it with Finder.read, or read_image(…, intensity=…)"
        )
    bands = min(_MOST_BANDS, 1 + radiograph.stored.size // _BAND)
    edges = [round(band * spec.crop / bands) for band in range(bands + 1)]
    return np.concatenate(together(threads, *(partial(_rows, radiograph, spec, *ends) for ends in pairwise(edges))))


def _rows(radiograph: Radiograph, spec: PreprocessSpec, first: int, last: int) -> NDArray[np.uint8]:
    """Compute rows `first` to `last` of the crop, uint8 [last - first, crop]."""
    height, width = radiograph.stored.shape
    reduction = radiograph.reduction or Reduction(1, (height, width))
    tall, wide = (side / spec.resize for side in reduction.shape)
    margin = (spec.resize - spec.crop) // 2
    rows, top, bottom = _source(margin + first, margin + last, tall, height, reduction.step)
    columns, left, right = _source(margin, margin + spec.crop, wide, width, reduction.step)
    part = Image.fromarray(look_up(radiograph.greys, radiograph.stored[rows, columns]))
    box = (left, top, right, bottom)
    return np.asarray(part.resize((spec.crop, last - first), Image.Resampling.BILINEAR, box))


def _source(first: int, last: int, scale: float, length: int, step: int) -> tuple[slice, float, float]:
    """Return the source pixels for pixels `first` to `last` of a resized axis, and where these lie within them."""
    # A pixel covers `scale` pixels of the full image, in groups of `step`. A source pixel is the first of its group, so
    # its centre lies (step - 1) / 2 before the group's.
    start, end = ((edge * scale + (step - 1) / 2) / step for edge in (first, last))
    reach = max(1.0, scale / step) + 1  # half the width of the triangle filter, plus rounding
    low, high = max(0, math.floor(start - reach)), min(length, math.ceil(end + reach))
    return slice(low, high), start - low, min(end, length) - low


def _checked(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise NotAnImageError(f"preprocessing: expected uint8 [H,W], found {pixels.dtype} {list(pixels.shape)}")
    return pixels
