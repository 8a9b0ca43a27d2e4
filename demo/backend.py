"""The server's answers to the questions that the page asks.

A question is a JSON object with its number `n`, an `action`, what that needs, and `about`: the number of the question
that put the image on the page, 0 without one. An answer has the parts of the page that change, as HTML by their ids,
what the viewer draws, and the `about` of the image that all of it belongs to, with its picture unless the page has it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.demo import markup, similar_images
from cbmir.demo.examples import Example
from cbmir.demo.markup import RESTING, escape, thumbnail_url
from cbmir.demo.mentions import mark_mentions
from cbmir.demo.page import map_note
from cbmir.demo.report import report_html
from cbmir.demo.sessions import Controls, Session, Sessions, View, members_html
from cbmir.demo.similar_images import Likeness, uncertain_of
from cbmir.demo.uploads import MOST_FILES, Upload, read_uploads
from cbmir.errors import CbmirError, GalleryError, ImageError, UserError
from cbmir.labels import readable
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.projection import NEAREST, GalleryProjection
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.logs import error_fields
from cbmir.runtime.results import Analysis, Neighbour

log = logging.getLogger("cbmir")

Question = Mapping[str, Any]
Answer = dict[str, Any]
Step = tuple[View | None, Answer]  # what the page shows from then on, and the answer
_OPENING = ("open", "example")
_NEW = (*_OPENING, "like", "findings")  # need nothing of what is on the page
_PUTTING = (*_NEW, "member")  # put an image, or findings, on the page
_MOST_AROUND = 2_000  # nearest look-alikes among which those that are on the map are looked for
_EXACT = 0.002  # within which a neighbour's map sums to the cosine if made from the gallery's very image
_FROM_THUMBNAIL = (
    "This image's file is gone or was changed since it came into the gallery: it was analysed from its thumbnail, so "
    "findings and look-alikes are approximate."
)
_STRANGE = "nothing in the gallery is like it"
_NOT_NEAR = "none of its nearest look-alikes is on it"
_FORGOTTEN = "This page was left for long, or its connection broke: its image is forgotten. Open it again."
_NO_SUCH = "The gallery has no answer: there is no such image in it any more, or it cannot be read."
_INTERNAL = "An internal error, which the server's log tells more of. Ask anew, or open another image."


class Backend:
    def __init__(
        self, finder: Finder, examples: Sequence[Example], uploads: Callable[[], Path],
        chart: GalleryProjection | None = None,
    ) -> None:  # fmt: skip
        """`uploads` names the folder for uploads, which is known once the server runs."""
        if finder.gallery is None:
            raise UserError("expected a finder with a gallery, found none")
        self.finder, self.gallery = finder, finder.gallery
        self.sessions = Sessions()
        self._examples, self._uploads, self._chart = examples, uploads, chart
        self._likeness = Likeness.of(self.gallery)
        self._actions: dict[str, Callable[[View | None, Question], Step]] = {
            "open": self._open, "example": self._example, "member": self._member, "search": self._search,
            "like": self._like, "findings": self._findings, "compare": self._compare, "report": self._report,
        }  # fmt: skip

    def answer(self, name: str, question: Any) -> Answer:
        """Answer a question of the session of this name. Never raises: what went wrong is said on the page."""
        asked: Question = question if isinstance(question, Mapping) else {}
        session = self.sessions.get(name)
        try:
            answer = self._answered(session, asked)
        except CbmirError as error:
            log.info("Not answered: %s", type(error).__name__)  # the message names a file, and that perhaps a patient
            answer = self._failed(session, asked, _NO_SUCH if isinstance(error, GalleryError) else str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the page must not wait for ever
            log.error("Internal error: %s", error_fields(error))
            answer = self._failed(session, asked, _INTERNAL)
        about = 0 if session.view is None else session.view.about
        return {"n": asked.get("n"), "action": asked.get("action"), "about": about, **answer}

    def _answered(self, session: Session, asked: Question) -> Answer:
        number, action = asked.get("n"), str(asked.get("action"))
        act = self._actions.get(action)
        if act is None or not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UserError("expected a question that this page can ask, found another")
        puts = action in _PUTTING
        if number < (session.opened if puts else session.newest):  # questions may arrive in either order
            return {"action": "late"}
        if not session.newest and asked.get("about") and action not in _NEW:
            return {"action": "gone", **self._blank(_FORGOTTEN)}
        session.newest = max(number, session.newest)
        session.opened = number if puts else session.opened
        session.view, answer = act(session.view, asked)  # all of it, or nothing where this raises
        return answer

    def _failed(self, session: Session, asked: Question, why: str) -> Answer:
        """The page stays as it is; but where an image was to be opened, the one before must not be taken for it."""
        if asked.get("action") not in _OPENING:
            return {"action": "error", "html": {"errors": markup.error_html(why)}}
        session.view = None
        return {"action": "error", **self._blank(why)}

    # What puts an image on the page.

    def _open(self, view: View | None, asked: Question) -> Step:
        paths, more = asked.get("paths"), asked.get("more", 0)
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths) or not isinstance(more, int):
            raise UserError("expected uploaded files, found something else")
        images, left_out = read_uploads(paths, self._uploads(), self._upload)
        if more > 0:
            left_out.append(f"{more} more files were not sent: {MOST_FILES} at a time are")
        return self._search(View(asked["n"], tuple(images), left_out=tuple(left_out)), asked)

    def _upload(self, data: bytes, name: str) -> Upload:
        return Upload.of(replace(self.finder.read(data), name=name), self.finder.card.preprocess)

    def _example(self, view: View | None, asked: Question) -> Step:
        example = _pick(self._examples, asked.get("at"), "example")
        try:
            radiograph = self.finder.read(example.path)
        except ImageError as error:  # whose message names the file's place on the server
            raise UserError(f"{example.caption}: expected this example's file, found it gone or changed") from error
        upload = Upload.of(radiograph, self.finder.card.preprocess, f"Example {example.caption}")
        return self._search(View(asked["n"], (upload,)), asked)

    def _member(self, view: View | None, asked: Question) -> Step:
        if view is None:
            return None, {"action": "idle"}
        _pick(view.images, asked.get("at"), "image of the study")
        return self._search(replace(view, about=asked["n"], at=asked["at"]), asked)

    def _like(self, view: View | None, asked: Question) -> Step:
        """Ask about an image of the gallery. Its file is analysed where it is still there; shown is its thumbnail."""
        entry = self.gallery.entry(str(asked.get("id")))
        image, thumbnail, whole = self._of_gallery(entry)
        known = replace(image, sha256=entry.sha256, patient_id="", name=entry.id)  # the gallery knows whose it is
        upload = Upload.of(known, self.finder.card.preprocess).showing(
            thumbnail, f"Gallery image {entry.id} (thumbnail)", *([] if whole else [_FROM_THUMBNAIL])
        )
        return self._search(View(asked["n"], (upload,)), asked)

    def _findings(self, view: View | None, asked: Question) -> Step:
        labels = asked.get("labels")
        names = self.finder.card.labels.names
        if not isinstance(labels, list) or not labels or not all(label in names for label in labels):
            raise UserError("expected one or several of the model's findings, found others")
        return self._search(View(asked["n"], labels=tuple(dict.fromkeys(labels))), asked)

    # What is asked about the image that is there.

    def _search(self, view: View | None, asked: Question) -> Step:
        """The answer about a view, and its picture with it unless the page has that already."""
        if view is None:
            return None, {"action": "idle"}
        controls = Controls.of(asked.get("controls"), self.gallery.labels)
        image = view.image
        view, answer = self._by_findings(view, controls) if image is None else self._by_image(view, image, controls)
        if asked.get("about") != view.about:
            answer["picture"] = None if image is None else image.for_page(self.finder.card.preprocess)
            answer["html"]["members"] = members_html(view)
        return view, answer

    def _by_image(self, view: View, image: Upload, controls: Controls) -> tuple[View, Answer]:
        analysis = self.finder.analyze(
            image.radiograph, controls.k, patient_id=controls.patient or None, exclude_same_patient=controls.exclude,
            filter=controls.filter,
        )  # fmt: skip
        analysis = replace(analysis, warnings=(*analysis.warnings, *image.warnings))
        strange = analysis.novelty is not None and analysis.novelty.flagged
        known = bool(controls.patient or image.radiograph.patient_id.strip() or analysis.known)
        unsure = {name for one in analysis.known for name in uncertain_of(self.gallery.entry(one))}
        labels = ", ".join(readable(name) + " (uncertain)" * (name in unsure) for name in analysis.query_labels)
        source = "known" if analysis.known else "predicted"
        of_image = f"; this image: {labels or 'no finding'} ({source})" if analysis.labels_known else ""
        searched = controls.text(known=known) + of_image
        place = None if strange else self._place(
            lambda count: [(hit.entry.id, hit.distance) for hit in self.gallery.search(analysis.embedding, count).hits]
        )  # fmt: skip
        view = replace(view, analysis=analysis, neighbours=analysis.neighbours, searched=searched)
        return view, {
            "html": {
                "alerts": markup.alerts_html(analysis.warnings),
                "findings": markup.findings_html(self.finder.card, analysis.findings),
                "novelty": markup.novelty_html(analysis.novelty),
                "agreement": similar_images.agreement_html(analysis.agreement),
                "wall": self._wall(analysis.neighbours, _labels_of(analysis), self._likeness),
                "search": escape(searched),
                "map-note": map_note(self._chart, "" if place else _STRANGE if strange else _NOT_NEAR),
            },
            # Every finding's map: small enough to go along, so that choosing one needs no question.
            "evidence": {
                f"finding:{f.label}": _cells(readable(f.label), analysis.evidence_for_finding(f.label))
                for f in analysis.findings
            },
            "place": place,
        }  # fmt: skip

    def _by_findings(self, view: View, controls: Controls) -> tuple[View, Answer]:
        neighbours = self.finder.search_by_findings(view.labels, controls.k, filter=controls.filter)
        place = self._place(
            lambda count: [(one.id, one.distance) for one in self.finder.search_by_findings(view.labels, count)]
        )
        said = " + ".join(readable(label) for label in view.labels)
        searched = f"{said}; {controls.text(known=None)}"
        note = f'<p class="note fine">No image: the gallery is asked for what shows <b>{escape(said)}</b>.</p>'
        return replace(view, neighbours=neighbours, searched=searched), {
            "html": self._blank_html(
                alerts=note, wall=self._wall(neighbours, view.labels, None), search=escape(searched),
            ) | {"map-note": map_note(self._chart, "" if place else _NOT_NEAR)},
            "evidence": {},
            "place": place,
        }  # fmt: skip

    def _compare(self, view: View | None, asked: Question) -> Step:
        """Two images side by side: which cells of each make it like the other, and which labels they share."""
        view, name = _shown(view, asked), str(asked.get("id"))
        neighbour = next((one for one in view.neighbours if one.id == name), None)
        if neighbour is None:
            raise UserError("expected a look-alike that is on the page, found another; ask anew")
        analysis, entry = view.analysis, self.gallery.entry(name)
        labels = view.labels if analysis is None else _labels_of(analysis)
        answer: Answer = {
            "id": name, "src": thumbnail_url(name), "title": f"Gallery image {name}", "here": None, "there": None,
            "exact": True,
            "labels": similar_images.label_marks(labels, entry, neighbour.shared, is_asked_for=not analysis),
            "report": mark_mentions(neighbour.report.strip(), neighbour.shared) or "No report",
        }  # fmt: skip
        if analysis is not None:
            image, _, whole = self._of_gallery(entry)
            there = self.finder.evidence_towards(image, analysis.embedding)
            answer |= {
                "here": _cells("this image", analysis.evidence_for_neighbour(name)),
                "there": _cells("the look-alike", there),
                "exact": whole and abs(float(there.sum()) - neighbour.cosine) < _EXACT,
                "title": f"{self._likeness.words(neighbour.cosine)}: cosine {neighbour.cosine:.3f}, more alike than "
                f"{100 * self._likeness.share(neighbour.cosine):.1f}% of pairs in the gallery",
            }
        return view, {"compare": answer}

    def _report(self, view: View | None, asked: Question) -> Step:
        view = _shown(view, asked)
        if view.analysis is None or view.image is None:
            raise UserError("expected an analysed image to report on, found none")
        chosen = str(asked.get("chosen", "")).removeprefix("finding:")
        label = chosen if chosen in self.finder.card.labels.names else ""
        html = report_html(self.finder.card, self.gallery, view.image, view.analysis, view.searched, label=label)
        return view, {"download": {"name": "cbmir-report.html", "html": html}}

    # Parts of answers.

    def _wall(self, neighbours: Sequence[Neighbour], labels: Sequence[str] | None, likeness: Likeness | None) -> str:
        entries = [self.gallery.entry(one.id) for one in neighbours]
        return similar_images.wall_html(neighbours, entries, labels, likeness)

    def _place(self, nearest: Callable[[int], Sequence[tuple[str, float]]]) -> tuple[float, float] | None:
        """A place on the map. `nearest` finds so many of the whole gallery: twice as many as must be on the map."""
        if self._chart is None:
            return None
        count = math.ceil(2 * NEAREST * len(self.gallery) / len(self._chart.ids))
        return self._chart.place(nearest(min(_MOST_AROUND, count)))

    def _of_gallery(self, entry: Entry) -> tuple[Radiograph, NDArray[np.uint8], bool]:
        """An image of the gallery: to analyse, to show, and whether the first is of its file, not of its thumbnail."""
        jpeg = self.gallery.thumbnail(entry.id)
        thumbnail = None if jpeg is None else self.finder.read(jpeg)
        try:
            image = self.finder.read(entry.image)
            whole = image.sha256 == entry.sha256 or not entry.sha256
        except ImageError:
            whole = False
        if whole:
            return image, (thumbnail or image).pixels, True
        if thumbnail is None:
            raise UserError(f"{entry.id}: expected its file or a thumbnail, found neither")
        return thumbnail, thumbnail.pixels, False

    def _blank(self, why: str) -> Answer:
        return {"html": self._blank_html(errors=markup.error_html(why)), "picture": None, "evidence": {}, "place": None}

    def _blank_html(self, **parts: str) -> dict[str, str]:
        """Every part of the page as it is without an image, but for `parts`."""
        return {
            "alerts": RESTING, "findings": markup.findings_html(self.finder.card), "novelty": "", "agreement": "",
            "wall": similar_images.EMPTY, "members": "", "search": "", "map-note": map_note(self._chart), **parts,
        }  # fmt: skip


def _labels_of(analysis: Analysis) -> Sequence[str] | None:
    """The labels of the image that was analysed; None where nothing is known of it."""
    return analysis.query_labels if analysis.labels_known else None


def _cells(name: str, evidence: NDArray[np.float32]) -> dict[str, Any]:
    """An evidence map [h, w] as the page takes it, and what its cells sum to."""
    return {"name": name, "cells": np.round(evidence.astype(float), 6).tolist(), "sum": float(evidence.sum())}


def _pick(items: Sequence[Any], at: Any, what: str) -> Any:
    if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < len(items):
        raise UserError(f"expected an {what}, found none of this number")
    return items[at]


def _shown(view: View | None, asked: Question) -> View:
    """The view, where it is what the page shows."""
    if view is None or view.about != asked.get("about"):
        raise UserError("expected a question about the image on the page, found one about another; ask anew")
    return view
