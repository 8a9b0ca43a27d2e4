"""The conversion of a grey image into the model's input, for training and runtime.

The aspect ratio is squashed to a square, as the paper does and as NIH's own 1024x1024 files were made.
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

#: Pixels of the bands in which large images are resized: what is looked up is still in the cache when it is resized.
_BAND, _MOST_BANDS = 2**20, 8


def resize_square(pixels: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Resize uint8 [H,W] to uint8 [resize,resize] by Pillow's antialiasing bilinear filter. Raises NotAnImageError."""
    square = Image.fromarray(_checked(pixels)).resize((spec.resize, spec.resize), Image.Resampling.BILINEAR)
    return np.array(square)


def centre_crop(square: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """The middle [...,crop,crop] of uint8 [...,resize,resize], as a view. Raises NotAnImageError for another shape."""
    if square.shape[-2:] != (spec.resize, spec.resize):
        raise NotAnImageError(
            f"preprocessing: expected [...,{spec.resize},{spec.resize}], found {list(square.shape)}; resize it first"
        )
    start = (spec.resize - spec.crop) // 2
    inner = slice(start, start + spec.crop)
    return square[..., inner, inner]


def preprocess(image: Radiograph | NDArray[np.uint8], spec: PreprocessSpec, *, threads: int = 1) -> NDArray[np.uint8]:
    """A radiograph, or uint8 [H,W] -> the model's input, uint8 [crop,crop].

    It is what `centre_crop(resize_square(...))` gives, within one grey level, but only what the crop shows is resized.

    Args:
        spec: The model's (`card.preprocess`).
        threads: How many work on a large image.

    Raises:
        NotAnImageError: An array of another type or number of axes.
        UserError: The radiograph was read by another intensity policy than `spec`'s.
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
    """Rows `first` to `last` of the crop, uint8 [last - first, crop]."""
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
    """The source pixels for pixels `first` to `last` of a resized axis, and where these begin and end within them."""
    # A pixel takes up `scale` pixels of the full image, of which every `step`-th is a source pixel, the first of
    # `step`: its middle is (step - 1) / 2 before the middle of those.
    start, end = ((edge * scale + (step - 1) / 2) / step for edge in (first, last))
    reach = max(1.0, scale / step) + 1  # the triangle's half width, and rounding
    low, high = max(0, math.floor(start - reach)), min(length, math.ceil(end + reach))
    return slice(low, high), start - low, min(end, length) - low


def _checked(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise NotAnImageError(f"preprocessing: expected uint8 [H,W], found {pixels.dtype} {list(pixels.shape)}")
    return pixels
