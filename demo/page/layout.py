"""Where everything is on the page: Gradio's components, and our two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from cbmir.card import NOT_A_DEVICE, OF_PHANTOMS
from cbmir.demo.controls import MOST_NEIGHBOURS
from cbmir.demo.desk import Desk
from cbmir.demo.examples import Example
from cbmir.demo.page.about import card_html
from cbmir.demo.page.findings import REST
from cbmir.demo.page.markup import escape, image_uri, spelled, static
from cbmir.demo.page.similar_images import similar_images
from cbmir.demo.page.viewer import viewer

#: A click on a row chooses the finding whose evidence the viewer draws; the viewer listens on the page.
_CHOOSE = """
element.addEventListener("click", (event) => {
  const row = event.target.closest("[data-finding]");
  if (row) document.dispatchEvent(new CustomEvent("cbmir-explain", {detail: row.dataset.finding}));
});
document.addEventListener("cbmir-explained", ({detail}) => {
  for (const row of element.querySelectorAll("[data-finding]")) {
    row.setAttribute("aria-pressed", row.dataset.finding === detail);
  }
});
"""


@dataclass(frozen=True, eq=False)
class Layout:
    """The components that listeners read and change; `controls` are in the order of the fields of `Controls`."""

    tabs: gr.Tabs
    files: gr.UploadButton
    trail: gr.HTML
    member: gr.Dropdown
    report: gr.Button
    alerts: gr.HTML
    viewer: gr.HTML
    start: gr.Column
    offers: gr.Dataset
    filters: gr.Column
    similar: gr.HTML
    refining: gr.Accordion
    weights: list[gr.Slider]
    rank: gr.Button
    findings: gr.HTML
    wanted: gr.CheckboxGroup
    find: gr.Button
    controls: list[Any]


def html(value: Any, **options: Any) -> gr.HTML:
    return gr.HTML(value, apply_default_css=False, **options)


def lay_out(desk: Desk, whole: Callable[[Any], str | None], add_map: Callable[[], None]) -> Layout:
    """Put the page into the blocks that are open. `add_map` fills the tab of the map."""
    card, gallery = desk.finder.card, desk.gallery
    own = [(spelled(name), name) for name in card.labels.names]
    points = list(card.operating_points) or [desk.finder.operating_point]
    if OF_PHANTOMS in card.notes:
        html(f'<p id="phantoms" role="alert">{escape(OF_PHANTOMS)}</p>')
    html(static("bar.html").replace("DEVICE", escape(NOT_A_DEVICE)), elem_id="bar",
         js_on_load=static("bar.js"))  # fmt: skip
    with gr.Tabs(elem_id="tabs", selected="read") as tabs:
        with gr.Tab("Read", id="read"):
            with gr.Row(elem_id="way"):
                files = gr.UploadButton("Open an X-ray", file_count="multiple", variant="primary", size="sm", scale=0)
                trail = html({}, html_template='<nav aria-label="Steps"></nav>', elem_id="trail",
                             js_on_load=static("trail.js"))  # fmt: skip
                member = gr.Dropdown([], visible=False, container=False, label="Image of the study", elem_id="member")
                report = gr.Button("Report", size="sm", scale=0, visible=False)
            alerts = html("", elem_id="alerts")
            with gr.Row(elem_id="desk"):
                with gr.Column(elem_id="film"):
                    film = viewer(whole)
                with gr.Column(elem_id="found"):
                    with gr.Column(elem_id="start", visible=bool(desk.examples)) as start:
                        html("<h2>Or begin with an example</h2>")
                        offers = gr.Dataset(
                            components=[gr.HTML(visible=False)], show_label=False, type="index", layout="gallery",
                            samples=[[example_html(one)] for one in desk.examples], samples_per_page=6,
                        )  # fmt: skip
                    with gr.Column(visible=False, elem_id="filters") as filters:
                        controls = search_controls(gallery.info(), gallery.labels.names)
                    similar = similar_images(visible=not desk.examples)
                    with gr.Accordion("Rank again by findings", open=False, visible=False) as refining:
                        html('<p class="fine">To the right: towards images with the finding. To the left: away from '
                             "them.</p>")  # fmt: skip
                        with gr.Row(elem_id="weights"):
                            weights = [gr.Slider(-1, 1, 0, step=0.1, label=name, min_width=200) for name, _ in own]
                        rank = gr.Button("Rank again", size="sm")
                with gr.Column(elem_id="answers"):
                    html("<h2>Findings</h2>", visible=card.has_findings)
                    controls.append(gr.Radio(
                        [(name.capitalize(), name) for name in points], value=desk.finder.operating_point,
                        container=False, label="Operating point", elem_id="point",
                        visible=card.has_findings and len(points) > 1,
                    ))  # fmt: skip
                    findings = html(REST, js_on_load=_CHOOSE, elem_id="findings")
        with (
            gr.Tab("By findings", id="search", elem_id="search", visible=card.has_findings),
            gr.Column(elem_classes="text"),
        ):
            html("<p>Finds images of the gallery that show these findings: those with most of them first, then the "
                 "nearest.</p>")  # fmt: skip
            wanted = gr.CheckboxGroup(own, label="Findings")
            find = gr.Button("Find images", variant="primary", scale=0)
        with gr.Tab("Map", id="map"), gr.Column(elem_classes="text"):
            add_map()
        with gr.Tab("Model", id="about"):
            html(card_html(card), elem_classes="text")
    return Layout(tabs, files, trail, member, report, alerts, film, start, offers, filters, similar, refining, weights,
                  rank, findings, wanted, find, controls)  # fmt: skip


def search_controls(counts: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """All but the operating point, with how many images of the gallery there are of each kind."""
    having = counts.get("labels", {})
    labels = [(f"{spelled(name)} ({having[name]})" if name in having else spelled(name), name) for name in names]
    views = [(f"{view} ({count})", view) for view, count in counts.get("views", {}).items() if view]
    first, last = counts.get("days") or ("", "")
    with gr.Row():
        k = gr.Slider(1, MOST_NEIGHBOURS, 20, step=1, label="Similar images")
        view = gr.Dropdown([("any", ""), *views], value="", label="View", visible=len(views) > 0)
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
    return [k, with_, without, where, view, since, until, exclude, patient]


def example_html(example: Example) -> str:
    caption = escape(example.caption)
    return f'<img src="{image_uri(example.thumbnail)}" alt="Example: {caption}"><span>{caption}</span>'
