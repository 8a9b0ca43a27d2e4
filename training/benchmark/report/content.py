"""The report block by block: what was compared, what came out, and how it was made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cbmir.card import NOT_A_DEVICE
from cbmir.training.benchmark.pictures.drawing import Picture
from cbmir.training.benchmark.protocols import PROTOCOLS
from cbmir.training.benchmark.report.blocks import Block, Heading, Items, Text
from cbmir.training.benchmark.report.breakdowns import breakdown_tables, finding_table
from cbmir.training.benchmark.report.provenance import how_it_was_made
from cbmir.training.benchmark.report.rows import Results, headline, is_sweep, metric_title
from cbmir.training.benchmark.report.tables import main_table, sweep_table
from cbmir.training.benchmark.statistics import QUERIES

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
