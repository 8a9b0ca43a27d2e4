"""Pictures that are not chest X-rays: text, drawings, textures, limbs, photographs.

All are drawn from a seed, except for parts of the two photographs that come with scikit-learn.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Grey = NDArray[np.uint8]


def impostor(seed: int, size: int = 128) -> Grey:
    """Draw a picture, uint8 [size, size], that is not a chest X-ray. The seed determines it; `KINDS` take turns."""
    rng = np.random.default_rng([seed, 7])
    picture = KINDS[seed % len(KINDS)](rng, size)
    if rng.random() < 0.3:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 2.5)))
    return np.asarray(picture)


def text(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw a page or part of one: lines of words, dark on bright or bright on dark."""
    paper, ink = _apart(rng)
    page = Image.new("L", (size, size), paper)
    pen = ImageDraw.Draw(page)
    height = int(rng.integers(6, 26))
    font = ImageFont.load_default(height)
    line, left, top = height * rng.uniform(1.1, 1.9), int(rng.integers(-10, size // 4)), rng.uniform(-10, size / 2)
    width = rng.uniform(0.4, 1.2) * size
    for y in np.arange(top, top + rng.uniform(0.2, 1.2) * size, line):
        words = " ".join("".join(rng.choice(list(string.ascii_letters), int(rng.integers(1, 10)))) for _ in range(20))
        pen.text((left, y), words[: int(rng.uniform(0.4, 1) * width / (0.5 * height)) + 1], fill=ink, font=font)
    return page


def drawing(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw shapes and strokes, filled or not: diagrams, cartoons, test patterns."""
    page = Image.new("L", (size, size), int(rng.integers(256)))
    pen = ImageDraw.Draw(page)
    for _ in range(int(rng.integers(1, 16))):
        x0, y0, x1, y1 = (int(v) for v in rng.uniform(-0.2, 1.2, 4) * size)
        box, ink = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), int(rng.integers(256))
        fill, width = (ink if rng.random() < 0.5 else None), int(rng.integers(1, 6))
        shape = rng.integers(5)
        if shape == 0:
            pen.rectangle(box, fill=fill, outline=ink, width=width)
        elif shape == 1:
            pen.ellipse(box, fill=fill, outline=ink, width=width)
        elif shape == 2:
            pen.line((x0, y0, x1, y1), fill=ink, width=width)
        elif shape == 3:
            corners = rng.uniform(-0.1, 1.1, (int(rng.integers(3, 9)), 2)) * size
            pen.polygon([(float(x), float(y)) for x, y in corners], fill=fill, outline=ink)
        else:
            walk = rng.uniform(0, 1, (30, 2)).cumsum(axis=0) * size / 15
            pen.line([(float(x), float(y)) for x, y in walk], fill=ink, width=width, joint="curve")
    return page


def pattern(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw bars, checks, rings or a ramp, at any angle."""
    y, x = np.mgrid[:size, :size] / size - 0.5
    angle, frequency, phase = rng.uniform(0, math.pi), math.exp(rng.uniform(0, 3.4)), rng.uniform(0, 1)
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    radius = np.hypot(x - rng.uniform(-0.5, 0.5), y - rng.uniform(-0.5, 0.5))
    bars, rings = (np.sin(2 * np.pi * (frequency * along + phase)) for along in (u, radius))
    checks = np.sin(2 * np.pi * frequency * u) * np.sin(2 * np.pi * frequency * v)
    wave = (bars, checks, rings, 2 * u, 2 * radius - 0.5)[int(rng.integers(5))]
    if rng.random() < 0.5:
        wave = np.sign(wave)
    return _picture(wave + rng.uniform(0, 0.5) * rng.normal(size=wave.shape), rng)


def cloud(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw noise whose power falls with frequency by a random exponent, from snow to clouds."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size), np.fft.rfftfreq(size), indexing="ij"))
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(rng.normal(size=(size, size))) / frequency ** rng.uniform(0, 2.2)
    spectrum[0, 0] = 0
    return _picture(np.fft.irfft2(spectrum, (size, size)), rng)


def leaves(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw overlapping shaded objects of all sizes ("dead leaves"), which have the statistics of photographs."""
    page = Image.new("L", (size, size))
    for _ in range(int(rng.integers(20, 200))):
        radius = size * min(0.6, 0.03 * rng.pareto(1.3) + 0.03)
        cx, cy = rng.uniform(-0.1, 1.1, 2) * size
        angles = np.sort(rng.uniform(0, 2 * math.pi, int(rng.integers(3, 20))))
        corners = [(cx + radius * math.cos(a), cy + radius * math.sin(a)) for a in angles]
        mask = Image.new("L", (size, size))
        pen = ImageDraw.Draw(mask)
        if rng.random() < 0.5:
            pen.polygon(corners, fill=255)
        else:
            height = radius * rng.uniform(0.3, 1)
            pen.ellipse((cx - radius, cy - height, cx + radius, cy + height), fill=255)
        page.paste(_shade(rng, size), mask=mask)
    return page


def limb(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw bones in soft tissue on air: one to five jointed tubes with bright rims, as in a hand, knee or hip."""
    y, x = np.mgrid[:size, :size] / size
    tissue, bone = np.zeros((size, size)), np.zeros((size, size))
    count = int(rng.integers(1, 6))
    spread, thick = rng.uniform(0, 0.8), rng.uniform(0.05, 0.3) / math.sqrt(count)
    base, centre = rng.uniform(0, 2 * math.pi), rng.uniform(0.3, 0.7, 2)
    for n in range(count):
        angle = base + spread * (n - (count - 1) / 2)
        offset = (n - (count - 1) / 2) * thick * rng.uniform(1.0, 3.0)
        start = centre + offset * np.array([-math.sin(base), math.cos(base)]) - rng.uniform(0, 0.8) * _unit(angle)
        for _ in range(int(rng.integers(1, 4))):
            end = start + rng.uniform(0.25, 0.9) * _unit(angle)
            distance, along = _to_segment(x, y, start, end)
            width = thick * rng.uniform(0.25, 0.55) * (1 + rng.uniform(0, 0.8) * np.abs(2 * along - 1) ** 3)
            shell = np.sqrt(np.clip(1 - (distance / width) ** 2, 0, 1))
            hollow = np.sqrt(np.clip(1 - (distance / (rng.uniform(0.4, 0.8) * width)) ** 2, 0, 1))
            bone = np.maximum(bone, shell - rng.uniform(0.3, 0.8) * hollow * 0.6)
            tissue = np.maximum(tissue, np.clip(1 - (distance / (thick * rng.uniform(1.0, 3.0))) ** 2, 0, 1) ** 0.5)
            start, angle = end + 0.02 * _unit(angle), angle + rng.normal() * 0.3
    if rng.random() < 0.3:  # a pelvis or skull: round bone
        cx, wide, cy, tall = rng.uniform((0, 0.2, 0, 0.2), (1, 0.5, 1, 0.5))
        radius = np.hypot((x - cx) / wide, (y - cy) / tall)
        bone = np.maximum(bone, np.exp(-(((radius - 1) / rng.uniform(0.03, 0.15)) ** 2)))
        tissue = np.maximum(tissue, rng.uniform(0.5, 1) * (radius < 1.5))
    light = rng.uniform(0.2, 0.7) * tissue + rng.uniform(0.3, 0.8) * bone * (0.3 + 0.7 * (tissue > 0))
    light += rng.uniform(0, 0.06) * np.asarray(cloud(rng, size), np.float64) / 255
    return _picture(light, rng, 0, float(light.max()))


def photograph(rng: np.random.Generator, size: int) -> Image.Image:
    """Cut a part out of one of scikit-learn's photographs, in grey."""
    whole = _photographs()[int(rng.integers(2))]
    side = int(rng.uniform(0.15, 1) * min(whole.size))
    left, top = (int(rng.integers(0, length - side + 1)) for length in whole.size)
    return whole.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))


#: Limbs and leaves are listed twice, since they are the hardest.
KINDS: tuple[Callable[[np.random.Generator, int], Image.Image], ...] = (
    text, drawing, pattern, cloud, leaves, limb, photograph, limb, leaves,
)  # fmt: skip


@cache
def _photographs() -> tuple[Image.Image, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(Image.fromarray(photograph).convert("L") for photograph in load_sample_images().images)


def _apart(rng: np.random.Generator) -> tuple[int, int]:
    """Return two very different grey values."""
    dark, bright = int(rng.integers(0, 90)), int(rng.integers(165, 256))
    return (dark, bright) if rng.random() < 0.5 else (bright, dark)


def _shade(rng: np.random.Generator, size: int) -> Image.Image:
    """Draw a grey ramp in any direction."""
    y, x = np.mgrid[:size, :size] / size - 0.5
    angle = rng.uniform(0, 2 * math.pi)
    ramp = rng.uniform(0, 255) + rng.uniform(0, 150) * (x * math.cos(angle) + y * math.sin(angle))
    return Image.fromarray(np.clip(ramp + rng.uniform(0, 12) * rng.normal(size=ramp.shape), 0, 255).astype(np.uint8))


def _picture(
    values: NDArray[np.float64], rng: np.random.Generator, low: float | None = None, high: float | None = None
) -> Image.Image:
    """Map values to grey, from `low` to `high`, by default two random percentiles."""
    if low is None or high is None:
        low, high = np.percentile(values, [rng.uniform(0, 10), rng.uniform(90, 100)])
    grey = np.clip((values - low) / max(high - low, 1e-6), 0, 1) ** math.exp(rng.uniform(-0.5, 0.5))
    return Image.fromarray(np.rint(255 * grey).astype(np.uint8))


def _unit(angle: float) -> NDArray[np.float64]:
    return np.array([math.cos(angle), math.sin(angle)])


def _to_segment(
    x: NDArray[np.float64], y: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the distance of each point to a segment, and how far along it the nearest point is, 0 to 1."""
    dx, dy = end - start
    along = np.clip(((x - start[0]) * dx + (y - start[1]) * dy) / (dx * dx + dy * dy), 0, 1)
    return np.hypot(x - start[0] - along * dx, y - start[1] - along * dy), along
