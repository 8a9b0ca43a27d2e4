"""The wall of look-alikes, what they agree on, and words that say how common a cosine is among pairs of the gallery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.demo.markup import escape, table, thumbnail_url, unseen
from cbmir.demo.mentions import mark_mentions
from cbmir.labels import canonical, readable
from cbmir.manifest import Box
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.results import LabelAgreement, Neighbour

_SAMPLE = 400
#: Share of the gallery's pairs that are less alike, and what is said from there on.
_WORDS = ((0.999, "Nearly the same"), (0.99, "Very alike"), (0.95, "Alike"), (0.8, "Somewhat alike"))


@dataclass(frozen=True, eq=False)
class Likeness:
    """`cosines` are those between pairs of a sample of the gallery, float32, sorted; empty where it has no pair."""

    cosines: NDArray[np.float32]

    @classmethod
    def of(cls, gallery: SearchableGallery) -> Self:
        ids = gallery.ids()
        if len(ids) < 2:
            return cls(np.empty(0, np.float32))
        rows = np.random.default_rng(0).choice(len(ids), min(_SAMPLE, len(ids)), replace=False)
        vectors = np.stack([gallery.vector(ids[row]) for row in rows])
        return cls(np.sort((vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]))

    def share(self, cosine: float) -> float:
        """Share of the gallery's pairs that are less alike than this."""
        return float(np.searchsorted(self.cosines, cosine)) / max(1, len(self.cosines))

    def words(self, cosine: float) -> str:
        share = self.share(cosine)
        return next((word for least, word in _WORDS if share >= least), "Little alike")


EMPTY = '<p class="empty">Look-alikes from the gallery appear here, with their labels and reports.</p>'


def label_marks(
    query_labels: Sequence[str] | None, entry: Entry, shared: Sequence[str], *, is_asked_for: bool = False
) -> str:
    """Each label of two images with a sign and its words. `shared` are those of the entry's labels that the query has,
    however it calls them. `is_asked_for`: findings were asked for, not an image. With `query_labels` None nothing is
    known of the query, and the entry's labels stand without a sign."""
    if query_labels is None:
        having = [readable(name) + " (uncertain)" * (name in uncertain_of(entry)) for name in entry.positive]
        return f'<p class="fine-print">{escape(", ".join(having) or "No finding known of it")}</p>'
    values = {canonical(name): value for name, value in (entry.labels or {}).items()}
    theirs = {canonical(name) for name in entry.positive}
    missing = [name for name in query_labels if canonical(name) not in theirs]
    known = [name for name in missing if values.get(canonical(name)) is not None]
    groups = (
        (shared, "shared", "=", "asked for and there" if is_asked_for else "on both"),
        ([name for name in entry.positive if name not in shared], "theirs", "+", "only on the look-alike"),
        (known, "ours", "&minus;", "not on the look-alike"),
        ([name for name in missing if name not in known], "unknown", "?", "not known of it"),
    )
    uncertain = uncertain_of(entry)
    items = "".join(
        f'<li class="{kind}" title="{words}">{sign} {escape(readable(label))}'
        f"{' (uncertain)' * (label in uncertain)}{unseen(f' ({words})')}</li>"
        for labels, kind, sign, words in groups
        for label in labels
    )
    return f'<ul class="labels">{items}</ul>' if items else '<p class="fine-print">No finding on either</p>'


def uncertain_of(entry: Entry) -> frozenset[str]:
    """The labels that an image may have."""
    return frozenset(name for name, value in (entry.labels or {}).items() if value == -1)


def boxes_html(boxes: Sequence[Box]) -> str:
    """Boxes to lay over a picture, each with its label where the picture has room for it; the page shows them on
    request."""
    marks = "".join(
        f'<span class="{"low" * (box.top < 0.1)} {"left" * (box.left + box.width / 2 > 0.5)}" '
        f'style="left:{100 * box.left:.2f}%;top:{100 * box.top:.2f}%;width:{100 * box.width:.2f}%;'
        f'height:{100 * box.height:.2f}%"><b>{escape(readable(box.label))}</b></span>'
        for box in boxes
    )
    return f'<span class="boxes">{marks}</span>' if boxes else ""


def wall_html(
    neighbours: Sequence[Neighbour], entries: Sequence[Entry], query_labels: Sequence[str] | None,
    likeness: Likeness | None,
) -> str:  # fmt: skip
    """Cards, nearest first. Without `likeness` it was findings that were asked for, and not an image."""
    if not neighbours:
        return '<p class="empty">No image of the gallery passes these filters.</p>'
    reports = any(neighbour.report.strip() for neighbour in neighbours)
    cards = "".join(
        _card(rank, neighbour, entry, query_labels, likeness, reports)
        for rank, (neighbour, entry) in enumerate(zip(neighbours, entries, strict=True), 1)
    )
    return f'<ol class="wall">{cards}</ol>'


def _card(
    rank: int, neighbour: Neighbour, entry: Entry, query_labels: Sequence[str] | None, likeness: Likeness | None,
    reports: bool,
) -> str:  # fmt: skip
    """`reports` is whether any of the look-alikes has one: that this one has none is worth saying then."""
    name = escape(neighbour.id)
    asked_for = f"{len(neighbour.shared)} of {len(query_labels or ())} asked for"
    words = asked_for if likeness is None else likeness.words(neighbour.cosine)
    report = neighbour.report.strip()
    text = (
        f'<div class="report" tabindex="0" role="region" aria-label="Report of look-alike {rank}">'
        f"{mark_mentions(report, neighbour.shared)}</div>"
        if report
        else '<p class="fine-print report">No report</p>' * reports
    )
    facts = " · ".join(escape(fact) for fact in (f"patient {neighbour.patient_id}", entry.view, entry.date) if fact)
    return (
        f'<li class="card" data-id="{name}"><div class="shown">'
        f'<button type="button" class="film" data-act="compare" data-id="{name}" '
        f'aria-label="Look-alike {rank}: side by side"><img src="{escape(thumbnail_url(neighbour.id))}" alt="" '
        f'width="256" height="256" loading="lazy"><span class="rank">{rank}</span></button>'
        f'{boxes_html(neighbour.boxes)}</div><div class="facts">'
        f'<p class="likeness"><strong>{words}</strong> '
        f'<span class="number" title="Cosine of the two embeddings">{neighbour.cosine:.3f}</span></p>'
        f"{label_marks(query_labels, entry, neighbour.shared, is_asked_for=likeness is None)}"
        f'<p class="fine-print"><span class="id">{name}</span> · {facts}</p>{text}'
        f'<p class="acts"><button type="button" data-act="compare" data-id="{name}" '
        f'aria-label="Side by side: look-alike {rank}">Side by side</button>'
        f'<button type="button" data-act="like" data-id="{name}" '
        f'aria-label="More like this: look-alike {rank}">More like this</button></p></div></li>'
    )


def agreement_html(agreement: Sequence[LabelAgreement]) -> str:
    """The labels that the look-alikes have, the most agreed on first: a line, and a table behind it."""
    seen = sorted((of for of in agreement if of.positive + of.uncertain), key=lambda of: (-(of.share or 0), of.label))
    if not agreement:
        return ""
    if not seen:
        return '<p class="fine-print">None of the look-alikes has a finding marked.</p>'
    line = ", ".join(f"{escape(readable(of.label))} {100 * (of.share or 0):.0f}%" for of in seen[:4])
    rows = [
        (escape(readable(of.label)), f"{100 * (of.share or 0):.0f}%",
         *map(str, (of.positive, of.negative, of.uncertain, of.unknown)))
        for of in seen
    ]  # fmt: skip
    return (
        f"<details><summary>They agree on: {line}</summary>"
        f"{table(('Label', 'Share', 'Yes', 'No', 'Uncertain', 'Unknown'), rows)}"
        '<p class="fine-print">Share: of the look-alikes for which the label is known, those that have it or may have '
        "it; a nearer one weighs more.</p></details>"
    )
