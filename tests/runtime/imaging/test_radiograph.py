"""Shared by readers: lookup of greys, and contrast estimated from a few rows."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.errors import BlankImageError
from cbmir.runtime.imaging.radiograph import Radiograph, check_contrast, look_up


def test_pixels_are_looked_up_and_replaced() -> None:
    stored = np.arange(600 * 100, dtype=np.uint16).reshape(600, 100)  # larger than one block of the lookup
    greys = (np.arange(65536) // 256).astype(np.uint8)
    radiograph = Radiograph(stored, "name", "digest", greys=greys)
    assert np.array_equal(radiograph.pixels, stored // 256)
    assert np.array_equal(look_up(greys, stored[::3, 5:50]), stored[::3, 5:50] // 256)
    square = np.full((32, 32), 7, np.uint8)
    other = radiograph.with_pixels(square)
    assert other.pixels is square
    assert (other.name, other.sha256) == ("name", "digest")


@pytest.mark.parametrize("inverted", [False, True])
def test_contrast_depends_on_all_pixels(inverted: bool) -> None:
    """Compare with percentiles of all pixels, on images whose spread is near the limit and changes from row to row."""
    generator = np.random.default_rng(0)
    warned = 0
    for _ in range(200):
        spread = generator.integers(2, generator.integers(10, 80), (80, 1))
        stored = (100 + spread * generator.random((80, 50)) ** generator.integers(1, 8)).astype(np.uint8)
        stored[: generator.integers(0, 3)] = 255
        greys = np.arange(255, -1, -1).astype(np.uint8) if inverted else None
        pixels = 255 - stored if inverted else stored
        low, high = np.quantile(pixels, [0.01, 0.99], method="inverted_cdf")
        warnings = check_contrast(stored, greys, "image")
        assert len(warnings) == (int(high) - int(low) < 32)
        assert not warnings or f"within {low}..{high} of" in warnings[0]
        warned += len(warnings)
    assert 20 < warned < 180


def test_blank_images_are_detected_from_displayed_greys() -> None:
    with pytest.raises(BlankImageError, match="grey value 3 "):
        check_contrast(np.full((40, 40), 9, np.uint16), np.full(65536, 3, np.uint8), "image")
    nearly = np.zeros((40, 40), np.uint8)
    nearly[39, 39] = 1
    assert len(check_contrast(nearly, None, "image")) == 1
