"""The report on an image: complete, on one page, and without names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cbmir import __version__
from cbmir.card import NOT_A_DEVICE
from cbmir.demo.report import report_html
from cbmir.demo.uploads import Upload
from cbmir.labels import NIH_14, LabelSet
from cbmir.runtime import Analysis, Finder, Finding, read_image
from cbmir.runtime.neighbours import NOTHING_ALIKE

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def finder(tiny_model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        yield finder


@pytest.fixture
def upload(finder: Finder, tiny_manifest: Path) -> Upload:
    """An image of the gallery in a file named after a patient."""
    image = read_image(tiny_manifest.parent / "image_03.png")
    return Upload.of(image, finder.card.preprocess, "DOE^JOHN_1960.png")


@pytest.fixture
def analysis(finder: Finder, upload: Upload) -> Analysis:
    return finder.analyze(upload.radiograph, 10)


def text_of(html: str) -> str:
    return re.sub(r"<style>.*?</style>|<[^>]*>", " ", html)


def test_it_states_the_image_the_date_and_the_model(finder: Finder, upload: Upload, analysis: Analysis) -> None:
    assert finder.gallery is not None
    html = report_html(finder.card, finder.gallery, upload, analysis, "k = 10; <b>", label="Mass", now=WHEN)
    text = text_of(html)
    for part in (NOT_A_DEVICE, "2026-01-02 00:00 UTC", f"gallery image {finder.gallery.case_id('image_03')}",
                 "Evidence for Mass", "Searched: k = 10; &lt;b&gt;.", f"cbmir {__version__}: tiny",
                 *analysis.warnings):  # fmt: skip
        assert part in text
    assert all(src.startswith("data:image/jpeg;base64,") for src in re.findall(r'src="(.*?)"', html))
    assert not re.search(r"<(script|link|iframe)|http", html)


def test_similar_images_are_cases(finder: Finder, upload: Upload, analysis: Analysis) -> None:
    assert finder.gallery is not None
    first, second, *rest = analysis.neighbours
    first = replace(first, labels=("Effusion", "Mass"), shared=("Effusion",), uncertain=("Mass",))
    second = replace(second, labels=())
    html = report_html(
        finder.card, finder.gallery, upload, replace(analysis, neighbours=(first, second, *rest)), "", now=WHEN
    )
    cases = re.findall(r"case-[0-9a-f]{16}", html)
    assert cases[1:] == [finder.gallery.case_id(one.id) for one in analysis.neighbours[:6]]
    assert "Effusion (shared), Mass (uncertain)" in html
    assert "no finding known" in html


def test_it_contains_no_names(finder: Finder, upload: Upload, analysis: Analysis) -> None:
    assert finder.gallery is not None
    assert analysis.known == ("image_03",)
    html = report_html(finder.card, finder.gallery, upload, analysis, "", now=WHEN)
    for name in ("DOE", ".png", "image_", *(one.patient_id for one in analysis.neighbours)):
        assert name not in html
    assert html.count("<img") == 2  # no picture of another patient


def test_a_file_is_identified_by_its_digest_unless_the_gallery_has_it(
    finder: Finder, upload: Upload, analysis: Analysis
) -> None:
    assert finder.gallery is not None
    digest = upload.radiograph.sha256[:16]
    known, new = (
        text_of(report_html(finder.card, finder.gallery, upload, one, "", now=WHEN))
        for one in (analysis, replace(analysis, known=()))
    )
    assert digest not in known
    assert f"image file with SHA-256 {digest}" in new


@pytest.mark.browser
def test_it_fits_a_page_of_a4(finder: Finder, upload: Upload, analysis: Analysis, browser: Any) -> None:
    """With all fourteen findings, a flag, a warning, and six similar images."""
    assert finder.gallery is not None
    card = finder.card.with_(
        labels=LabelSet(NIH_14), thresholds=(0.5,) * 14, calibration=(None,) * 14, proxies_per_class=(2,) * 15
    )
    vector = next(iter(analysis.finding_vectors.values()))
    many = replace(
        analysis,
        findings=tuple(Finding(label, 0.6, None, True, 0.5) for label in NIH_14),
        finding_vectors=dict.fromkeys(NIH_14, vector),
        warnings=(NOTHING_ALIKE, *analysis.warnings),
    )
    assert len(analysis.neighbours) >= 6
    page = browser.new_page()
    page.set_content(report_html(card, finder.gallery, upload, many, "k = 20; same patient left out", now=WHEN))
    pdf = page.pdf(prefer_css_page_size=True)
    page.close()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1


def test_it_shows_the_searched_box_and_the_evidence_of_a_predicted_finding(
    finder: Finder, upload: Upload, analysis: Analysis
) -> None:
    assert finder.gallery is not None
    whole = report_html(finder.card, finder.gallery, upload, analysis, "", now=WHEN)
    part = report_html(
        finder.card, finder.gallery, upload, replace(analysis, region=(0.2, 0.2, 0.6, 0.6)), "", now=WHEN
    )
    pictures = [re.findall(r'src="([^"]*)"', html) for html in (whole, part)]
    assert pictures[0][0] != pictures[1][0] and pictures[0][1:] == pictures[1][1:]
    assert "the box that was searched for" in part and "the box that was searched for" not in whole
    rare = (Finding("Mass", 0, 0.9, predicted=False, threshold=0.95), Finding("Effusion", 0, 0.4, True, 0.3))
    assert "Evidence for Effusion" in report_html(
        finder.card, finder.gallery, upload, replace(analysis, findings=rare), "", now=WHEN
    )
