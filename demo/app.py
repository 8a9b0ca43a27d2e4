"""The page: what is on it, and what happens when something is dropped, chosen or moved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from cbmir.demo.examples import Example
from cbmir.demo.rendering import (
    evidence_html,
    examples_html,
    findings_html,
    header_html,
    message_html,
    neighbours_html,
)
from cbmir.demo.study import NO_CHOICE, PLAIN, Study, picture_of
from cbmir.errors import CbmirError
from cbmir.runtime.finder import Finder
from cbmir.runtime.radiograph import Radiograph
from cbmir.runtime.reading import read_image

log = logging.getLogger("cbmir")

#: Seconds: how often the cache is swept, and how old a file or a session's image may get.
_CACHE = (600, 3600)
#: A click on a button in the HTML tells Python which one it was.
_ON_CLICK = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-key]");
  if (!button) return;
  trigger("click", {key: button.dataset.key});
  document.getElementById("picture").scrollIntoView({block: "nearest"});
});
"""


def build_app(finder: Finder, examples: Sequence[Example] = ()) -> gr.Blocks:
    """The page as Gradio blocks. All state is of the browser's session; one finder serves all sessions."""
    app = gr.Blocks(title="cbmir", analytics_enabled=False, delete_cache=_CACHE, fill_width=True)
    with app:
        radiograph = gr.State(None, time_to_live=_CACHE[1])
        study = gr.State(None, time_to_live=_CACHE[1])
        gr.HTML(header_html(), elem_id="header")
        with gr.Row(elem_id="reading"):
            with gr.Column(scale=3, min_width=260, elem_id="sources"):
                upload = gr.File(label="Chest X-ray: PNG, JPEG, TIFF or DICOM", height=150, elem_id="upload")
                strip = gr.HTML(
                    examples_html(examples), js_on_load=_ON_CLICK, visible=bool(examples), elem_id="examples"
                )
                k = gr.Slider(1, 30, value=10, step=1, label="Neighbours (k)", elem_id="k")
                exclude = gr.Checkbox(True, label="Exclude the same patient", elem_id="exclude")
                patient = gr.Textbox(
                    label="Patient id (optional)", info="As the gallery names patients; Enter applies it.",
                    max_lines=1, elem_id="patient",
                )  # fmt: skip
            with gr.Column(scale=5, min_width=300, elem_id="viewer"):
                picture = gr.Image(
                    label="X-ray", show_label=False, format="png", interactive=False, buttons=["fullscreen"],
                    elem_id="picture", alt_text="The analysed X-ray, with the evidence that was chosen",
                )  # fmt: skip
                with gr.Row():
                    choice = gr.Dropdown([NO_CHOICE], value=PLAIN, label="Evidence for",
                                         min_width=180, elem_id="evidence")  # fmt: skip
                    opacity = gr.Slider(0, 1, value=0.6, step=0.05, label="Opacity", min_width=160, elem_id="opacity")
                explanation = gr.HTML(evidence_html(None), elem_id="explanation")
            with gr.Column(scale=5, min_width=300, elem_id="answers"):
                message = gr.HTML("", elem_id="message")
                gr.HTML("<h2>Findings</h2>")
                findings = gr.HTML(findings_html(()), js_on_load=_ON_CLICK, elem_id="findings")
        gr.HTML("<h2>Nearest neighbours</h2>")
        neighbours = gr.HTML(neighbours_html((), {}), js_on_load=_ON_CLICK, elem_id="neighbours")

        def failed(error: CbmirError, path: str = "") -> dict[Any, Any]:
            """Empty results and a message, which names the file but not where the server keeps it."""
            log.info("Not analysed: %s", type(error).__name__)  # the message names a file, and that perhaps a patient
            text = str(error).replace(path, Path(path).name) if path else str(error)
            return blank() | {message: message_html((), text)}

        def blank() -> dict[Any, Any]:
            return {
                radiograph: None, study: None, picture: None, message: "", findings: findings_html(()),
                neighbours: neighbours_html((), {}), choice: gr.update(choices=[NO_CHOICE], value=PLAIN),
                explanation: evidence_html(None),
            }  # fmt: skip

        def analyse(image: Radiograph | None, k: int, exclude: bool, patient_id: str) -> dict[Any, Any]:
            if image is None:
                return {radiograph: None}
            try:
                analysis = finder.analyze(
                    image, int(k), patient_id=patient_id.strip() or None, exclude_same_patient=exclude
                )
                gallery = finder.gallery
                pictures = {n.id: gallery.thumbnail(n.id) if gallery is not None else None for n in analysis.neighbours}
            except CbmirError as error:
                return failed(error)
            result = Study(analysis, picture_of(image.pixels), finder.card.preprocess)
            return {
                radiograph: image,
                study: result,
                picture: result.picture(PLAIN, 0),
                message: message_html(analysis.warnings),
                findings: findings_html(analysis.findings),
                neighbours: neighbours_html(analysis.neighbours, pictures),
                choice: gr.update(choices=result.choices(), value=PLAIN),
                explanation: evidence_html(None),
            }

        def read(path: str, k: int, exclude: bool) -> dict[Any, Any]:
            """A new image is of a new patient: the field is emptied."""
            try:
                image = read_image(path)
            except CbmirError as error:
                return failed(error, path) | {patient: ""}
            return analyse(image, k, exclude, "") | {patient: ""}

        def read_example(k: int, exclude: bool, event: gr.EventData) -> dict[Any, Any]:
            return read(str(examples[int(event.key)].path), k, exclude) | {upload: None}

        def explain(current: Study | None, key: str, opacity: float) -> dict[Any, Any]:
            if current is None:
                return {explanation: evidence_html(None)}
            try:
                evidence = current.evidence(key)
            except CbmirError as error:  # a click on what another image has just replaced
                raise gr.Error(str(error), print_exception=False) from error
            return {
                picture: current.picture(key, opacity),
                explanation: evidence_html(None if evidence is None else float(evidence.sum())),
            }

        def chosen(event: gr.EventData) -> str:
            return str(event.key)

        results = [radiograph, study, picture, message, findings, neighbours, choice, explanation]
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        shown: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal", "show_progress_on": [picture]}
        upload.upload(read, [upload, k, exclude], [*results, patient], **shown)
        upload.clear(blank, None, results, **quiet)
        strip.click(read_example, [k, exclude], [*results, patient, upload], **shown)
        gr.on([k.release, exclude.input, patient.submit], analyse, [radiograph, k, exclude, patient], results, **shown)
        gr.on([choice.change, opacity.release], explain, [study, choice, opacity], [picture, explanation], **quiet)
        gr.on([findings.click, neighbours.click], chosen, None, choice, **quiet)
    app.queue(default_concurrency_limit=2, max_size=32, api_open=False)
    return app
