"""The viewer: one to four X-rays, their evidence, and a box that is drawn on the first of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.page.markup import data_uri, static
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import seen_box

if TYPE_CHECKING:
    import gradio as gr


def viewer(whole: Callable[[Any], str | None]) -> gr.HTML:
    """X-rays on black, with zoom, window and level, all of it in the browser.

    Its value is JSON, since Gradio walks through anything else: {"panes", "maps": a finding -> cells,
    "names": a finding -> its name, "region": box or None, "note", "boxed": whether there are boxes to show,
    "grid": columns and rows of cells}. A pane is what `pane` makes, with `name`, its own `cells` of evidence, `labels`,
    `report`, `boxes`, and `place`. Boxes are (x0, y0, x1, y1) in fractions of the image.

    Its events are `region` (a box, or None to take it away), and `close` (of the images beside the first).

    Args:
        whole: Gives a pane's whole image by its key, as a data URI, once it is zoomed into.
    """
    import gradio as gr  # here, since a report is written without it

    # A function: beside the source of a subclass of its components Gradio writes a .pyi file.
    return gr.HTML(
        "", html_template=static("viewer.html"), css_template=static("viewer.css"),
        js_on_load=static("elements.js", "evidence.js", "viewer.js", "drop.js"),
        apply_default_css=False, server_functions=[whole], elem_id="viewer",
    )  # fmt: skip


def pane(picture: NDArray[np.uint8], spec: PreprocessSpec, caption: str, key: str = "") -> dict[str, Any]:
    """An image as the viewer takes it, and where in it the model looks, in fractions.

    Args:
        picture: uint8 [H, W].
        key: Of the whole image, for zooming in.
    """
    height, width = picture.shape
    top, bottom, left, right = seen_box(height, width, spec)
    return {
        "src": picture_uri(picture), "width": width, "height": height, "caption": caption, "key": key,
        "seen": [left / width, top / height, right / width, bottom / height],
    }  # fmt: skip


def picture_uri(pixels: NDArray[np.uint8]) -> str:
    """An image uint8 [H, W] as a data URI, without loss: BMP, since to write a PNG takes longer than an answer."""
    bitmap = io.BytesIO()
    Image.fromarray(pixels).save(bitmap, "BMP")
    return data_uri(bitmap.getvalue(), "image/bmp")
