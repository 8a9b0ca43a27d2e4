"""Small pictures of radiographs, to look at."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def thumbnail_jpeg(pixels: NDArray[np.uint8], side: int = 256) -> bytes:
    """The JPEG file of grey uint8 [H, W], made smaller to fit into `side` x `side` pixels; never enlarged."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue()
