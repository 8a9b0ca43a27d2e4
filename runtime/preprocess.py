"""The one way from a grey image to the model's input; training and runtime both call it.

The aspect ratio is squashed to a square, as the paper does and as NIH's own 1024x1024 files were made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import NotAnImageError
from cbmir.preprocessing import PreprocessSpec


def resize_square(pixels: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """Resize uint8 [H,W] to uint8 [resize,resize], a new array, by Pillow's antialiasing bilinear (triangle) filter.

    Raises NotAnImageError for another dtype or number of axes.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise NotAnImageError(f"preprocessing: expected uint8 [H,W], found {pixels.dtype} {list(pixels.shape)}")
    square = Image.fromarray(pixels).resize((spec.resize, spec.resize), Image.Resampling.BILINEAR)
    return np.array(square)


def centre_crop(square: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """The middle uint8 [...,crop,crop] of uint8 [...,resize,resize], as a view; offset (resize - crop) // 2.

    Raises NotAnImageError where the last two axes are not `resize` long.
    """
    if square.shape[-2:] != (spec.resize, spec.resize):
        raise NotAnImageError(
            f"preprocessing: expected [...,{spec.resize},{spec.resize}], found {list(square.shape)}; resize it first"
        )
    start = (spec.resize - spec.crop) // 2
    inner = slice(start, start + spec.crop)
    return square[..., inner, inner]


def preprocess(pixels: NDArray[np.uint8], spec: PreprocessSpec) -> NDArray[np.uint8]:
    """uint8 [H,W] -> the model's input, uint8 [crop,crop]."""
    return centre_crop(resize_square(pixels, spec), spec)
