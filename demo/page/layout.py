"""The layout of the page: Gradio's components and our own, and the theme.

Answers show and hide parts by the classes of `page.css`, because Gradio rebuilds a component for each `gr.update`.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
import pandas as pd  # type: ignore[import-untyped]

from cbmir.card import NOT_A_DEVICE, OF_PHANTOMS
from cbmir.demo.controls import MOST_NEIGHBOURS
from cbmir.demo.desk import Desk
from cbmir.demo.examples import Example
from cbmir.demo.page.about import card_html
from cbmir.demo.page.findings import REST
from cbmir.demo.page.markup import data_uri, escape, static
from cbmir.demo.page.similar_images import similar_images
from cbmir.demo.page.viewer import viewer
from cbmir.labels import spelled
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.gallery.protocol import SearchableGallery

_SIGNS = {1: "with it", -1: "uncertain", 0: "without it", None: "not known"}
_COLOURS = {"with it": "#f0a04b", "uncertain": "#c9b458", "without it": "#3f6f8f", "not known": "#66727c"}
_NONE = "<p>This gallery has no map yet. Make one with <code>cbmir index map GALLERY</code>, and restart the demo.</p>"


def html(value: Any, **options: Any) -> gr.HTML:
    return gr.HTML(value, apply_default_css=False, **options)


class Layout:
    """The components that event listeners use. `controls` has the order of the fields of `Controls`."""

    def __init__(self, desk: Desk, chart: GalleryProjection | None, rule: str = "") -> None:
        """Add the page to the current blocks. `rule` says how the examples were chosen."""

        def whole(key: Any) -> dict[str, Any] | None:
            return desk.whole.show(key[0] if isinstance(key, list) and key else key)

        card, gallery = desk.finder.card, desk.gallery
        own = [(spelled(name), name) for name in card.labels.names]
        points = list(card.operating_points) or [desk.finder.operating_point]
        if OF_PHANTOMS in card.notes:
            html(f'<p id="phantoms" role="alert">{escape(OF_PHANTOMS)}</p>')
        html(static("bar.html").replace("DEVICE", escape(NOT_A_DEVICE)), elem_id="bar",
             js_on_load=static("bar.js"))  # fmt: skip
        with gr.Tabs(elem_id="tabs", selected="read") as self.tabs:
            with gr.Tab("Read", id="read"):
                with gr.Row(elem_id="way"):
                    self.files = gr.UploadButton("Open an X-ray", file_count="multiple", variant="primary", size="sm")
                    self.trail = html({}, html_template=static("trail.html"), elem_id="trail",
                                      js_on_load=static("elements.js", "trail.js"))  # fmt: skip
                    self.report = gr.Button("Download report", size="sm", scale=0, elem_id="report")
                    self.dicom = gr.Button("DICOM SR + SC", size="sm", scale=0, elem_id="dicom")
                self.alerts = html("", elem_id="alerts")
                with gr.Row(elem_id="desk"):
                    with gr.Column(elem_id="film"):
                        self.viewer = viewer(whole)
                    with gr.Column(elem_id="found"):
                        with gr.Column(elem_id="start", visible=bool(desk.examples)):
                            html(f'<h2>Or start with an example</h2><p class="fine">{escape(rule)}</p>')
                            self.offers = gr.Dataset(
                                components=[gr.HTML(visible=False)], show_label=False, type="index", layout="gallery",
                                samples=[[example_html(one)] for one in desk.examples], samples_per_page=6,
                            )  # fmt: skip
                        with gr.Accordion("Filters", open=False, elem_id="filters"):
                            self.controls = search_controls(gallery.info(), gallery.labels.names)
                        self.similar = similar_images()
                    with gr.Column(elem_id="answers"):
                        html("<h2>Findings</h2>", visible=card.has_findings)
                        self.controls.append(gr.Radio(
                            [(name.capitalize(), name) for name in points], value=desk.finder.operating_point,
                            container=False, label="Operating point", elem_id="point",
                            visible=card.has_findings and len(points) > 1,
                        ))  # fmt: skip
                        self.findings = html(REST, js_on_load=static("findings.js"), elem_id="findings")
                        with gr.Accordion("Rank by findings", open=False, visible=card.has_findings, elem_id="weigh"):
                            html('<p class="fine">Right: towards images with the finding. Left: away from them.</p>')
                            self.weights = [gr.Slider(-1, 1, 0, step=0.1, label=name, buttons=[]) for name, _ in own]
                            self.rank = gr.Button("Rank again", size="sm")
            with (
                gr.Tab("By findings", id="search", elem_id="search", visible=card.has_findings),
                gr.Column(elem_classes="text"),
            ):
                html("<p>Finds images in the gallery that show these findings: those with the most of them first, then "
                     "the nearest.</p>")  # fmt: skip
                self.wanted = gr.CheckboxGroup(own, label="Findings")
                self.find = gr.Button("Find images", variant="primary", scale=0)
            with gr.Tab("Map", id="map"), gr.Column(elem_classes="text"):
                add_map(gallery, chart)
            with gr.Tab("Model", id="about"):
                html(card_html(card), elem_classes="text")


def search_controls(counts: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Make all controls except the operating point, with the number of gallery images for each choice."""
    having = counts.get("labels", {})
    labels = [(f"{spelled(name)} ({having[name]})" if name in having else spelled(name), name) for name in names]

    def choice(label: str, of: dict[str, int]) -> gr.Dropdown:
        choices = [(f"{name} ({count})", name) for name, count in of.items() if name]
        return gr.Dropdown([("any", ""), *choices], value="", label=label, visible=len(choices) > 0)

    first, last = counts.get("days") or ("", "")
    with gr.Row():
        k = gr.Slider(1, MOST_NEIGHBOURS, 20, step=1, label="Similar images")
        view, source = choice("View", counts.get("views", {})), choice("Source", counts.get("sources", {}))
    with gr.Row():
        with_, without = (
            gr.Dropdown(labels, multiselect=True, label=label) for label in ("With", "Known to be without")
        )
    where = gr.Textbox(label="Expression", placeholder="Effusion and not (Mass or Nodule)", max_lines=1)
    with gr.Row(visible=bool(last)):
        since = gr.Textbox(label="From day", placeholder=first or "YYYY-MM-DD", max_lines=1)
        until = gr.Textbox(label="Until day", placeholder=last or "YYYY-MM-DD", max_lines=1)
    with gr.Row():
        exclude = gr.Checkbox(True, label="Leave the same patient out")
        patient = gr.Textbox(label="Patient id, if the file has none", max_lines=1)
    return [k, with_, without, where, view, source, since, until, exclude, patient]


def example_html(example: Example) -> str:
    caption = escape(example.caption)
    return f'<img src="{data_uri(example.thumbnail)}" alt="Example: {caption}"><span>{caption}</span>'


def add_map(gallery: SearchableGallery, chart: GalleryProjection | None) -> None:
    """Add the map to the current blocks, or a note on how to make it."""
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
         "other; large distances mean little.</p>")  # fmt: skip
    label.input(lambda name: points(gallery, chart, name), label, plot, api_visibility="private")


def points(gallery: SearchableGallery, chart: GalleryProjection, name: str) -> pd.DataFrame:
    """Make one row per image of the map, without those that the gallery no longer has."""
    known = set(gallery.ids())
    places = {id: place for id, place in zip(chart.ids, chart.points.tolist(), strict=True) if id in known}
    signs = (_SIGNS[(entry.labels or {}).get(name)] for entry in gallery.entries(list(places)))
    rows = [(*place, sign, id) for (id, place), sign in zip(places.items(), signs, strict=True)]
    return pd.DataFrame(rows, columns=["x", "y", "finding", "image"])


def theme() -> gr.themes.Base:
    """Make a theme with the colours of `static/page.css` and the system's fonts."""
    look = gr.themes.Base(
        primary_hue="teal", neutral_hue="slate", text_size="sm", spacing_size="sm", radius_size="sm",
        font=[gr.themes.Font("system-ui"), gr.themes.Font("sans-serif")],
        font_mono=[gr.themes.Font("ui-monospace"), gr.themes.Font("monospace")],
    )  # fmt: skip
    colours = {
        "body_background_fill": "ground", "background_fill_primary": "panel", "background_fill_secondary": "panel",
        "block_background_fill": "panel", "panel_background_fill": "panel", "body_text_color": "ink",
        "block_label_text_color": "soft", "block_title_text_color": "soft", "body_text_color_subdued": "soft",
        "border_color_primary": "line", "block_border_color": "line", "input_background_fill": "ground",
        "input_border_color": "line", "input_placeholder_color": "soft", "button_secondary_background_fill": "panel",
        "button_secondary_background_fill_hover": "line", "button_secondary_text_color": "ink",
        "button_primary_background_fill": "accent", "button_primary_background_fill_hover": "accent",
        "button_primary_text_color": "on-accent", "slider_color": "accent",
        "border_color_accent": "accent", "checkbox_label_background_fill": "panel", "table_text_color": "ink",
        "checkbox_background_color": "ground", "checkbox_background_color_selected": "accent",
    }  # fmt: skip
    values = {f"{name}{dark}": f"var(--{colour})" for name, colour in colours.items() for dark in ("", "_dark")}
    return look.set(**values, color_accent="var(--accent)")
