"""Random views of chests and other pictures, which train the picture check."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from cbmir.runtime.imaging.picture_check import SIDE

STORED = 128  # pixels per side of the source images of views
CHEST, PART, OTHER = 0.8, (0.25, 0.52), 0.5  # share of a side that a view shows: at least; from, to; at least
_EVERY = (slice(None), None, None, None)  # broadcasts one number per image over its pixels


def stored(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize grey uint8 [H, W] for `Views`, to uint8 [STORED, STORED]."""
    return np.asarray(Image.fromarray(pixels).resize((STORED, STORED), Image.Resampling.BOX))


class Views:
    """Random views float32 [n, 1, SIDE, SIDE] in 0..1 of images uint8 [N, STORED, STORED]."""

    def __init__(self, images: NDArray[np.uint8], seed: int) -> None:
        self.images = torch.from_numpy(images)
        self.random = torch.Generator().manual_seed(seed)

    def pick(self, rows: Tensor, n: int) -> Tensor:
        """Draw n of `rows`, with replacement."""
        return rows[torch.randint(len(rows), (n,), generator=self.random)]

    def uniform(self, n: int, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=self.random)

    def chance(self, n: int, probability: float) -> Tensor:
        return torch.rand(n, generator=self.random) < probability

    def quarter_turns(self, n: int, upright: float = 0.25) -> Tensor:
        return torch.where(self.chance(n, upright), 0, torch.randint(1, 4, (n,), generator=self.random))

    def whole(self, rows: Tensor, least: float = CHEST) -> Tensor:
        """Show almost all of each image, with random tilt, position, scale, shape and exposure."""
        n = len(rows)
        x, y = self.uniform(n, -0.08, 0.08), self.uniform(n, -0.08, 0.08)
        return self._exposed(self._framed(rows, torch.exp(self.uniform(n, math.log(least), math.log(1.35))), x, y))

    def part(self, rows: Tensor) -> Tensor:
        """Show a random part of each image."""
        n = len(rows)
        scale = self.uniform(n, *PART)
        x, y = (self.uniform(n, -1, 1) * (1 - scale) for _ in range(2))
        return self._exposed(self._framed(rows, scale, x, y))

    def _framed(self, rows: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Transform and crop each image; beyond its edges a view is black, sometimes white."""
        n = len(rows)
        angle = self.uniform(n, -1, 1) ** 3 * math.radians(12)  # mostly small
        aspect = torch.exp(self.uniform(n, -0.12, 0.12))
        cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
        matrix = torch.stack([cos * aspect, -sin, x, sin, cos / aspect, y], 1).reshape(n, 2, 3)
        grid = functional.affine_grid(matrix, [n, 1, SIDE, SIDE], align_corners=False)
        grey = self.images[rows][:, None].float() / 255
        view = functional.grid_sample(grey, grid, align_corners=False)
        beyond = 1 - functional.grid_sample(torch.ones_like(grey), grid, align_corners=False)
        return view + beyond * self.chance(n, 0.08)[_EVERY]

    def _exposed(self, view: Tensor) -> Tensor:
        """Vary sharpness, local contrast and exposure; add collimation, markers, tubes and noise."""
        n = len(view)
        soft = _mean(view, 3)
        view = view + (self.uniform(n, 0, 1) * self.chance(n, 0.3))[_EVERY] * (soft - view)
        flatter = self.uniform(n, 0, 0.7) * self.chance(n, 0.25)
        view = (view + flatter[_EVERY] * (0.5 - _mean(soft, 9))).clamp(0, 1)
        gamma, contrast = torch.exp(self.uniform(n, -0.5, 0.5)), torch.exp(self.uniform(n, -0.35, 0.5))
        view = (view ** gamma[_EVERY] - 0.5) * contrast[_EVERY] + 0.5 + self.uniform(n, -0.15, 0.15)[_EVERY]
        view = view.clamp(0, 1)
        at = (torch.arange(SIDE) + 0.5) / SIDE
        for line in (at, 1 - at):
            for axes in ((n, 1, SIDE, 1), (n, 1, 1, SIDE)):
                border = self.uniform(n, 0, 0.12) * self.chance(n, 0.2)
                view = view * (line[None] > border[:, None]).reshape(axes)
        for _ in range(2):
            x, y, width, height = (self.uniform(n, *ends) for ends in ((0, 1), (0, 1), (0.01, 0.08), (0.01, 0.06)))
            across = ((at[None] - x[:, None]).abs() < width[:, None])[:, None, None, :]
            along = ((at[None] - y[:, None]).abs() < height[:, None])[:, None, :, None]
            there = across & along & self.chance(n, 0.2)[_EVERY]
            view = torch.where(there, self.uniform(n, 0, 1)[_EVERY], view)
        noise = torch.randn(view.shape, generator=self.random)
        return (view + self.uniform(n, 0, 0.05)[_EVERY] * noise).clamp(0, 1)


def changed(view: Tensor, inverted: Tensor, turned: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror views [n, 1, S, S] (bool [n]), turn them by quarter turns anticlockwise (int [n]), then invert them."""
    view = torch.where(mirrored[_EVERY], view.flip(-1), view)
    for quarters in (1, 2, 3):
        view = torch.where((turned == quarters)[_EVERY], torch.rot90(view, quarters, (-2, -1)), view)
    return torch.where(inverted[_EVERY], 1 - view, view)


def _mean(view: Tensor, side: int) -> Tensor:
    """Return the mean of the `side` x `side` pixels around each pixel."""
    margin = side // 2
    return functional.avg_pool2d(functional.pad(view, [margin] * 4, mode="replicate"), side, 1)
