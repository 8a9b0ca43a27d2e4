"""What is seen in and behind the lungs of each half: bones, vessels, chest wall."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cbmir.training.phantom.anatomy import MARGIN, PIXEL, Array, Half, Pen, Points, U, Y, soft
from cbmir.training.phantom.patients import LEFT, Anatomy

_RIBS = 10
_VERTEBRA = 0.052  # height with its disc


def body(anatomy: Anatomy) -> Array:
    """Soft tissue of neck, shoulders, trunk and breasts, f32[GRID, GRID/2]: 0 = air, about 0.5 = trunk."""
    side = anatomy.width + 0.03 + anatomy.fat
    ys = (-0.1, -0.03, 0.02, 0.06, 0.11, 0.18, 0.30, 0.42, 0.52, 1.1)
    us = (0.10, 0.11, 0.19, 0.33, 0.46, 0.56, 0.58, side + 0.06, side, side + 0.015)
    skin = np.interp(Y[:, 0], ys, us).astype(np.float32)[:, None]
    # A cylinder: the path through tissue shortens towards the skin.
    trunk = np.clip(1 - (U / skin) ** 6, 0, 1) ** 0.4 * (0.42 + 0.14 * np.clip(Y, 0, 1))
    return np.asarray(trunk + _breast(anatomy) if anatomy.breasts else trunk, np.float32)


def _breast(anatomy: Anatomy) -> Array:
    """Denser towards a sharp lower edge."""
    centre_u, centre_y, radius = 0.21, 0.55 + 0.4 * anatomy.fat, 0.16 + 0.3 * anatomy.fat
    r = np.hypot((U - centre_u) / 1.05, Y - centre_y)
    return np.asarray(
        soft(radius - r, 0.015) * np.clip(0.35 + (Y - centre_y) / radius, 0, 1) * (0.11 * anatomy.breasts), np.float32
    )


def spine(anatomy: Anatomy) -> Array:
    """Column of vertebrae: denser end plates, pedicles and spinous processes."""
    phase = (Y - anatomy.apex) / _VERTEBRA * (2 * math.pi)
    waist = 0.036 + 0.003 * np.cos(phase)
    column = soft(waist - U, 0.012) * (0.62 + 0.38 * np.clip(np.cos(phase) * 1.6 - 0.5, -0.4, 1))
    pedicles = np.exp(-(((U - 0.023) / 0.006) ** 2)) * np.clip(np.cos(phase + 2.2), 0, 1) ** 6
    processes = np.exp(-((U / 0.006) ** 2)) * np.clip(np.cos(phase + 3.6), 0, 1) ** 4
    return np.asarray(0.07 * column + 0.05 * pedicles + 0.05 * processes, np.float32)


def ribs(half: Half, anatomy: Anatomy) -> Array:
    """Posterior arcs, and fainter anterior ones, f32[GRID, GRID/2] in [0, 1.5]."""
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
        if i < _RIBS - 3:  # the lowest reach the front below the picture
            front.line(_points(anterior_u[i], anterior_y[i]), 0.020)
    return back.mask(0.004) + 0.5 * front.mask(0.007)


def _points(us: NDArray[np.floating], ys: NDArray[np.floating]) -> Points:
    return list(zip(us.tolist(), ys.tolist(), strict=True))


def shoulder(half: Half, view: str) -> Array:
    """Clavicle, scapula and the head of the humerus; in AP views the scapula lies over the lung."""
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
    """A tree from the hilum that halves its calibre on its way out, f32[GRID, GRID/2] in [0, 1]."""
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
    """Half of the trachea, and the main bronchus of this side: 1 = air."""
    carina = half.apex + 0.36 * (half.base - half.apex)
    pen = Pen()
    pen.line([(0.0, -MARGIN), (0.0, carina)], 0.034)
    end = (half.hilum[0], half.hilum[1] + 0.01)
    pen.line([(0.002, carina - 0.005), end], 0.015, 0.5)
    return pen.mask(0.007)


def stomach(half: Half, radius: float) -> Array:
    """The gas bubble under the dome of the left half, with a fluid level below: 1 = gas."""
    u = 0.45 * half.width
    top = float(half.diaphragm[0, int(u / PIXEL)]) + 0.018
    centre = top + radius * 0.8
    r = np.hypot((U - u) / (1.5 * radius), (Y - centre) / (0.8 * radius))
    return soft(1 - r, 0.25) * soft(centre + 0.4 * radius - Y, 0.008)
