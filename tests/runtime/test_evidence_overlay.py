"""Evidence over the image: position, signs and sums."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.demo.uploads import PICTURE_SIDE, picture_of
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import LESS, MORE, overlay, seen_box

SPEC = PreprocessSpec(resize=80, crop=64)  # 8 of 80 are cropped on each side


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
    # Near the corners of the frame, bilinear interpolation is constant.
    assert picture[12, 12].tolist() == np.rint(100 * 0.5 + np.array(MORE) * 0.5).tolist()
    for place, weight in (((87, 87), 0.25 / 0.35 / 2), ((12, 87), 0.05 / 0.35 / 2)):
        assert picture[place].tolist() == np.rint(100 * (1 - weight) + np.array(LESS) * weight).tolist()
    assert (picture[:10] == 100).all()  # not seen by the model
    assert (picture[10, 10:90] == 128).all()  # the frame


def test_signs_are_shown_without_colour() -> None:
    """Cells have 100 pixels: + and - are in the centres of the largest differences, and nothing in small ones."""
    evidence = np.array([[1, -1], [0.1, -0.1]], np.float32)
    picture = overlay(np.full((200, 200), 100, np.uint8), evidence, PreprocessSpec(resize=64, crop=64), opacity=0.5)
    white, black = [255, 255, 255], [0, 0, 0]
    assert picture[50, 50].tolist() == picture[50, 47].tolist() == picture[47, 50].tolist() == white
    assert picture[50, 150].tolist() == picture[50, 147].tolist() == white
    assert picture[48, 150].tolist() == black  # a minus has no vertical bar, and an edge for bright images
    assert picture[150, 50].max() < 200 > picture[150, 150].max()


def test_midway_is_bilinear() -> None:
    pixels = np.zeros((100, 100), np.uint8)
    evidence = np.array([[1, 0], [1, 0]], np.float32)
    picture = overlay(pixels, evidence, PreprocessSpec(resize=64, crop=64), opacity=1)
    assert picture[50, 1].tolist() == list(MORE)
    assert picture[50, -2].tolist() == list(LESS)
    assert picture[50, 49:51].max() <= 6  # the mean cell: only the black image
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


def test_large_images_are_shown_smaller() -> None:
    assert picture_of(np.zeros((3000, 1500), np.uint8)).shape == (PICTURE_SIDE, PICTURE_SIDE // 2)
    assert picture_of(np.zeros((30, 20), np.uint8)).shape == (30, 20)
