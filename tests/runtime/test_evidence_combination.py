"""A query by findings, without an image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import ManifestError, UserError
from cbmir.runtime import Filter, Finder, evidence_map, read_image
from cbmir.runtime.evidence import combination_vector

#: Two proxies for each of three labels and the negative class, in 8 dimensions.
HEAD = np.eye(8, dtype=np.float32)


def test_by_hand(tiny_card: ModelCard) -> None:
    one = combination_vector(tiny_card, HEAD, ["Mass"])
    np.testing.assert_allclose(one, [0, 0, 0.5**0.5, 0.5**0.5, 0, 0, 0, 0], atol=1e-6)
    two = combination_vector(tiny_card, HEAD, ["Nodule", "Effusion"])
    np.testing.assert_allclose(two, [0.5, 0.5, 0, 0, 0.5, 0.5, 0, 0], atol=1e-6)
    assert two.dtype == np.float32


def test_long_and_short_directions_weigh_the_same(tiny_card: ModelCard) -> None:
    card = tiny_card.with_(head="linear", proxies_per_class=(), negative_proxies=False)
    weights = np.diag([10, 1, 1, 0, 0, 0, 0, 0]).astype(np.float32)[:3]
    vector = combination_vector(card, weights, ["Effusion", "Mass"])
    np.testing.assert_allclose(vector[:3], [0.5**0.5, 0.5**0.5, 0], atol=1e-6)


@pytest.mark.parametrize("labels", [[], ["Mass", "Mass"], ["Mass", "mass"]])
def test_missing_and_duplicate_findings_are_refused(tiny_card: ModelCard, labels: list[str]) -> None:
    with pytest.raises((UserError, ManifestError)):
        combination_vector(tiny_card, HEAD, labels)


def test_unknown_and_contrary_findings(tiny_card: ModelCard) -> None:
    with pytest.raises(ManifestError, match="Knee"):
        combination_vector(tiny_card, HEAD, ["Knee"])
    contrary = np.concatenate([HEAD[:2], -HEAD[:2], HEAD[4:]])
    with pytest.raises(UserError, match="cancel out"):
        combination_vector(tiny_card, contrary, ["Effusion", "Mass"])


def test_finder_returns_the_nearest_to_the_combination(tiny_model: Path, tiny_gallery: Path) -> None:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        gallery = finder.gallery
        assert gallery is not None
        vector = combination_vector(finder.card, finder.engine.head, ["Effusion", "Mass"])
        expected = gallery.search(vector, 5).hits
        found = finder.search_by_findings(["Effusion", "Mass"], 5)
        assert [one.id for one in found] == [hit.entry.id for hit in expected]
        assert all(set(one.shared) == set(one.labels) & {"Effusion", "Mass"} for one in found)
        filtered = finder.search_by_findings(["Mass"], 20, filter=Filter(where="Mass"))
        assert all("Mass" in one.labels for one in filtered)


def test_finder_without_gallery(tiny_model: Path) -> None:
    with Finder.open(tiny_model, threads=1) as finder, pytest.raises(UserError, match="gallery"):
        finder.search_by_findings(["Mass"])


def test_evidence_on_both_of_two_images_sums_to_the_same_cosine(tiny_model: Path, tiny_manifest: Path) -> None:
    one, other = (read_image(tiny_manifest.parent / f"image_{n}.png") for n in ("01", "02"))
    with Finder.open(tiny_model, threads=1) as finder:
        first, second = finder.embed([tiny_manifest.parent / "image_01.png", tiny_manifest.parent / "image_02.png"])
        there, back = finder.evidence_towards(one, second), finder.evidence_towards(other, first)
        own = finder.analyze(one)
    assert there.sum() == pytest.approx(float(first @ second), abs=1e-5)
    assert back.sum() == pytest.approx(float(first @ second), abs=1e-5)
    np.testing.assert_allclose(there, evidence_map(own.feature_map, second), atol=1e-6)
