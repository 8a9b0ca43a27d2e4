"""The page as Gradio's blocks: what Gradio itself keeps of a visitor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gradio as gr

from cbmir.demo import build
from cbmir.demo.sessions import MOST
from cbmir.runtime import Finder


def test_nothing_of_an_answer_is_kept_once_the_page_is_closed(tiny_model: Path, wall_gallery: Path) -> None:
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
