"""How Gradio's own controls look: the colours of `static/page.css`, and fonts of the system."""

from __future__ import annotations

import gradio as gr


def theme() -> gr.themes.Base:
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
