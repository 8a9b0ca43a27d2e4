"""Colour pictures as grey: their luma, and whether they are really grey."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops

from cbmir.errors import BlankImageError
from cbmir.runtime.imaging.image_warning import ImageWarning

APART, MANY = 32, 0.05  # colourful: channels differ by more than APART levels in more than this share of pixels
_COLOUR = ImageWarning("colour", "colour image: looks like a photo or screenshot, not an X-ray")


def to_grey(image: Image.Image, name: str) -> tuple[NDArray[np.uint8], tuple[ImageWarning, ...]]:
    """Convert an 8-bit image of any mode to luma uint8 [H,W], on black, with a warning if it is colourful."""
    if image.mode in ("1", "L") and not image.has_transparency_data:
        return np.asarray(image.convert("L")), ()
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        if image.getchannel("A").getextrema()[1] == 0:
            raise BlankImageError(f"{name}: expected an X-ray, found a fully transparent image")
    grey = image.convert("L")
    if image.mode == "RGBA":
        grey = ImageChops.multiply(grey, image.getchannel("A"))  # luma on black, without a colour copy
    return np.asarray(grey), (_COLOUR,) if is_colourful(image) else ()


def is_colourful(image: Image.Image) -> bool:
    """Return whether the channels of over 5% of the pixels differ by more than 32 (JPEG noise and marks stay below)."""
    step = max(1, min(image.size) // 256)
    small = image.resize((image.width // step, image.height // step), Image.Resampling.NEAREST)
    if small.mode == "RGBA":
        small = Image.alpha_composite(Image.new("RGBA", small.size, "black"), small)
    return bool((np.ptp(np.asarray(small.convert("RGB")), axis=2) > APART).mean() > MANY)
