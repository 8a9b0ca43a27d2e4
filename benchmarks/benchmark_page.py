"""Fill in the tables of docs/benchmark.md from the results of `cbmir benchmark`.

python benchmarks/benchmark_page.py nih docs/benchmark/nih/results.json docs/benchmark.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from figures import filled, table

from cbmir.files import write_text
from cbmir.input_file import read_json
from cbmir.training.comparison.report.tables import (
    NOTHING,
    P,
    Table,
    TableCell,
    difference_tables,
    lists_table,
    paper_table,
    yardstick_table,
)
from cbmir.training.metrics import QUERIES


@click.command()
@click.argument("name")
@click.argument("results", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def main(name: str, results: Path, page: Path) -> None:
    """Fill in the sections of PAGE that are called NAME:TABLE, from RESULTS, the results.json of a report."""
    write_text(page, filled(page.read_text("utf-8"), name, sections(read_json(results))))


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the report that the page shows, by the name of their CSV file."""
    tables = [yardstick_table(results), *difference_tables(results), lists_table(results)]
    tables += [paper_table(results, column) for column in QUERIES]
    return {one.name: markdown(one) for one in tables}


def markdown(shown: Table) -> str:
    """Format a table of the report; each p stands in the cell of its difference."""
    rows = [[text(cell) for cell in row] for row in shown.rows]
    titles = [column.title for column in shown.columns]
    for place in [at for at, title in enumerate(titles) if title == P][::-1]:
        for row in rows:
            p = row.pop(place)
            if p != NOTHING.text:
                row[place - 1] += f", p {p}" if p.startswith("<") else f", p = {p}"
        del titles[place]
    return table(titles, rows)


def text(cell: TableCell) -> str:
    """Format a cell; the highest figure of a column is bold."""
    return f"{f'**{cell.text}**' if cell.best else cell.text} {cell.detail}".strip()


if __name__ == "__main__":
    main()
