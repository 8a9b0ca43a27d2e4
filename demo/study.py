"""One analysed image in one browser session: what the page shows of it, and the pictures that explain it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.evidence_overlay import overlay
from cbmir.demo.rendering import readable
from cbmir.errors import UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.result import Analysis

#: The longer side of the picture on the page, in pixels.
PICTURE_SIDE = 1024
#: The choice of no evidence.
PLAIN = ""
NO_CHOICE = ("None", PLAIN)


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
