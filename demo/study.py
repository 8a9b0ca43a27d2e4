"""One image in one browser session: what is kept of it, what the page shows, and the pictures that explain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.evidence_overlay import overlay
from cbmir.demo.rendering import readable
from cbmir.errors import UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.preprocess import centre_crop, preprocess, resize_square
from cbmir.runtime.radiograph import Radiograph
from cbmir.runtime.result import Analysis

#: The longer side of the picture on the page, in pixels.
PICTURE_SIDE = 1024
#: The choice of no evidence.
PLAIN = ""
NO_CHOICE = ("None", PLAIN)


@dataclass(frozen=True, eq=False)
class Upload:
    """What is kept of an image that may have a hundred million pixels.

    `radiograph` has the square that preprocessing makes as its pixels, uint8 [resize, resize], with the model's input
    in its middle: resizing that again changes nothing, so its analysis is that of the whole image. `picture` is
    uint8 [H, W], at most PICTURE_SIDE long.
    """

    radiograph: Radiograph
    picture: NDArray[np.uint8]

    @classmethod
    def of(cls, radiograph: Radiograph, spec: PreprocessSpec) -> Self:
        square = resize_square(radiograph.pixels, spec)
        centre_crop(square, spec)[:] = preprocess(radiograph, spec)  # within one grey level of what is there
        return cls(radiograph.with_pixels(square), picture_of(radiograph.pixels))


@dataclass(frozen=True, eq=False)
class Study:
    """`pixels` is the analysed image, uint8 [H, W], at most PICTURE_SIDE long."""

    analysis: Analysis
    pixels: NDArray[np.uint8]
    spec: PreprocessSpec

    def choices(self) -> list[tuple[str, str]]:
        """(What it is called, its key) of everything there is evidence for."""
        findings = [(f"Finding: {readable(f.label)}", f"finding:{f.label}") for f in self.analysis.findings]
        neighbours = [
            (f"Neighbour {rank}: {n.id}", f"neighbour:{n.id}") for rank, n in enumerate(self.analysis.neighbours, 1)
        ]
        return [NO_CHOICE, *findings, *neighbours]

    def evidence(self, key: str) -> NDArray[np.float32] | None:
        """float32 [h, w] that sums to the cosine, or None for PLAIN. Raises UserError for an unknown key."""
        kind, _, name = key.partition(":")
        if key == PLAIN:
            return None
        if kind == "finding":
            return self.analysis.evidence_for_finding(name)
        if kind == "neighbour":
            return self.analysis.evidence_for_neighbour(name)
        raise UserError(f"expected a finding or a neighbour to explain, found {key!r}")

    def picture(self, key: str, opacity: float) -> NDArray[np.uint8]:
        """uint8 [H, W] without evidence, [H, W, 3] with it; opacity in [0, 1]."""
        evidence = self.evidence(key)
        return self.pixels if evidence is None else overlay(self.pixels, evidence, self.spec, opacity)


def picture_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image uint8 [H, W], made smaller where its longer side exceeds PICTURE_SIDE."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return np.array(picture)
