"""The demo's look: a quiet page, images on black as in a reading room, fonts of the system only."""

from __future__ import annotations

import gradio as gr

_FONTS = tuple(map(gr.themes.Font, ("system-ui", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")))
_MONO = tuple(map(gr.themes.Font, ("ui-monospace", "Consolas", "Menlo", "monospace")))


def theme() -> gr.themes.Base:
    """Gradio's bare theme with teal on slate, small type and tight spacing."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        text_size="sm",
        spacing_size="sm",
        radius_size="sm",
        font=_FONTS,
        font_mono=_MONO,
    ).set(
        body_background_fill="#f4f6f8",
        body_background_fill_dark="#0d1216",
        block_background_fill="#ffffff",
        block_background_fill_dark="#161d23",
        block_border_color="#d5dce2",
        block_border_color_dark="#2a343d",
        block_label_background_fill="#ffffff",
        block_label_background_fill_dark="#161d23",
        input_border_width="1px",
        input_border_color="#b9c4cd",
        input_border_color_dark="#3a4651",
        input_background_fill="#ffffff",
        input_background_fill_dark="#0d1216",
        slider_color="#0f766e",
        slider_color_dark="#2dd4bf",
    )


CSS = """
.gradio-container {
  --ink: #1c2730; --soft: #566573; --line: #d5dce2; --panel: #ffffff; --accent: #0f766e; --film: #05080a;
  --warn: #7a4b00; --warn-fill: #fff6e0; --bad: #9b1c1c; --bad-fill: #fdecec;
}
.gradio-container .main.app { max-width: 1560px !important; padding: 58px 16px 24px !important; }
.dark .gradio-container, .gradio-container.dark {
  --ink: #e3e9ee; --soft: #9aa9b5; --line: #2a343d; --panel: #161d23; --accent: #2dd4bf;
  --warn: #ffd58a; --warn-fill: #33270e; --bad: #ffb4b4; --bad-fill: #3a1518;
}
.gradio-container .html-container { padding: 0; color: var(--ink); overflow: visible; }
.gradio-container h2 { font-size: 15px; font-weight: 650; margin: 4px 0 2px; color: var(--ink); }

#header { position: fixed; top: 0; left: 0; right: 0; z-index: 1000; }
#header header {
  display: flex; flex-wrap: wrap; align-items: center; gap: 2px 14px; padding: 8px 16px;
  background: #0b1013; color: #e3e9ee; border-bottom: 1px solid #2a343d;
}
#header h1 { font-size: 19px; font-weight: 700; letter-spacing: .02em; margin: 0; color: #5eead4; }
#header .tagline { margin: 0; flex: 1 1 240px; color: #b7c4ce; font-size: 13px; }
#header .not-a-device {
  margin: 0; padding: 2px 10px; border: 1px solid #ffd58a; border-radius: 4px; color: #ffd58a;
  font-size: 13px; font-weight: 600;
}

#picture, #picture .image-container, #picture .image-frame { background: var(--film); }
#picture { border-color: #000; min-height: 300px; color: #9aa9b5; scroll-margin: 64px; }
#picture .image-container > button, #picture .image-frame { width: 100%; }
#picture img { width: 100%; height: auto; max-height: 600px; object-fit: contain; background: var(--film); }

#evidence input { padding-right: 22px; text-overflow: ellipsis; }

#examples .title { color: var(--soft); font-size: 13px; margin: 0 0 4px; }
.examples { display: grid; grid-template-columns: repeat(3, 1fr); gap: 6px; }
.examples button {
  padding: 0; border: 2px solid transparent; border-radius: 4px; background: var(--film); aspect-ratio: 1;
  overflow: hidden; cursor: pointer;
}
.examples img { width: 100%; height: 100%; object-fit: cover; margin: 0; }
.examples button:hover, .examples button:focus-visible { border-color: var(--accent); }

#message .message { border: 1px solid; border-left-width: 5px; border-radius: 4px; padding: 6px 12px; }
#message .warning { color: var(--warn); background: var(--warn-fill); }
#message .error { color: var(--bad); background: var(--bad-fill); overflow-wrap: anywhere; }
#message ul { margin: 2px 0 0; padding-left: 18px; list-style: disc; }
#message * { color: inherit; }

.empty { color: var(--soft); padding: 18px; border: 1px dashed var(--line); border-radius: 6px; text-align: center; }
.muted { color: var(--soft); font-size: 12px; }
.legend { color: var(--soft); font-size: 12px; margin: 4px 0; }
.number { font-variant-numeric: tabular-nums; font-size: 12px; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; }
.key.more { background: rgb(255, 140, 0); }
.key.less { background: rgb(45, 125, 255); }

.sheet {
  width: 100%; border: 0 !important; border-collapse: collapse; font-size: 13px; background: var(--panel);
  color: var(--ink);
}
.sheet th, .sheet td { padding: 4px 6px; border: 0; border-bottom: 1px solid var(--line); text-align: left; }
.sheet tr { border: 0; }
.sheet thead th { font-size: 11px; font-weight: 600; color: var(--soft); vertical-align: bottom; }
.sheet tbody th { font-weight: 500; }
.findings tr.predicted th { font-weight: 700; }
.findings .verdict { display: block; font-size: 11px; font-weight: 400; color: var(--soft); }
.findings tr.predicted .verdict { color: var(--accent); font-weight: 700; }
.findings tr.predicted .verdict::before { content: "● "; }
.sheet .probability { display: flex; align-items: center; gap: 8px; min-width: 90px; }
.sheet .bar { flex: 1; height: 10px; border: 1px solid var(--line); border-radius: 2px; overflow: hidden; }
.sheet .bar span { display: block; height: 100%; background: #7d8f9d; }
.findings tr.predicted .bar span { background: var(--accent); }
.sheet .percent { width: 34px; text-align: right; font-variant-numeric: tabular-nums; }
.agreement { max-width: 640px; }
#message .message + .message { margin-top: 6px; }

.why {
  font-size: 12px; padding: 2px 8px; border: 1px solid var(--line); border-radius: 4px; cursor: pointer;
  background: transparent; color: var(--accent);
}
.why:hover, .why:focus-visible { border-color: var(--accent); outline: 2px solid var(--accent); outline-offset: 1px; }

.neighbours {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 10px; list-style: none;
  margin: 0; padding: 0;
}
.neighbours .card {
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; overflow: hidden; margin: 0;
  display: flex; flex-direction: column;
}
.neighbours .picture {
  position: relative; background: var(--film); aspect-ratio: 1; display: grid; place-items: center;
}
.neighbours .picture img { width: 100%; height: 100%; object-fit: contain; margin: 0; border-radius: 0; }
.neighbours .rank {
  position: absolute; top: 6px; left: 6px; min-width: 22px; padding: 1px 5px; border-radius: 4px; text-align: center;
  background: #0b1013cc; color: #e3e9ee; font-size: 12px; font-weight: 700;
}
.neighbours .facts { padding: 8px 10px 10px; display: flex; flex-direction: column; gap: 3px; align-items: flex-start; }
.neighbours h3 { font-size: 13px; font-weight: 650; margin: 0; overflow-wrap: anywhere; color: var(--ink); }
.neighbours p { margin: 0; }
.neighbours .number { display: flex; flex-wrap: wrap; gap: 0 10px; }
.labels { display: flex; flex-wrap: wrap; gap: 4px; list-style: none; margin: 2px 0; padding: 0; }
.labels li {
  margin: 0; font-size: 11px; padding: 1px 6px; border: 1px solid var(--line); border-radius: 4px; position: relative;
}
.labels li.shared { border: 2px solid var(--accent); font-weight: 700; }
.report {
  white-space: pre-line; font-size: 12px; line-height: 1.4; max-height: 84px; overflow: auto; width: 100%;
  color: var(--ink);
}
@media (max-width: 520px) {
  #reading { margin-top: 36px; }
  #picture { scroll-margin: 100px; }
  .sheet th, .sheet td { padding: 4px 3px; font-size: 12px; }
  .sheet .probability { min-width: 70px; gap: 4px; }
  .neighbours { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  #header .tagline { display: none; }
  #header .not-a-device { font-size: 12px; padding: 1px 6px; }
}
"""
