"""The endpoints for `gradio_client`: the page's actions with plain values. Each client has its own session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import gradio as gr
from gradio import events

from cbmir.demo.controls import Controls
from cbmir.demo.desk import Desk
from cbmir.demo.page.alerts import words_of
from cbmir.demo.sessions import Session, Sessions, Step, Wish
from cbmir.errors import CbmirError


def told(act: Callable[..., Any]) -> Callable[..., Any]:
    """Report cbmir's own errors to the visitor. Gradio hides the messages of all others."""

    @wraps(act)
    def answering(*given: Any) -> Any:
        try:
            return act(*given)
        except CbmirError as error:
            raise gr.Error(words_of(error), print_exception=False) from error

    return answering


def add_endpoints(desk: Desk, sessions: Sessions) -> None:
    """Add the endpoints to the current blocks."""

    def controls(k: int, where: str, view: str = "") -> Controls:
        given = Controls(k=k, where=where, view=view, point=desk.finder.operating_point)
        return Controls.of(given.values())

    def answer(step: Step | None) -> dict[str, Any]:
        """Return the answer without the gallery's paths and patients: its images are ids."""
        assert step is not None  # endpoints never return to the empty page
        neighbours = [
            {
                "id": one.id, "cosine": one.cosine, "distance": one.distance, "labels": list(one.labels),
                "shared": list(one.shared), "uncertain": list(one.uncertain), "report": one.report,
                "place": one.place, "boxes": [asdict(box) for box in one.boxes],
            }
            for one in step.neighbours
        ]  # fmt: skip
        if step.analysis is None:
            return {"findings_searched": list(step.labels), "neighbours": neighbours}
        whole = step.analysis.to_json()
        kept = ("findings", "agreement", "novelty", "warnings", "operating_point")
        return {**{name: whole[name] for name in kept}, "region": step.region, "neighbours": neighbours}

    def session_of(request: gr.Request) -> Session:
        return sessions.get(request.session_hash or "")

    def analyze(
        request: gr.Request, image: gr.FileData, k: int = 10, where: str = "", view: str = ""
    ) -> dict[str, Any]:
        """Analyse a chest X-ray: its findings and similar images.

        Args:
            image: PNG, JPEG, TIFF or DICOM, or a zip file of a study, whose first image is analysed.
            k: How many similar images.
            where: Only images with these labels, such as "Effusion and not Mass".
            view: Only images of this view, such as "PA".

        Returns:
            Findings, similar images, warnings. The image stays with this client for the other endpoints.
        """
        return answer(desk.open(session_of(request), controls(k, where, view), [dict(image)["path"]]))

    def search_by_findings(
        request: gr.Request, findings: list[str], k: int = 10, where: str = "", view: str = ""
    ) -> dict[str, Any]:
        """Search for images with these findings: those with the most of them first, then the nearest.

        Args:
            findings: Names of the model's findings.
            k: How many images.
            where: Only images with these labels.
            view: Only images of this view.

        Returns:
            Similar images.
        """
        return answer(desk.by_findings(session_of(request), controls(k, where, view), findings))

    def search_by_region(
        request: gr.Request, x0: float, y0: float, x1: float, y1: float, k: int = 10, where: str = ""
    ) -> dict[str, Any]:
        """Search for images that are similar to a part of the image that was last analysed.

        Args:
            x0: Left edge, in fractions of the image's width.
            y0: Upper edge, in fractions of its height.
            x1: Right edge.
            y1: Lower edge.
            k: How many similar images.
            where: Only images with these labels.

        Returns:
            As `/analyze`; the findings remain those of the whole image.
        """
        return answer(desk.region(session_of(request), controls(k, where), (x0, y0, x1, y1)))

    def refine(
        request: gr.Request, alike: list[str], unlike: list[str], findings: dict[str, float], k: int = 10,
        where: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Rank again by images marked as alike or not alike, and by findings.

        Args:
            alike: Ids of images that are similar to the query.
            unlike: Ids of images that are not.
            findings: Weights from -1 (away from) to 1 (towards) by finding.
            k: How many similar images.
            where: Only images with these labels.

        Returns:
            As `/analyze`.
        """
        wish = Wish(tuple(alike), tuple(unlike), tuple(findings.items()))
        return answer(desk.refine(session_of(request), controls(k, where), wish))

    def report(request: gr.Request, finding: str = "") -> str:
        """Make the report on the image that was last analysed.

        Args:
            finding: The finding whose evidence is drawn; by default the most probable one.

        Returns:
            One self-contained HTML page.
        """
        return desk.report(session_of(request), finding)

    for endpoint in (analyze, search_by_findings, search_by_region, refine, report):
        events.api(told(endpoint), api_name=endpoint.__name__, concurrency_id="page", concurrency_limit=1)
