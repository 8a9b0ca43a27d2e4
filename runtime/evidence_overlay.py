"""Evidence maps drawn over the image for the report; the page draws its own by the same rule (`static/evidence.js`).

Orange gives more than an even share of the cosine, blue less; + and - say the same without colour.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cbmir.preprocessing import PreprocessSpec

#: RGB of cells above and below an even share: told apart with every kind of colour vision.
MORE = (255, 140, 0)
LESS = (45, 125, 255)

#: Differences below this part of an even share stay pale: a map that is flat should look flat.
FLAT = 0.2
#: Cells from this part of the greatest difference on bear a sign.
TOLD = 0.5


def seen_box(height: int, width: int, spec: PreprocessSpec) -> tuple[int, int, int, int]:
    """The part of an image [height, width] that the model sees, as (top, bottom, left, right) in pixels.

    Preprocessing squashes the image to a square of `resize` and keeps the middle `crop`.
    """
    start = (spec.resize - spec.crop) // 2
    first, last = start / spec.resize, (start + spec.crop) / spec.resize
    return round(height * first), round(height * last), round(width * first), round(width * last)


def overlay(
    pixels: NDArray[np.uint8], evidence: NDArray[np.float32], spec: PreprocessSpec, opacity: float
) -> NDArray[np.uint8]:
    """Blend an evidence map float32 [h, w] over the grey image uint8 [H, W]: uint8 [H, W, 3].

    The map is spread bilinearly over the part that the model sees, whose edge is marked by a thin line. Most cells of
    a map speak for it, so each is shown by its difference from the mean cell: the greatest, of either sign, gets
    `opacity` in [0, 1], smaller ones less in proportion. Cells of `TOLD` or more bear a sign in their middle.
    """
    height, width = pixels.shape
    top, bottom, left, right = seen_box(height, width, spec)
    picture = np.repeat(pixels[..., None], 3, axis=2)
    inside = picture[top:bottom, left:right]
    even = evidence.mean()
    difference = evidence - even
    strength = max(np.abs(difference).max(), FLAT * abs(even))
    if strength > 0:
        size = (right - left, bottom - top)
        shares = np.array(Image.fromarray(difference / strength).resize(size, Image.Resampling.BILINEAR))[..., None]
        weight = opacity * np.abs(shares)
        colour = np.where(shares > 0, np.array(MORE, np.float32), np.array(LESS, np.float32))
        inside[...] = np.rint(inside * (1 - weight) + colour * weight).astype(np.uint8)
        inside[...] = _signed(inside, difference / strength)
    for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
        edge[...] = 128
    return picture


def _signed(picture: NDArray[np.uint8], shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The picture uint8 [H, W, 3] with a white + or - on black in the cells of `shares` [h, w] that are told."""
    drawn = Image.fromarray(picture)
    draw = ImageDraw.Draw(drawn)
    down, across = picture.shape[0] / shares.shape[0], picture.shape[1] / shares.shape[1]
    long = max(2, round(picture.shape[1] / 50))
    thin = long // 5
    for row, column in np.argwhere(np.abs(shares) >= TOLD):
        x, y = round((column + 0.5) * across), round((row + 0.5) * down)
        bars = [(long, thin), (thin, long)] if shares[row, column] > 0 else [(long, thin)]
        for edge, grey in ((2, 0), (0, 255)):
            for wide, high in bars:
                box = (x - wide - edge, y - high - edge, x + wide + edge, y + high + edge)
                draw.rectangle(box, (grey, grey, grey))
    return np.array(drawn)
