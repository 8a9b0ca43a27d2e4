"""Findings, neighbours and messages as HTML. Whatever comes from data is escaped; nothing is told by colour alone."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from cbmir.card import NOT_A_DEVICE
from cbmir.demo.examples import Example
from cbmir.runtime.agreement import LabelAgreement
from cbmir.runtime.finder import NOTHING_ALIKE
from cbmir.runtime.novelty import QUANTILE, Novelty
from cbmir.runtime.result import Finding, Neighbour

NOT_AVAILABLE = "not available"
#: Signs that the page's own template engines would read (Handlebars, JavaScript), as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Text as HTML, in which no tag, attribute or template survives."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def readable(label: str) -> str:
    """A label as people write it."""
    return label.replace("_", " ")


def header_html() -> str:
    """The page's name, and what it must never be taken for."""
    return (
        '<header><h1>cbmir</h1><p class="tagline">Chest X-rays that are alike, and the findings they show</p>'
        f'<p class="not-a-device" role="note">{escape(NOT_A_DEVICE)}</p></header>'
    )


def examples_html(examples: Sequence[Example]) -> str:
    """A button with a thumbnail for each example, whose key is its position."""
    buttons = "".join(
        f'<button type="button" data-key="{position}" title="{escape(example.caption)}">'
        f'<img src="{_jpeg_uri(example.thumbnail)}" alt="Example {escape(example.caption)}"></button>'
        for position, example in enumerate(examples)
    )
    return f'<p class="title">Or choose an example</p><div class="examples">{buttons}</div>'


def message_html(warnings: Sequence[str], error: str = "") -> str:
    """An error or the warnings; empty where there is nothing to say. Screen readers announce what is put there.

    That nothing in the gallery looks like the image stands by itself, before the other warnings.
    """
    if error:
        return f'<div class="message error"><strong>Not analysed.</strong> {escape(error)}</div>'
    strange = ""
    if NOTHING_ALIKE in warnings:
        strange = f'<div class="message error"><strong>Caution.</strong> {escape(NOTHING_ALIKE)}</div>'
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings if warning != NOTHING_ALIKE)
    notes = f'<div class="message warning"><strong>Please note</strong><ul>{items}</ul></div>' if items else ""
    return strange + notes


def findings_html(findings: Sequence[Finding]) -> str:
    """A table, most probable first; findings without a calibrated probability last, by their scores."""
    if not findings:
        return '<p class="empty">Findings appear here.</p>'
    ordered = sorted(
        findings, key=lambda f: (f.probability is None, -(f.score if f.probability is None else f.probability), f.label)
    )
    rows = "".join(_finding_row(finding) for finding in ordered)
    return (
        '<table class="sheet findings"><thead><tr><th scope="col">Finding</th>'
        '<th scope="col">Calibrated probability</th><th scope="col">Score</th>'
        '<th scope="col">Threshold</th><th scope="col">Evidence</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
        '<p class="legend">Predicted: the score is above the threshold that was chosen on validation data.</p>'
    )


def _finding_row(finding: Finding) -> str:
    verdict = {True: "predicted", False: "not predicted", None: "no verdict"}[finding.predicted]
    if finding.probability is None:
        probability = f'<span class="muted">{NOT_AVAILABLE}</span>'
    else:
        percent = 100 * finding.probability
        probability = (
            f'<span class="bar" aria-hidden="true"><span style="width:{percent:.1f}%"></span></span>'
            f'<span class="percent">{percent:.0f}%</span>'
        )
    threshold = NOT_AVAILABLE if finding.threshold is None else f"{finding.threshold:.3f}"
    label = readable(finding.label)
    button = _evidence_button(f"finding:{finding.label}", "show", label)
    return (
        f'<tr class="{verdict.replace(" ", "-")}">'
        f'<th scope="row">{escape(label)} <span class="verdict">{verdict}</span></th>'
        f'<td><span class="probability">{probability}</span></td><td class="number">{finding.score:.3f}</td>'
        f'<td class="number">{threshold}</td><td>{button}</td></tr>'
    )


def search_text(k: int, *, excluded: bool, known: bool) -> str:
    """What was searched for: `excluded` is what was asked for, `known` whether the image's patient is."""
    if excluded and not known:
        return f"k = {k}; same patient NOT left out, since it is not known"
    return f"k = {k}; same patient {'left out' if excluded else 'NOT left out'}"


def neighbours_html(neighbours: Sequence[Neighbour], thumbnails: Mapping[str, bytes | None], search: str = "") -> str:
    """Cards, nearest first, with the gallery's own thumbnails (JPEG bytes by id) inside the page, under the search."""
    if not neighbours:
        return '<p class="empty">Neighbours appear here.</p>'
    cards = "".join(_card(rank, n, thumbnails.get(n.id)) for rank, n in enumerate(neighbours, 1))
    legend = f"{escape(search)}{'. ' if search else ''}✓ marks labels shared with this image."
    return f'<p class="legend">{legend}</p><ol class="neighbours">{cards}</ol>'


def _card(rank: int, neighbour: Neighbour, thumbnail: bytes | None) -> str:
    name = escape(neighbour.id)
    picture = '<span class="muted">no picture</span>'
    if thumbnail is not None:
        picture = f'<img src="{_jpeg_uri(thumbnail)}" alt="X-ray {name}">'
    button = _evidence_button(f"neighbour:{neighbour.id}", "show evidence", f"neighbour {rank}")
    labels = "".join(
        f'<li class="shared">✓ {escape(readable(label))}<span class="unseen"> (shared)</span></li>'
        if label in neighbour.shared
        else f"<li>{escape(readable(label))}</li>"
        for label in neighbour.labels
    )
    labels = f'<ul class="labels">{labels}</ul>' if labels else '<p class="muted">No finding marked</p>'
    report = neighbour.report.strip()
    if report:
        report = f'<p class="report" tabindex="0" role="region" aria-label="Report of {name}">{escape(report)}</p>'
    else:
        report = '<p class="muted">No report</p>'
    return (
        f'<li class="card"><div class="picture">{picture}<span class="rank">{rank}</span></div><div class="facts">'
        f"<h3>{name}</h3>"
        f'<p class="muted">Patient {escape(neighbour.patient_id)}</p>'
        f'<p class="number"><span>distance {neighbour.distance:.3f}</span> '
        f"<span>cosine {neighbour.cosine:.3f}</span></p>"
        f"{labels}{report}{button}</div></li>"
    )


def agreement_html(agreement: Sequence[LabelAgreement]) -> str:
    """A table of the labels that some neighbour has, the most agreed on first; empty without neighbours."""
    if not agreement:
        return ""
    seen = [of for of in agreement if of.positive + of.uncertain]
    if not seen:
        return '<p class="legend">None of the neighbours has a finding marked.</p>'
    rows = "".join(_agreement_row(of) for of in sorted(seen, key=lambda of: (-(of.share or 0), of.label)))
    return (
        '<table class="sheet agreement"><thead><tr><th scope="col">Label of the neighbours</th>'
        '<th scope="col">Share</th><th scope="col">Yes</th><th scope="col">No</th>'
        '<th scope="col">Uncertain</th><th scope="col">Unknown</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>"
        '<p class="legend">Share: of the neighbours for which the label is known, those that have it or may have it; '
        "a nearer one weighs more.</p>"
    )


def _agreement_row(of: LabelAgreement) -> str:
    percent = 100 * (of.share or 0)
    counts = "".join(f'<td class="number">{n}</td>' for n in (of.positive, of.negative, of.uncertain, of.unknown))
    return (
        f'<tr><th scope="row">{escape(readable(of.label))}</th><td><span class="probability">'
        f'<span class="bar" aria-hidden="true"><span style="width:{percent:.1f}%"></span></span>'
        f'<span class="percent">{percent:.0f}%</span></span></td>{counts}</tr>'
    )


def novelty_html(novelty: Novelty | None) -> str:
    """How far from the gallery the image is, in a line; None is what cannot be told."""
    if novelty is None:
        return '<p class="legend">Cannot tell whether the gallery has anything like this image: it is too small.</p>'
    return (
        f'<p class="legend">This image is farther from the gallery than {novelty.percentile:.1f}% of its own images; '
        f"from {100 * QUANTILE:.0f}% on, nothing in it looks like this image.</p>"
    )


def evidence_html(cosine: float | None) -> str:
    """How to read the picture; `cosine` is the sum of the evidence shown, None where none is."""
    if cosine is None:
        return '<p class="legend">Choose a finding or a neighbour to see which parts of the image speak for it.</p>'
    return (
        '<p class="legend"><span class="key more" aria-hidden="true"></span>orange: more than an even share · '
        '<span class="key less" aria-hidden="true"></span>blue: less · inside the frame: what the model '
        f"sees. Exact: all cells sum to the cosine, {cosine:.3f}.</p>"
    )


def _jpeg_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def _evidence_button(key: str, text: str, what: str) -> str:
    aloud = f"{text} evidence for {what}" if text == "show" else f"{text} for {what}"
    return f'<button type="button" class="why" data-key="{escape(key)}" aria-label="{escape(aloud)}">{text}</button>'
