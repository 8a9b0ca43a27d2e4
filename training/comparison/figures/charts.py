"""What the charts are made of: rows of results.json as points with intervals, lines, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbmir.training.comparison.figures.drawing import BLACK, VERMILLION, method_style
from cbmir.training.comparison.methods.registry import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = {"auc": "AUC", "ndcg": "nDCG", "acg": "ACG", "precision": "precision"}
#: The columns of a chart's CSV; `kind` is measured, paper (the paper's own figure) or random (a random ranking).
HEADER = ("kind", "method", "training_images", "proxies_per_class", "queries", "metric", "value", "low", "high", "sd")

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Line:
    """Rows of results.json that a chart joins."""

    label: str
    style: dict[str, Any]
    rows: Sequence[Row]


def by_method(rows: Iterable[Row]) -> list[Line]:
    """A line for each method, in the order of the table."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return [Line(METHODS[name].title, method_style(name), found[name]) for name in METHODS if name in found]


def figure_in(row: Row, column: str, metric: str) -> dict[str, Any]:
    """A figure of a row: {"value", "low", "high", "sd"}; AUC is not by column."""
    figure: dict[str, Any] = row["auc"] if metric == "auc" else row[column][metric]
    return figure


def numbers(row: Row, column: str, metric: str) -> tuple[Any, ...]:
    """A figure as a line of the CSV (`HEADER`)."""
    figure = figure_in(row, column, metric)
    own = (row["method"], row["training_images"], row["proxies"], "" if metric == "auc" else column, metric)
    return ("measured", *own, figure["value"], figure["low"], figure["high"], figure["sd"])


def draw_lines(axis: Axes, lines: Sequence[Line], column: str, metric: str, x: str) -> None:
    """A metric over the rows' `x`, with error bars; where a method has no value, its line has no point."""
    for number, line in enumerate(lines):
        aside = 1.025 ** (number - (len(lines) - 1) / 2)  # a factor: the axis is logarithmic
        points = [(int(row[x]) * aside, figure_in(row, column, metric)) for row in line.rows]
        known = sorted((at, figure["value"], *_reach(figure)) for at, figure in points if figure["value"] is not None)
        if known:
            at, value, below, above = zip(*known, strict=True)
            axis.errorbar(
                at, value, (below, above), label=line.label, markersize=4.5, capsize=2, elinewidth=0.8,
                markerfacecolor="white" if number % 2 else None, **line.style,
            )  # fmt: skip


def log_axis(axis: Axes, ticks: Sequence[int], label: str) -> None:
    """A logarithmic x axis with a tick at each value."""
    names = [f"{tick:,}" for tick in ticks]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, names, rotation=30 if len("".join(names)) > 25 else 0)
    axis.minorticks_off()
    axis.set_xlabel(f"{label} (log scale)")
    axis.grid(axis="y")


def draw_interval(axis: Axes, place: int, figure: dict[str, Any], paper: float | None) -> None:
    """One method of a table as a picture: a dot with its interval, the number beside, and the paper's own value."""
    value = figure["value"]
    if place % 2:
        axis.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", linewidth=0, zorder=-1)
    text = "none" if value is None else f"{value:.3f}"
    axis.text(1.02, place, text, transform=axis.get_yaxis_transform(), va="center", fontsize=7)
    if value is not None:
        reach = [[side] for side in _reach(figure)]
        axis.errorbar(value, place, xerr=reach, fmt="o", color=BLACK, markersize=4, label="mean and 95% interval")
    if paper is not None:
        axis.plot(
            paper, place, "D", markerfacecolor="none", color=VERMILLION, markersize=5, label="paper's own, on its data"
        )


def _reach(figure: dict[str, Any]) -> tuple[float, float]:
    """How far the interval goes below and above the value, 0 where there is none."""
    value, low, high = figure["value"], figure["low"], figure["high"]
    return (0, 0) if low is None else (max(0, value - low), max(0, high - value))
