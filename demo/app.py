"""The page: what is on it, and what happens when something is dropped, chosen or moved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from cbmir.demo.examples import Example
from cbmir.demo.rendering import (
    agreement_html,
    evidence_html,
    examples_html,
    findings_html,
    header_html,
    message_html,
    neighbours_html,
    novelty_html,
    search_text,
)
from cbmir.demo.study import NO_CHOICE, PLAIN, Study, Upload
from cbmir.errors import CbmirError
from cbmir.runtime.finder import Finder
from cbmir.runtime.reading import read_image

log = logging.getLogger("cbmir")

#: Seconds: how often the cache is swept, and how old a file or a session's image may get.
_CACHE = (300, 900)
#: Sessions whose image is kept; beyond that, that of the one longest unused goes.
_SESSIONS = 64
#: A screen reader announces what is put into an element only where the element was there before.
_ANNOUNCED = 'element.setAttribute("aria-live", "polite");'
#: A click on a button in the HTML tells Python which one it was.
_ON_CLICK = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("[data-key]");
  if (!button) return;
  trigger("click", {key: button.dataset.key, at: performance.now()});
  document.getElementById("picture")?.scrollIntoView({block: "nearest"});
});
"""


def build_app(finder: Finder, examples: Sequence[Example] = ()) -> gr.Blocks:
    """The page as Gradio blocks. All state is of the browser's session; one finder serves all sessions."""
    app = gr.Blocks(title="cbmir", analytics_enabled=False, delete_cache=_CACHE, fill_width=True)
    app.state_session_capacity = _SESSIONS
    with app:
        loaded = gr.State(None, time_to_live=_CACHE[1])
        study = gr.State(None, time_to_live=_CACHE[1])
        newest = gr.State(0.0)  # when the last example that was read had been clicked, by the page's clock
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
                message = gr.HTML("", js_on_load=_ANNOUNCED, elem_id="message")
                gr.HTML("<h2>Findings</h2>")
                findings = gr.HTML(findings_html(()), js_on_load=_ON_CLICK, elem_id="findings")
        gr.HTML("<h2>Nearest neighbours</h2>")
        agreement = gr.HTML("", elem_id="agreement")
        neighbours = gr.HTML(neighbours_html((), {}), js_on_load=_ON_CLICK, elem_id="neighbours")

        def failed(error: CbmirError, path: str = "") -> dict[Any, Any]:
            """Empty results and a message, which names the file but not where the server keeps it."""
            log.info("Not analysed: %s", type(error).__name__)  # the message names a file, and that perhaps a patient
            text = str(error).replace(path, Path(path).name) if path else str(error)
            return blank() | {message: message_html((), text)}

        def blank() -> dict[Any, Any]:
            return {
                loaded: None, study: None, picture: None, message: "", findings: findings_html(()),
                neighbours: neighbours_html((), {}), agreement: "", choice: gr.update(choices=[NO_CHOICE], value=PLAIN),
                explanation: evidence_html(None),
            }  # fmt: skip

        def read(path: str) -> dict[Any, Any]:
            """A new image is of a new patient: the field is emptied."""
            try:
                return {loaded: Upload.of(read_image(path), finder.card.preprocess), patient: ""}
            except CbmirError as error:
                return failed(error, path) | {patient: ""}

        def read_example(newest_at: float, event: gr.EventData) -> Any:
            if event.at < newest_at:  # two requests at once may arrive in either order
                return gr.skip()
            return read(str(examples[int(event.key)].path)) | {upload: None, newest: event.at}

        def analyse(image: Upload | None, k: int, exclude: bool, patient_id: str) -> Any:
            if image is None:  # not read, or no longer kept
                return gr.skip()
            patient_id = patient_id.strip()
            query, gallery = image.radiograph, finder.gallery
            try:
                analysis = finder.analyze(query, int(k), patient_id=patient_id or None, exclude_same_patient=exclude)
                pictures = {n.id: gallery.thumbnail(n.id) if gallery is not None else None for n in analysis.neighbours}
                known = bool(
                    patient_id or query.patient_id.strip() or (gallery is not None and gallery.find(query.sha256))
                )
            except CbmirError as error:
                return failed(error)
            result = Study(analysis, image.picture, finder.card.preprocess)
            search = search_text(int(k), excluded=exclude, known=known)
            return {
                study: result,
                picture: result.picture(PLAIN, 0),
                message: message_html(analysis.warnings),
                findings: findings_html(analysis.findings),
                neighbours: neighbours_html(analysis.neighbours, pictures, search),
                agreement: agreement_html(analysis.agreement)
                + ("" if gallery is None else novelty_html(analysis.novelty)),
                choice: gr.update(choices=result.choices(), value=PLAIN),
                explanation: evidence_html(None),
            }

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

        results = [loaded, study, picture, message, findings, neighbours, agreement, choice, explanation]
        # All events wait in one queue: answers come in the order of the questions, and the last one stays on the page.
        quiet: dict[str, Any] = {
            "api_visibility": "private", "show_progress": "hidden", "concurrency_id": "page", "concurrency_limit": 1,
        }  # fmt: skip
        shown = quiet | {"show_progress": "minimal", "show_progress_on": [picture]}
        # Gradio's own choice, "once", drops an event while one of its kind is on its way. "always_last" asks again
        # with the newest values of the controls; a click must not wait so, for its key would be that of the first.
        every: dict[str, Any] = {"trigger_mode": "multiple"}
        last: dict[str, Any] = {"trigger_mode": "always_last"}
        controls = [loaded, k, exclude, patient]
        uploaded = upload.upload(read, upload, [*results, patient], **shown, **every)
        clicked = strip.click(read_example, newest, [*results, patient, upload, newest], **shown, **every)
        for reading in (uploaded, clicked):
            reading.then(analyse, controls, results, **shown, **last)
        gr.on([k.release, exclude.input, patient.submit], analyse, controls, results, **shown, **last)
        upload.clear(blank, None, results, **quiet, **every)
        gr.on([choice.change, opacity.release], explain, [study, choice, opacity], [picture, explanation],
              **quiet, **last)  # fmt: skip
        gr.on([findings.click, neighbours.click], chosen, None, choice, **quiet, **every)
    app.queue(max_size=32, api_open=False)
    return app
