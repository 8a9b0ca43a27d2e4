"""The findings as a list of bars, each of which is a button that lays its evidence over the image."""

from __future__ import annotations

from collections.abc import Sequence

from cbmir.card import ModelCard
from cbmir.demo.markup import escape
from cbmir.labels import readable
from cbmir.runtime.results import Finding, most_probable_first

VERDICTS = {True: ("predicted", "● predicted"), False: ("absent", "not predicted"), None: ("open", "no threshold")}


def threshold_probability(card: ModelCard, finding: Finding) -> float | None:
    """The finding's threshold on the scale of its calibrated probability; None where either is missing."""
    calibration = card.calibration[card.labels.index(finding.label)]
    if calibration is None or finding.threshold is None:
        return None
    return calibration.probability(finding.threshold)


def findings_html(card: ModelCard, findings: Sequence[Finding] = ()) -> str:
    """One row a finding, most probable first. Without findings, the model's labels hold their places."""
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
