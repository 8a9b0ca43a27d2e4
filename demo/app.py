"""The page as Gradio blocks: a shell of our own, and a channel on which it asks and is answered.

Gradio brings the uploads, the sessions, and the queue, whose position it shows. What is on the page and what it does is
`static/` (plain JavaScript and CSS, as they are); what it is told comes from `room`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from cbmir.demo.examples import Example
from cbmir.demo.page import page_html
from cbmir.demo.room import Room
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.projection import GalleryProjection

#: Seconds: how often uploads that nobody asked about are looked for, and how old these may get.
_CACHE = (300, 900)
#: Gradio runs this once the shell is there. The word "ask" in it makes the event of that name.
_START = """
import(new URL("room/room.js", document.baseURI).href)
  .then((room) => room.start(element, (question) => trigger("ask", question), upload));
"""
#: The channel has no picture of its own; an answer is an event of the document.
_LISTEN = """
watch("value", () => document.dispatchEvent(new CustomEvent("cbmir-answer", {detail: props.value})));
"""
#: What Gradio itself could not have answered: a full queue, an error of its own.
_FAILED = '() => document.dispatchEvent(new Event("cbmir-failed"))'


def build_app(finder: Finder, examples: Sequence[Example] = (), chart: GalleryProjection | None = None) -> gr.Blocks:
    """One finder serves all sessions; what a session holds ends when its page is closed."""
    app = gr.Blocks(title="cbmir", analytics_enabled=False, delete_cache=_CACHE, fill_width=True)
    room = Room(finder, examples, lambda: Path(app.GRADIO_CACHE), chart)

    def ask(event: gr.EventData, request: gr.Request) -> dict[str, Any]:
        return room.answer(request.session_hash or "", event._data)

    def leave(request: gr.Request) -> None:
        room.sessions.end(request.session_hash or "")

    with app:
        shell = gr.HTML(page_html(finder, examples, chart), js_on_load=_START, apply_default_css=False, elem_id="shell")
        channel = gr.HTML({}, html_template="", js_on_load=_LISTEN, apply_default_css=False, elem_id="channel")
        # One queue, one after the other: answers come in the order of the questions.
        asked = shell.ask(
            ask, None, channel, show_progress="minimal", trigger_mode="multiple", concurrency_id="page",
            concurrency_limit=1, api_visibility="private",
        )  # fmt: skip
        asked.failure(None, js=_FAILED, api_visibility="private")
        app.unload(leave)
    app.queue(max_size=64, api_open=False)
    return app
