"""Cells of a region, and their vector: by hand, and against the embedding."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.errors import UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import Region, RegionCells, parse_region

WHOLE = PreprocessSpec(resize=64, crop=64)
CROPPED = PreprocessSpec(resize=80, crop=64)  # 0.1 to 0.9 of the image


def test_a_cell_is_weighted_by_its_share_in_the_region() -> None:
    cells = RegionCells.of((0.25, 0.0, 1.0, 0.5), (2, 2), WHOLE)
    np.testing.assert_allclose(cells.down, [1, 0])
    np.testing.assert_allclose(cells.across, [0.5, 1])
    feature_map = np.array([[[4, 0], [9, 9]], [[0, 3], [9, 9]]], np.float32)  # [D, h, w]
    np.testing.assert_allclose(cells.vector(feature_map), np.array([2, 3]) / np.sqrt(13), atol=1e-7)


def test_fractions_are_of_the_whole_image_not_of_the_crop() -> None:
    cells = RegionCells.of((0.1, 0.3, 0.5, 0.7), (4, 4), CROPPED)
    np.testing.assert_allclose(cells.across, [1, 1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(cells.down, [0, 1, 1, 0], atol=1e-12)


def test_the_region_of_the_whole_crop_gives_the_embedding() -> None:
    feature_map = np.random.default_rng(0).normal(size=(16, 5, 7)).astype(np.float32)
    mean = feature_map.astype(np.float64).mean(axis=(1, 2))
    for region in ((0.0, 0.0, 1.0, 1.0), (0.1, 0.1, 0.9, 0.9)):
        vector = RegionCells.of(region, (5, 7), CROPPED).vector(feature_map)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ((0.4, 0.0, 0.3, 1.0), "found 0.4,0,0.3,1"),
        ((0.0, 0.0, 1.0, 1.2), "0 <= y0 < y1 <= 1"),
        ((float("nan"), 0.0, 1.0, 1.0), "0 <= x0 < x1 <= 1"),
        ((0.0, 0.0, 0.09, 1.0), "from 0.100 to 0.900 in both directions; found 0.00 cells"),
        ((0.5, 0.5, 0.6, 0.6), "at least half a cell of the model's 4x4, .* found 0.25 cells"),
    ],
)
def test_invalid_regions_are_refused(region: Region, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RegionCells.of(region, (4, 4), CROPPED)


def test_a_region_outside_the_crop_is_refused() -> None:
    with pytest.raises(UserError, match="sees something"):
        RegionCells.of((0.0, 0.0, 0.5, 0.5), (2, 2), WHOLE).vector(np.zeros((3, 2, 2), np.float32))


def test_a_region_as_text() -> None:
    assert parse_region("0.1, .5,0.4,1") == (0.1, 0.5, 0.4, 1.0)
    for text in ("", "0.1,0.2,0.3", "a,b,c,d", "0,0,1,1,1"):
        with pytest.raises(UserError, match="expected a region x0,y0,x1,y1"):
            parse_region(text)
