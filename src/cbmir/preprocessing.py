"""How an image becomes the model's input: the contract, which `cbmir.runtime.imaging.preprocess` implements.

The values travel in the model card, so that a model file always says how to feed it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cbmir.errors import CardError

#: 270 and 224 are the paper's ("Implementation"); other sizes keep the ratio.
RESIZE_RATIO = 270 / 224
MIN_IMAGE_SIZE = 32
#: How stored values become grey (`PreprocessSpec.intensity`).
INTENSITIES = ("header", "minmax", "percentile")
#: Of the pixels that are no padding, so many percent are black or white at most, by `percentile`.
PERCENTILES = (1.0, 99.0)


@dataclass(frozen=True)
class PreprocessSpec:
    """Grey image -> square of `resize` pixels -> crop of `crop` pixels (random in training, else centred).

    `resampling` is a Pillow filter with antialiasing. `intensity` says how an image's stored values become grey, in
    training and afterwards alike:

    - `header`: of DICOM the file's own VOI LUT or window, and the range of the values present where it has neither;
      every other format maps the full range of its type to 0..255. What radiologists see, where headers can be trusted.
    - `minmax`: from the lowest to the highest value present, whatever the header or the type says.
    - `percentile`: from the value that 1% of the pixels do not exceed to that which 99% do not exceed, so that a marker
      or a collimator's border does not decide.

    Of DICOM it is always values after the modality LUT or rescale, padding left out, MONOCHROME1 inverted in the end.
    """

    resize: int = 270
    crop: int = 224
    resampling: str = "bilinear"
    intensity: str = "header"

    def __post_init__(self) -> None:
        if not MIN_IMAGE_SIZE <= self.crop <= self.resize:
            raise CardError(
                f"preprocessing: expected {MIN_IMAGE_SIZE} <= crop <= resize, found crop={self.crop}, "
                f"resize={self.resize}; choose an --image-size of at least {MIN_IMAGE_SIZE}"
            )
        if self.resampling != "bilinear" or self.intensity not in INTENSITIES:
            raise CardError(
                f"preprocessing: this version knows resampling 'bilinear' and intensity {', '.join(INTENSITIES)}; "
                f"found {self.resampling!r} and {self.intensity!r}; use a newer cbmir for this model"
            )

    @classmethod
    def for_image_size(cls, size: int, intensity: str = "header") -> PreprocessSpec:
        """The spec for `--image-size size`: crop to `size`, after a resize in the paper's ratio (224 -> 270)."""
        return cls(resize=round(size * RESIZE_RATIO), crop=size, intensity=intensity)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PreprocessSpec:
        try:
            return cls(**data)
        except TypeError as error:
            raise CardError(f"preprocessing: expected resize, crop, resampling, intensity; found {data}") from error
