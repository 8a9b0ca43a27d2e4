"""Findings in their usual places. Those that only move a border (a wide heart, a flat diaphragm) are in `anatomy`.

Each function changes the layers of one half: `opacity` is added to the picture, `air` and `vessels` scale those of the
normal lung. Exposure and noise are applied later.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cbmir.training.phantom.anatomy import CM, GRID, LUNG_TIP, Array, Half, Pen, U, Y, cloud, lung_borders, soft
from cbmir.training.phantom.patients import LEFT, LOWER, UPPER, PhantomFinding


class Layers:
    """The layers of one half that findings change, each f32[GRID, GRID/2]."""

    def __init__(self) -> None:
        self.air, self.vessels = np.ones((2, GRID, GRID // 2), np.float32)
        self.opacity: Array = np.zeros((GRID, GRID // 2), np.float32)


def paint(findings: tuple[PhantomFinding, ...], half: Half) -> Layers:
    layers = Layers()
    for finding in findings:
        if finding.on_side(half.side) and finding.label in _PAINTERS:
            rng = np.random.default_rng([finding.seed, half.side == LEFT])
            _PAINTERS[finding.label](finding, half, layers, rng)
    return layers


def _effusion(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint fluid that fills the pleural space from below; its upper border climbs along the wall (meniscus)."""
    height = 0.075 + 0.30 * finding.severity
    climb = (0.05 + 0.05 * finding.severity) * np.exp(-(half.lateral - U) / (0.05 + 0.04 * finding.severity))
    fluid = half.lung * soft(Y - (half.base - height - climb), 0.022)
    layers.air *= 1 - fluid
    layers.opacity += 0.15 * fluid
    layers.vessels *= 1 - fluid


def _pneumothorax(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint air between the wall and a collapsed lung, mostly at the apex; the pleura is visible as a line."""
    gap = 0.03 + 0.10 * finding.severity
    apex = half.apex + 0.04 + 0.15 * finding.severity
    lateral, medial = lung_borders(apex, half.base, half.width - gap, tip=LUNG_TIP - 0.2 * gap)
    lateral = lateral + gap * np.clip((Y - apex) / (half.base - apex), 0, 1) ** 2
    collapsed = soft(lateral - U) * soft(U - medial) * soft(Y - apex)
    rim = half.lung * (1 - collapsed)
    layers.vessels *= 1 - rim
    layers.air *= 1 + 0.28 * rim
    layers.opacity += 0.05 * finding.severity * half.lung * collapsed
    pen = Pen()
    top, bottom = half.row(apex) + 1, half.row(half.base - 0.02)
    border = [(float(u), float(y)) for u, y in zip(lateral[top:bottom, 0], Y[top:bottom, 0], strict=True)]
    inside = [(float(u), float(y)) for u, y in zip(medial[top : top + 24, 0], Y[top : top + 24, 0], strict=True)]
    pen.line([*reversed(inside), *border], 0.005)
    layers.opacity += 0.16 * pen.mask(0.0012) * half.lung


def _consolidation(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint a patch of filled alveoli that ends at a fissure, with bronchi that still contain air."""
    u, y = half.place(finding.zone, rng.uniform(0.3, 0.6), rng.uniform(0.3, 0.8))
    radius = 0.085 + 0.055 * finding.severity
    r = np.hypot(U - u, (Y - y) * rng.uniform(0.9, 1.3)) / radius
    patch = soft(1 - r + 0.16 * cloud(rng, 9) + 0.16 * cloud(rng, 24), 0.7) * half.lung
    if finding.zone == UPPER:
        patch = patch * soft(y + 0.5 * radius - Y, 0.008)
    bronchi = Pen()
    for turn in rng.uniform(-0.5, 0.5, 3):
        angle = math.atan2(y - half.hilum[1], u - half.hilum[0]) + turn
        along = (0.6 * radius * math.cos(angle), 0.6 * radius * math.sin(angle))
        bronchi.line([(u - along[0], y - along[1]), (u + 0.5 * along[0], y + 0.5 * along[1])], 0.007)
    layers.air *= 1 - (0.75 + 0.2 * finding.severity) * patch * (1 - 0.25 * bronchi.mask(0.003))
    layers.opacity += 0.08 * patch
    layers.vessels *= 1 - 0.9 * patch


def _edema(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint haze around the hila that spares the periphery (bat wing), wide blurred vessels, and Kerley's B lines."""
    u, y = half.hilum
    wing = np.exp(-(((U - u - 0.055) / 0.095) ** 2) - ((Y - y - 0.04) / 0.17) ** 2)
    haze = np.clip(wing * (1 + 0.22 * cloud(rng, 22)), 0, 1) * half.lung
    layers.opacity += (0.15 + 0.13 * finding.severity) * haze + 0.03 * half.lung
    layers.vessels *= 1.25 - 0.5 * haze
    kerley = Pen()
    for line_y in np.arange(half.base - 0.22, half.base - 0.04, 0.017) + rng.uniform(-0.003, 0.003):
        wall = float(half.lateral[half.row(line_y), 0])
        kerley.line([(wall - rng.uniform(0.03, 0.05), line_y + 0.004), (wall, line_y)], 0.003)
    layers.opacity += 0.10 * kerley.mask(0.001) * half.lung


def _atelectasis(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint plates of airless lung above a raised diaphragm, and a wedge beside the heart (lobar volume loss)."""
    plates = Pen()
    for step in range(2 + int(finding.severity > 0.4)):
        u, y = half.place(LOWER, 0.02 + 0.1 * step, 0.95 - 0.4 * step + rng.uniform(-0.1, 0.1))
        length, tilt = rng.uniform(0.13, 0.19), rng.uniform(-0.25, 0.35)
        plates.line([(u, y), (u + length, y + tilt * length)], 0.013 + 0.008 * finding.severity)
    layers.opacity += 0.19 * plates.mask(0.0025) * half.lung
    inner = half.heart + 0.13 * (0.4 + finding.severity)
    wedge = soft((inner - U) * 0.7 + (Y - half.base + 0.10) * 0.9, 0.05) * soft(Y - half.base + 0.24, 0.12)
    layers.opacity += 0.17 * wedge * half.lung


def _spot(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint a nodule or mass: round, of diameter `finding.diameter_cm`, with a slightly irregular border."""
    density, wobble = (0.29, 0.04) if finding.label == "Nodule" else (0.31, 0.14)
    radius = finding.diameter_cm * CM / 2
    u, y = half.place(finding.zone, rng.uniform(0.35, 0.7), rng.uniform(0, 1))
    angle = np.arctan2(Y - y, U - u)
    border = radius * (1 + wobble * sum(np.sin(n * angle + rng.uniform(0, 6.28)) / n for n in (2, 3, 4)))
    r = np.hypot(U - u, Y - y)
    # The path through a ball is longest at its centre.
    spot = soft(border - r, 0.016) * np.sqrt(np.clip(1.1 - 0.75 * (r / border) ** 2, 0, 1))
    layers.opacity += density * spot * half.lung
    layers.vessels *= 1 - spot


def _emphysema(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint more air, fewer and thinner vessels, and bullae in the upper zones. The flat diaphragm is in `anatomy`."""
    layers.air *= 1.13 + 0.12 * finding.severity
    layers.vessels *= 0.55 - 0.25 * finding.severity
    for _ in range(2):
        u, y = half.place(UPPER, rng.uniform(0.4, 0.8), rng.uniform(0, 1))
        bulla = soft(rng.uniform(0.035, 0.06) - np.hypot(U - u, Y - y), 0.01)
        layers.air *= 1 + 0.10 * bulla
        layers.vessels *= 1 - 0.8 * bulla


def _pleural_thickening(finding: PhantomFinding, half: Half, layers: Layers, rng: np.random.Generator) -> None:
    """Paint a band along the wall: a cap over the apex, or a plaque beside the middle zone."""
    thickness = (0.028 + 0.024 * finding.severity) * (1 + 0.15 * cloud(rng, 16)[:, :1])
    if finding.zone == UPPER:
        lateral, _ = lung_borders(half.apex + 1.6 * float(thickness.mean()), half.base, half.width)
        along = soft(half.apex + 0.22 + 0.1 * finding.severity - Y, 0.06)
        depth = U - np.minimum(lateral, half.lateral - thickness)
    else:
        centre = half.apex + rng.uniform(0.45, 0.6) * (half.base - half.apex)
        along = soft(0.12 + 0.05 * finding.severity - np.abs(Y - centre), 0.05)
        depth = U - half.lateral + thickness
    layers.opacity += 0.24 * soft(depth, 0.008) * along * half.lung


_PAINTERS: dict[str, Callable[[PhantomFinding, Half, Layers, np.random.Generator], None]] = {
    "Effusion": _effusion, "Pneumothorax": _pneumothorax, "Consolidation": _consolidation, "Edema": _edema,
    "Atelectasis": _atelectasis, "Nodule": _spot, "Mass": _spot, "Emphysema": _emphysema,
    "Pleural_Thickening": _pleural_thickening,
}  # fmt: skip
