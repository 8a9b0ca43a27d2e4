"""The normal thorax, as two halves.

Each half is drawn as a left one, in coordinates from the midline outwards (u) and from top to bottom (y), both in image
widths; the patient's right half is mirrored when the image is put together, and stands at the image's left. Borders
are one-dimensional profiles over u or y, so a soft mask is a subtraction and a clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from cbmir.training.phantom.patients import LEFT, LOWER, MIDDLE, RIGHT, UPPER, Phantom, PhantomFinding

Array = NDArray[np.float32]
Points = Sequence[tuple[float, float]]

GRID = 288  # rows of the internal picture
MARGIN = 0.08  # drawn beyond the image on each side, so that rotation and shift find something there
PIXEL = (1 + 2 * MARGIN) / GRID
CM = 1 / 40  # an image is about 40 cm wide

Y: Array = ((np.arange(GRID, dtype=np.float32) + 0.5) * PIXEL - MARGIN)[:, None]
U: Array = ((np.arange(GRID // 2, dtype=np.float32) + 0.5) * PIXEL)[None, :]
_PEN = 2 / PIXEL  # pen pixels an image width

MEDIAL_BORDER = 0.045
LUNG_TIP = 0.115  # u of the lung's apex


@dataclass(frozen=True, eq=False)
class Half:
    """One half of a thorax. Profiles over y are f32[GRID, 1], over u f32[1, GRID/2], masks f32[GRID, GRID/2]."""

    side: str
    apex: float  # y of the lung's tip
    base: float  # y of the costophrenic angle
    width: float  # greatest u of the lung
    lateral: Array  # u of the chest wall
    medial: Array  # u of the lung's inner border
    heart: Array  # u of the border of heart and mediastinum
    diaphragm: Array  # y of the diaphragm
    lung: Array  # 1 = in front of the lung

    @property
    def hilum(self) -> tuple[float, float]:
        """(u, y) where the vessels enter; the left one is higher."""
        return 0.085, self.apex + (0.43 if self.side == LEFT else 0.455) * (self.base - self.apex)

    def row(self, y: float) -> int:
        return int(np.clip((y + MARGIN) / PIXEL, 0, GRID - 1))

    def place(self, zone: str, outwards: float, within: float) -> tuple[float, float]:
        """(u, y) in a zone of the lung: `outwards` from the heart's border (0) to the wall (1), `within` 0 to 1."""
        low, high = {UPPER: (0.17, 0.34), MIDDLE: (0.38, 0.55), LOWER: (0.60, 0.76)}[zone]
        y = self.apex + (low + (high - low) * within) * (self.base - self.apex)
        row = self.row(y)
        inner = max(float(self.medial[row, 0]), float(self.heart[row, 0]))
        return inner + outwards * (float(self.lateral[row, 0]) - inner), y


def halves(phantom: Phantom) -> tuple[Half, Half]:
    """The patient's right and left half, shaped by habitus, breath, view and the findings that move borders."""
    anatomy = phantom.anatomy
    emphysema, cardiomegaly = phantom.finding("Emphysema"), phantom.finding("Cardiomegaly")
    inflated = 0.5 + 0.5 * emphysema.severity if emphysema else 0.0
    dome = anatomy.dome * (1 - 0.72 * inflated)
    base = anatomy.base + 0.05 * (phantom.breath - 0.5) + 0.035 * inflated
    width = anatomy.width + 0.008 * inflated
    if cardiomegaly:
        ratio = 0.53 + 0.09 * cardiomegaly.severity
    else:
        ratio = min(anatomy.heart_ratio + (0.015 if phantom.view == "AP" else 0.0), 0.47) - 0.06 * inflated
    heart_width = ratio * 2 * width
    return (
        _half(phantom, RIGHT, width + anatomy.asymmetry / 2, base, dome, 0.31 * heart_width),
        _half(phantom, LEFT, width - anatomy.asymmetry / 2, base + 0.012, dome * 0.9, 0.69 * heart_width),
    )


def _half(phantom: Phantom, side: str, width: float, base: float, dome: float, heart_width: float) -> Half:
    atelectasis = phantom.finding("Atelectasis")
    # Volume loss: the diaphragm comes up.
    lift = 0.02 + 0.05 * atelectasis.severity if atelectasis and on_side(atelectasis, side) else 0.0
    apex = phantom.anatomy.apex
    lateral, medial = lung_borders(apex, base, width)
    centre = 0.48 * width
    outwards = np.maximum(U - centre, 0) / (width - centre)
    inwards = np.maximum(centre - U, 0) / centre
    diaphragm = base - lift - dome * (1 - outwards**2.2 - 0.45 * inwards**2)
    heart = _heart_border(side, base - lift * 0.5 - dome, heart_width, phantom.anatomy.aortic_knob)
    lung = soft(lateral - U) * soft(U - medial) * soft(diaphragm - Y, 0.006) * soft(Y - apex)
    return Half(side, apex, base, width, lateral, medial, heart, diaphragm, lung)


def lung_borders(apex: float, base: float, width: float, tip: float = LUNG_TIP) -> tuple[Array, Array]:
    """u of a lung's outer and inner border for each y, f32[GRID, 1]; both are at `tip` at the apex."""
    t = np.clip((Y - apex) / (0.78 * (base - apex)), 0, 1)
    lateral = tip + (width - tip) * (1 - (1 - t) ** 2.3) ** 0.58
    medial = MEDIAL_BORDER + (tip - MEDIAL_BORDER) * (1 - np.clip(t / 0.20, 0, 1)) ** 2.2
    return lateral, medial


def _heart_border(side: str, bottom: float, width: float, knob: float) -> Array:
    """u of the border of mediastinum and heart; its maximum is `width`, a little above the diaphragm (`bottom`)."""
    if side == RIGHT:
        points = [(-0.1, 0.06), (0.1, 0.045), (0.24, 0.04), (0.36, 0.05), (bottom - 0.25, 0.06)]
        points += [(bottom - 0.12, width), (bottom - 0.06, width * 0.97), (bottom + 0.03, 0.55 * width)]
    else:
        points = [(-0.1, 0.06), (0.1, 0.045), (0.22, 0.042), (0.275, knob), (0.315, knob), (0.355, 0.048)]
        points += [(0.40, 0.072), (bottom - 0.24, 0.5 * width), (bottom - 0.12, 0.9 * width)]
        points += [(bottom - 0.05, width), (bottom - 0.01, 0.97 * width), (bottom + 0.05, 0.6 * width)]
    ys, us = np.array(points).T
    sharp = np.interp(Y[:, 0], ys, us)
    window = 13
    padded = np.pad(sharp, window - 1, mode="edge")
    smooth = np.convolve(np.convolve(padded, np.ones(window), "valid"), np.ones(window), "valid") / window**2
    return np.asarray(smooth * (width / smooth[Y[:, 0] > 0.42].max()), dtype=np.float32)[:, None]


def on_side(finding: PhantomFinding, side: str) -> bool:
    return finding.side in (side, "both")


def soft(distance: Array, width: float = 0.004) -> Array:
    """0 outside (distance < 0), 1 inside, with an edge of the given width."""
    return np.asarray(np.clip(distance / width + 0.5, 0, 1), np.float32)


def cloud(rng: np.random.Generator, cells: int, shape: tuple[int, int] = (GRID, GRID // 2)) -> Array:
    """Smooth noise of unit variance at its `cells` x `cells` nodes, f32[shape]."""
    nodes = Image.fromarray(rng.standard_normal((cells, cells), dtype=np.float32))
    return np.asarray(nodes.resize((shape[1], shape[0]), Image.Resampling.BICUBIC))


class Pen:
    """Draws lines and shapes on a half, at twice the grid, and gives them back as a mask in [0, 1]."""

    def __init__(self) -> None:
        self._image = Image.new("L", (GRID, 2 * GRID))
        self._draw = ImageDraw.Draw(self._image)

    def line(self, points: Points, width: float, value: float = 1.0) -> None:
        """A polyline through (u, y) points, `width` in image widths."""
        pixels = max(1, round(width * _PEN))
        self._draw.line([(u * _PEN, (y + MARGIN) * _PEN) for u, y in points], round(255 * value), pixels)

    def polygon(self, points: Points, value: float = 1.0) -> None:
        self._draw.polygon([(u * _PEN, (y + MARGIN) * _PEN) for u, y in points], round(255 * value))

    def mask(self, blur: float = 0.0) -> Array:
        """f32[GRID, GRID/2]; edges are softened over `blur` image widths on either side."""
        image = self._image.reduce(2)
        if blur:
            image = image.filter(ImageFilter.BoxBlur(blur / PIXEL))
        return np.asarray(image, np.float32) / np.float32(255)
