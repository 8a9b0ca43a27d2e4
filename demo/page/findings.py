"""The findings of an image: the model's predictions, the similar images' labels, and where the two differ."""

from __future__ import annotations

from collections.abc import Sequence

from cbmir.card import WITHOUT_FINDINGS, ModelCard, OperatingPoint
from cbmir.demo.page.markup import escape, percent
from cbmir.labels import canonical, spelled
from cbmir.runtime.novelty import QUANTILE, Novelty
from cbmir.runtime.results import CHANCE, Analysis, Finding, LabelAgreement, most_probable_first

WHOLE = '<p class="fine">These findings are for the whole image, not for the box.</p>'
REST = '<p class="fine">Findings appear here, with what the similar images say about each.</p>'
_ASK = (
    '<span class="ask" data-label="LABEL"><button type="button" data-say="1" aria-pressed="false">Agree</button>'
    '<button type="button" data-say="0" aria-pressed="false">Disagree</button></span>'
)
GATE = "Show the findings anyway"
UNCOUNTED = "Similar images are not counted here: they were found by their labels, or have no labels."


def threshold_probability(card: ModelCard, finding: Finding) -> float | None:
    """Return the finding's threshold as a calibrated probability; None if it has no threshold or calibration."""
    calibration = card.calibration[card.labels.index(finding.label)]
    if calibration is None or finding.threshold is None:
        return None
    return calibration.probability(finding.threshold)


def findings_html(card: ModelCard, analysis: Analysis, *, gated: str = "", asked: bool = False) -> str:
    """Render the findings above, below and without a threshold, each group with the most probable first.

    Args:
        card: The model's card with all operating points; the analysis names the one that applies.
        gated: If not empty, findings are hidden behind a button, since a warning makes them worthless. It is the
            image's name: the reader opens the findings once per image.
        asked: Whether to ask the reader if the model is right about the selected finding.
    """
    if not card.has_findings:
        return f'<p class="fine">{escape(WITHOUT_FINDINGS)}</p>{novelty_html(analysis.novelty)}'
    agreement = {canonical(of.label): of for of in analysis.agreement}
    said = {f.label: neighbours_say(f, agreement.get(canonical(f.label))) for f in analysis.findings if agreement}
    points = dict(zip(card.labels.names, card.operating_points.get(analysis.operating_point, ()), strict=False))
    rows = most_probable_first(analysis.findings)
    groups = (
        ("Above the threshold", [f for f in rows if f.predicted]),
        ("Below the threshold", [f for f in rows if f.predicted is False]),
        ("No threshold", [f for f in rows if f.predicted is None]),
    )
    parts = "".join(
        f'<h3>{name} <span class="count">{len(found)}</span></h3><ol>'
        + "".join(_row(card, f, points.get(f.label), said.get(f.label, ("", False)), asked=asked) for f in found)
        + "</ol>"
        for name, found in groups
        if found or name == groups[0][0]
    )
    if analysis.neighbours and not analysis.agreement:
        parts += f'<p class="fine">{UNCOUNTED}</p>'
    parts += novelty_html(analysis.novelty)
    if gated:
        return f'<details class="gate" data-image="{gated}"><summary>{GATE}</summary>{parts}</details>'
    return parts


def _row(
    card: ModelCard, finding: Finding, point: OperatingPoint | None, said: tuple[str, bool], *, asked: bool
) -> str:
    bar, number, limit = "", f"score {finding.score:.2f}", "No threshold is known for this finding."
    at = threshold_probability(card, finding)
    if finding.probability is not None:
        tick = "" if at is None else f'<i style="left:{100 * at:.1f}%"></i>'
        bar = f'<b style="width:{100 * finding.probability:.1f}%"></b>{tick}'
        number = percent(finding.probability)
    if at is not None:
        limit = f"Threshold {percent(at)}"
        if point is not None:
            limit += f": there, sensitivity {percent(point.sensitivity)} and specificity {percent(point.specificity)}"
    text, differs = said
    flag = '<em title="The similar images say otherwise">differs</em>' * differs
    kind = {True: "above", False: "below", None: "open"}[finding.predicted]
    return (
        f'<li><button type="button" class="{kind}" data-finding="{escape(finding.label)}" aria-pressed="false">'
        f'<span class="name">{escape(spelled(finding.label))}{flag}</span>'
        f'<span class="bar" aria-hidden="true">{bar}</span><span class="number">{escape(number)}</span>'
        f'<span class="of">{escape(text)}</span><span class="limit">{escape(limit)}</span></button>'
        f"{_ASK.replace('LABEL', escape(finding.label)) * (asked and finding.predicted is not None)}</li>"
    )


def neighbours_say(finding: Finding, of: LabelAgreement | None) -> tuple[str, bool]:
    """Say how many similar images have a finding. Also returns whether that contradicts the prediction."""
    if of is None:
        return "not in the gallery's labels", False
    known, having = of.positive + of.uncertain + of.negative, of.positive + of.uncertain
    if not known:
        return "not known for the similar images", False
    text = f"in {having} of {known} similar images"
    rare = False  # no similar image has it, which is unlikely by chance
    if of.gallery is not None:
        text += f", gallery {percent(of.gallery)}"
        rare = having == 0 and (1 - of.gallery) ** known < CHANCE
    differs = of.above_chance if finding.predicted is False else finding.predicted is True and rare
    return text, differs


def novelty_html(novelty: Novelty | None) -> str:
    """Say in one line how unusual the image is for the gallery."""
    text = "The gallery is too small to tell whether it has anything like this image."
    if novelty is not None:
        text = (
            f"More unusual than {novelty.percentile:.0f}% of the gallery's images (flagged above "
            f"{100 * QUANTILE:.0f}%)."
        )
    return f'<p class="fine">{text}</p>'


def rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in rows]
