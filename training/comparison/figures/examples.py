"""A page of example retrievals, as in the paper: queries chosen by a rule, and their nearest images with their
findings.

The paper does not say how its examples were chosen. Here they are the queries at six quantiles of the method's nDCG, so
the page shows good and bad ones; a second page shows the same queries for BCE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.runtime.imaging.reader import read_image
from cbmir.training.comparison.cells import CellAnswers, read_answers, shown_cells
from cbmir.training.comparison.figures.sheet import BLUE, GREY, VERMILLION, ReportFigure, save, sheet
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan, selection_path
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.metrics import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = (95, 80, 60, 40, 20, 5)
SHOWN = 5
#: `query` is the position among the part's test images; findings are separated by semicolons.
HEADER = ("query", "quantile", "ndcg", "rank", "shared", "missing", "more")

#: In inches: side of an image, space between two, a line of text, margins. In pixels: side of a thumbnail.
SIDE, GAP, LINE, LEFT, TOP = 1.2, 0.17, 0.125, 0.8, 0.85
PIXELS = 180

#: Which of the query's findings a neighbour shares -> colour and line of its frame.
FRAMES: dict[str, tuple[str, Any]] = {
    "all": (BLUE, "-"),
    "some": (BLUE, (0, (3, 1.2))),
    "none": (VERMILLION, (0, (0.7, 0.9))),
}
#: Which image has a finding -> its mark, colour and weight.
MARKS = {
    "own": ("", "black", "bold"),
    "shared": ("✓ ", BLUE, "bold"),
    "more": ("+ ", VERMILLION, "normal"),
    "missing": ("\N{MINUS SIGN} ", GREY, "normal"),
}


@dataclass(frozen=True)
class Agreement:
    """Findings that query and neighbour share, that only the query has, and that only the neighbour has."""

    shared: tuple[str, ...]
    missing: tuple[str, ...]
    more: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Whether `all`, `some` or `none` of the query's findings are shared (`FRAMES`)."""
        return "none" if not self.shared else "some" if self.missing else "all"

    @property
    def findings(self) -> list[tuple[str, str]]:
        """The lines of text below the neighbour, as (key of MARKS, name)."""
        return [(kind, name) for kind in ("shared", "more", "missing") for name in getattr(self, kind)]


@dataclass(frozen=True)
class ExampleRetrieval:
    """A query, the quantile of nDCG at which it was chosen, its nDCG here, and its nearest images."""

    position: int
    quantile: int
    ndcg: float
    query: Row
    findings: Sequence[str]
    neighbours: Sequence[tuple[Row, Agreement]]


def draw_examples(report: Path, plan: Plan, folder: Path) -> list[ReportFigure]:
    """Draw a page for the paper's method (or the first finished one), and one for BCE with the same queries.

    There is no page if no cell is finished or no query has a finding. Raises ImageError if an image cannot be read.
    """
    cells = shown_cells(report, plan, dict.fromkeys(("proxy-negative", "proxy", *METHODS)))
    if not cells:
        return []
    shown = next(iter(cells.values()))
    selection = read_manifest(selection_path(report, shown.part))
    answers = {cell.method: read_answers(report, plan, cell) for cell in (shown, cells.get("bce", shown))}
    queries = choose_queries(answers[shown.method].retrieval["positive queries"].ndcg)
    if not queries:
        return []
    k, intensity = PROTOCOLS[plan.protocol].k, plan.training.get("intensity", "header")
    rule = (
        f"Queries were chosen by rule: of those with a finding, the ones at the quantiles "
        f"{', '.join(map(str, queries.values()))}% of nDCG@{k} under “{METHODS[shown.method].title}”, best first."
    )
    return [_page(name, examples(own, queries, selection), k, rule, folder, intensity) for name, own in answers.items()]


def choose_queries(ndcg: Floats) -> dict[int, int]:
    """Choose queries by their nDCG [Q]: position of a query -> its quantile (%), best first. NaN is left out.

    Of n queries in ascending order (stable), quantile q is the one nearest to place (n - 1) q / 100. If there are too
    few queries, each appears once.
    """
    known = np.flatnonzero(~np.isnan(ndcg))
    order = known[np.argsort(ndcg[known], kind="stable")]
    chosen: dict[int, int] = {}
    for quantile in QUANTILES if len(order) else ():
        chosen.setdefault(int(order[round((len(order) - 1) * quantile / 100)]), quantile)
    return chosen


def agreement(query: Row, neighbour: Row, names: Sequence[str]) -> Agreement:
    """Compare the findings of two images; uncertain (-1) counts as positive, unknown does not, as in the metrics."""
    own, theirs = ({n for n, v in zip(names, row.labels, strict=True) if v in (1, -1)} for row in (query, neighbour))
    return Agreement(*(tuple(n for n in names if n in group) for group in (own & theirs, own - theirs, theirs - own)))


def examples(answers: CellAnswers, queries: dict[int, int], selection: Manifest) -> list[ExampleRetrieval]:
    """Return the chosen queries (position -> quantile) with the images that a method found for them."""
    asking, gallery, names = selection.split("test").rows, selection.split("train").rows, selection.labels.names
    ndcg = answers.retrieval["positive queries"].ndcg
    return [
        ExampleRetrieval(
            position, quantile, float(ndcg[position]), asking[position],
            agreement(asking[position], asking[position], names).shared,
            [(gallery[i], agreement(asking[position], gallery[i], names))
             for i in answers.neighbours[position, :SHOWN] if i >= 0],
        )
        for position, quantile in queries.items()
    ]  # fmt: skip


def _page(
    method: str, shown: Sequence[ExampleRetrieval], k: int, rule: str, folder: Path, intensity: str
) -> ReportFigure:
    """Draw one row per query: its nDCG, the query, its neighbours."""
    title = METHODS[method].title
    kinds = [found.kind for example in shown for _, found in example.neighbours]
    page = ReportFigure(
        f"examples-{method}",
        f"Example retrievals: {title}",
        f"{len(shown)} queries and their {SHOWN} nearest gallery images of other patients ({title}). {rule} Below an "
        "image, ✓ marks a finding shared with the query, + one that only the neighbour has, \N{MINUS SIGN} one that "
        "only the query has. Frames: solid if all of the query's findings are shared, dashed if some are, dotted "
        f"if none are. Of the {len(kinds)} neighbours "
        + ", ".join(f"{kinds.count(kind)} share {kind}" for kind in FRAMES)
        + " of them.",
    )
    lines = [max(map(len, (one.findings, *(found.findings for _, found in one.neighbours)))) for one in shown]
    heights = [SIDE + GAP + LINE * count for count in lines]
    width = LEFT + (1 + max(len(one.neighbours) for one in shown)) * (SIDE + GAP) + GAP
    height = TOP + sum(heights)
    with sheet(width, height, layout=None) as figure:
        for row, example in enumerate(shown):
            bottom = height - TOP - sum(heights[:row]) - SIDE
            own = [("own", name) for name in example.findings]
            tiles = [(example.query, own, ""), *((image, one.findings, one.kind) for image, one in example.neighbours)]
            for column, tile in enumerate(tiles):
                left = LEFT + column * (SIDE + GAP) + (GAP if column else 0)  # a gap after the query
                axis = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
                _draw_tile(axis, *tile, intensity)
                if row == 0:
                    axis.set_title(f"nearest {column}" if column else "query", fontsize=8)
                if column == 0:
                    word = f"nDCG@{k}\n{example.ndcg:.2f}"
                    axis.text(-0.08, 0.5, word, transform=axis.transAxes, ha="right", va="center", fontsize=7.5)
        _draw_legend(figure)
        table = [
            (example.position, example.quantile, example.ndcg, rank,
             *("; ".join(group) for group in (found.shared, found.missing, found.more)))
            for example in shown
            for rank, (_, found) in enumerate(example.neighbours, start=1)
        ]  # fmt: skip
        return save(figure, page, folder, HEADER, table)


def _draw_tile(axis: Axes, image: Row, findings: Sequence[tuple[str, str]], frame: str, intensity: str) -> None:
    """Draw an X-ray, its findings below it as (key of MARKS, name), and its frame (key of FRAMES, or empty)."""
    from matplotlib.patches import Rectangle

    radiograph = read_image(image.image, intensity=intensity, allow_lateral=image.view == "LATERAL")
    pixels = Image.fromarray(radiograph.pixels)
    axis.imshow(np.asarray(ImageOps.pad(pixels, (PIXELS, PIXELS))), cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
    for line, (kind, name) in enumerate(findings):
        mark, colour, weight = MARKS[kind]
        size = 6.8 * min(1, 22 / len(name))  # keep long names out of the next column
        axis.annotate(
            f"{mark}{name.replace('_', ' ')}", (0, 0), xycoords="axes fraction", fontsize=size, va="top",
            xytext=(0, -5 - 72 * LINE * line), textcoords="offset points", color=colour, weight=weight,
        )  # fmt: skip
    if frame:
        colour, line_style = FRAMES[frame]
        border = Rectangle((-0.02, -0.02), 1.04, 1.04, transform=axis.transAxes, fill=False, clip_on=False)
        border.set(color=colour, linestyle=line_style, linewidth=2)
        axis.add_patch(border)


def _draw_legend(figure: Figure) -> None:
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
