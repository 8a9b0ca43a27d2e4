"""The page as Gradio blocks, and the routes that give its scripts, the thumbnails and the map.

Gradio brings uploads, sessions and the queue; the page is a shell of our own (`static/`) and a channel to `Backend`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI, Response
from starlette.staticfiles import StaticFiles

from cbmir.demo.backend import Backend
from cbmir.demo.examples import Example
from cbmir.demo.page import STATIC, page_html
from cbmir.errors import GalleryError
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.projection import GalleryProjection
from cbmir.runtime.gallery.protocol import SearchableGallery

_CACHE = (300, 900)  # seconds: how often Gradio looks for uploads that no question took, and how old these may get
#: Gradio runs this once the shell is there. The word "ask" in it makes the event of that name.
_START = """
import(new URL("page/page.js", document.baseURI).href)
  .then((page) => page.start(element, (question) => trigger("ask", {question}), upload));
"""
#: The channel has no picture of its own; an answer is an event of the document.
_LISTEN = """
watch("value", () => document.dispatchEvent(new CustomEvent("cbmir-answer", {detail: props.value})));
"""
#: For a question that Gradio itself does not answer: a full queue, an error of its own.
_FAILED = '() => document.dispatchEvent(new Event("cbmir-failed"))'
_SIGNS = {1: "1", 0: "0", -1: "u", None: "?"}  # the last two: uncertain, not known


def build_app(finder: Finder, examples: Sequence[Example] = (), chart: GalleryProjection | None = None) -> gr.Blocks:
    """The page. One finder serves all sessions; what a session holds ends when its page is closed.

    Args:
        examples: Images that the page offers.
        chart: The gallery's map, where there is one.
    """
    blocks = gr.Blocks(title="cbmir", analytics_enabled=False, delete_cache=_CACHE, fill_width=True)
    backend = Backend(finder, examples, lambda: Path(blocks.GRADIO_CACHE), chart)

    def ask(event: gr.EventData, request: gr.Request) -> dict[str, Any]:
        return backend.answer(request.session_hash or "", event.question)

    def leave(request: gr.Request) -> None:
        backend.sessions.end(request.session_hash or "")

    with blocks:
        shell = gr.HTML(page_html(finder, examples, chart), js_on_load=_START, apply_default_css=False, elem_id="shell")
        channel = gr.HTML({}, html_template="", js_on_load=_LISTEN, apply_default_css=False, elem_id="channel")
        # One queue, one after the other: answers come in the order of the questions.
        asked = shell.ask(
            ask, None, channel, show_progress="minimal", trigger_mode="multiple", concurrency_id="page",
            concurrency_limit=1, api_visibility="private",
        )  # fmt: skip
        asked.failure(None, js=_FAILED, api_visibility="private")
        blocks.unload(leave)
    blocks.queue(max_size=64, api_open=False)
    return blocks


def add_files(app: FastAPI, gallery: SearchableGallery, chart: GalleryProjection | None) -> None:
    """Add the routes `page/…`, `thumbnail?id=…` and `map.json`. Nothing is fetched by a path."""
    app.mount("/page", StaticFiles(directory=STATIC))

    @app.get("/thumbnail")
    def thumbnail(id: str) -> Response:
        try:
            jpeg = gallery.thumbnail(id)
        except GalleryError:
            jpeg = None
        return Response(status_code=404) if jpeg is None else Response(jpeg, media_type="image/jpeg")

    @app.get("/map.json")
    def map_json() -> Response:
        if chart is None:
            return Response(status_code=404)
        return Response(json.dumps(_map(gallery, chart)), media_type="application/json")


def _map(gallery: SearchableGallery, chart: GalleryProjection) -> dict[str, Any]:
    """Points with ids, and for each of the gallery's labels a string with a sign for each point, of `_SIGNS`."""
    labels = {}
    for name in chart.ids:
        try:
            labels[name] = dict(gallery.entry(name).labels or {})
        except GalleryError:  # it was removed since the map was made
            continue
    kept = [at for at, name in enumerate(chart.ids) if name in labels]
    names = [chart.ids[at] for at in kept]
    return {
        "method": chart.method,
        "ids": names,
        "points": chart.points[kept].round(4).tolist(),
        "labels": {label: "".join(_SIGNS[labels[name].get(label)] for name in names) for label in gallery.labels.names},
    }
