"""What the tables of the report share: which rows of results.json they show, and how they write a figure.

The tables of the report, from results.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cbmir.training.comparison.plan import Cell as Run
from cbmir.training.comparison.plan import Part
from cbmir.training.comparison.report.blocks import MEASURE, Cell, Column, Table
from cbmir.training.evaluate import figure
from cbmir.training.metrics import RETRIEVAL_METRICS

Results = dict[str, Any]
Row = dict[str, Any]

#: Of a table's cell where there is nothing to say.
NOTHING = Cell("\N{EN DASH}", numbers=(None,))


def headline(results: Results) -> list[Row]:
    """The rows that compare the methods, in their order; of a sweep, those of the size and number of proxies shown."""
    size, proxies = results["shown"]["size"], results["shown"]["proxies"]
    return [row for row in ordered(results) if row["size"] == size and row["proxies"] in ("", proxies)]


def ordered(results: Results) -> list[Row]:
    """All rows in the order of their methods: that of the paper's Table 1, then those that go past it."""
    order = list(results["methods"])
    return sorted(results["rows"], key=lambda row: order.index(row["method"]))


def is_sweep(results: Results) -> bool:
    """Whether several sizes or numbers of proxies are compared."""
    return len(results["plan"]["sizes"]) > 1 or len(results["plan"]["proxies"]) > 1


def row_title(results: Results, row: Row) -> str:
    """The method's title, and how many of its parts are finished unless all are."""
    title: str = results["methods"][row["method"]]["title"]
    return title if row["finished"] == row["cells"] else f"{title} ({row['finished']} of {row['cells']} parts)"


def failures(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """A line for each error of these rows' cells: the method, how often, the error and where the log is."""
    shown = {Run(Part(0, 0, row["size"]), row["method"], row["proxies"]).name for row in rows}
    logs: dict[tuple[str, str], list[str]] = {}
    for failed in results["failed"]:
        if re.sub(r"^seed\d+(-fold\d+)?", "seed0", failed["cell"]) in shown:
            logs.setdefault((failed["method"], failed["error"]), []).append(f"cells/{failed['log']}")
    for (method, error), (first, *others) in logs.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{results['methods'][method]['title']} failed: {error} ({first}{more})"


def metric_title(results: Results, metric: str) -> str:
    """`nDCG@100`."""
    names = {"auc": "AUC", "ndcg": "nDCG@{}", "acg": "ACG@{}", "precision": "precision@{}"}
    return names[metric].format(results["protocol"]["k"])


def measure(value: dict[str, float | None], *, signed: bool = False) -> Cell:
    """`+0.023 [0.010, 0.036] ± 0.004`, the sign only of a difference, the sd over seeds where there are several."""
    text, _, detail = figure(value).replace("-", "\N{MINUS SIGN}").partition(" ")
    if signed and (value["value"] or 0) > 0:
        text = f"+{text}"
    if value.get("sd") is not None:
        detail = f"{detail} ± {value['sd']:.3f}".strip()
    return Cell(text, detail, tuple(value.get(key) for key in ("value", "low", "high", "sd")))


METRICS = ("auc", *RETRIEVAL_METRICS)
#: Those whose difference from BCE has columns of its own.
COMPARED = ("ndcg", "auc")
PAPER_NOTE = (
    "“paper's own” are the paper's figures, on its data and by its code: they were not measured here. The paper does "
    "not say how a query without a finding counts."
)


def main_table(results: Results, column: str) -> Table:
    """A row a method for one column of METHOD.md, the random ranking last."""
    rows, methods = headline(results), results["methods"]
    given = [metric for metric in METRICS if any(metric in methods[row["method"]]["paper"] for row in rows)]
    paper = tuple(Column(f"paper's own {metric_title(results, metric)}", ("",)) for metric in given)
    cells = [
        (
            Cell(row_title(results, row)),
            *_measures(results, row, column),
            *(_paper(methods[row["method"]]["paper"].get(metric)) for metric in given),
        )
        for row in rows
    ]
    chance = results["random"].get(str(rows[0]["size"]), {}).get(column, {}) if rows else {}
    random = (measure(_plain(chance.get(metric))) for metric in RETRIEVAL_METRICS)
    nothing = [NOTHING] * (2 * len(COMPARED) + len(given))
    cells.append((Cell("random ranking"), measure(_plain(None)), *random, *nothing))
    return Table(
        column.replace(" ", "-"), column.capitalize(), (Column("method"), *_columns(results), *paper),
        _mark_best(cells, rows),
        (_counts(rows, column, results["plan"]["seeds"]), *([PAPER_NOTE] if given else []), *failures(results, rows)),
    )  # fmt: skip


def sweep_table(results: Results, column: str) -> Table:
    """A row for each method, training-set size and number of proxies."""
    rows = ordered(results)
    cells = tuple(
        (Cell(row_title(results, row)), _size(row), _proxies(row), *_measures(results, row, column)) for row in rows
    )
    columns = (Column("method"), Column("training images", ("",)), Column("proxies per class", ("",)))
    name = f"sweep-{column.replace(' ', '-')}"
    return Table(name, f"Sweep, {column}", (*columns, *_columns(results)), cells, tuple(failures(results, rows)))


def _columns(results: Results) -> tuple[Column, ...]:
    measured = (Column(metric_title(results, metric), MEASURE) for metric in METRICS)
    gains = (f"{metric_title(results, metric)} \N{MINUS SIGN} BCE" for metric in COMPARED)
    # in a CSV file the difference tells one p from the other
    compared = ((Column(gain, MEASURE[:3]), Column("p (Holm)", (f" of {gain}",))) for gain in gains)
    return (*measured, *(column for pair in compared for column in pair))


def _measures(results: Results, row: Row, column: str) -> list[Cell]:
    if not row["finished"]:
        failed = any(failures(results, [row]))
        return [*[Cell("failed" if failed else "not finished")] * len(METRICS), *[NOTHING] * 2 * len(COMPARED)]
    measured = [measure(row["auc"]), *(measure(row[column][metric]) for metric in RETRIEVAL_METRICS)]
    return [*measured, *(cell for metric in COMPARED for cell in _difference(row, column, metric))]


def _difference(row: Row, column: str, metric: str) -> tuple[Cell, Cell]:
    if row["method"] == "bce":
        return Cell("reference"), NOTHING
    if row["minus_bce"] is None:
        return NOTHING, NOTHING
    minus, parts = row["minus_bce"], row["minus_bce"]["parts"]
    gain = minus["auc"] if metric == "auc" else minus[column][metric]
    cell = measure(gain, signed=True)
    if parts < row["finished"]:
        cell = replace(cell, detail=f"{cell.detail} on {parts} of {row['finished']} parts")
    p = gain["p_holm"]
    return cell, NOTHING if p is None else Cell("< 0.001" if p < 0.001 else f"{p:.3f}", numbers=(p,))


def _plain(value: float | None) -> dict[str, float | None]:
    return {"value": value, "low": None, "high": None, "sd": None}


def _paper(value: float | None) -> Cell:
    return NOTHING if value is None else Cell(f"{value:.2f}", numbers=(value,))


def _size(row: Row) -> Cell:
    size = row.get("training_images", row["size"])
    return Cell(f"{size:,}", numbers=(size,)) if size else Cell("all")


def _proxies(row: Row) -> Cell:
    proxies = row["proxies"]
    return Cell(proxies, numbers=(int(proxies),) if proxies.isdigit() else ()) if proxies else NOTHING


def _counts(rows: Sequence[Row], column: str, seeds: int) -> str:
    most = max((row for row in rows if row["finished"]), key=lambda row: row["finished"], default=None)
    if most is None:
        return "No method is finished."
    count, left = most[column]["queries"], most[column]["queries_left_out"]
    why = {
        "positive queries": "without a positive label, or with none that the gallery shares",
        "all queries": "with no positive and an unknown label, or with none that the gallery shares; no finding at all "
        "counts as a label",
    }
    each = f", of {seeds} seeds together," if seeds > 1 and most["finished"] == most["cells"] else ""
    return f"{count:,} queries{each} have an nDCG, {left:,} are left out ({why[column]})."


def _mark_best(table: Sequence[tuple[Cell, ...]], rows: Sequence[Row]) -> tuple[tuple[Cell, ...], ...]:
    """The highest of each metric, as shown, among the methods that finished all of their parts."""
    marked = [list(cells) for cells in table]
    for j in range(1, 1 + len(METRICS)):
        shown = {}
        for i, row in enumerate(rows):
            value = table[i][j].numbers[0] if row["finished"] == row["cells"] else None
            if value is not None:
                shown[i] = round(value, 3)
        for i, value in shown.items():
            marked[i][j] = replace(table[i][j], best=value == max(shown.values()))
    return tuple(map(tuple, marked))
