"""A check of the picture itself: is it a frontal chest X-ray, bone bright, upright, and not mirrored?

Tags do not answer that. A small convolutional network does, from a grey thumbnail, in about a millisecond. It does not
depend on the model or the gallery, and only needs NumPy, so it works with every engine. Its weights are beside this
file; `cbmir.training.picture_check` makes them, and docs/picture_check.md says how often it is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import IO, Any, Final, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image

from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.radiograph import Radiograph, look_up

SIDE: Final = 64  # pixels of the thumbnail
SMALLEST: Final = 96  # pixels of the shorter side: smaller images are not judged
#: The network's outputs, logits: what the picture shows, whether it was inverted, by how many quarter turns
#: anticlockwise it was turned, and whether it was mirrored.
OUTPUTS: Final = ("chest", "part", "other", "inverted", "turned 0", "turned 1", "turned 2", "turned 3", "mirrored")
#: The index of each output in the outputs of the mirror image.
_OF_MIRROR_IMAGE = [0, 1, 2, 3, 4, 7, 6, 5, 8]
_ENOUGH = 256  # pixels of the shorter side that are enough for a thumbnail

_UNRELIABLE = "Do not rely on its findings and neighbours."
#: The warnings by kind and, for `turned`, quarter turns.
SENTENCES: Final = {
    "other": ImageWarning("not a chest", f"This image does not look like a frontal chest X-ray. {_UNRELIABLE}"),
    "part": ImageWarning("part of a chest", f"This image looks like only a part of a chest X-ray. {_UNRELIABLE}"),
    "inverted": ImageWarning("inverted", f"This image looks inverted: bone dark and air bright. {_UNRELIABLE}"),
    "turned 1": ImageWarning("turned", f"This image looks rotated by 90° anticlockwise. {_UNRELIABLE}"),
    "turned 2": ImageWarning("turned", f"This image looks upside down. {_UNRELIABLE}"),
    "turned 3": ImageWarning("turned", f"This image looks rotated by 90° clockwise. {_UNRELIABLE}"),
    "mirrored": ImageWarning("perhaps mirrored", "This image may be mirrored, or the heart lies on the right: compare "
                             "the side marker."),
}  # fmt: skip

Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PictureCheck:
    """The network: convolutions of 3 x 3 with stride 2 and ReLU, then a linear layer.

    Attributes:
        weights: float32 [9 * in, out] per convolution, by row, column and channel; [H * W * in, 9] for the last layer.
        biases: float32 [out] per layer.
        about: How the network was made and measured. A kind of `scores` is reported above its value in `thresholds`.
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]
    about: Mapping[str, Any]

    @classmethod
    def read(cls, file: IO[bytes]) -> Self:
        """Read a file of NumPy arrays: `weight0`, `bias0` and so on, and `about` in JSON."""
        with np.load(file) as arrays:
            layers = range(sum(name.startswith("weight") for name in arrays))
            weights, biases = ([arrays[f"{name}{n}"].astype(np.float32) for n in layers] for name in ("weight", "bias"))
            return cls(tuple(weights), tuple(biases), json.loads(str(arrays["about"])))

    def logits(self, thumbnails: NDArray[np.uint8]) -> Array:
        """Return the `OUTPUTS`, float32 [N, 9], for thumbnails [N, SIDE, SIDE]."""
        x = standardised(thumbnails)[..., None]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            windows = sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2].transpose(0, 1, 2, 4, 5, 3)
            shape = windows.shape[:3]
            x = np.maximum(windows.reshape(-1, len(weight)) @ weight + bias, 0).reshape(*shape, -1)
        logits: Array = x.reshape(len(x), -1) @ self.weights[-1] + self.biases[-1]
        return logits

    def scores(self, thumbnails: NDArray[np.uint8]) -> dict[str, Array]:
        """Return how strongly each kind is indicated over a normal image: float32 [N] for thumbnails [N, SIDE, SIDE].

        The outputs for an image and for its mirror image are averaged. An image without a whole chest is either `other`
        or `part`; the less likely of the two is -inf.
        """
        logits, mirror = self.logits(thumbnails), self.logits(thumbnails[:, :, ::-1])
        both = (logits + mirror[:, _OF_MIRROR_IMAGE]) / 2
        part, other = both[:, 1], both[:, 2]
        no_chest = np.logaddexp(part, other) - both[:, 0]
        return {
            "other": np.where(other >= part, no_chest, -np.inf),
            "part": np.where(other < part, no_chest, -np.inf),
            "inverted": both[:, 3],
            **{f"turned {n}": both[:, 4 + n] - both[:, 4] for n in (1, 2, 3)},
            "mirrored": (logits[:, 8] - mirror[:, 8]) / 2,
        }

    def said(self, scores: Mapping[str, float]) -> list[str]:
        """Return the kinds to report for an image, by its `scores`; empty if no score is above its threshold.

        If any score is, and the image is more likely not a whole chest than one (`other` or `part` is above 0), only
        that is reported: "inverted" or "mirrored" would imply that it is a chest. At most one `turned` is reported.
        """
        sure = {kind: score for kind, score in scores.items() if score > self.about["thresholds"][kind]}
        for kind in ("other", "part"):
            if sure and scores[kind] > 0:
                return [kind]
        turned = max((kind for kind in sure if kind.startswith("turned")), key=lambda kind: sure[kind], default="")
        return [kind for kind in sure if not kind.startswith("turned") or kind == turned]


@cache
def own_check() -> PictureCheck:
    """Load the network that comes with the package."""
    with resources.files(__package__).joinpath("picture_check.npz").open("rb") as file:
        return PictureCheck.read(file)


def check_picture(radiograph: Radiograph) -> tuple[ImageWarning, ...]:
    """Return the check's warnings; empty for images with a side of less than `SMALLEST` pixels."""
    if min(radiograph.stored.shape) < SMALLEST:
        return ()
    check = own_check()
    scores = check.scores(thumbnail(radiograph)[None])
    return tuple(SENTENCES[kind] for kind in check.said({kind: float(of[0]) for kind, of in scores.items()}))


def thumbnail(radiograph: Radiograph) -> NDArray[np.uint8]:
    """Squeeze the whole image to uint8 [SIDE, SIDE]."""
    step = max(1, min(radiograph.stored.shape) // _ENOUGH)
    grey = look_up(radiograph.greys, np.ascontiguousarray(radiograph.stored[::step, ::step]))
    return np.asarray(Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BOX))


def standardised(thumbnails: NDArray[np.uint8]) -> Array:
    """Scale each of [N, SIDE, SIDE] to mean 0 and variance 1, so that exposure and window matter less."""
    grey = thumbnails.astype(np.float32)
    centred = grey - grey.mean(axis=(1, 2), keepdims=True)
    scaled: Array = centred / (grey.std(axis=(1, 2), keepdims=True) + 1)
    return scaled
