"""How an image becomes the model's input: the contract, of which `cbmir.runtime.preprocess` is the one implementation.

The values travel in the model card, so that a model file always says how to feed it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cbmir.errors import CardError

#: 270 and 224 are the paper's ("Implementation"); other sizes keep the ratio.
RESIZE_RATIO = 270 / 224
MIN_IMAGE_SIZE = 32


@dataclass(frozen=True)
class PreprocessSpec:
    """Grey image -> square of `resize` pixels -> crop of `crop` pixels (random in training, else centred).

    `resampling` is a Pillow filter with antialiasing. `intensity` says how a DICOM's stored values become grey:
    `header` applies the modality LUT, then the file's own VOI LUT or window, and takes the full range of the values
    present where the file has neither; every other format maps the full range of its type to 0..255.
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
        if self.resampling != "bilinear" or self.intensity != "header":
            raise CardError(
                f"preprocessing: this version knows resampling 'bilinear' and intensity 'header', found "
                f"{self.resampling!r} and {self.intensity!r}; use a newer cbmir for this model"
            )

    @classmethod
    def for_image_size(cls, size: int) -> PreprocessSpec:
        """The spec for `--image-size size`: crop to `size`, after a resize in the paper's ratio (224 -> 270)."""
        return cls(resize=round(size * RESIZE_RATIO), crop=size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PreprocessSpec:
        try:
            return cls(**data)
        except TypeError as error:
            raise CardError(f"preprocessing: expected resize, crop, resampling, intensity; found {data}") from error
