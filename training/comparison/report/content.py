"""What the report says of its results: the sentences that depend on them, and all that its templates are given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cbmir.card import NOT_A_DEVICE
from cbmir.training.comparison.figures.sheet import ReportFigure
from cbmir.training.comparison.protocols import PROTOCOLS, VALIDATION
from cbmir.training.comparison.report.provenance import provenance_tables
from cbmir.training.comparison.report.tables import breakdown_tables, finding_table, is_sweep, main_table, sweep_table
from cbmir.training.comparison.results import Results, headline, metric_title
from cbmir.training.comparison.statistics import LEAST, QUERIES, RESAMPLES

#: A corrected p below it is reported as a difference, if the interval says so too.
SIGNIFICANT = 0.05

PATIENTS_NOTICE = (
    "Figures may show images of patients, and selections/ and cells/ hold their identifiers and decoded images: "
    "protect this folder as the images are."
)


def contents(results: Results, pictures: Sequence[ReportFigure]) -> dict[str, Any]:
    """What `templates/content.j2` is given; `tables` are in the order of the report, by section."""
    protocol = results["protocol"]
    table = "" if PROTOCOLS[protocol["name"]].labels else f" {results['plan']['manifest']}"
    breakdowns = (finding_table(results), *breakdown_tables(results))
    return {
        "results": results,
        "protocol": PROTOCOLS[protocol["name"]],
        "title": f"Benchmark: {protocol['title']}{table}",
        "comparison": compared(results),
        "patients": f"{NOT_A_DEVICE} {PATIENTS_NOTICE}",
        "setting": _setting(results) if is_sweep(results) else "",
        "ndcg": metric_title(results, "ndcg"),
        "statements": [statement for column in QUERIES for statement in statements(results, column)],
        "sources": [f"{m['title']}: {m['source']}. {m['chosen']}".strip() for m in results["methods"].values()],
        "tables": {
            "methods": [main_table(results, column) for column in QUERIES],
            "sweeps": [sweep_table(results, column) for column in QUERIES] if is_sweep(results) else [],
            "breakdowns": [table for table in breakdowns if table.rows],
            "provenance": provenance_tables(results),
        },
        "pictures": pictures,
        "significant": SIGNIFICANT,
        "validation": VALIDATION,
        "resamples": RESAMPLES,
        "least": LEAST,
    }


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
    words = {"higher": "higher than BCE's", "lower": "lower than BCE's", "alike": "cannot be told apart from BCE's"}
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
