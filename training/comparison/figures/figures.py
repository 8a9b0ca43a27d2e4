"""The charts of the report, drawn from results.json: methods compared, and results over sizes and proxies per class.

Error bars are 95% bootstrap intervals over patients. As in the paper's figures, training-set size and proxies per class
have a logarithmic axis; here those charts come once for each column of METHOD.md ("-all": all queries). The paper does
not say how its figures count queries without a finding, so that they are set beside the positive queries alone, for
which its formulas are defined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cbmir.training.comparison.figures.charts import (
    HEADER,
    METRICS,
    Line,
    Row,
    by_method,
    draw_interval,
    draw_lines,
    figure_in,
    log_axis,
    numbers,
)
from cbmir.training.comparison.figures.drawing import GREY, Picture, numbered_style, save, sheet
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.statistics import QUERIES

_MEANING = {
    "positive queries": "queries with at least one finding",
    "all queries": "all queries (no finding counts as a label of its own)",
}
_SUFFIX = {"positive queries": "", "all queries": "-all"}


def draw_figures(results: dict[str, Any], folder: Path) -> list[Picture]:
    """The charts that the results have data for; none where no cell is finished."""
    rows = [row for row in results["rows"] if row["finished"]]
    if not rows:
        return []
    shown = results["shown"]
    usual = [row for row in rows if row["proxies"] in ("", shown["proxies"])]
    compared = [row for row in usual if row["size"] == shown["size"]]
    pictures = [_comparison(results, compared, folder)] if compared else []
    swept = [row for row in rows if row["proxies"].isdigit()]
    sizes, proxies = ({row[name] for row in rows} for name, rows in (("size", rows), ("proxies", swept)))
    for column in QUERIES:
        if len(sizes) > 1:
            pictures.append(_over_sizes(results, usual, column, folder))
        of_size = [row for row in swept if row["size"] == shown["size"]]
        if len({row["proxies"] for row in of_size}) > 1:
            pictures.append(_over_proxies(results, of_size, column, folder))
        if len({row["size"] for row in swept}) > 1 and len(proxies) > 1:
            pictures.append(_over_both(results, swept, column, folder))
    return pictures


def _comparison(results: dict[str, Any], rows: list[Row], folder: Path) -> Picture:
    """Every method: nDCG of both columns, and AUC."""
    order = list(results["methods"])
    shown = sorted(rows, key=lambda row: order.index(row["method"]))
    chance = results["random"][str(shown[0]["size"])]
    panels = [("ndcg", column, chance[column]["ndcg"]) for column in QUERIES] + [("auc", "", 0.5)]
    table: list[tuple[Any, ...]] = []
    legend: dict[str, Any] = {}
    with sheet(9, 1.3 + 0.24 * len(shown)) as figure:
        for axis, (metric, column, random) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
            for place, row in enumerate(shown):
                paper = results["methods"][row["method"]]["paper"].get(metric) if column != "all queries" else None
                draw_interval(axis, place, figure_in(row, column, metric), paper)
                table.append(numbers(row, column, metric))
                if paper is not None:
                    table.append(("paper", row["method"], "", "", column, metric, paper, "", "", ""))
            if random is not None:
                axis.axvline(random, color=GREY, linestyle="--", linewidth=1, zorder=0, label="random ranking")
                table.append(("random", "", "", "", column, metric, random, "", "", ""))
            axis.set(xlabel=f"{_name(metric, results)}, {column}" if column else "AUC, mean over findings")
            axis.set_yticks(range(len(shown)), [METHODS[row["method"]].title for row in shown])
            axis.set_ylim(len(shown) - 0.5, -0.5)
            axis.tick_params(axis="y", length=0)
            axis.grid(axis="x")
            axis.margins(x=0.08)
            legend |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        names = sorted(legend)
        figure.legend([legend[name] for name in names], names, loc="outside lower center", ncols=3)
        positive, everything = (max(row[column]["queries"] for row in shown) for column in QUERIES)
        picture = Picture(
            "comparison",
            f"The methods compared: {_name('ndcg', results)} and AUC",
            f"{len(shown)} methods, {shown[0]['training_images']:,} training images. Dots are means over the "
            f"{positive:,} queries with at least one finding (left), over {everything:,} queries, no finding counting "
            "as a label of its own (middle), and the mean AUC over findings (right); bars are 95% intervals over "
            "patients, the dashed line is a random ranking. Hollow diamonds are the paper's own figures, on its own "
            "data. A method without scores for findings has no AUC.",
        )
        return save(figure, picture, folder, HEADER, table)


def _over_sizes(results: dict[str, Any], rows: list[Row], column: str, folder: Path) -> Picture:
    lines, counts = by_method(rows), _sizes(rows)
    picture = Picture(
        f"train-size{_SUFFIX[column]}",
        f"Results over training-set size, {column}",
        f"AUC, nDCG, ACG and precision of {len(lines)} methods after training on {_listed(counts)} images (logarithmic "
        f"axis). Retrieval is judged on {_MEANING[column]}; AUC is the same in both columns. Error bars are 95% "
        "intervals over patients; lines are set a little apart sideways.",
    )
    return _four_panels(results, lines, column, "training_images", "training images", counts, picture, folder)


def _over_proxies(results: dict[str, Any], rows: list[Row], column: str, folder: Path) -> Picture:
    counts = sorted({int(row["proxies"]) for row in rows})
    picture = Picture(
        f"proxies{_SUFFIX[column]}",
        f"Results over proxies per class, {column}",
        f"AUC, nDCG, ACG and precision with {_listed(counts)} proxies for each class (logarithmic axis) after training "
        f"on {rows[0]['training_images']:,} images. Retrieval is judged on {_MEANING[column]}; AUC is the same in both "
        "columns. Error bars are 95% intervals over patients; lines are set a little apart sideways.",
    )
    return _four_panels(results, by_method(rows), column, "proxies", "proxies per class", counts, picture, folder)


def _four_panels(
    results: dict[str, Any], lines: list[Line], column: str, x: str, x_label: str, ticks: list[int],
    picture: Picture, folder: Path,
) -> Picture:  # fmt: skip
    """AUC, nDCG, ACG and precision over `x`, as in the paper."""
    with sheet(7.2, 5.6) as figure:
        for axis, metric in zip(np.ravel(figure.subplots(2, 2, sharex=True)), METRICS, strict=True):
            draw_lines(axis, lines, column, metric, x)
            log_axis(axis, ticks, x_label)
            axis.set(title=_name(metric, results))
        for axis in figure.axes[:2]:
            axis.set_xlabel("")
        figure.legend(*figure.axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(lines)))
        table = [numbers(row, column, metric) for metric in METRICS for line in lines for row in line.rows]
        return save(figure, picture, folder, HEADER, table)


def _over_both(results: dict[str, Any], rows: list[Row], column: str, folder: Path) -> Picture:
    """nDCG over size: a panel with and one without negative proxies, a line for each number of proxies."""
    panels, counts = by_method(rows), _sizes(rows)
    proxies, name = sorted({int(row["proxies"]) for row in rows}), _name("ndcg", results)
    with sheet(1.2 + 3 * len(panels), 3.4) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            lines = [
                Line(str(count), numbered_style(place), [row for row in panel.rows if row["proxies"] == str(count)])
                for place, count in enumerate(proxies)
            ]
            draw_lines(axis, lines, column, "ndcg", "training_images")
            log_axis(axis, counts, "training images")
            axis.set(title=panel.label)
        axes[0].set_ylabel(f"{name}, {column}")
        legend = {
            label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        names = sorted(legend, key=int)
        figure.legend([legend[one] for one in names], names, title="proxies per class", loc="outside right center")
        picture = Picture(
            f"size-and-proxies{_SUFFIX[column]}",
            f"{name} over training-set size and proxies per class, {column}",
            f"{name} of {_MEANING[column]} after training on {_listed(counts)} images (logarithmic axis), a line for "
            f"each number of proxies per class ({_listed(proxies)}), a panel for each of "
            f"{_listed([panel.label for panel in panels])}. Error bars are 95% intervals over patients; lines are set "
            "a little apart sideways.",
        )
        return save(figure, picture, folder, HEADER, [numbers(row, column, "ndcg") for row in rows])


def _sizes(rows: Iterable[Row]) -> list[int]:
    return sorted({row["size"]: row["training_images"] for row in rows}.values())


def _name(metric: str, results: dict[str, Any]) -> str:
    return METRICS[metric] if metric == "auc" else f"{METRICS[metric]}@{results['protocol']['k']}"


def _listed(values: Sequence[int | str]) -> str:
    words = [f"{value:,}" if isinstance(value, int) else f"“{value}”" for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
