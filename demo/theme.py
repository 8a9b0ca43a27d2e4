"""Gradio's part of the look: its bare theme, with fonts of the system only. The page's own is `static/style.css`."""

from __future__ import annotations

import gradio as gr

_FONTS = tuple(map(gr.themes.Font, ("system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")))
_MONO = tuple(map(gr.themes.Font, ("ui-monospace", "Consolas", "Menlo", "monospace")))


def theme() -> gr.themes.Base:
    """For what Gradio itself shows: the place in the queue."""
    return gr.themes.Base(primary_hue="teal", neutral_hue="slate", text_size="sm", font=_FONTS, font_mono=_MONO)
