"""The page of examples as a drawing: X-rays in rows, their findings with marks below, and frames by agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from cbmir.runtime.imaging.reader import read_image
from cbmir.training.comparison.figures.drawing import BLUE, GREY, VERMILLION, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches: the side of an image, the space between two, a line of text, the margins; then pixels of a thumbnail's side.
SIDE, GAP, LINE, LEFT, TOP = 1.2, 0.17, 0.125, 0.8, 0.85
PIXELS = 180

#: How many of the query's findings a neighbour shares -> colour and line of its frame.
FRAMES: dict[str, tuple[str, Any]] = {
    "all": (BLUE, "-"),
    "some": (BLUE, (0, (3, 1.2))),
    "none": (VERMILLION, (0, (0.7, 0.9))),
}
#: Whose a finding is -> its mark, colour and weight.
MARKS = {
    "own": ("", "black", "bold"),
    "shared": ("✓ ", BLUE, "bold"),
    "more": ("+ ", VERMILLION, "normal"),
    "missing": ("\N{MINUS SIGN} ", GREY, "normal"),
}


@dataclass(frozen=True)
class Tile:
    """An X-ray, the findings below it as (key of MARKS, name), and its frame (key of FRAMES, or empty)."""

    image: Path
    findings: Sequence[tuple[str, str]]
    frame: str = ""


@contextmanager
def page(rows: Sequence[tuple[str, Sequence[Tile]]]) -> Iterator[Figure]:
    """A page of rows, each with a word at its left, its query and the query's neighbours; save it inside the block.

    Raises ImageError when an image cannot be read.
    """
    heights = [SIDE + GAP + LINE * max(len(tile.findings) for tile in tiles) for _, tiles in rows]
    columns = max(len(tiles) for _, tiles in rows)
    width, height = LEFT + columns * (SIDE + GAP) + GAP, TOP + sum(heights)
    with sheet(width, height, layout=None) as figure:
        for row, (word, tiles) in enumerate(rows):
            bottom = height - TOP - sum(heights[:row]) - SIDE
            for column, tile in enumerate(tiles):
                left = LEFT + column * (SIDE + GAP) + (GAP if column else 0)  # the query stands a little apart
                axis = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
                _draw(axis, tile)
                if row == 0:
                    axis.set_title(f"nearest {column}" if column else "query", fontsize=8)
                if column == 0:
                    axis.text(-0.08, 0.5, word, transform=axis.transAxes, ha="right", va="center", fontsize=7.5)
        _legend(figure)
        yield figure


def _draw(axis: Axes, tile: Tile) -> None:
    from matplotlib.patches import Rectangle

    pixels = Image.fromarray(read_image(tile.image).pixels)
    axis.imshow(np.asarray(ImageOps.pad(pixels, (PIXELS, PIXELS))), cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
    for line, (kind, name) in enumerate(tile.findings):
        mark, colour, weight = MARKS[kind]
        size = 6.8 * min(1, 22 / len(name))  # a long name must not reach into the next column
        axis.annotate(
            f"{mark}{name.replace('_', ' ')}", (0, 0), xycoords="axes fraction", fontsize=size, va="top",
            xytext=(0, -5 - 72 * LINE * line), textcoords="offset points", color=colour, weight=weight,
        )  # fmt: skip
    if tile.frame:
        colour, line_style = FRAMES[tile.frame]
        frame = Rectangle((-0.02, -0.02), 1.04, 1.04, transform=axis.transAxes, fill=False, clip_on=False)
        frame.set(color=colour, linestyle=line_style, linewidth=2)
        axis.add_patch(frame)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linestyle=line, linewidth=2, label=f"shares {kind} of the query's findings")
        for kind, (colour, line) in FRAMES.items()
    ]
    inch = 1 / figure.get_figheight()
    left = LEFT / figure.get_figwidth()
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(left, 1 - 0.05 * inch), ncols=3, borderpad=0)
    marks = "✓ shared with the query       + only the neighbour has it       \N{MINUS SIGN} only the query has it"
    figure.text(left, 1 - 0.45 * inch, marks, fontsize=7.5)
