"""The gallery laid out in the plane, as a plot by Gradio."""

from __future__ import annotations

import gradio as gr
import pandas as pd  # type: ignore[import-untyped]

from cbmir.demo.page.layout import html
from cbmir.demo.page.markup import escape, spelled
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.gallery.protocol import SearchableGallery

_SIGNS = {1: "with it", -1: "uncertain", 0: "without it", None: "not known"}
_COLOURS = {"with it": "#f0a04b", "uncertain": "#c9b458", "without it": "#3f6f8f", "not known": "#66727c"}
_NONE = "<p>This gallery has no map yet. Make one with <code>cbmir index map GALLERY</code>, and restart the demo.</p>"


def add_map(gallery: SearchableGallery, chart: GalleryProjection | None) -> None:
    """Add the plot to the blocks that are open, or say how to make the map."""
    if chart is None or not len(gallery.labels):
        html(_NONE if chart is None else "<p>This gallery has no labels to colour a map by.</p>")
        return
    names = gallery.labels.names
    label = gr.Dropdown([(spelled(name), name) for name in names], value=names[0], label="Finding", scale=0)
    plot = gr.ScatterPlot(
        points(gallery, chart, names[0]), x="x", y="y", color="finding", color_map=_COLOURS,
        tooltip=["image", "finding"], x_axis_labels_visible=False, height=560, x_title=" ", y_title=" ",
        show_label=False,
    )  # fmt: skip
    html(f"<p class='fine'>{len(chart.ids)} images by {escape(chart.method)}. Similar images are near each "
         "other; distances between far ones mean little.</p>")  # fmt: skip
    label.input(lambda name: points(gallery, chart, name), label, plot, api_visibility="private")


def points(gallery: SearchableGallery, chart: GalleryProjection, name: str) -> pd.DataFrame:
    """One row per image of the map that the gallery still has."""
    known = set(gallery.ids())
    places = {id: place for id, place in zip(chart.ids, chart.points.tolist(), strict=True) if id in known}
    signs = (_SIGNS[(entry.labels or {}).get(name)] for entry in gallery.entries(list(places)))
    rows = [(*place, sign, id) for (id, place), sign in zip(places.items(), signs, strict=True)]
    return pd.DataFrame(rows, columns=["x", "y", "finding", "image"])
