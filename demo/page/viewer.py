"""The viewer: one to four X-rays, their evidence, and a box that is drawn on the first of them."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.page.markup import data_uri, static
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import seen_box
from cbmir.runtime.imaging.radiograph import Radiograph, counted, look_up

if TYPE_CHECKING:
    import gradio as gr


def viewer(whole: Callable[[Any], dict[str, Any] | None]) -> gr.HTML:
    """X-rays on black, with zoom, window and level, all of it in the browser.

    Its value is JSON, since Gradio walks through anything else: {"panes", "maps": a finding -> cells,
    "names": a finding -> its name, "region": box or None, "note", "boxed": whether there are boxes to show,
    "grid": columns and rows of cells}. A pane is what `pane` makes, with `name`, its own `cells` of evidence, `labels`,
    `report`, `boxes`, and `place`. Boxes are (x0, y0, x1, y1) in fractions of the image.

    Its events are `region` (a box, or None to take it away), `close` (of the images beside the first), and `again`,
    where it lacks a picture that it should have.

    Args:
        whole: Gives a pane's whole image by its key, as `whole_image` makes it, once it is zoomed into or windowed.
    """
    import gradio as gr  # here, since a report is written without it

    # A function: beside the source of a subclass of its components Gradio writes a .pyi file.
    return gr.HTML(
        "", html_template=static("viewer.html"), css_template=static("viewer.css"),
        js_on_load=static("elements.js", "evidence.js", "pane.js", "tools.js", "viewer.js", "drop.js"),
        apply_default_css=False, server_functions=[whole], elem_id="viewer",
    )  # fmt: skip


def pane(
    name: str, picture: NDArray[np.uint8], spec: PreprocessSpec, caption: str, key: str, about: dict[str, Any],
    held: Container[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """An image as the viewer takes it, and where in it the model looks, in fractions.

    Args:
        name: Of the picture. Those that are `held` by the page go without: it is nearly all of an answer.
        picture: uint8 [H, W].
        key: Of the whole image; empty where the picture is all there is.
        about: What `about_image` says of the whole image.
    """
    height, width = picture.shape
    top, bottom, left, right = seen_box(height, width, spec)
    return {
        "picture": name, "src": None if name in held else picture_uri(picture), "width": width, "height": height,
        "caption": caption, "key": key, "seen": [left / width, top / height, right / width, bottom / height], **about,
    }  # fmt: skip


def about_image(radiograph: Radiograph) -> dict[str, Any]:
    """How many pixels the file has across and down, how many mm these are, in which plane ("mm", "where"), and whether
    there is more to window than its picture."""
    (rows, columns), spacing = radiograph.stored.shape, radiograph.spacing
    about = {"size": [columns, rows], "mm": None, "where": "", "deep": radiograph.values is not None}
    if spacing is not None:
        about |= {"mm": [columns * spacing.column, rows * spacing.row], "where": spacing.where}
    return about


def whole_image(radiograph: Radiograph) -> dict[str, Any]:
    """An image in all its pixels and values: {"src"} alone where its 256 greys are all, else with "values" and the
    window ("low", "high", "inverted", "edge") that its picture was made by.

    A pixel is the rank of its value among those present, the high byte red and the low one green: a browser decodes no
    more than 8 bits of grey. "values" are float32 by rank, little-endian, as base64; padding has the rank after them.
    """
    stored, values = radiograph.stored, radiograph.values
    if values is None:
        return {"src": picture_uri(look_up(radiograph.greys, stored))}
    present = np.flatnonzero(counted(stored, len(values.of_stored)))
    known, ranks = np.unique(values.of_stored[present], return_inverse=True)  # NaN comes last
    rank = np.zeros(len(values.of_stored), np.uint16)
    rank[present] = ranks
    high, low = (Image.fromarray(look_up(part.astype(np.uint8), stored)) for part in (rank >> 8, rank & 255))
    known = known[~np.isnan(known)].astype("<f4")
    png = io.BytesIO()  # a third of a bitmap, which would be three times that of the greys
    picture = Image.merge("RGB", (high, low, Image.new("L", high.size)))
    picture.save(png, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return {
        "src": data_uri(png.getvalue(), "image/png"),
        "values": base64.b64encode(known.tobytes()).decode(), "low": values.low, "high": values.high,
        "inverted": values.inverted, "edge": values.edge,
    }  # fmt: skip


def picture_uri(pixels: NDArray[np.uint8]) -> str:
    """An image uint8 [H, W] as a data URI, without loss: BMP, since to write a PNG takes longer than an answer."""
    bitmap = io.BytesIO()
    Image.fromarray(pixels).save(bitmap, "BMP")
    return data_uri(bitmap.getvalue(), "image/bmp")
