"""The report on an image: one self-contained HTML page, to keep or to print.

It may leave the machine, so it contains no file names, patients or ids of the gallery. Similar images are listed by
opaque case ids with labels and distances; only the patient's own images have pictures. The image itself is named by the
digest of its file, or by its case id if the gallery has it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cbmir import __version__
from cbmir.card import NOT_A_DEVICE, OF_PHANTOMS, WITHOUT_FINDINGS, ModelCard
from cbmir.demo.page.alerts import alerts_html
from cbmir.demo.page.findings import novelty_html, threshold_probability
from cbmir.demo.page.markup import data_uri, escape, static, table
from cbmir.demo.uploads import Upload
from cbmir.labels import spelled
from cbmir.runtime.evidence import MORE, Region, overlay
from cbmir.runtime.gallery.entry import Hit
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.results import Analysis, Finding, Neighbour, most_probable_first

_VERDICTS = {True: "● predicted", False: "not predicted", None: "no threshold"}
_SHOWN = 6  # similar images; with two pictures and about twenty findings they fit on an A4 page


def report_html(
    card: ModelCard, gallery: SearchableGallery, image: Upload, analysis: Analysis, searched: str, *,
    label: str = "", now: datetime | None = None, timeline: Sequence[Hit] = (),
) -> str:  # fmt: skip
    """Render the report. `searched` is plain text; `timeline` has other images of the patient.

    Evidence is shown for `label`, by default the first predicted finding; without findings, for the nearest image.
    """
    findings = most_probable_first(analysis.findings)
    when = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    name = f"image file with SHA-256 {image.radiograph.sha256[:16]}…"
    if analysis.known:
        name = f"gallery image {gallery.case_id(analysis.known[0])}"
    threshold = f"Threshold ({escape(analysis.operating_point)})"
    found = f'<p class="fine">{escape(WITHOUT_FINDINGS)}</p>'
    if findings:
        head = ("Finding", "Verdict", "Calibrated probability", threshold)
        found = table(head, [_row(card, finding) for finding in findings])
    bar = f'<p class="phantoms">{escape(OF_PHANTOMS)}</p>' if OF_PHANTOMS in card.notes else ""
    shown = "The image" if analysis.region is None else "The image, and the box that was searched for"
    alike = [_alike(rank, gallery.case_id(n.id), n) for rank, n in enumerate(analysis.neighbours[:_SHOWN], 1)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cbmir report</title>'
        f"<style>{static('report.css')}</style>"
        f'</head><body>{bar}<button class="print" onclick="print()">Print, or save as PDF</button>'
        f'<p class="device">{escape(NOT_A_DEVICE)}</p><h1>cbmir: report on an image</h1>'
        f'<p class="fine">{when} · {escape(name)}</p>'
        f'{alerts_html(analysis.warnings)}<div class="case"><div>'
        f"{_figure('The X-ray', image.picture, shown, analysis.region)}"
        f"{_evidence(card, image, analysis, label)}</div><div><h2>Findings</h2>{found}"
        f"{novelty_html(analysis.novelty)}<h2>Nearest similar images</h2>"
        f"{table(('Case', 'Distance', 'Labels'), alike)}"
        f'<p class="fine">Searched: {escape(searched)}.</p></div></div>{_timeline(gallery, timeline)}<h2>Model</h2>'
        '<p class="fine">cbmir '
        f"{__version__}: {escape(card.encoder)}, precision {escape(card.precision)}, fingerprint "
        f"{escape(card.fingerprint[:16])}. {escape(card.intended_use)}</p></body></html>"
    )


def _timeline(gallery: SearchableGallery, hits: Sequence[Hit]) -> str:
    """Render the patient's other images; empty without any."""
    figures = []
    for hit in hits:
        jpeg = gallery.thumbnail(hit.entry.id)
        picture = "" if jpeg is None else f'<img alt="" src="{data_uri(jpeg)}">'
        labels = ", ".join(map(spelled, hit.entry.positive)) or hit.entry.without_positive
        figures.append(
            f"<figure>{picture}<figcaption><b>{escape(hit.entry.date)}</b>, distance {hit.distance:.3f}<br>"
            f"{escape(labels)}<br>{escape(gallery.case_id(hit.entry.id))}</figcaption></figure>"
        )
    head = '<h2>Gallery images with this patient id</h2><p class="fine">The most similar dated images, at most six.</p>'
    return f'{head}<div class="timeline">{"".join(figures)}</div>' if hits else ""


def _evidence(card: ModelCard, image: Upload, analysis: Analysis, label: str) -> str:
    """Render the evidence for a finding, or for the nearest similar image; empty if there is neither."""
    findings = most_probable_first(analysis.findings)
    if findings:
        label = label or next((one.label for one in findings if one.predicted), findings[0].label)
        evidence, what = analysis.evidence_for_finding(label), spelled(label)
    elif analysis.neighbours:
        evidence, what = analysis.evidence_for_neighbour(analysis.neighbours[0].id), "the nearest similar image"
    else:
        return ""
    explained = (
        f"Evidence for {what}: orange and + more, blue and \N{MINUS SIGN} less than an even share; the line marks "
        "the part that the model sees"
    )
    picture = overlay(image.picture, evidence, card.preprocess, 0.6)
    return _figure("The X-ray with evidence", picture, explained)


def _row(card: ModelCard, finding: Finding) -> list[str]:
    numbers = (
        "not available" if share is None else f"{100 * share:.1f}%"
        for share in (finding.probability, threshold_probability(card, finding))
    )
    cells = [escape(spelled(finding.label)), _VERDICTS[finding.predicted], *numbers]
    return [f"<b>{cell}</b>" for cell in cells] if finding.predicted else cells


def _alike(rank: int, case: str, neighbour: Neighbour) -> tuple[str, str, str]:
    labels = ", ".join(
        f"{spelled(label)}{' (uncertain)' * (label in neighbour.uncertain)}{' (shared)' * (label in neighbour.shared)}"
        for label in neighbour.labels
    )
    return f"{rank}. {escape(case)}", f"{neighbour.distance:.3f}", escape(labels or "no finding known")


def _figure(name: str, picture: NDArray[np.uint8], caption: str, box: Region | None = None) -> str:
    file, drawn = io.BytesIO(), Image.fromarray(picture).convert("RGB")
    if box is not None:
        corners = [part * side for part, side in zip(box, 2 * drawn.size, strict=True)]
        ImageDraw.Draw(drawn).rectangle(corners, outline=MORE, width=1 + drawn.width // 150)
    drawn.save(file, "JPEG", quality=88)
    source = data_uri(file.getvalue())
    return f'<figure><img alt="{name}" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>'
