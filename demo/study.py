"""One image in one browser session: what is kept of it, and what the page is told."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.markup import image_uri, readable
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.evidence import seen_box
from cbmir.runtime.imaging.preprocess import centre_crop, preprocess, resize_square
from cbmir.runtime.imaging.radiograph import Radiograph
from cbmir.runtime.results import Analysis

#: The longer side of the picture on the page, in pixels.
PICTURE_SIDE = 1024


@dataclass(frozen=True, eq=False)
class Upload:
    """What is kept of an image that may have a hundred million pixels.

    `radiograph` has a square of preprocessing's size as its pixels, uint8 [resize, resize], with the model's input in
    its middle: resizing that again changes nothing, so its analysis is that of the whole image. `picture` is
    uint8 [H, W], at most PICTURE_SIDE long. `caption` says what is shown, and `warnings` what a reader must know of it
    beside what an analysis warns of.
    """

    radiograph: Radiograph
    picture: NDArray[np.uint8]
    caption: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, radiograph: Radiograph, spec: PreprocessSpec, caption: str = "") -> Self:
        picture = picture_of(radiograph.pixels)
        square = resize_square(picture, spec)  # of which the model sees but the middle
        centre_crop(square, spec)[:] = preprocess(radiograph, spec)
        return cls(radiograph.with_pixels(square), picture, caption or radiograph.name)

    def showing(self, picture: NDArray[np.uint8], caption: str, *warnings: str) -> Self:
        """The same image under another picture of it."""
        return replace(self, picture=picture_of(picture), caption=caption, warnings=warnings)

    def for_page(self, spec: PreprocessSpec) -> dict[str, Any]:
        """The picture as a PNG, without loss, and where in it the model looks, as shares of its sides."""
        height, width = self.picture.shape
        top, bottom, left, right = seen_box(height, width, spec)
        png = io.BytesIO()
        Image.fromarray(self.picture).save(png, "PNG", compress_level=1)  # the time counts more than the bytes
        return {
            "src": image_uri(png.getvalue(), "png"), "width": width, "height": height, "caption": self.caption,
            "box": [top / height, bottom / height, left / width, right / width],
        }  # fmt: skip


def evidence_for_page(analysis: Analysis) -> dict[str, Any]:
    """Every evidence map of an analysis by its key: small enough to go along, so that choosing one asks nobody."""
    findings = {
        f"finding:{f.label}": cells(readable(f.label), analysis.evidence_for_finding(f.label))
        for f in analysis.findings
    }
    neighbours = {
        f"neighbour:{n.id}": cells(f"look-alike {rank}", analysis.evidence_for_neighbour(n.id))
        for rank, n in enumerate(analysis.neighbours, 1)
    }
    return findings | neighbours


def cells(name: str, evidence: NDArray[np.float32]) -> dict[str, Any]:
    """An evidence map [h, w] as the page takes it."""
    return {"name": name, "cells": np.round(evidence.astype(float), 6).tolist(), "cosine": float(evidence.sum())}


def picture_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image uint8 [H, W], made smaller where its longer side exceeds PICTURE_SIDE."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return np.array(picture)
