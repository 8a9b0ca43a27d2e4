"""The tables that take the figures apart: AUC by finding, nDCG by view and by source of the query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cbmir.training.benchmark.report.blocks import MEASURE, Cell, Column, Table
from cbmir.training.benchmark.report.rows import NOTHING, Results, Row, headline, measure, metric_title, row_title
from cbmir.training.benchmark.statistics import QUERIES


def finding_table(results: Results) -> Table:
    """AUC by finding, a column a method that has one."""
    rows = [row for row in headline(results) if row.get("auc", {}).get("value") is not None]
    labels = results["protocol"]["labels"]
    cells = tuple((Cell(name), *(measure(row["auc_by_label"][name]) for row in rows)) for name in labels)
    mean = (Cell("mean"), *(measure(row["auc"] | {"sd": None}) for row in rows))
    lost = sorted({name for row in rows for name in row["auc_without_both_values"]}, key=labels.index)
    note = f"Not in the mean of a method where the queries do not hold both values: {', '.join(lost)}." if lost else ""
    columns = (Column("finding"), *(Column(row_title(results, row), MEASURE[:3]) for row in rows))
    return Table("auc-by-finding", "AUC by finding", columns, (*cells, mean) if rows else (), (note,) if note else ())


def breakdown_tables(results: Results) -> Iterator[Table]:
    """nDCG by view and by source of the query, as far as the manifest has them."""
    rows = [row for row in headline(results) if row["finished"]]
    for attribute in ("views", "sources"):
        for column in QUERIES:
            counts: dict[str, int] = {}
            for row in rows:
                for name, group in row[attribute].items():
                    if column in group:
                        counts[name] = max(counts.get(name, 0), group[column]["queries"])
            if counts:
                yield _breakdown(results, rows, attribute, column, counts)


def _breakdown(results: Results, rows: Sequence[Row], attribute: str, column: str, counts: dict[str, int]) -> Table:
    def cell(row: Row, name: str) -> Cell:
        group = row[attribute].get(name, {}).get(column)
        return NOTHING if group is None else measure(group["ndcg"])

    columns = (Column("method"), *(Column(f"{name}, n = {count:,}", MEASURE[:3]) for name, count in counts.items()))
    cells = tuple((Cell(row_title(results, row)), *(cell(row, name) for name in counts)) for row in rows)
    title = f"{metric_title(results, 'ndcg')} by {attribute[:-1]} of the query, {column}"
    return Table(f"{attribute}-{column.replace(' ', '-')}", title, columns, cells)
