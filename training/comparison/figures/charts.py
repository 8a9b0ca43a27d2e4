"""The charts of the report, from results.json: a comparison of methods, and results by size and proxies per class.

As in the paper's figures, training-set size and proxies per class have a logarithmic axis. There is one chart for each
column of figures ("-all" for all queries), since the paper does not say how queries without a finding count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbmir.training.comparison.figures.sheet import BLACK, COLOURS, GREY, VERMILLION, ReportFigure, save, sheet
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.results import Results, Row, figure_in, headline, metric_title
from cbmir.training.metrics import PAPER_METRICS, QUERIES
from cbmir.training.rankings import CORRECTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The columns of a chart's CSV; `kind` is measured, paper (the paper's own figure) or random (a random ranking).
HEADER = ("kind", "method", "training_images", "proxies_per_class", "queries", "metric", "value", "low", "high", "sd")

#: The metrics of a sweep's charts: the yardstick's and the paper's.
_METRICS = ("auc", *CORRECTED, *PAPER_METRICS)
_MEANING = {
    "positive queries": "queries with at least one finding",
    "all queries": "all queries (no finding counts as a label of its own)",
}
_SUFFIX = {"positive queries": "", "all queries": "-all"}
_MARKERS = "osD^vP*X<>hdp8H."
_LINES = ("-", "--", "-.", (0, (1, 1.2)))
_BARS = "Error bars are 95% intervals over patients; lines are shifted slightly sideways."


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart, which connects rows of results.json."""

    label: str
    style: dict[str, Any]
    rows: Sequence[Row]


def draw_charts(results: Results, folder: Path) -> list[ReportFigure]:
    """Draw the charts that the results have data for; none if no cell is finished."""
    rows, shown = [row for row in results["rows"] if row["finished"]], results["shown"]
    compared = [row for row in headline(results) if row["finished"]]
    charts = [_comparison(results, compared, folder)] if compared else []
    usual = [row for row in rows if row["proxies"] in ("", shown["proxies"])]
    swept = [row for row in rows if row["proxies"].isdigit()]
    of_size = [row for row in swept if row["size"] == shown["size"]]
    for column in QUERIES:
        if len({row["size"] for row in rows}) > 1:
            charts.append(_panels(results, usual, column, "training_images", folder))
        if len({row["proxies"] for row in of_size}) > 1:
            charts.append(_panels(results, of_size, column, "proxies", folder))
        if len({row["size"] for row in swept}) > 1 and len({row["proxies"] for row in swept}) > 1:
            charts.append(_over_both(results, swept, column, folder))
    return charts


def by_method(rows: Iterable[Row]) -> list[Line]:
    """Return one line per method, in the order of the table."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return [Line(METHODS[name].title, method_style(name), found[name]) for name in METHODS if name in found]


def method_style(name: str) -> dict[str, Any]:
    """Return colour, marker and line of a method, the same in every chart; BCE has the first style."""
    order = list(METHODS)
    return numbered_style(order.index(name) - order.index("bce"))


def numbered_style(number: int) -> dict[str, Any]:
    """Return colour, marker and line of the nth line of a chart; the first 16 have different markers."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _LINES[number % len(_LINES)],
    }


def draw_lines(axis: Axes, lines: Sequence[Line], column: str, metric: str, x: str) -> None:
    """Draw a metric over the rows' `x`, with error bars; missing values are left out."""
    for number, line in enumerate(lines):
        aside = 1.025 ** (number - (len(lines) - 1) / 2)  # a factor, since the axis is logarithmic
        points = [(int(row[x]) * aside, figure_in(row, metric, column)) for row in line.rows]
        known = sorted((at, figure["value"], *_reach(figure)) for at, figure in points if figure["value"] is not None)
        if known:
            at, value, below, above = zip(*known, strict=True)
            axis.errorbar(
                at, value, (below, above), label=line.label, markersize=4.5, capsize=2, elinewidth=0.8,
                markerfacecolor="white" if number % 2 else None, **line.style,
            )  # fmt: skip


def _comparison(results: Results, shown: list[Row], folder: Path) -> ReportFigure:
    """Draw every method: AUC, corrected nDCG of all queries, and the paper's nDCG of both columns."""
    chance = results["references"][str(shown[0]["size"])]
    panels = [("auc", "", 0.5), ("corrected_ndcg", "all queries", 0.0)]
    panels += [("ndcg", column, chance[f"random, {column}"]["ndcg"]) for column in QUERIES]
    table: list[tuple[Any, ...]] = []
    with sheet(11, 1.3 + 0.24 * len(shown)) as figure:
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (metric, column, random) in zip(axes, panels, strict=True):
            for place, row in enumerate(shown):
                paper = results["methods"][row["method"]]["paper"].get(metric) if column != "all queries" else None
                _draw_interval(axis, place, figure_in(row, metric, column), paper)
                table.append(_numbers(row, column, metric))
                if paper is not None:
                    table.append(("paper", row["method"], "", "", column, metric, paper, "", "", ""))
            if random is not None:
                axis.axvline(random, color=GREY, linestyle="--", linewidth=1, zorder=0, label="random ranking")
                table.append(("random", "", "", "", column, metric, random, "", "", ""))
            axis.set(xlabel=f"{metric_title(results, metric)}, {column}" if column else "AUC, mean over findings")
            axis.set_yticks(range(len(shown)), [METHODS[row["method"]].title for row in shown])
            axis.set_ylim(len(shown) - 0.5, -0.5)
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="x")
            axis.margins(x=0.08)
        legend = _legend(axes)
        figure.legend([legend[name] for name in sorted(legend)], sorted(legend), loc="outside lower center", ncols=3)
        positive, everything = (max(row[column]["queries"] for row in shown) for column in QUERIES)
        chart = ReportFigure(
            "comparison",
            f"The methods compared: AUC and {metric_title(results, 'ndcg')}",
            f"{len(shown)} methods, {shown[0]['training_images']:,} training images. From the left: the mean AUC over "
            f"findings; nDCG corrected for chance over {everything:,} queries, no finding counting as a label of its "
            f"own; nDCG over the {positive:,} queries with at least one finding, and over all. Bars are 95% intervals "
            "over patients, the dashed line is a random ranking. Hollow diamonds are the paper's own figures, on its "
            "own data. A method without scores for findings has no AUC.",
        )
        return save(figure, chart, folder, HEADER, table)


def _draw_interval(axis: Axes, place: int, figure: dict[str, Any], paper: float | None) -> None:
    """Draw one method as a dot with its interval, the number beside it, and the paper's own value."""
    value = figure["value"]
    if place % 2:
        axis.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", linewidth=0, zorder=-1)
    text = "none" if value is None else f"{value:.3f}"
    axis.text(1.02, place, text, transform=axis.get_yaxis_transform(), va="center", fontsize=7)
    if value is not None:
        reach = [[side] for side in _reach(figure)]
        axis.errorbar(value, place, xerr=reach, fmt="o", color=BLACK, markersize=4, label="mean and 95% interval")
    if paper is not None:
        label = "paper's own, on its data"
        axis.plot(paper, place, "D", markerfacecolor="none", color=VERMILLION, markersize=5, label=label)


def _panels(results: Results, rows: list[Row], column: str, x: str, folder: Path) -> ReportFigure:
    """Draw the yardstick, and the paper's nDCG, ACG and precision, over `x`."""
    lines = by_method(rows)
    if x == "training_images":
        ticks, name, axis_title, title = _sizes(rows), "train-size", "training images", "training-set size"
        setting = f"of {len(lines)} methods after training on {_listed(ticks)} images (logarithmic axis)"
    else:
        ticks, name = sorted({int(row["proxies"]) for row in rows}), "proxies"
        axis_title = title = "proxies per class"
        setting = f"with {_listed(ticks)} proxies for each class (logarithmic axis) after training on "
        setting += f"{rows[0]['training_images']:,} images"
    chart = ReportFigure(
        f"{name}{_SUFFIX[column]}",
        f"Results over {title}, {column}",
        f"AUC, corrected nDCG with both gains, nDCG, ACG and precision {setting}. Retrieval is judged on "
        f"{_MEANING[column]}; AUC is the same in both columns. {_BARS}",
    )
    with sheet(10, 5.6) as figure:
        for axis, metric in zip(np.ravel(figure.subplots(2, 3, sharex=True)), _METRICS, strict=True):
            draw_lines(axis, lines, column, metric, x)
            _log_axis(axis, ticks, axis_title)
            axis.set(title=metric_title(results, metric))
        for axis in figure.axes[:3]:
            axis.set_xlabel("")
        figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(lines)))
        table = [_numbers(row, column, metric) for metric in _METRICS for line in lines for row in line.rows]
        return save(figure, chart, folder, HEADER, table)


def _over_both(results: Results, rows: list[Row], column: str, folder: Path) -> ReportFigure:
    """Draw nDCG over size: one panel per method, one line per number of proxies."""
    panels, counts = by_method(rows), _sizes(rows)
    proxies, name = sorted({int(row["proxies"]) for row in rows}), metric_title(results, "ndcg")
    with sheet(1.2 + 3 * len(panels), 3.4) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            lines = [
                Line(str(count), numbered_style(place), [row for row in panel.rows if row["proxies"] == str(count)])
                for place, count in enumerate(proxies)
            ]
            draw_lines(axis, lines, column, "ndcg", "training_images")
            _log_axis(axis, counts, "training images")
            axis.set(title=panel.label)
        axes[0].set_ylabel(f"{name}, {column}")
        legend = _legend(axes)
        names = sorted(legend, key=int)
        figure.legend([legend[one] for one in names], names, title="proxies per class", loc="outside right center")
        chart = ReportFigure(
            f"size-and-proxies{_SUFFIX[column]}",
            f"{name} over training-set size and proxies per class, {column}",
            f"{name} of {_MEANING[column]} after training on {_listed(counts)} images (logarithmic axis), a line for "
            f"each number of proxies per class ({_listed(proxies)}), a panel for each of "
            f"{_listed([panel.label for panel in panels])}. {_BARS}",
        )
        return save(figure, chart, folder, HEADER, [_numbers(row, column, "ndcg") for row in rows])


def _log_axis(axis: Axes, ticks: Sequence[int], label: str) -> None:
    names = [f"{tick:,}" for tick in ticks]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, names, rotation=30 if len("".join(names)) > 25 else 0)
    axis.minorticks_off()
    axis.set_xlabel(f"{label} (log scale)")
    axis.grid(axis="y")


def _numbers(row: Row, column: str, metric: str) -> tuple[Any, ...]:
    """Return a figure as a row of the CSV (`HEADER`)."""
    figure = figure_in(row, metric, column)
    own = (row["method"], row["training_images"], row["proxies"], "" if metric == "auc" else column, metric)
    return ("measured", *own, figure["value"], figure["low"], figure["high"], figure["sd"])


def _reach(figure: dict[str, Any]) -> tuple[float, float]:
    """Return the distances from the value to the ends of its interval, 0 without an interval."""
    value, low, high = figure["value"], figure["low"], figure["high"]
    return (0, 0) if low is None else (max(0, value - low), max(0, high - value))


def _legend(axes: Iterable[Axes]) -> dict[str, Any]:
    """Return label -> handle, with each label once."""
    return {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}


def _sizes(rows: Iterable[Row]) -> list[int]:
    return sorted({row["size"]: row["training_images"] for row in rows}.values())


def _listed(values: Sequence[int | str]) -> str:
    words = [f"{value:,}" if isinstance(value, int) else f"“{value}”" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
