"""The preprocessing spec, part of every model card. `cbmir.runtime.imaging.preprocess` implements it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cbmir.errors import CardError

#: 270 and 224 are the paper's ("Implementation"); other sizes keep the ratio.
RESIZE_RATIO = 270 / 224
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 32, 8192
#: How stored values become grey (`PreprocessSpec.intensity`).
INTENSITIES = ("header", "minmax", "percentile")
#: With `percentile`, the percentiles of the pixels (without padding) that become black and white.
PERCENTILES = (1.0, 99.0)


@dataclass(frozen=True)
class PreprocessSpec:
    """The steps from a grey image to the model's input, in training and at run time.

    Attributes:
        resize: The image is resized to a square with this side, in pixels.
        crop: The square is cropped to this side, in pixels: at random in training, otherwise at the centre.
        resampling: A Pillow filter, with antialiasing.
        intensity: How stored values become grey. `header`: by the VOI LUT or window of a DICOM file, or the range of
            its values if it has neither; in other formats the full range of the type becomes 0..255. This is what
            radiologists see, if headers can be trusted. `minmax`: from the lowest to the highest value.
            `percentile`: from the 1st to the 99th percentile, so that markers and collimator borders do not count.
            DICOM values are taken after the modality LUT or rescale, without padding; MONOCHROME1 is inverted last.
    """

    resize: int = 270
    crop: int = 224
    resampling: str = "bilinear"
    intensity: str = "header"

    def __post_init__(self) -> None:
        if not MIN_IMAGE_SIZE <= self.crop <= self.resize <= 2 * MAX_IMAGE_SIZE:
            raise CardError(
                f"preprocessing: expected {MIN_IMAGE_SIZE} <= crop <= resize, found crop={self.crop}, "
                f"resize={self.resize}; choose an --image-size from {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE}"
            )
        if self.resampling != "bilinear" or self.intensity not in INTENSITIES:
            raise CardError(
                f"preprocessing: this version knows resampling 'bilinear' and intensity {', '.join(INTENSITIES)}; "
                f"found {self.resampling!r} and {self.intensity!r}; use a newer cbmir for this model"
            )

    @classmethod
    def for_image_size(cls, size: int, intensity: str = "header") -> PreprocessSpec:
        """Return the spec of `--image-size size`: resize with the paper's ratio (224 -> 270), then crop to `size`."""
        return cls(resize=round(size * RESIZE_RATIO), crop=size, intensity=intensity)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PreprocessSpec:
        try:
            return cls(**data)
        except TypeError as error:
            raise CardError(f"preprocessing: expected resize, crop, resampling, intensity; found {data}") from error
