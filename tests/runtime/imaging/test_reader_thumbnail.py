"""Thumbnails: small JPEGs of a radiograph."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.runtime import thumbnail_jpeg


def read(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as picture:
        assert (picture.format, picture.mode) == ("JPEG", "L")
        return np.asarray(picture)


@pytest.mark.parametrize(
    ("shape", "side", "expected"),
    [((1024, 512), 256, (256, 128)), ((300, 600), 100, (50, 100)), ((64, 48), 256, (64, 48))],
)
def test_it_fits_a_square_and_is_never_enlarged(shape: tuple[int, int], side: int, expected: tuple[int, int]) -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, shape[1]).astype(np.uint8), shape)
    picture = read(thumbnail_jpeg(ramp, side))
    assert picture.shape == expected
    np.testing.assert_allclose(picture[0], np.linspace(0, 255, expected[1]), atol=6)


def test_the_side_is_256_by_default() -> None:
    assert read(thumbnail_jpeg(np.full((512, 512), 99, np.uint8))).shape == (256, 256)
