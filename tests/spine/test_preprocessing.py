"""The preprocessing spec: sizes and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cbmir.errors import CardError
from cbmir.preprocessing import INTENSITIES, PreprocessSpec


@pytest.mark.parametrize(("size", "resize"), [(224, 270), (112, 135), (64, 77), (32, 39), (512, 617)])
def test_sizes_keep_the_ratio_of_the_paper(size: int, resize: int) -> None:
    assert PreprocessSpec.for_image_size(size) == PreprocessSpec(resize=resize, crop=size)


def test_the_default_is_that_of_the_paper() -> None:
    assert PreprocessSpec() == PreprocessSpec.for_image_size(224)


def test_json_round_trip() -> None:
    spec = PreprocessSpec.for_image_size(96)
    assert PreprocessSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop": 31}, "image-size from 32 to 8192"),
        ({"crop": 271}, "crop=271, resize=270"),
        ({"resampling": "nearest"}, "newer cbmir"),
        ({"intensity": "guess"}, "newer cbmir"),
        ({"colour": "sepia"}, "expected resize, crop"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CardError, match=message):
        PreprocessSpec.from_json(values)


@pytest.mark.parametrize("intensity", INTENSITIES)
def test_intensity_policies(intensity: str) -> None:
    spec = PreprocessSpec.for_image_size(64, intensity)
    assert spec.intensity == intensity
    assert PreprocessSpec.from_json(spec.to_json()) == spec
    assert spec.to_json() == {"resize": 77, "crop": 64, "resampling": "bilinear", "intensity": intensity}, (
        "cards and fingerprints of earlier models hang on these four"
    )
