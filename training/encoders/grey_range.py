"""The values for black and white that an encoder's weights expect. The conversion is part of the model's graph, so a
model file still takes uint8.

The grey image g in [0, 1] enters channel c as (g - mean_c) / std_c. cbmir's own range is [-1, 1] in one channel.
Published weights need the range that they were trained with; another range changes their output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from cbmir.errors import EncoderError


@dataclass(frozen=True)
class GreyRange:
    """Mean and standard deviation of each channel, for grey in [0, 1]. Equal channels are merged into one."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std) or not all(std > 0 for std in self.std):
            raise EncoderError(f"expected a mean and a standard deviation above 0 of each channel, found {self.mean} "
                               f"and {self.std}")  # fmt: skip

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Build from a library's three channels; they become one channel if all three are equal."""
        alike = len(set(zip(mean, std, strict=True))) == 1
        return cls(tuple(mean[:1]), tuple(std[:1])) if alike else cls(tuple(mean), tuple(std))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "MEAN,STD". Raises EncoderError for any other text."""
        try:
            mean, std = map(float, text.split(","))
        except ValueError as error:
            raise EncoderError(f"expected a grey range of auto, own, signed, or MEAN,STD of grey in [0, 1] such as "
                               f"0.5,0.25; found {text!r}") from error  # fmt: skip
        return cls((mean,), (std,))

    @property
    def channels(self) -> int:
        return len(self.mean)

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Self:
        """Build from the result of `to_json`; [-1, 1] for a card without a range."""
        return cls((0.5,), (0.5,)) if data is None else cls(tuple(data["mean"]), tuple(data["std"]))


#: cbmir's own range: one channel in [-1, 1].
SIGNED = GreyRange((0.5,), (0.5,))
#: torchxrayvision's range: one channel in [-1024, 1024] (`torchxrayvision.utils.normalize`).
XRV = GreyRange((0.5,), (1 / 2048,))
#: RAD-DINO's range, the same in its three channels (preprocessor_config.json of microsoft/rad-dino).
RAD_DINO = GreyRange((0.5307,), (0.2583,))


class InOwnRange(nn.Module):
    """A first convolution that takes grey in [-1, 1], float [N, 1, S, S], and converts it to its own range.

    The conversion comes before the convolution's zero padding, as it did when the weights were trained.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, conv: nn.Module, own: GreyRange) -> None:
        super().__init__()
        self.conv = conv
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (own.mean, own.std))
        self.register_buffer("scale", (0.5 / std).float())
        self.register_buffer("shift", ((0.5 - mean) / std).float())

    def forward(self, image: Tensor) -> Tensor:
        read: Tensor = self.conv(image * self.scale + self.shift)
        return read


def read_grey(encoder: nn.Module, own: GreyRange) -> None:
    """Make the encoder's first convolution convert to its own range. Raises EncoderError unless exactly one convolution
    could read the image."""
    found = [
        name
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == own.channels and module.groups == 1
    ]
    if len(found) != 1:
        raise EncoderError(f"expected an encoder with one convolution of {own.channels} channels, which reads the "
                           f"image, found {len(found)}; choose another, or --grey-range signed")  # fmt: skip
    encoder.set_submodule(found[0], InOwnRange(encoder.get_submodule(found[0]), own))
