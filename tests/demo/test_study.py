"""What is kept of an image in a browser session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.demo.study import PICTURE_SIDE, Upload
from cbmir.runtime import Finder, read_image


@pytest.mark.parametrize("shape", [(1500, 1200), (40, 50)])
def test_little_is_kept_and_the_analysis_is_that_of_the_whole_image(
    shape: tuple[int, int], tiny_model: Path, tiny_gallery: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    whole = read_image(np.resize(make_xray(5, 256), shape))
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        spec = finder.card.preprocess
        upload = Upload.of(whole, spec)
        expected, found = finder.analyze(whole, 5), finder.analyze(upload.radiograph, 5)
    assert upload.radiograph.pixels.shape == (spec.resize, spec.resize)
    assert max(upload.picture.shape) == min(PICTURE_SIDE, max(shape))
    assert upload.radiograph.pixels.base is None
    assert found.to_json() == expected.to_json()
    np.testing.assert_array_equal(found.embedding, expected.embedding)
    np.testing.assert_array_equal(found.feature_map, expected.feature_map)
