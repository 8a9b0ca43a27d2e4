"""Evidence over the image: where it lies, its signs, and what it sums to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.demo.evidence_overlay import LESS, MORE, overlay, seen_box
from cbmir.demo.study import NO_CHOICE, PICTURE_SIDE, PLAIN, Study, picture_of
from cbmir.errors import UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import Finder, read_image

SPEC = PreprocessSpec(resize=80, crop=64)  # 8 of 80 cut off on each side


def test_seen_box() -> None:
    assert seen_box(100, 200, SPEC) == (10, 90, 20, 180)
    assert seen_box(100, 200, PreprocessSpec(resize=64, crop=64)) == (0, 100, 0, 200)


def test_signs_and_weights_by_hand() -> None:
    """The mean cell is 0.05; the others differ from it by 0.35, -0.05, -0.05 and -0.25."""
    pixels = np.full((100, 100), 100, np.uint8)
    evidence = np.zeros((2, 2), np.float32)
    evidence[0, 0], evidence[1, 1] = 0.4, -0.2
    picture = overlay(pixels, evidence, SPEC, opacity=0.5)
    assert picture.shape == (100, 100, 3)
    assert picture.dtype == np.uint8
    # Corners of the frame are nearest to one cell alone, where bilinear interpolation is constant.
    assert picture[12, 12].tolist() == np.rint(100 * 0.5 + np.array(MORE) * 0.5).tolist()
    for place, weight in (((87, 87), 0.25 / 0.35 / 2), ((12, 87), 0.05 / 0.35 / 2)):
        assert picture[place].tolist() == np.rint(100 * (1 - weight) + np.array(LESS) * weight).tolist()
    assert (picture[:10] == 100).all()  # not seen by the model
    assert (picture[10, 10:90] == 128).all()  # the frame


def test_midway_is_bilinear() -> None:
    pixels = np.zeros((100, 100), np.uint8)
    evidence = np.array([[1, 0], [1, 0]], np.float32)
    picture = overlay(pixels, evidence, PreprocessSpec(resize=64, crop=64), opacity=1)
    assert picture[50, 1].tolist() == list(MORE)
    assert picture[50, -2].tolist() == list(LESS)
    assert picture[50, 49:51].max() <= 6  # the mean cell: the black image itself
    assert (np.diff(picture[50, 1:50, 0].astype(int)) <= 0).all()


def test_a_flat_map_looks_flat() -> None:
    evidence = np.array([[0.1001, 0.0999], [0.1, 0.1]], np.float32)
    picture = overlay(np.zeros((100, 100), np.uint8), evidence, PreprocessSpec(resize=64, crop=64), opacity=1)
    assert picture[1:-1, 1:-1].max() <= 3


@pytest.mark.parametrize("evidence", [np.zeros((3, 3), np.float32), np.full((3, 3), 0.1, np.float32)])
def test_no_evidence_or_no_opacity_leaves_the_image(evidence: NDArray[np.float32]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70), dtype=np.uint8)
    picture = overlay(pixels, evidence, SPEC, opacity=0)
    top, bottom, left, right = seen_box(50, 70, SPEC)
    inner = (slice(top + 1, bottom - 1), slice(left + 1, right - 1))
    np.testing.assert_array_equal(picture[inner], np.repeat(pixels[inner][..., None], 3, axis=2))


@pytest.fixture(scope="module")
def study(tiny_model: Path, tiny_gallery: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> Study:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        radiograph = read_image(make_xray(77))
        return Study(finder.analyze(radiograph, 3), radiograph.pixels, finder.card.preprocess)


def test_every_choice_has_exact_evidence(study: Study) -> None:
    (_, none), *others = study.choices()
    assert none == PLAIN == NO_CHOICE[1]
    assert [name for name, _ in others[:3]] == ["Finding: Effusion", "Finding: Mass", "Finding: Nodule"]
    assert [name.split(":")[0] for name, _ in others[3:]] == ["Neighbour 1", "Neighbour 2", "Neighbour 3"]
    for (_, key), neighbour in zip(others[3:], study.analysis.neighbours, strict=True):
        evidence = study.evidence(key)
        assert evidence is not None
        assert evidence.sum() == pytest.approx(neighbour.cosine, abs=1e-5)
    for (_, key), finding in zip(others[:3], study.analysis.findings, strict=True):
        evidence = study.evidence(key)
        assert evidence is not None
        # The score of a proxy head is exp((cosine - 1) / sigma^2).
        assert np.exp((evidence.sum() - 1) / 0.7**2) == pytest.approx(finding.score, abs=1e-5)


def test_picture(study: Study) -> None:
    np.testing.assert_array_equal(study.picture(PLAIN, 0.5), study.pixels)
    shown = study.picture("finding:Mass", 0.5)
    assert shown.shape == (*study.pixels.shape, 3)
    assert (shown[..., 0] > shown[..., 2]).any()


@pytest.mark.parametrize("key", ["finding:Knee", "neighbour:nobody", "x"])
def test_unknown_key(study: Study, key: str) -> None:
    with pytest.raises(UserError, match="found"):
        study.evidence(key)


def test_large_images_are_shown_smaller() -> None:
    assert picture_of(np.zeros((3000, 1500), np.uint8)).shape == (PICTURE_SIDE, PICTURE_SIDE // 2)
    assert picture_of(np.zeros((30, 20), np.uint8)).shape == (30, 20)
