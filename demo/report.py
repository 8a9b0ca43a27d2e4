"""The report of a case: one HTML page that needs nothing beside it, to keep or to print.

It leaves the machine, so it names no file, no patient and no image of the gallery: look-alikes are labels and cosines
under opaque case ids, as in `cbmir.runtime.dicom_output`. The image is told by its picture and its file's digest, or by
its case id where it is in the gallery.
"""

from __future__ import annotations

import io
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir import __version__
from cbmir.card import NOT_A_DEVICE, ModelCard
from cbmir.demo.findings import threshold_probability
from cbmir.demo.markup import alerts_html, escape, image_uri, novelty_html, readable
from cbmir.demo.study import Upload
from cbmir.runtime.evidence import overlay
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.results import Analysis, Finding, Neighbour, most_probable_first

_SHOWN = 6  # look-alikes: with two pictures and some twenty findings they fit a page of A4
_STYLE = """
body { font: 12px/1.35 system-ui, sans-serif; color: #16202a; max-width: 186mm; margin: 8mm auto; padding: 0 8px }
h1 { font-size: 19px; margin: 8px 0 0 } h2 { font-size: 14px; margin: 12px 0 4px } p { margin: 3px 0 }
.device { border: 2px solid #8a4b00; color: #6b3a00; padding: 4px 10px; font-weight: 700 }
.case { display: grid; grid-template-columns: 58mm 1fr; gap: 6mm; margin-top: 8px } figure { margin: 0 0 6px }
.case img { width: 100%; max-height: 58mm; object-fit: contain; background: #000; display: block }
.case h2:first-child { margin-top: 0 } table { border-collapse: collapse; width: 100% } thead th { color: #4a5763 }
th, td { text-align: left; padding: 1px 8px 1px 0; border-bottom: 1px solid #d5dce2; font-weight: 400 }
th[scope=row] { white-space: nowrap }
td { font-variant-numeric: tabular-nums } .on > * { font-weight: 700 } .fine-print, figcaption { color: #4a5763 }
.note { border-left: 4px solid #8a4b00; padding: 4px 10px; background: #fff6e6; margin: 6px 0 }
.note.fine { border-color: #0b6b64; background: #eef4f3 } .note ul { margin: 2px 0 }
@page { size: A4; margin: 10mm } @media print { body { margin: 0 auto } tr, figure { break-inside: avoid } }
"""


def report_html(
    card: ModelCard,
    gallery: SearchableGallery,
    image: Upload,
    analysis: Analysis,
    searched: str,
    *,
    label: str = "",
    now: datetime | None = None,
) -> str:
    """The image, what was predicted and why, the nearest look-alikes, how these were searched for, and by which model.

    `label` is the finding whose evidence is shown, the most probable one where it is empty; `searched` is plain text.
    """
    findings = most_probable_first(analysis.findings)
    label = label or findings[0].label
    evidence = overlay(image.picture, analysis.evidence_for_finding(label), card.preprocess, 0.6)
    when = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    told = (
        f"gallery image {gallery.case_id(analysis.known[0])}"
        if analysis.known
        else f"image file with SHA-256 {image.radiograph.sha256[:16]}…"
    )
    rows = "".join(_row(card, finding) for finding in findings)
    alike = "".join(_alike(rank, gallery.case_id(n.id), n) for rank, n in enumerate(analysis.neighbours[:_SHOWN], 1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>cbmir report</title><style>{_STYLE}</style>'
        f'</head><body><p class="device">{escape(NOT_A_DEVICE)}</p><h1>cbmir: report of a case</h1>'
        f'<p class="fine-print">{when} · {escape(told)}</p>'
        f'{alerts_html(analysis.warnings)}<div class="case"><div>'
        f"{_figure('The X-ray', image.picture, 'The image')}"
        f"{_figure('The X-ray with evidence', evidence, _explained(label))}</div>"
        '<div><h2>Findings</h2><table><thead><tr><th scope="col">Finding</th><th scope="col">Verdict</th>'
        '<th scope="col">Calibrated probability</th><th scope="col">Threshold</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{novelty_html(analysis.novelty)}"
        '<h2>Nearest look-alikes</h2><table><thead><tr><th scope="col">Case</th><th scope="col">Cosine</th>'
        f'<th scope="col">Labels</th></tr></thead><tbody>{alike}</tbody></table>'
        f'<p class="fine-print">Searched: {escape(searched)}.</p></div></div><h2>Model</h2><p class="fine-print">cbmir '
        f"{__version__}: {escape(card.encoder)}, precision {escape(card.precision)}, fingerprint "
        f"{escape(card.fingerprint[:16])}. {escape(card.intended_use)}</p></body></html>"
    )


def _explained(label: str) -> str:
    return (
        f"Evidence for {readable(label)}: orange and + more, blue and \N{MINUS SIGN} less than an even share; the line "
        "is what the model sees"
    )


def _row(card: ModelCard, finding: Finding) -> str:
    verdict = {True: "● predicted", False: "not predicted", None: "no threshold"}[finding.predicted]
    numbers = "".join(
        f"<td>{'not available' if share is None else f'{100 * share:.1f}%'}</td>"
        for share in (finding.probability, threshold_probability(card, finding))
    )
    on = ' class="on"' if finding.predicted else ""
    return f'<tr{on}><th scope="row">{escape(readable(finding.label))}</th><td>{verdict}</td>{numbers}</tr>'


def _alike(rank: int, case: str, neighbour: Neighbour) -> str:
    labels = ", ".join(
        f"{readable(label)}{' (uncertain)' * (label in neighbour.uncertain)}{' (shared)' * (label in neighbour.shared)}"
        for label in neighbour.labels
    )
    return (
        f'<tr><th scope="row">{rank}. {escape(case)}</th><td>{neighbour.cosine:.3f}</td>'
        f"<td>{escape(labels or 'no finding marked')}</td></tr>"
    )


def _figure(name: str, picture: NDArray[np.uint8], caption: str) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return (
        f'<figure><img alt="{name}" src="{image_uri(file.getvalue())}"><figcaption>{escape(caption)}</figcaption>'
        "</figure>"
    )
