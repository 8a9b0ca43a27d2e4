"""The page as Gradio blocks, and the state that Gradio itself keeps for a visitor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gradio as gr

from cbmir.demo import build
from cbmir.demo.controls import Controls
from cbmir.demo.sessions import MOST
from cbmir.runtime import Finder


def test_no_answer_is_kept_once_the_page_is_closed(tiny_model: Path, wall_gallery: Path) -> None:
    async def visit(finder: Finder) -> tuple[int, str, list[str]]:
        blocks = build(finder)
        gr.routes.App.create_app(blocks)
        holder: Any = blocks.state_holder
        request = gr.Request(session_hash="page")

        async def ask(event: str, *inputs: Any, **said: Any) -> None:
            (asked,) = (fn for fn in blocks.fns.values() if any(target[1] == event for target in fn.targets))
            await blocks.process_api(asked, list(inputs), holder["page"], request, event_data=gr.EventData(None, said))

        await ask("load", "", f"?image={finder.gallery.ids()[0]}", "0")  # type: ignore[union-attr]
        kept = str(holder["page"].config_values)
        await ask("unload")
        return holder.capacity, kept, list(holder.session_data)

    with Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        capacity, kept, pages = asyncio.run(visit(finder))
    assert capacity == MOST
    assert "data:image/bmp" in kept
    assert pages == []


def test_a_page_that_lacks_a_picture_gets_it_again(tiny_model: Path, wall_gallery: Path) -> None:
    async def visit(finder: Finder) -> list[str | None]:
        blocks = build(finder)
        gr.routes.App.create_app(blocks)
        holder: Any = blocks.state_holder
        request = gr.Request(session_hash="page")

        async def picture(event: str, *inputs: Any, **said: Any) -> str | None:
            (asked,) = (fn for fn in blocks.fns.values() if any(target[1] == event for target in fn.targets))
            event_data = gr.EventData(None, said)
            answer = await blocks.process_api(asked, list(inputs), holder["page"], request, event_data=event_data)
            (at,) = (at for at, part in enumerate(asked.outputs) if getattr(part, "elem_id", "") == "viewer")
            (pane,) = json.loads(answer["data"][at])["panes"]
            return None if pane["src"] is None else str(pane["src"])

        controls = Controls().values()
        return [
            await picture("load", "", f"?image={finder.gallery.ids()[0]}", "0"),  # type: ignore[union-attr]
            await picture("go", "", *controls, step=1),
            await picture("again", "", *controls),
        ]

    with Finder.open(tiny_model, wall_gallery, threads=1) as finder:
        first, second, again = asyncio.run(visit(finder))
    assert first is not None and second is None and again == first
