"""The tables that take the figures apart: AUC by finding, nDCG by view and by source of the query.

The report block by block: what was compared, what came out, and how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cbmir.card import NOT_A_DEVICE
from cbmir.training.comparison.figures.drawing import Picture
from cbmir.training.comparison.protocols import PROTOCOLS
from cbmir.training.comparison.report.blocks import MEASURE, Block, Cell, Column, Heading, Items, Table, Text
from cbmir.training.comparison.report.provenance import how_it_was_made
from cbmir.training.comparison.report.tables import (
    NOTHING,
    Results,
    Row,
    headline,
    is_sweep,
    main_table,
    measure,
    metric_title,
    row_title,
    sweep_table,
)
from cbmir.training.comparison.statistics import QUERIES


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


#: Below it a corrected p is told of as a difference, if the interval says so too.
SIGNIFICANT = 0.05

PATIENTS_NOTICE = (
    "Figures may show images of patients, and selections/ and cells/ hold their identifiers and decoded images: "
    "protect this folder as the images are."
)


def report_title(results: Results) -> str:
    """The report's heading."""
    protocol = results["protocol"]
    table = "" if PROTOCOLS[protocol["name"]].labels else f" {results['plan']['manifest']}"
    return f"Benchmark: {protocol['title']}{table}"


def contents(results: Results, pictures: Sequence[Picture]) -> Iterator[Block]:
    """Everything below the heading, in its order."""
    yield Text(compared(results))
    yield Text(f"{NOT_A_DEVICE} {PATIENTS_NOTICE}", notice=True)
    if results["unfinished"] or results["failed"]:
        unfinished, failed = len(results["unfinished"]), len(results["failed"])
        yield Text(f"Of the cells, {unfinished} are not finished and {failed} failed.", notice=True)
    yield Heading("Methods compared")
    yield Text(
        "In brackets: 95% bootstrap interval over patients. ±: standard deviation over seeds. Bold: the highest "
        "figure measured here, of methods that finished all parts. p: difference from BCE, Holm-corrected."
        + (f" Shown are the rows of the sweep with {_setting(results)}." if is_sweep(results) else "")
    )
    yield from (main_table(results, column) for column in QUERIES)
    yield Heading("What the intervals carry")
    yield Text(
        f"Difference of {metric_title(results, 'ndcg')} from BCE's: told of where the corrected p is below "
        f"{SIGNIFICANT} and the interval is clear of 0. It holds for these training runs."
    )
    yield Items(tuple(statement for column in QUERIES for statement in statements(results, column)))
    if is_sweep(results):
        yield Heading("Sweeps")
        yield from (sweep_table(results, column) for column in QUERIES)
    breakdowns = [table for table in (finding_table(results), *breakdown_tables(results)) if table.rows]
    if breakdowns:
        yield Heading("By finding, view and source")
        yield from breakdowns
    if pictures:
        yield Heading("Figures")
        yield from pictures
    yield from how_it_was_made(results)


def compared(results: Results) -> str:
    """What was compared, in two sentences."""
    rows, plan, protocol = headline(results), results["plan"], results["protocol"]
    suffix = f"-{rows[0]['size']}" if rows and rows[0]["size"] else ""
    parts = [one for one in results["selections"] if re.fullmatch(rf"seed\d+(-fold\d+)?{suffix}", one["part"])]
    images, queries = (_range([one["images"][split] for one in parts]) for split in ("train", "test"))
    patients = _range([one["patients"]["test"] for one in parts])
    seeds = _number(plan["seeds"], "seed")
    folds = f", each in {plan['folds']} folds by patient" if plan["folds"] else ""
    methods, findings = _number(len(rows), "method"), _number(len(protocol["labels"]), "finding")
    return (
        f"{methods} by the protocol “{protocol['title']}” ({findings}), ranked by what they retrieve for a query: the "
        f"{protocol['k']} nearest training images of other patients. Each part "
        f"({seeds}{folds}) has {images} images to train on and {queries} queries of {patients} patients."
    )


def statements(results: Results, column: str) -> Iterator[str]:
    """Which methods' nDCG differs from BCE's, in which direction, and which cannot be told apart from it."""
    found: dict[str, list[str]] = {"higher": [], "lower": [], "alike": []}
    for row in headline(results):
        if row.get("minus_bce") and row["minus_bce"][column]["ndcg"]["p_holm"] is not None:
            found[_direction(row["minus_bce"][column]["ndcg"])].append(results["methods"][row["method"]]["title"])
    words = {
        "higher": "higher than BCE's",
        "lower": "lower than BCE's",
        "alike": "cannot be told apart from BCE's",
    }
    if not any(found.values()):
        yield f"{column.capitalize()}: no method could be compared with BCE."
    for direction, titles in found.items():
        if titles:
            yield f"{column.capitalize()}, {words[direction]}: {'; '.join(titles)}."


def _direction(gain: dict[str, float]) -> str:
    if gain["p_holm"] < SIGNIFICANT and gain["low"] > 0:
        return "higher"
    if gain["p_holm"] < SIGNIFICANT and gain["high"] < 0:
        return "lower"
    return "alike"


def _setting(results: Results) -> str:
    rows = headline(results)
    size = f"{rows[0]['size']:,}" if rows[0]["size"] else "all"
    proxies = next((row["proxies"] for row in rows if row["proxies"]), "")
    return f"{size} training images" + (f" and {proxies} proxies per class" if proxies else "")


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
