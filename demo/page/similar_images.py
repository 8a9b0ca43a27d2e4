"""Similar images as cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gradio as gr

from cbmir.demo.page.markup import data_uri, static
from cbmir.labels import canonical, spelled
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.results import Neighbour


def similar_images() -> gr.HTML:
    """Make the component that shows ranked similar images with their labels, reports and actions.

    Its value is JSON: {"step": a number, "heading", "note", "searched", "empty": texts, "chips": filters that are set,
    "cards": see `card`, "alike", "unlike", "pinned": ids, "can_refine"}.

    Its events are `compare` (ids), `like` (an id), `pin` (all ids that are pinned), `refine` (ids alike and unlike),
    `say` (an id, and 1, 0 or null), and `unfilter` (the name of a filter; empty: all filters).
    """
    return gr.HTML(
        "", html_template=static("similar_images.html"), css_template=static("similar_images.css"),
        js_on_load=static("elements.js", "similar_images.js"),
        apply_default_css=False, elem_id="similar",
    )  # fmt: skip


def card(
    rank: int, neighbour: Neighbour, entry: Entry, thumbnail: bytes | None, words: str,
    query_labels: Sequence[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """Describe a similar image in plain values, which the page inserts as text, never as HTML.

    Args:
        words: Its similarity in words.
        query_labels: The labels of the query; None if they are not known.
    """
    return {
        "rank": rank, "id": neighbour.id, "src": "" if thumbnail is None else data_uri(thumbnail), "words": words,
        "labels": label_marks(query_labels, entry, neighbour),
        "facts": " · ".join(fact for fact in (entry.view, entry.source, entry.date) if fact),
        "report": mentions(neighbour.report.strip(), neighbour.shared), "boxes": box_corners(neighbour),
        "place": neighbour.place,
    }  # fmt: skip


def mentions(report: str, labels: Sequence[str]) -> list[tuple[str, bool]]:
    """Split a report. Returns each piece, and whether it is the name of one of these labels, negated or not."""
    names = "|".join(rf"\b{re.escape(spelled(label))}\b" for label in labels)
    pieces = re.split(f"({names})", report, flags=re.IGNORECASE) if names else [report]
    return [(piece, at % 2 == 1) for at, piece in enumerate(pieces) if piece]


def box_corners(neighbour: Neighbour) -> list[list[float]]:
    """Return the boxes of its findings, as (x0, y0, x1, y1) in fractions of the image."""
    return [[box.left, box.top, box.left + box.width, box.top + box.height] for box in neighbour.boxes]


def label_marks(query_labels: Sequence[str] | None, entry: Entry, neighbour: Neighbour) -> list[dict[str, str]]:
    """Return the labels of both images, each with its kind and an explanation."""

    def texts(names: Sequence[str]) -> list[str]:
        return [spelled(name) + " (uncertain)" * (name in neighbour.uncertain) for name in names]

    if query_labels is None:
        groups = [("plain", "a label of this similar image", texts(entry.positive))]
    else:
        values = {canonical(name): value for name, value in (entry.labels or {}).items()}
        theirs = {canonical(name) for name in entry.positive}
        missing = [name for name in query_labels if canonical(name) not in theirs]
        not_there = ", ".join(spelled(name) for name in missing if values.get(canonical(name)) is not None)
        unknown = ", ".join(spelled(name) for name in missing if values.get(canonical(name)) is None)
        groups = [
            ("shared", "on both", texts([name for name in entry.positive if name in neighbour.shared])),
            ("theirs", "only on this similar image",
             texts([name for name in entry.positive if name not in neighbour.shared])),
            ("ours", "not on this similar image", [f"not: {not_there}"] if not_there else []),
            ("unknown", "not known for this similar image", [f"unknown: {unknown}"] if unknown else []),
        ]  # fmt: skip
    if not entry.positive:
        groups.insert(0, ("none", "on this similar image", [entry.without_positive]))
    return [{"text": text, "kind": kind, "words": words} for kind, words, found in groups for text in found]
