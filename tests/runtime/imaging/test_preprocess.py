"""The deterministic part of preprocessing: fixed by the values in this file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import NotAnImageError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.preprocess import centre_crop, preprocess, resize_square
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.imaging.reader import read_image

SPEC = PreprocessSpec()
GOLDEN_VALUES = [200, 109, 95, 241, 226]
GOLDEN_HASH = "b4934c875d7fbad645fc74609f7630693ba888ef8c523901072c755f7e0a9981"
GOLDEN_INPUT_HASH = "063ac84169d4deed9a32ec8dbd277ceba64eb0e1a00f27f4da34168e494fc33c"  # of `preprocess`
BANDS_VALUES = [46, 172, 60, 69, 45]
BANDS_HASH = "f955d8ec8d5e354939c280c28ca12ce571a8d3e5bab855bcb0f5d506e1e81f05"


def test_halving_is_a_triangle_filter_over_four_pixels() -> None:
    """An output pixel's weights at distances .5 and 1.5 are (3, 3, 1, 1) / 8, and (3, 3, 1) / 7 at the border."""
    spec = PreprocessSpec(resize=32, crop=32)
    columns = np.zeros(64, np.uint8)
    columns[[0, 20, 43]] = 224
    row = resize_square(np.tile(columns, (64, 1)), spec)[5]
    expected = np.zeros(32, np.uint8)
    expected[0] = 96  # 224 * 3/7
    expected[10], expected[9] = 84, 28  # 224 * 3/8, 224 * 1/8
    expected[21], expected[22] = 84, 28
    assert row.tolist() == expected.tolist()


def test_an_image_of_the_right_size_is_only_cropped() -> None:
    square = np.random.default_rng(0).integers(0, 256, (270, 270), dtype=np.uint8)
    assert np.array_equal(resize_square(square, SPEC), square)
    assert np.array_equal(preprocess(square, SPEC), square[23:247, 23:247])


def test_odd_margin_rounds_the_offset_down() -> None:
    spec = PreprocessSpec(resize=39, crop=32)
    square = np.arange(39 * 39).reshape(39, 39).astype(np.uint8)
    assert np.array_equal(centre_crop(square, spec), square[3:35, 3:35])


def test_crop_accepts_any_leading_axes() -> None:
    stack = np.random.default_rng(0).integers(0, 256, (2, 3, 270, 270), dtype=np.uint8)
    assert np.array_equal(centre_crop(stack, SPEC)[1, 2], centre_crop(stack[1, 2], SPEC))


def test_the_aspect_ratio_is_squashed() -> None:
    ramp = np.tile(np.linspace(0, 255, 800).astype(np.uint8), (300, 1))
    square = resize_square(ramp, SPEC)
    assert square.shape == (270, 270)
    assert square[0, 0] <= 1
    assert square[0, -1] >= 254
    assert np.array_equal(square[0], square[-1])


def test_golden_values() -> None:
    """This must detect a change of one grey level by any library, since models would be affected too."""
    y, x = np.mgrid[:600, :500]
    pixels = ((x * 7 + y * 3 + (x // 50 + y // 60) % 2 * 90) % 256).astype(np.uint8)
    reference, result = centre_crop(resize_square(pixels, SPEC), SPEC), preprocess(pixels, SPEC)
    for made, digest in ((reference, GOLDEN_HASH), (result, GOLDEN_INPUT_HASH)):
        assert made.shape == (224, 224)
        assert made.dtype == np.uint8
        assert made[[0, 0, 111, 223, 223], [0, 223, 111, 0, 223]].tolist() == GOLDEN_VALUES
        assert hashlib.sha256(made.tobytes()).hexdigest() == digest
    assert np.abs(result.astype(int) - reference).max() <= 1


def test_golden_values_of_looked_up_greys() -> None:
    """With several bands, results are the same for any number of threads, and within one grey level of one band."""
    y, x = np.mgrid[:2100, :1900]
    stored = ((x * 3 + y * 2 + (x // 190 + y // 210) % 2 * 900) % 4096).astype(np.uint16)
    greys = np.clip((np.arange(65536) - 300) / 12, 0, 255).astype(np.uint8)
    radiograph = Radiograph(stored, "golden", "", greys=greys)
    result = preprocess(radiograph, SPEC)
    assert result[[0, 0, 111, 223, 223], [0, 223, 111, 0, 223]].tolist() == BANDS_VALUES
    assert hashlib.sha256(result.tobytes()).hexdigest() == BANDS_HASH
    assert np.array_equal(preprocess(radiograph, SPEC, threads=3), result)
    assert np.array_equal(radiograph.pixels, greys[stored])
    assert np.abs(result.astype(int) - centre_crop(resize_square(greys[stored], SPEC), SPEC)).max() <= 1


@pytest.mark.parametrize("shape", [(32, 128), (45, 33), (270, 270), (271, 1000), (1024, 1024), (3001, 999)])
@pytest.mark.parametrize("sizes", [(270, 224), (39, 32), (64, 64), (33, 32)])
def test_the_input_is_the_centre_of_the_resized_square(shape: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Within one grey level, for sides that shrink, grow, or both; noise reveals any wrong offset."""
    spec = PreprocessSpec(*sizes)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    reference = centre_crop(resize_square(pixels, spec), spec)
    difference = np.abs(preprocess(pixels, spec).astype(int) - reference)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.1


def test_real_x_ray(shared: Path) -> None:
    path = next(iter(sorted((shared / "nih" / "images").iterdir())))
    pixels = read_image(path).pixels
    result = preprocess(pixels, SPEC)
    assert result.shape == (224, 224)
    assert abs(float(resize_square(pixels, SPEC).mean()) - float(pixels.mean())) < 0.5  # the filter keeps the mean


@pytest.mark.parametrize("pixels", [np.zeros((64, 64), np.float32), np.zeros((64, 64, 3), np.uint8)])
def test_invalid_arrays_are_refused(pixels: NDArray[Any]) -> None:
    with pytest.raises(NotAnImageError, match=r"expected uint8 \[H,W\]"):
        resize_square(pixels, SPEC)


def test_a_square_of_another_size_is_refused() -> None:
    with pytest.raises(NotAnImageError, match=r"\[...,270,270\]"):
        centre_crop(np.zeros((3, 224, 224), np.uint8), SPEC)


def test_the_result_can_be_written_to() -> None:
    assert resize_square(np.eye(64, dtype=np.uint8), SPEC).flags.writeable
