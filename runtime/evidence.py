"""Evidence maps: which cells of an image make a finding likely, or a neighbour similar. The maps are exact and need no
gradient.

The embedding e is the mean f of the feature map over its n cells, divided by its norm. So its product with a vector v
is a sum over the cells:  e . v = sum_cells  F[:, cell] . v / (n |f|).

- A neighbour's map uses the neighbour's embedding as the vector: the cells sum to the cosine of the two images.
- A finding's map uses its row of weights in a linear head. In a proxy head it is a contrast: the nearest proxy of the
  finding minus the mean of the other findings' proxies, since the proxies of all findings have much in common.

In the overlay, orange and + mark cells with more than an even share of the sum, blue and - cells with less. The demo's
page draws contours by the same rule (`static/evidence.js`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from cbmir.card import ModelCard
from cbmir.errors import UserError
from cbmir.preprocessing import PreprocessSpec

#: A part of an image: (x0, y0, x1, y1) as fractions of its width and height, from the upper left corner.
Region = tuple[float, float, float, float]
#: RGB for cells above and below an even share, distinguishable with every kind of colour vision.
MORE, LESS = (255, 140, 0), (45, 125, 255)
FLAT = 0.2  # differences below this part of an even share stay pale, so that a flat map looks flat
SIGNED = 0.5  # cells from this part of the colour scale on get a sign
LEAST_CELLS = 0.5  # minimum size of a region, in cells: less of a cell says nothing about the region


def evidence_map(feature_map: NDArray[np.float32], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each cell's share in the cosine between the image's embedding and a vector.

    Args:
        feature_map: float32 [D, h, w].
        vector: float32 [D] of any norm.

    Returns:
        float32 [h, w], which sums to the cosine. All zeros if the feature map's mean or the vector is zero.
    """
    cells = feature_map.astype(np.float64)
    _, h, w = cells.shape
    norm = h * w * np.linalg.norm(cells.mean(axis=(1, 2)))
    shares: NDArray[np.float64] = np.einsum("dhw,d->hw", cells, unit_vector(vector)) / max(float(norm), 1e-12)
    return shares.astype(np.float32)


def finding_vectors(
    card: ModelCard, head: NDArray[np.float32], embedding: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """Return the vector [D] of each finding's map for an image with this embedding [D]; empty without findings.

    For a linear head, it is the finding's row of weights, so the map's cells sum to the logit without its bias, up to a
    factor. For a proxy head, it is a contrast (`contrasts`).
    """
    vectors = scoring_vectors(card, head, embedding)
    return vectors if card.head == "linear" else contrasts(vectors)


def contrasts(vectors: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return each vector minus the mean of the others, so that what they have in common cancels. One alone stays."""
    total = np.sum(list(vectors.values()), axis=0, dtype=np.float64)
    others = max(len(vectors) - 1, 1)
    return {name: (one - (total - one) / others).astype(np.float32) for name, one in vectors.items()}


def scoring_vectors(
    card: ModelCard, head: NDArray[np.float32], embedding: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    """Return the vector [D] that determines each finding's score for an image with this embedding [D].

    For a proxy head it is the proxy that is nearest to the embedding (docs/method.md: the maximum); for a linear head,
    the finding's weight row. Empty if the model has no findings.
    """
    if not card.has_findings:
        return {}
    rows = zip(card.labels.names, _rows_of_labels(card, head), strict=True)
    return {name: max(own, key=lambda row: unit_vector(row) @ embedding) for name, own in rows}


def _rows_of_labels(card: ModelCard, head: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return each label's proxies [n, D], or its weight row [1, D] in a linear head."""
    counts = [1] * len(head) if card.head == "linear" else card.proxies_per_class
    return np.split(head, np.cumsum(counts)[:-1])[: len(card.labels)]  # drops the negative class, which is last


def seen_part(spec: PreprocessSpec) -> tuple[float, float]:
    """Return where the part that the model sees begins and ends, as fractions of an image's width and height."""
    start = (spec.resize - spec.crop) // 2
    return start / spec.resize, (start + spec.crop) / spec.resize


def seen_box(height: int, width: int, spec: PreprocessSpec) -> tuple[int, int, int, int]:
    """Return the part of an image [height, width] that the model sees, as (top, bottom, left, right) in pixels."""
    first, last = seen_part(spec)
    return round(height * first), round(height * last), round(width * first), round(width * last)


@dataclass(frozen=True, eq=False)
class RegionCells:
    """A region's cells in a feature map [D, h, w]: the share of each row (`down` float64 [h]) and of each column
    (`across` float64 [w]) that lies in the region. `seen` is the part of each side that the model sees."""

    down: NDArray[np.float64]
    across: NDArray[np.float64]
    seen: tuple[float, float]

    @classmethod
    def of(cls, region: Region, shape: Sequence[int], spec: PreprocessSpec) -> Self:
        """Find a region's cells in a feature map of `shape` (h, w). Parts that the model does not see have no cells.

        Raises UserError for a region outside the image, or of less than half a cell.
        """
        x0, y0, x1, y1 = region
        if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):  # also refuses NaN
            raise UserError(f"expected a region x0,y0,x1,y1 with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1, in fractions "
                            f"of the image; found {','.join(f'{value:g}' for value in region)}")  # fmt: skip
        first, last = seen_part(spec)
        height, width = shape
        down, across = ((np.array(ends) - first) / (last - first) for ends in ((y0, y1), (x0, x1)))
        cells = cls(_covered(down * height, height), _covered(across * width, width), (first, last))
        held = float(cells.down.sum() * cells.across.sum())
        if held < LEAST_CELLS:
            raise UserError(
                f"expected a region of at least half a cell of the model's {shape[0]}x{shape[1]}, which cover the "
                f"image from {first:.3f} to {last:.3f} in both directions; found {held:.2f} cells: choose a larger one"
            )
        return cells

    @property
    def window(self) -> tuple[int, int]:
        """The region's size in whole rows and columns of cells; at least one of each."""
        return max(1, round(float(self.down.sum()))), max(1, round(float(self.across.sum())))

    def place(self, corner: tuple[int, int]) -> Region:
        """Return the part of the image that a window of this size covers if its upper left cell is (row, column)."""
        first, last = self.seen
        ends = []
        for at, length, count in zip(corner, self.window, (len(self.down), len(self.across)), strict=True):
            ends.append([first + (last - first) * edge / count for edge in (at, at + length)])
        (y0, y1), (x0, x1) = ends
        return x0, y0, x1, y1

    def vector(self, feature_map: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the mean of these cells at unit length, float32 [D]. For all cells it is the image's embedding.

        Raises UserError if the mean is zero.
        """
        mean = np.einsum("dhw,h,w->d", feature_map.astype(np.float64), self.down, self.across)
        if not np.linalg.norm(mean):
            raise UserError("expected a region in which the model sees something, found an empty one: choose another")
        return unit_vector(mean).astype(np.float32)


def parse_region(text: str) -> Region:
    """Parse `x0,y0,x1,y1`. Raises UserError for anything but four numbers; `RegionCells` checks their values."""
    try:
        x0, y0, x1, y1 = map(float, text.split(","))
    except ValueError:
        raise UserError(
            f"expected a region x0,y0,x1,y1 in fractions of the image, such as 0.1,0.5,0.4,0.9; found {text!r}"
        ) from None
    return x0, y0, x1, y1


def _covered(ends: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the share of each of `count` cells, [0, 1], [1, 2] and so on, that lies between two ends."""
    at = np.arange(count)
    shares: NDArray[np.float64] = np.clip(np.minimum(ends[1], at + 1) - np.maximum(ends[0], at), 0, 1)
    return shares


def overlay(
    pixels: NDArray[np.uint8], evidence: NDArray[np.float32], spec: PreprocessSpec, opacity: float
) -> NDArray[np.uint8]:
    """Blend an evidence map float32 [h, w] over a grey image uint8 [H, W]. Returns uint8 [H, W, 3].

    The map covers the part that the model sees, and a thin line marks the edge of that part. Colours show each cell's
    difference from the mean cell: the largest gets `opacity` in [0, 1], smaller ones proportionally less.
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
    """Draw a white + or - on black into a picture uint8 [H, W, 3], in the cells whose `shares` [h, w] reach SIGNED."""
    drawn = Image.fromarray(picture)
    draw = ImageDraw.Draw(drawn)
    down, across = picture.shape[0] / shares.shape[0], picture.shape[1] / shares.shape[1]
    long = max(2, round(picture.shape[1] / 50))
    thin = long // 5
    for row, column in np.argwhere(np.abs(shares) >= SIGNED):
        x, y = round((column + 0.5) * across), round((row + 0.5) * down)
        bars = [(long, thin), (thin, long)] if shares[row, column] > 0 else [(long, thin)]
        for edge, grey in ((2, 0), (0, 255)):
            for wide, high in bars:
                box = (x - wide - edge, y - high - edge, x + wide + edge, y + high + edge)
                draw.rectangle(box, (grey, grey, grey))
    return np.array(drawn)


def combination_vector(card: ModelCard, head: NDArray[np.float32], labels: Sequence[str]) -> NDArray[np.float32]:
    """Return the direction that represents one or several of the model's labels together: float32 [D], unit norm.

    Training pulls an image towards the proxies of the findings that it shows (docs/method.md), so this is the mean of
    the labels' directions: the mean of a label's proxies, or the weight row of a linear head. Raises UserError for a
    model without findings, no label, a repeated label, or labels that cancel out; ManifestError for an unknown label.
    """
    if not card.has_findings:
        raise UserError("expected a model that scores findings, to search by them, found an embedding model; filter "
                        "by the images' known labels instead")  # fmt: skip
    rows = sorted(card.labels.index(label) for label in labels)
    if not rows or len(set(rows)) < len(rows):
        raise UserError(f"expected one or several findings, each once, found {', '.join(labels) or 'none'}")
    of_labels = _rows_of_labels(card, head)
    mean = np.mean([unit_vector(of_labels[row].mean(axis=0)) for row in rows], axis=0)
    if np.linalg.norm(mean) < 1e-6:
        raise UserError(f"expected findings that can be combined, found {', '.join(labels)}, which cancel out")
    return unit_vector(mean).astype(np.float32)


def unit_vector(vector: NDArray[np.floating]) -> NDArray[np.float64]:
    """Scale a vector to unit length; zero stays zero."""
    exact = vector.astype(np.float64)
    unit: NDArray[np.float64] = exact / max(float(np.linalg.norm(exact)), 1e-12)
    return unit
