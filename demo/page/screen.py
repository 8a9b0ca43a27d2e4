"""Renders a session's step as values of the page's components."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlencode

import gradio as gr
import orjson

from cbmir.demo.controls import ControlsError
from cbmir.demo.desk import Beside, Desk, labels_of
from cbmir.demo.page.alerts import alerts_html, error_html, is_grave, words_of
from cbmir.demo.page.findings import REST, WHOLE, findings_html, rounded
from cbmir.demo.page.layout import Layout
from cbmir.demo.page.markup import escape
from cbmir.demo.page.similar_images import box_corners, card, label_marks, mentions
from cbmir.demo.page.viewer import pane
from cbmir.demo.sessions import Session, Step
from cbmir.errors import CbmirError
from cbmir.labels import spelled
from cbmir.runtime.logs import error_fields
from cbmir.runtime.results import Analysis, Neighbour

log = logging.getLogger("cbmir")

Updates = dict[Any, Any]  # component -> its new value or its update
_INTERNAL = "Something went wrong on the server; its log says more. Try again, or open another image."
_EMPTY = "No image in the gallery passes these filters."


class Screen:
    def __init__(self, desk: Desk, layout: Layout) -> None:
        self._desk, self._at = desk, layout

    def answer(self, session: Session, act: Callable[[], object], *, opening: bool) -> Updates:
        """Perform an action and show the session's current step. If that fails, restore the session."""
        before = session.copy()
        try:
            act()
            return self.show(session)
        except CbmirError as error:
            log.info("Not answered: %s", type(error).__name__)  # a message may name a file, and so a patient
            why = words_of(error)
            opening = opening and not isinstance(error, ControlsError)
        except Exception as error:  # noqa: BLE001 - whatever it is, the page must say that it went wrong
            log.error("Internal error: %s", error_fields(error))
            why = _INTERNAL
        session.steps, session.shown, session.newest = before.steps, before.shown, before.newest
        session.pictures = before.pictures
        if opening:  # the previous image must not be mistaken for the new one
            session.shown = 0
            return self._blank(session, error_html(why))
        gr.Warning(escape(why))  # visible on every tab
        return {self._at.alerts: gr.skip()}

    def show(self, session: Session) -> Updates:
        """Show the session's current step, or the empty page."""
        step, at = session.step, self._at
        if step is None:
            return self._blank(session, "")
        warnings = step.analysis.warnings if step.analysis else ()
        gated = step.image.name if step.image and any(map(is_grave, warnings)) else ""
        findings = '<p class="fine">Searched by findings: there is no image to score.</p>'
        if step.analysis is not None:
            findings = WHOLE * (step.region is not None) + findings_html(
                self._desk.finder.engine.card, step.analysis, gated=gated, asked=self._desk.feedback is not None
            )
        names, cases, root = self._desk.finder.card.labels.names, session.cases(), session.trail()[0]
        case = cases.get(root.images or root.labels)
        dicom = step.image is not None and len(self._desk.whole.dicom(step.image.key)) > 0
        return {
            at.alerts: alerts_html(warnings, step.left_out),
            at.viewer: orjson.dumps(self._viewer(session, step)).decode(),
            at.similar: orjson.dumps(self._similar(session, step)).decode(),
            at.findings: findings,
            at.trail: {
                "step": step.number, "crumbs": _choices(session.trail()),
                "link": urlencode([*step.link, *step.controls.link()]) if step.link else "",
                "cases": _choices(cases.values()), "case": case and case.number,
                "images": [image.caption for image in step.images], "image": step.at,
                "has": {"step": True, "analysis": step.analysis is not None, "dicom": dicom},
            },
            at.tabs: gr.update(selected="read"),
            **{slider: dict(step.wish.findings).get(name, 0) for name, slider in zip(names, at.weights, strict=True)},
            **dict(zip(at.controls, step.controls.values(), strict=True)),
        }  # fmt: skip

    def _blank(self, session: Session, alerts: str) -> Updates:
        at, session.pictures = self._at, ()
        return {at.alerts: alerts, at.viewer: "", at.findings: REST, at.similar: "", at.trail: {}}

    def _viewer(self, session: Session, step: Step) -> dict[str, Any]:
        panes: list[dict[str, Any]] = []
        beside = self._desk.beside(step)
        spec, held = self._desk.finder.card.preprocess, session.pictures
        if step.image is not None:
            image, own = step.image, step.image.radiograph
            name = " · ".join(fact for fact in (image.caption, own.view, own.date) if fact)
            panes.append({
                **pane(image.name, image.picture, spec, name, image.key, image.about, held), "name": name, "boxes": [],
            })  # fmt: skip
            if step.analysis is not None and len(beside) == 1:
                panes[0]["cells"] = rounded(step.analysis.evidence_for_neighbour(step.compare[0]).tolist())
        panes += [self._pane(step, one, held) for one in beside]
        session.pictures = tuple(one["picture"] for one in panes)
        return {
            "panes": panes, "region": step.region, "note": "" if panes else f"Images with {step.title}",
            "maps": _maps(step.analysis) if step.analysis else {}, "boxed": any(n.boxes for n in step.neighbours),
            "grid": step.analysis and step.analysis.feature_map.shape[:0:-1],
            "names": {name: spelled(name) for name in self._desk.finder.card.labels.names},
        }  # fmt: skip

    def _pane(self, step: Step, one: Beside, held: tuple[str, ...]) -> dict[str, Any]:
        rank = next(rank for rank, n in enumerate(step.neighbours, 1) if n.id == one.neighbour.id)
        facts = (self._words(step, one.neighbour), one.neighbour.view, one.neighbour.source, one.neighbour.date)
        name = f"Similar image {rank}: {' · '.join(fact for fact in facts if fact)}"
        spec, picture = self._desk.finder.card.preprocess, f"{one.entry.id} {one.entry.sha256} {one.whole}"
        return {
            **pane(picture, one.picture, spec, one.entry.id, one.key, one.about, held), "name": name,
            "cells": None if one.evidence is None else rounded(one.evidence.tolist()),
            "labels": label_marks(labels_of(step), one.entry, one.neighbour),
            "report": mentions(one.neighbour.report.strip(), one.neighbour.shared), "boxes": box_corners(one.neighbour),
            "place": one.neighbour.place, "approximate": not one.whole,
        }  # fmt: skip

    def _similar(self, session: Session, step: Step) -> dict[str, Any]:
        gallery, labels = self._desk.gallery, labels_of(step)
        ids = [neighbour.id for neighbour in step.neighbours]
        found = zip(step.neighbours, gallery.entries(ids), gallery.thumbnails(ids), strict=True)
        cards = [
            card(rank, neighbour, entry, thumbnail, self._words(step, neighbour), labels)
            for rank, (neighbour, entry, thumbnail) in enumerate(found, 1)
        ]
        note = "of the 200 nearest, those with the most matching findings first" if step.analysis is None else ""
        heading = "Similar images" if step.analysis else f"Images with {step.title}"
        return {
            "heading": "Similar to the box" if step.region else heading, "note": note,
            "searched": step.searched, "chips": step.controls.chips(), "cards": cards, "empty": _EMPTY,
            "alike": list(step.wish.alike), "unlike": list(step.wish.unlike), "pinned": list(session.pinned),
            "can_refine": step.analysis is not None, "feedback": self._desk.feedback is not None, "step": step.number,
        }  # fmt: skip

    def _words(self, step: Step, neighbour: Neighbour) -> str:
        """Say how similar an image is to the query."""
        if step.analysis is None:
            return f"{len(neighbour.shared)} of {len(step.labels)} findings"
        return f"distance {neighbour.distance:.3f}"


def _choices(steps: Iterable[Step]) -> list[dict[str, Any]]:
    return [{"step": step.number, "text": step.title} for step in steps]


def _maps(analysis: Analysis) -> dict[str, list[list[float]]]:
    return {of.label: rounded(analysis.evidence_for_finding(of.label).tolist()) for of in analysis.findings}
