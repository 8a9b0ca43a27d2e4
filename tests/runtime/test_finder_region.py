"""Search by a region and refined searches, against brute force over the gallery's vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import cbmir
from cbmir.errors import GalleryError, ManifestError, UserError
from cbmir.runtime import Analysis, Finder
from cbmir.runtime.evidence import combination_vector

MakeXray = Callable[..., NDArray[np.uint8]]
REGION = (0.1, 0.5, 0.5, 0.9)


@pytest.fixture
def finder(tiny_model: Path, tiny_gallery: Path) -> Iterator[Finder]:
    with cbmir.load(tiny_model, gallery=tiny_gallery, threads=1) as opened:
        yield opened


def nearest(finder: Finder, vector: NDArray[np.float32], k: int) -> list[str]:
    assert finder.gallery is not None
    distances = {name: float(np.linalg.norm(finder.gallery.vector(name) - vector)) for name in finder.gallery.ids()}
    return sorted(distances, key=lambda name: distances[name])[:k]


def ids(analysis: Analysis) -> list[str]:
    return [one.id for one in analysis.neighbours]


def test_the_neighbours_are_the_nearest_to_the_region(finder: Finder, make_xray: MakeXray) -> None:
    whole, analysis = (finder.analyze(make_xray(99), 20, region=region) for region in (None, REGION))
    assert ids(analysis) == nearest(finder, analysis.query, 20)
    assert (analysis.region, whole.region) == (REGION, None)
    np.testing.assert_array_equal(whole.query, whole.embedding)
    np.testing.assert_array_equal(analysis.query, finder.embed_region(make_xray(99), REGION))
    assert abs(np.linalg.norm(analysis.query) - 1) < 1e-6
    assert np.linalg.norm(analysis.query - analysis.embedding) > 0.01
    # findings, novelty and warnings are about the whole image
    assert (analysis.findings, analysis.novelty, analysis.warnings) == (whole.findings, whole.novelty, whole.warnings)
    np.testing.assert_array_equal(analysis.embedding, whole.embedding)


def test_a_region_has_no_findings_to_rank_by(finder: Finder, make_xray: MakeXray) -> None:
    with pytest.raises(UserError, match="rank nearness with a region"):
        finder.analyze(make_xray(99), region=REGION, rank="findings")


def test_a_region_needs_no_gallery(tiny_model: Path, make_xray: MakeXray) -> None:
    with cbmir.load(tiny_model, threads=1) as finder:
        analysis = finder.analyze(make_xray(99), region=REGION)
    assert (analysis.neighbours, analysis.region) == ((), REGION)


def test_a_refined_search(finder: Finder, make_xray: MakeXray) -> None:
    before = finder.analyze(make_xray(99), 5)
    assert finder.gallery is not None
    alike, unlike = ids(before)[3], "image_01"
    after = finder.refine(before, alike=[alike], unlike=[unlike], findings={"Mass": 0.5}, k=8)
    mass = combination_vector(finder.card, finder.engine.head, ["Mass"])
    total = before.query + 0.75 * finder.gallery.vector(alike) - 0.15 * finder.gallery.vector(unlike) + 0.5 * mass
    np.testing.assert_allclose(after.query, total / np.linalg.norm(total), atol=1e-6)
    assert ids(after) == nearest(finder, after.query, 8)
    assert after.refinement is not None
    assert after.to_json()["refinement"] == {"alike": (alike,), "unlike": (unlike,), "findings": {"Mass": 0.5}}
    assert after.agreement == ()  # neighbours chosen by Mass say nothing about it
    assert finder.refine(before, alike=[alike]).agreement
    assert (before.refinement, after.findings, after.known) == (None, before.findings, before.known)
    assert set(after.neighbour_vectors) == set(ids(after))
    # from the first again: a step only adds to another if it starts from it
    again = finder.refine(after, alike=[alike])
    np.testing.assert_allclose(
        again.query, (v := after.query + 0.75 * finder.gallery.vector(alike)) / np.linalg.norm(v), atol=1e-6
    )


def test_a_refined_search_leaves_the_same_patient_out(finder: Finder, tiny_manifest: Path) -> None:
    analysis = finder.analyze(tiny_manifest.parent / "image_06.png", 5)
    own = {"patient_03"}
    refined = finder.refine(analysis, findings={"Mass": 1.0}, k=50)
    assert not own & {one.patient_id for one in refined.neighbours}
    included = finder.refine(analysis, findings={"Mass": 1.0}, k=50, exclude_same_patient=False)
    assert own & {one.patient_id for one in included.neighbours}
    assert "patient_03" not in str(analysis.to_json() | {"neighbours": []})


def test_searches_that_cannot_be_refined(finder: Finder, tiny_model: Path, make_xray: MakeXray) -> None:
    analysis = finder.analyze(make_xray(99))
    with pytest.raises(GalleryError, match="the id of an entry of this gallery, found 'nobody'"):
        finder.refine(analysis, alike=["nobody"])
    with pytest.raises(ManifestError, match="Hernia"):
        finder.refine(analysis, findings={"Hernia": 1.0})
    with cbmir.load(tiny_model, threads=1) as bare, pytest.raises(UserError, match="expected a gallery to search"):
        bare.refine(analysis, findings={"Mass": 1.0})


def test_agreement_has_the_shares_of_the_gallery(finder: Finder, make_xray: MakeXray) -> None:
    assert finder.gallery is not None
    entries = list(finder.gallery.every_entry())
    for one in finder.analyze(make_xray(99), 5).agreement:
        values = [value for entry in entries if (value := (entry.labels or {})[one.label]) is not None]
        assert one.gallery == pytest.approx(sum(value in (1, -1) for value in values) / len(values))
