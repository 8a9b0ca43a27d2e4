"""What the tables of the report share: which rows of results.json they show, and how they write a figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cbmir.training.benchmark.plan import Cell as Run
from cbmir.training.benchmark.plan import Part
from cbmir.training.benchmark.report.blocks import Cell
from cbmir.training.report import figure

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
