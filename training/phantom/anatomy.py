"""The normal thorax as two halves: their borders, bones, vessels and chest wall.

Each half is drawn as if it were the patient's left. u runs from the midline outwards and y from top to bottom, both in
image widths. At the end the right half is mirrored; it is on the left of the image. Borders are one-dimensional
profiles over u or y, so a soft mask only takes a subtraction and a clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from cbmir.training.phantom.patients import LEFT, LOWER, MIDDLE, RIGHT, UPPER, Anatomy, Phantom

Array = NDArray[np.float32]
Points = Sequence[tuple[float, float]]

GRID = 288  # rows of the internal picture
MARGIN = 0.08  # on each side, for rotation and shift
PIXEL = (1 + 2 * MARGIN) / GRID
CM = 1 / 40  # an image is about 40 cm wide

Y: Array = ((np.arange(GRID, dtype=np.float32) + 0.5) * PIXEL - MARGIN)[:, None]
U: Array = ((np.arange(GRID // 2, dtype=np.float32) + 0.5) * PIXEL)[None, :]
_PEN = 2 / PIXEL  # pen pixels per image width

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
    lung: Array  # 1 = inside the lung

    @property
    def hilum(self) -> tuple[float, float]:
        """(u, y) of the point where the vessels enter, which is higher on the left."""
        return 0.085, self.apex + (0.43 if self.side == LEFT else 0.455) * (self.base - self.apex)

    def row(self, y: float) -> int:
        return int(np.clip((y + MARGIN) / PIXEL, 0, GRID - 1))

    def place(self, zone: str, outwards: float, within: float) -> tuple[float, float]:
        """Return (u, y) in a zone of the lung: `outwards` from the heart (0) to the wall (1), `within` from top to
        bottom (0 to 1)."""
        low, high = {UPPER: (0.17, 0.34), MIDDLE: (0.38, 0.55), LOWER: (0.60, 0.76)}[zone]
        y = self.apex + (low + (high - low) * within) * (self.base - self.apex)
        row = self.row(y)
        inner = max(float(self.medial[row, 0]), float(self.heart[row, 0]))
        return inner + outwards * (float(self.lateral[row, 0]) - inner), y


def halves(phantom: Phantom) -> tuple[Half, Half]:
    """Return the patient's right and left half, shaped by habitus, breath, view and the findings that move borders."""
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
    # Volume loss raises the diaphragm.
    lift = 0.02 + 0.05 * atelectasis.severity if atelectasis and atelectasis.on_side(side) else 0.0
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
    """Return u of a lung's outer and inner border for each y, f32[GRID, 1]; at the apex both are `tip`."""
    t = np.clip((Y - apex) / (0.78 * (base - apex)), 0, 1)
    lateral = tip + (width - tip) * (1 - (1 - t) ** 2.3) ** 0.58
    medial = MEDIAL_BORDER + (tip - MEDIAL_BORDER) * (1 - np.clip(t / 0.20, 0, 1)) ** 2.2
    return lateral, medial


def _heart_border(side: str, bottom: float, width: float, knob: float) -> Array:
    """Return u of the border of mediastinum and heart. It peaks at `width`, just above the diaphragm (`bottom`)."""
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


def soft(distance: Array, width: float = 0.004) -> Array:
    """Return 0 outside (distance < 0) and 1 inside, with a soft edge of the given width."""
    return np.asarray(np.clip(distance / width + 0.5, 0, 1), np.float32)


def cloud(rng: np.random.Generator, cells: int, shape: tuple[int, int] = (GRID, GRID // 2)) -> Array:
    """Return smooth noise with unit variance at its `cells` x `cells` nodes, f32[shape]."""
    nodes = Image.fromarray(rng.standard_normal((cells, cells), dtype=np.float32))
    return np.asarray(nodes.resize((shape[1], shape[0]), Image.Resampling.BICUBIC))


class Pen:
    """A pen that draws lines and shapes on a half, at twice the grid's resolution, as a mask in [0, 1]."""

    def __init__(self) -> None:
        self._image = Image.new("L", (GRID, 2 * GRID))
        self._draw = ImageDraw.Draw(self._image)

    def line(self, points: Points, width: float, value: float = 1.0) -> None:
        """Draw a polyline through (u, y) points; `width` is in image widths."""
        pixels = max(1, round(width * _PEN))
        self._draw.line([(u * _PEN, (y + MARGIN) * _PEN) for u, y in points], round(255 * value), pixels)

    def polygon(self, points: Points, value: float = 1.0) -> None:
        self._draw.polygon([(u * _PEN, (y + MARGIN) * _PEN) for u, y in points], round(255 * value))

    def mask(self, blur: float = 0.0) -> Array:
        """Return f32[GRID, GRID/2], with edges softened over `blur` image widths on either side."""
        image = self._image.reduce(2)
        if blur:
            image = image.filter(ImageFilter.BoxBlur(blur / PIXEL))
        return np.asarray(image, np.float32) / np.float32(255)


_RIBS = 10
_VERTEBRA = 0.052  # height including the disc


def body(anatomy: Anatomy) -> Array:
    """Return soft tissue of neck, shoulders, trunk and breasts, f32[GRID, GRID/2]: 0 = air, about 0.5 = trunk."""
    side = anatomy.width + 0.03 + anatomy.fat
    ys = (-0.1, -0.03, 0.02, 0.06, 0.11, 0.18, 0.30, 0.42, 0.52, 1.1)
    us = (0.10, 0.11, 0.19, 0.33, 0.46, 0.56, 0.58, side + 0.06, side, side + 0.015)
    skin = np.interp(Y[:, 0], ys, us).astype(np.float32)[:, None]
    # A cylinder: the path through tissue is shorter near the skin.
    trunk = np.clip(1 - (U / skin) ** 6, 0, 1) ** 0.4 * (0.42 + 0.14 * np.clip(Y, 0, 1))
    return np.asarray(trunk + _breast(anatomy) if anatomy.breasts else trunk, np.float32)


def _breast(anatomy: Anatomy) -> Array:
    """Return a breast, denser towards its sharp lower edge."""
    centre_u, centre_y, radius = 0.21, 0.55 + 0.4 * anatomy.fat, 0.16 + 0.3 * anatomy.fat
    r = np.hypot((U - centre_u) / 1.05, Y - centre_y)
    return np.asarray(
        soft(radius - r, 0.015) * np.clip(0.35 + (Y - centre_y) / radius, 0, 1) * (0.11 * anatomy.breasts), np.float32
    )


def spine(anatomy: Anatomy) -> Array:
    """Return the column of vertebrae, with denser end plates, pedicles and spinous processes."""
    phase = (Y - anatomy.apex) / _VERTEBRA * (2 * math.pi)
    waist = 0.036 + 0.003 * np.cos(phase)
    column = soft(waist - U, 0.012) * (0.62 + 0.38 * np.clip(np.cos(phase) * 1.6 - 0.5, -0.4, 1))
    pedicles = np.exp(-(((U - 0.023) / 0.006) ** 2)) * np.clip(np.cos(phase + 2.2), 0, 1) ** 6
    processes = np.exp(-((U / 0.006) ** 2)) * np.clip(np.cos(phase + 3.6), 0, 1) ** 4
    return np.asarray(0.07 * column + 0.05 * pedicles + 0.05 * processes, np.float32)


def ribs(half: Half, anatomy: Anatomy) -> Array:
    """Return posterior arcs and fainter anterior ones, f32[GRID, GRID/2] in [0, 1.5]."""
    number = np.arange(_RIBS)[:, None]
    start = half.apex - 0.005 + number * anatomy.ribs
    end = start + anatomy.rib_slope * (0.028 + 0.017 * number)
    wall = np.interp(end, Y[:, 0], half.lateral[:, 0]) + 0.004
    t = np.linspace(0, 1, 12)
    quarter = np.sin(t * math.pi / 2)
    posterior_u = 0.03 + (wall - 0.03) * quarter**0.9
    posterior_y = start + (end - start) * t**2 - 0.016 * np.sin(math.pi * np.minimum(1, 1.6 * t))
    anterior_u = wall - (0.38 * wall - 0.004) * quarter**1.4
    anterior_y = end + (0.055 + 0.008 * number) * quarter + 0.012 * np.sin(t * math.pi)
    back, front = Pen(), Pen()
    for i in range(_RIBS):
        arc = _points(posterior_u[i], posterior_y[i])
        back.line(arc, 0.018)
        back.line(arc, 0.008, 0.7)  # marrow is less dense than cortex
        if i < _RIBS - 3:  # the lowest ribs reach the front below the picture
            front.line(_points(anterior_u[i], anterior_y[i]), 0.020)
    return back.mask(0.004) + 0.5 * front.mask(0.007)


def _points(us: NDArray[np.floating], ys: NDArray[np.floating]) -> Points:
    return list(zip(us.tolist(), ys.tolist(), strict=True))


def shoulder(half: Half, view: str) -> Array:
    """Return the clavicle, the scapula and the head of the humerus. In AP views the scapula overlaps the lung."""
    y = half.apex + (0.055 if view == "PA" else 0.02)
    pen = Pen()
    t = np.linspace(0, 1, 12)
    clavicle = _points(0.028 + 0.35 * t, y + 0.012 * np.sin(2 * math.pi * t) - 0.055 * t)
    pen.line(clavicle, 0.023, 0.85)
    pen.line(clavicle, 0.011, 0.65)
    inwards = 0.045 if view == "AP" else 0.0
    blade = [(0.345, 0.13), (0.40, 0.10), (0.47, 0.13), (0.455, 0.22), (0.415, 0.36), (0.385, 0.41), (0.36, 0.32)]
    blade = [(u - inwards, v + half.apex - 0.06) for u, v in blade]
    pen.polygon(blade, 0.28)
    pen.line([*blade[4:], blade[0]], 0.007, 0.5)
    pen.line([(0.36 - inwards, 0.19 + half.apex - 0.06), (0.46, half.apex + 0.02)], 0.016, 0.5)
    head = [
        (0.50 + 0.05 * math.cos(a), half.apex + 0.065 + 0.055 * math.sin(a)) for a in np.linspace(0, 6.2, 20).tolist()
    ]
    pen.polygon(head, 0.6)
    return pen.mask(0.005)


def vessels(half: Half, seed: int) -> Array:
    """Return a tree of vessels that grows from the hilum and thins at each fork, f32[GRID, GRID/2] in [0, 1]."""
    rng = np.random.default_rng([seed, half.side == LEFT])
    pen = Pen()
    u, y = half.hilum
    spread = (np.linspace(-1.45, 1.5, 9) + rng.normal(0, 0.12, 9)).tolist()
    # (u, y, angle, length, calibre)
    branches = [(u, y + 0.03 * a, a, rng.uniform(0.04, 0.09), 0.0115 + 0.005 * (a > 0)) for a in spread]
    draws = iter(rng.random(4000).tolist())
    while branches:
        u, y, angle, length, calibre = branches.pop()
        bend = angle + 0.7 * (next(draws) - 0.5)
        end = (u + length * math.cos(bend), y + length * math.sin(bend))
        pen.line([(u, y), end], calibre, min(1.0, 0.25 + calibre * 50))
        if calibre > 0.004:
            for turn in (-0.35, 0.35):
                split = bend + turn * (0.6 + 0.9 * next(draws))
                branches.append((*end, split, length * (0.7 + 0.3 * next(draws)), calibre * (0.55 + 0.2 * next(draws))))
    hilum = 0.5 * np.exp(-(((U - half.hilum[0]) / 0.026) ** 2) - ((Y - half.hilum[1]) / 0.05) ** 2)
    return np.maximum(pen.mask(0.003), hilum.astype(np.float32))


def airways(half: Half) -> Array:
    """Return half of the trachea and the main bronchus of this side: 1 = air."""
    carina = half.apex + 0.36 * (half.base - half.apex)
    pen = Pen()
    pen.line([(0.0, -MARGIN), (0.0, carina)], 0.034)
    end = (half.hilum[0], half.hilum[1] + 0.01)
    pen.line([(0.002, carina - 0.005), end], 0.015, 0.5)
    return pen.mask(0.007)


def stomach(half: Half, radius: float) -> Array:
    """Return the gas bubble under the left dome of the diaphragm, with a fluid level below: 1 = gas."""
    u = 0.45 * half.width
    top = float(half.diaphragm[0, int(u / PIXEL)]) + 0.018
    centre = top + radius * 0.8
    r = np.hypot((U - u) / (1.5 * radius), (Y - centre) / (0.8 * radius))
    return soft(1 - r, 0.25) * soft(centre + 0.4 * radius - Y, 0.008)
