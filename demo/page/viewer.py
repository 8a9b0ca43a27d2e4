"""The viewer: one to four X-rays, their evidence, and a box drawn on the first one."""

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
    """Make the component that shows X-rays. Zoom, window and level work in the browser.

    Its value is a JSON string, because Gradio traverses other values: {"panes", "maps": finding -> cells,
    "names": finding -> its spelled name, "region": box or None, "note", "boxed": whether there are boxes to show,
    "grid": columns and rows of cells}. A pane is the result of `pane`, with `name`, its own `cells` of evidence,
    `labels`, `report`, `boxes`, and `place`. Boxes are (x0, y0, x1, y1) in fractions of the image.

    Its events are `region` (a box, or None to remove it), `close` (the images beside the first), and `again` (a picture
    that it should have is missing).

    Args:
        whole: Returns the `whole_image` of a pane by its key, when the reader zooms in or changes the window.
    """
    import gradio as gr  # imported here because reports need this module without Gradio

    # Not a subclass: Gradio writes a .pyi file next to the source of each subclass.
    return gr.HTML(
        "", html_template=static("viewer.html"), css_template=static("viewer.css"),
        js_on_load=static("elements.js", "evidence.js", "pane.js", "tools.js", "viewer.js", "drop.js"),
        apply_default_css=False, server_functions=[whole], elem_id="viewer",
    )  # fmt: skip


def pane(
    name: str, picture: NDArray[np.uint8], spec: PreprocessSpec, caption: str, key: str, about: dict[str, Any],
    held: Container[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Describe an image for the viewer, with the part that the model sees, in fractions.

    Args:
        name: The picture's name. Pictures that the page already has (`held`) are not sent again, as they make up nearly
            all of an answer.
        picture: uint8 [H, W].
        key: The key of the whole image; empty if the picture shows everything.
        about: The result of `about_image` for the whole image.
    """
    height, width = picture.shape
    top, bottom, left, right = seen_box(height, width, spec)
    return {
        "picture": name, "src": None if name in held else picture_uri(picture), "width": width, "height": height,
        "caption": caption, "key": key, "seen": [left / width, top / height, right / width, bottom / height], **about,
    }  # fmt: skip


def about_image(radiograph: Radiograph) -> dict[str, Any]:
    """Return a file's size in pixels ("size") and in mm ("mm"), the plane in which the mm are measured ("where"),
    whether it has more grey values than its picture ("deep"), and the patient's sides at its edges ("sides")."""
    whole, spacing = radiograph.reduction or radiograph.stored, radiograph.spacing
    rows, columns = whole.shape
    about = {"size": [columns, rows], "mm": None, "where": "", "deep": radiograph.values is not None,
             "sides": radiograph.sides}  # fmt: skip
    if spacing is not None:
        about |= {"mm": [columns * spacing.column, rows * spacing.row], "where": spacing.where}
    return about


def whole_image(radiograph: Radiograph) -> dict[str, Any]:
    """Encode an image with all its pixels and values: only {"src"} if it has at most 256 greys, else also "values" and
    the window of its picture ("low", "high", "inverted", "edge").

    Each pixel stores the rank of its value among the values present, the high byte in red and the low byte in green,
    because browsers decode only 8 bits of grey. "values" are float32 in the order of ranks, little-endian, as base64;
    padding has the rank after the last one.
    """
    stored, values = radiograph.stored, radiograph.values
    if values is None:
        return {"src": picture_uri(look_up(radiograph.greys, stored))}
    present = np.flatnonzero(counted(stored, len(values.of_stored)))
    known, ranks = np.unique(values.of_stored[present], return_inverse=True)  # NaN is sorted last
    rank = np.zeros(len(values.of_stored), np.uint16)
    rank[present] = ranks
    high, low = (Image.fromarray(look_up(part.astype(np.uint8), stored)) for part in (rank >> 8, rank & 255))
    known = known[~np.isnan(known)].astype("<f4")
    png = io.BytesIO()  # a third of the size of a bitmap
    picture = Image.merge("RGB", (high, low, Image.new("L", high.size)))
    picture.save(png, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return {
        "src": data_uri(png.getvalue(), "image/png"),
        "values": base64.b64encode(known.tobytes()).decode(), "low": values.low, "high": values.high,
        "inverted": values.inverted, "edge": values.edge,
    }  # fmt: skip


def picture_uri(pixels: NDArray[np.uint8]) -> str:
    """Encode uint8 [H, W] as a lossless data URI: a BMP, because encoding a PNG takes longer than an answer."""
    bitmap = io.BytesIO()
    Image.fromarray(pixels).save(bitmap, "BMP")
    return data_uri(bitmap.getvalue(), "image/bmp")
