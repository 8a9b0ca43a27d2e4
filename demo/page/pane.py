"""An image as the viewer takes it. Without Gradio, since a report is written without it too."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.page.markup import image_uri
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import seen_box


def pane(picture: NDArray[np.uint8], spec: PreprocessSpec, caption: str, key: str = "") -> dict[str, Any]:
    """A PNG, without loss, and where in it the model looks, in fractions.

    Args:
        picture: uint8 [H, W].
        key: Of the whole image, for zooming in.
    """
    height, width = picture.shape
    top, bottom, left, right = seen_box(height, width, spec)
    return {
        "src": png_uri(picture), "width": width, "height": height, "caption": caption, "key": key,
        "seen": [left / width, top / height, right / width, bottom / height],
    }  # fmt: skip


def png_uri(pixels: NDArray[np.uint8]) -> str:
    """An image uint8 [H, W] as a data URI."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG", compress_level=1)  # the time counts more than the bytes
    return image_uri(png.getvalue(), "png")
