"""The common style of the report's figures, and the three files of each.

Colours are those of M. Okabe and K. Ito ("Color Universal Design", 2008), which colour-blind readers can distinguish;
marker, line and hatch differ as well, so every figure also works in greyscale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbmir.errors import require
from cbmir.files import replacing, write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, GREY, LIGHT = "#000000", "#767676", "#c8c8c8"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
COLOURS = (BLACK, BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "legend.fontsize": 7.5,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "grid.linewidth": 0.4,
    "grid.color": "#dddddd", "axes.axisbelow": True, "legend.frameon": False, "lines.linewidth": 1.2,
    "text.parse_math": False,  # a label may contain a dollar sign
    "svg.fonttype": "none", "svg.hashsalt": "cbmir",
}  # fmt: skip


@dataclass(frozen=True)
class ReportFigure:
    """A figure with the files NAME.png, NAME.svg, and NAME.csv, which has the numbers. `caption` describes it."""

    name: str
    title: str
    caption: str


@contextmanager
def sheet(width: float, height: float, *, layout: Any = "constrained") -> Iterator[Figure]:
    """Yield an empty figure of this size in inches; draw and save it inside the block."""
    matplotlib = require("matplotlib", "train")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def save(
    figure: Figure, picture: ReportFigure, folder: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> ReportFigure:
    """Write the three files; the same figure gives the same bytes. None becomes an empty cell."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, dict[str, str | None]] = {"png": {}, "svg": {"Date": None}}
    for kind, more in metadata.items():
        with replacing(folder / f"{picture.name}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata={"Title": picture.title} | more)
        figure.set_layout_engine("none")  # lay out only once: half the time, and both files look the same
    write_csv(folder / f"{picture.name}.csv", [header, *rows])
    return picture
