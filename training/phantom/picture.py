"""Draw a described phantom: halves, findings, exposure, pose, noise."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cbmir.training.phantom import anatomy as thorax
from cbmir.training.phantom.anatomy import MARGIN, PIXEL, Array, Half, U, Y, cloud, halves, soft
from cbmir.training.phantom.findings import paint
from cbmir.training.phantom.patients import LEFT, Phantom

_QUANTILES: Array = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32)
# Strokes of the marker letters, in a box of about 2.4 x 4.
_LETTERS: dict[str, tuple[tuple[float, float], ...]] = {
    "L": ((0, 0), (0, 4), (2.4, 4)),
    "R": ((0, 4), (0, 0), (2.0, 0), (2.4, 0.9), (2.0, 1.9), (0, 2), (1.0, 2), (2.5, 4)),
}


def draw(phantom: Phantom, size: int = 512) -> NDArray[np.uint8]:
    """Return the radiograph as uint8[size, size], with dark air and bright bones (MONOCHROME2)."""
    return np.rint(render(phantom, size) * 255).astype(np.uint8)


def render(phantom: Phantom, size: int) -> Array:
    """Return the radiograph as f32[size, size] in [0, 1]; the patient's right is on the left of the image."""
    rng = np.random.default_rng(phantom.seed)
    body, spine = thorax.body(phantom.anatomy), thorax.spine(phantom.anatomy)
    right, left = (_half(phantom, half, body, spine) for half in halves(phantom))
    picture = np.concatenate([right[:, ::-1], left], axis=1)
    picture += 0.012 * cloud(rng, 9, picture.shape)
    exposed = np.clip((picture * phantom.gain + phantom.offset) / 1.08, 0, 1) ** phantom.gamma
    grey = _posed(phantom, np.asarray(exposed, np.float32), size)
    # Dense parts let fewer quanta through, so they are noisier.
    grey += phantom.noise * (0.6 + 0.8 * grey) * _white_noise(rng, size)
    _add_marker(phantom, grey)
    if phantom.collimation:
        border = round(phantom.collimation * size)
        framed = np.zeros_like(grey)
        framed[border:-border, border:-border] = grey[border:-border, border:-border]
        grey = framed
    return np.clip(grey, 0, 1)


def _half(phantom: Phantom, half: Half, body: Array, spine: Array) -> Array:
    """Return the attenuation of one half before exposure, f32[GRID, GRID/2]."""
    anatomy = phantom.anatomy
    rng = np.random.default_rng([anatomy.seed, 2, half.side == LEFT])
    layers = paint(phantom.findings, half)
    heart = soft(half.heart - U, 0.008)
    # The lung is thinner near its borders.
    depth = np.sqrt(np.clip((half.lateral - U) / (0.5 * half.lateral), 0.12, 1))
    air = half.lung * (1 - 0.78 * heart) * (0.55 + 0.45 * depth) * layers.air
    trunk = soft(half.lateral + 0.02 - U, 0.06)
    abdomen = soft(Y - half.diaphragm, 0.006) * trunk
    picture = body + 0.10 * heart * (1 - abdomen) + 0.13 * abdomen
    picture -= 0.34 * air
    picture -= 0.17 * thorax.airways(half)
    if half.side == LEFT and anatomy.stomach:
        picture -= 0.22 * thorax.stomach(half, anatomy.stomach)
    parenchyma = 0.07 + 0.035 * cloud(rng, 60)
    markings = thorax.vessels(half, anatomy.seed) + parenchyma
    picture += 0.19 * markings * layers.vessels * half.lung * (1 - 0.6 * heart)
    bones = 0.13 * thorax.ribs(half, anatomy) * soft(half.lateral + 0.016 - U, 0.01) * (1 - 0.6 * abdomen)
    bones += 0.15 * thorax.shoulder(half, phantom.view) * np.clip(4 * body, 0, 1) + spine
    picture += anatomy.bone * bones
    # Water next to water is invisible: an opacity shows only against air.
    picture += layers.opacity * (1 - 0.6 * heart) * (0.3 + 0.7 * np.minimum(layers.air, 1))
    return picture


def _white_noise(rng: np.random.Generator, size: int) -> Array:
    """Return f32[size, size] of unit variance, from 256 quantiles of the normal distribution: much faster than exact
    values."""
    return _QUANTILES[np.frombuffer(rng.bytes(size * size), np.uint8)].reshape(size, size)


def _posed(phantom: Phantom, picture: Array, size: int) -> Array:
    """Rotate, shift, scale and enlarge in one step, f32[size, size]."""
    angle = math.radians(phantom.rotation)
    cos, sin = phantom.scale * math.cos(angle), phantom.scale * math.sin(angle)
    step = 1 / (size * PIXEL)  # grid pixels per output pixel
    centre_x, centre_y = ((0.5 + MARGIN + shift) / PIXEL for shift in phantom.shift)
    a, b, d, e = cos * step, -sin * step, sin * step, cos * step
    half = size / 2
    matrix = (a, b, centre_x - (a + b) * half, d, e, centre_y - (d + e) * half)
    image = Image.fromarray(picture)
    return np.array(image.transform((size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR))


def _add_marker(phantom: Phantom, grey: Array) -> None:
    """Draw a lead letter in the upper corner, on the patient's side that it names."""
    if not phantom.marker:
        return
    size = grey.shape[0]
    left = 0.91 if phantom.marker == "L" else 0.06
    image = Image.new("L", (size, size))
    pen = ImageDraw.Draw(image)
    points = [((left + 0.012 * x) * size, (0.05 + 0.011 * y) * size) for x, y in _LETTERS[phantom.marker]]
    pen.line(points, fill=255, width=max(1, size // 85), joint="curve")
    np.maximum(grey, np.asarray(image, np.float32) / 268, out=grey)
