"""The tables of the report, from results.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cbmir.training.benchmark.report.blocks import MEASURE, Cell, Column, Table
from cbmir.training.benchmark.report.rows import (
    NOTHING,
    Results,
    Row,
    failures,
    headline,
    measure,
    metric_title,
    ordered,
    row_title,
)
from cbmir.training.metrics import RETRIEVAL_METRICS

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
