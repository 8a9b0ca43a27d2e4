"""Text as HTML: whatever comes from data passes through here on its way into the page.

And what a reader sees first: doubts about the image, warnings, errors, and the findings.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from cbmir.card import WITHOUT_FINDINGS, ModelCard
from cbmir.labels import readable
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.neighbours import NOTHING_ALIKE
from cbmir.runtime.novelty import QUANTILE, Novelty
from cbmir.runtime.results import Finding, most_probable_first

#: Signs that the page's template engines would read (Handlebars, JavaScript), as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Text as HTML, in which no tag, attribute or template survives."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def thumbnail_url(name: str) -> str:
    """The address of the thumbnail of an image of the gallery."""
    return f"thumbnail?id={quote(name, safe='')}"


def image_uri(data: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def unseen(text: str) -> str:
    """Words for screen readers alone."""
    return f'<span class="unseen">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first cell of a row names it."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return f'<table class="sheet"><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>'


RESTING = '<p class="note quiet">Flags and warnings about an image appear here, before its findings.</p>'


def error_html(text: str) -> str:
    return f'<div class="note bad"><strong>Not analysed.</strong> {escape(text)}</div>'


def alerts_html(warnings: Sequence[str]) -> str:
    """Doubts about the image first, each by itself, then the other warnings, or a note that there are no warnings."""
    doubts = [warning for warning in warnings if warning == NOTHING_ALIKE or warning in SENTENCES.values()]
    flags = "".join(f'<div class="note bad"><strong>Caution.</strong> {escape(doubt)}</div>' for doubt in doubts)
    others = [warning for warning in warnings if warning not in doubts]
    items = "".join(f"<li>{escape(warning)}</li>" for warning in others)
    notes = f'<div class="note warn"><strong>Please note</strong><ul>{items}</ul></div>'
    parts = flags + (notes if others else "")
    return parts or '<p class="note fine">No warnings for this image.</p>'


def novelty_html(novelty: Novelty | None) -> str:
    """How far from the gallery the image is, in a line; None where that is not known."""
    if novelty is None:
        text = "Cannot tell whether the gallery has anything like this image: it is too small."
    else:
        text = (
            f"This image is farther from the gallery than {novelty.percentile:.1f}% of its own images; from "
            f"{100 * QUANTILE:.0f}% on it is flagged."
        )
    return f'<p class="fine-print">{text}</p>'


VERDICTS = {True: ("predicted", "● predicted"), False: ("absent", "not predicted"), None: ("open", "no threshold")}


def threshold_probability(card: ModelCard, finding: Finding) -> float | None:
    """The finding's threshold on the scale of its calibrated probability; None where either is missing."""
    calibration = card.calibration[card.labels.index(finding.label)]
    if calibration is None or finding.threshold is None:
        return None
    return calibration.probability(finding.threshold)


def findings_html(card: ModelCard, findings: Sequence[Finding] = ()) -> str:
    """Bars, most probable first, each a button that shows its evidence. Without findings, labels hold their places; an
    embedding model has none."""
    if not card.has_findings:
        return f'<p class="fine-print">{escape(WITHOUT_FINDINGS)}</p>'
    rows = [_row(finding, threshold_probability(card, finding)) for finding in most_probable_first(findings)]
    waiting = [_cells(label, "", "", "&ndash;", "", "waiting", "span") for label in card.labels.names]
    return f'<ol class="findings">{"".join(rows or waiting)}</ol>'


def _row(finding: Finding, threshold: float | None) -> str:
    kind, verdict = VERDICTS[finding.predicted]
    if finding.probability is None:
        bar, number, limit = "", f"score {finding.score:.2f}", "not calibrated"
    else:
        tick = "" if threshold is None else f'<i style="left:{100 * threshold:.1f}%"></i>'
        bar = f'<b style="width:{100 * finding.probability:.1f}%"></b>{tick}'
        number = _percent(finding.probability)
        limit = "no threshold" if threshold is None else f"from {_percent(threshold)}"
    button = f'button type="button" data-evidence="finding:{escape(finding.label)}" aria-pressed="false"'
    return _cells(finding.label, verdict, bar, number, limit, kind, button)


def _cells(label: str, verdict: str, bar: str, number: str, limit: str, kind: str, tag: str) -> str:
    return (
        f'<li><{tag} class="finding {kind}"><span class="name">{escape(readable(label))}</span>'
        f'<span class="verdict">{verdict}</span><span class="bar" aria-hidden="true">{bar}</span>'
        f'<span class="percent">{number}</span><span class="limit">{limit}</span></{tag.split()[0]}></li>'
    )


def _percent(share: float) -> str:
    """Whole per cent; what is not nothing is never shown as 0%."""
    return "&lt;1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"
