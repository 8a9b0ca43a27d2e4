"""The tables of the report, from results.json: rows of text for page and Markdown, and of numbers for CSV files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cbmir.labels import spelled
from cbmir.training.comparison.plan import Cell, Part
from cbmir.training.comparison.results import Results, Row, figure_in, headline, metric_title, ordered
from cbmir.training.evaluation_report import figure
from cbmir.training.metrics import QUERIES, REFERENCES, RETRIEVAL_METRICS
from cbmir.training.rankings import CORRECTED

METRICS = ("auc", *RETRIEVAL_METRICS)
SWEPT = ("auc", *CORRECTED, *RETRIEVAL_METRICS)
#: Metrics whose difference from BCE stands in the same table.
COMPARED = ("corrected_ndcg", "ndcg")
#: The main measures: metric and column.
MAIN = (("auc", ""), *((metric, column) for column in reversed(QUERIES) for metric in CORRECTED))
P, MINUS_BCE = "p (Holm)", " \N{MINUS SIGN} BCE"
REFERENCE_TITLES = {
    "random": "random ranking",
    "most labels": "images with most labels first",
    "no finding": "images without a finding first",
}
#: Endings of a figure's columns in a CSV file: the value, the ends of its interval, the sd over seeds.
MEASURE = ("", " low", " high", " sd")
PAPER_NOTE = (
    "“paper's own” are the paper's figures, for its data and code; they were not measured here. The paper does not say "
    "how a query without a finding counts."
)


@dataclass(frozen=True)
class TableCell:
    """A cell of a table. `detail` follows `text` in smaller type. `numbers` replace both in the CSV file."""

    text: str
    detail: str = ""
    numbers: tuple[float | None, ...] = ()
    best: bool = False


#: An empty cell.
NOTHING = TableCell("\N{EN DASH}", numbers=(None,))


@dataclass(frozen=True)
class Column:
    """A column of a table. For numbers, the CSV file has one column for each of `fields`, the endings of their titles;
    for text it has one column."""

    title: str
    fields: tuple[str, ...] = ()

    def record(self, cell: TableCell) -> list[str]:
        """Return a cell's fields in the CSV file: numbers are not rounded, and a missing value is empty."""
        if not self.fields:
            return [cell.text]
        if not cell.numbers:  # text in a column of numbers: failed, reference
            return [cell.text, *[""] * (len(self.fields) - 1)]
        numbers = (*cell.numbers, *[None] * len(self.fields))[: len(self.fields)]
        return ["" if number is None else f"{number:.10g}" for number in numbers]


@dataclass(frozen=True)
class Table:
    """A table of the report. `name` is that of its CSV file; `notes` appear below it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    notes: tuple[str, ...] = ()

    def records(self) -> Iterator[list[str]]:
        """Yield the rows of the CSV file, header first."""
        yield [column.title + field for column in self.columns for field in column.fields or ("",)]
        for row in self.rows:
            yield [text for column, cell in zip(self.columns, row, strict=True) for text in column.record(cell)]


def is_sweep(results: Results) -> bool:
    """Return whether there are several sizes or numbers of proxies."""
    return len(results["plan"]["sizes"]) > 1 or len(results["plan"]["proxies"]) > 1


def row_title(results: Results, row: Row) -> str:
    """Return the method's title, and the number of finished parts unless all are finished."""
    title: str = results["methods"][row["method"]]["title"]
    return title if row["finished"] == row["cells"] else f"{title} ({row['finished']} of {row['cells']} parts)"


def failures(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line per error of these rows' cells: the method, the error, the log, and how often it occurred."""
    shown = {Cell(Part(0, 0, row["size"]), row["method"], row["proxies"]).name for row in rows}
    logs: dict[tuple[str, str], list[str]] = {}
    for failed in results["failed"]:
        if re.sub(r"^seed\d+(-fold\d+)?", "seed0", failed["cell"]) in shown:
            logs.setdefault((failed["method"], failed["error"]), []).append(f"cells/{failed['log']}")
    for (method, error), (first, *others) in logs.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{results['methods'][method]['title']} failed: {error} ({first}{more})"


def measure(value: dict[str, float | None], *, signed: bool = False) -> TableCell:
    """Format as `+0.023 [0.010, 0.036] ± 0.004`. Only differences get a plus sign, and only several seeds the sd."""
    text, _, detail = figure(value).replace("-", "\N{MINUS SIGN}").partition(" ")
    if signed and (value["value"] or 0) > 0:
        text = f"+{text}"
    if value.get("sd") is not None:
        detail = f"{detail} ± {value['sd']:.3f}".strip()
    return TableCell(text, detail, tuple(value.get(key) for key in ("value", "low", "high", "sd")))


def number(value: float | None, form: str = ",") -> TableCell:
    return NOTHING if value is None else TableCell(f"{value:{form}}", numbers=(value,))


def yardstick_table(results: Results) -> Table:
    """Return AUC and nDCG corrected for chance, which determine the best method, and the calibration error."""
    rows, shown = headline(results), len(MAIN)
    cells = [
        (TableCell(row_title(results, row)), *(measure(figure_in(row, *one)) for one in MAIN),
         measure(row["calibration_error"]))
        if row["finished"] else (TableCell(row_title(results, row)), *[_unfinished(results, row)] * shown, NOTHING)
        for row in rows
    ]  # fmt: skip
    ignorant = (TableCell("any list that ignores the query"), measure({"value": None}))
    cells.append((*ignorant, *[measure({"value": 0.0})] * (shown - 1), NOTHING))
    error = Column(metric_title(results, "calibration_error"), ("",))
    columns = (Column("method"), *(Column(title, MEASURE) for title in _main_titles(results, "")), error)
    note = (
        "nDCG corrected for chance is 0 for any list that ignores the query, and 1 for the best order. An image's "
        "Jaccard gain is the number of shared labels divided by the labels of either image."
    )
    notes = (note, *failures(results, rows))
    return Table("yardstick", "Yardstick", columns, _mark_best(cells, rows, shown), notes)


def difference_tables(results: Results) -> Iterator[Table]:
    """Yield the differences on the yardstick: the leader's lead over each other method, and each method minus BCE."""
    rows, methods, leads = headline(results), results["methods"], results["best"]["differences"]
    leader = next((row for row in rows if row["method"] == results["best"]["leaders"].get("auc")), {"finished": 0})
    gains = [(row_title(results, row), row["minus_bce"], row["finished"]) for row in rows if row.get("minus_bce")]
    leading = [(methods[m]["title"], leads[m], leader["finished"]) for m in methods if m in leads]
    title = f"{row_title(results, leader)}: lead over each other finished method" if leads else ""
    for name, heading, ending, shown in (
        ("lead", title, " lead", leading), ("minus-bce", "Differences from BCE", MINUS_BCE, gains)
    ):  # fmt: skip
        columns = (Column("method"), *_compared(_main_titles(results, ending)))
        cells = ((TableCell(method, _parts(gain, of)), *_differences(gain, MAIN)) for method, gain, of in shown)
        if shown:
            yield Table(name, heading, columns, tuple(cells))


def lists_table(results: Results) -> Table:
    """Return figures of whole lists, and in the last row those of the gallery and of random lists."""
    rows = [row for row in headline(results) if row["finished"]]
    single = ("gallery_shown", "hubness_skewness")
    cells = [
        (TableCell(row_title(results, row)), measure(row["lists"]["labels_per_hit"]),
         measure(row["healthy_queries"]["share"]), *(measure({"value": row["lists"][name]}) for name in single))
        for row in rows
    ]  # fmt: skip
    if rows:
        whole = max(rows, key=lambda row: row["finished"])
        lists, healthy = whole["lists"], whole["healthy_queries"]["gallery"]
        chance = (lists["labels_per_gallery_image"], healthy, lists["gallery_shown_at_random"])
        cells.append((TableCell("random lists"), *(measure({"value": one}) for one in chance), NOTHING))
    titles = ("labels per hit", "precision of healthy queries", "share of the gallery shown", "hubness (skewness)")
    columns = (Column(title, MEASURE[:3] if place < 2 else ("",)) for place, title in enumerate(titles))
    note = (
        "Many more labels per hit than in random lists, a small share shown and a high skewness mean that most queries "
        "get the same few images, which have many labels."
    )
    return Table("lists", "Contents of the lists", (Column("method"), *columns), tuple(cells), (note,))


def paper_table(results: Results, column: str) -> Table:
    """Return one row per method for one column of figures, and last the rankings that ignore the query."""
    rows, methods = headline(results), results["methods"]
    given = [metric for metric in METRICS if any(metric in methods[row["method"]]["paper"] for row in rows)]
    paper = tuple(Column(f"paper's own {metric_title(results, metric)}", ("",)) for metric in given)
    cells = [
        (
            TableCell(row_title(results, row)),
            *_measures(results, row, column, METRICS),
            *(number(methods[row["method"]]["paper"].get(metric), ".2f") for metric in given),
        )
        for row in rows
    ]
    chance = results["references"].get(str(rows[0]["size"]), {}) if rows else {}
    nothing = [NOTHING] * (2 + len(given))
    for name in REFERENCES:
        values = chance.get(f"{name}, {column}", {})
        measured = (measure({"value": values.get(metric)}) for metric in RETRIEVAL_METRICS)
        cells.append((TableCell(REFERENCE_TITLES[name]), measure({"value": None}), *measured, *nothing))
    return Table(
        column.replace(" ", "-"), column.capitalize(), (Column("method"), *_columns(results, METRICS), *paper),
        _mark_best(cells, rows, len(METRICS)),
        (_counts(rows, column, results["plan"]["seeds"]), *([PAPER_NOTE] if given else [])),
    )  # fmt: skip


def sweep_table(results: Results, column: str) -> Table:
    """Return one row per method, training-set size and number of proxies."""
    rows = ordered(results)
    cells = tuple(
        (TableCell(row_title(results, row)), _size(row), _proxies(row), *_measures(results, row, column, SWEPT))
        for row in rows
    )
    name = f"sweep-{column.replace(' ', '-')}"
    columns = (Column("method"), Column("training images", ("",)), Column("proxies per class", ("",)))
    swept = _columns(results, SWEPT)
    return Table(name, f"Sweep, {column}", (*columns, *swept), cells, tuple(failures(results, rows)))


def finding_table(results: Results) -> Table:
    """Return AUC by finding, with one column per method that has an AUC."""
    rows = [row for row in headline(results) if row.get("auc", {}).get("value") is not None]
    labels = results["protocol"]["labels"]
    cells = tuple((TableCell(spelled(name)), *(measure(row["auc_by_label"][name]) for row in rows)) for name in labels)
    mean = (TableCell("mean"), *(measure(row["auc"] | {"sd": None}) for row in rows))
    lost = sorted({name for row in rows for name in row["auc_without_both_values"]}, key=labels.index)
    names = ", ".join(map(spelled, lost))
    note = f"Left out of the mean of a method if the queries do not have both values: {names}." if lost else ""
    columns = (Column("finding"), *(Column(row_title(results, row), MEASURE[:3]) for row in rows))
    return Table("auc-by-finding", "AUC by finding", columns, (*cells, mean) if rows else (), (note,) if note else ())


def retrieval_table(results: Results) -> Table:
    """Return, per finding, the share of the first k images with it over queries with it; one column per method."""
    rows = [row for row in headline(results) if row["finished"]]
    shares = [{**row["retrieval_by_label"], "no finding at all": row["healthy_queries"]} for row in rows]
    most = max(zip(rows, shares, strict=True), key=lambda one: one[0]["finished"], default=({}, {}))[1]
    cells = tuple(
        (TableCell(f"{spelled(name)}, n = {one['queries']:,}"), measure({"value": one["gallery"]}),
         *(measure(own[name]["share"]) for own in shares))
        for name, one in most.items()
    )  # fmt: skip
    columns = (Column("finding"), Column("its share of the gallery", ("",)),
               *(Column(row_title(results, row), MEASURE[:3]) for row in rows))  # fmt: skip
    k = results["protocol"]["k"]
    note = f"For queries with the finding, the share of their first {k} that have it too; uncertain counts as positive."
    return Table("retrieval-by-finding", "Retrieval by finding", columns, cells, (note,))


def breakdown_tables(results: Results) -> Iterator[Table]:
    """Yield nDCG by view and by source of the query, if the manifest has them."""
    rows = [row for row in headline(results) if row["finished"]]
    for attribute in ("views", "sources"):
        for column in QUERIES:
            groups = [{name: one[column] for name, one in row[attribute].items() if column in one} for row in rows]
            counts: dict[str, int] = {}
            for name, group in (pair for own in groups for pair in own.items()):
                counts[name] = max(counts.get(name, 0), group["queries"])
            columns = (Column(f"{name}, n = {count:,}", MEASURE[:3]) for name, count in counts.items())
            figures = [[measure(own[n]["ndcg"]) if n in own else NOTHING for n in counts] for own in groups]
            titles = (TableCell(row_title(results, row)) for row in rows)
            cells = tuple((title, *own) for title, own in zip(titles, figures, strict=True))
            name = f"{metric_title(results, 'ndcg')} by {attribute[:-1]} of the query, {column}"
            if counts:
                yield Table(f"{attribute}-{column.replace(' ', '-')}", name, (Column("method"), *columns), cells)


def _main_titles(results: Results, ending: str) -> list[str]:
    return [", ".join(filter(None, (metric_title(results, metric) + ending, column))) for metric, column in MAIN]


def _columns(results: Results, metrics: Sequence[str]) -> tuple[Column, ...]:
    measured = (Column(metric_title(results, metric), MEASURE) for metric in metrics)
    gains = [metric_title(results, metric) + MINUS_BCE for metric in metrics if metric in COMPARED]
    return (*measured, *_compared(gains))


def _compared(titles: Sequence[str]) -> Iterator[Column]:
    """Yield the columns of differences. In a CSV file, the title of the difference distinguishes the p columns."""
    for title in titles:
        yield Column(title, MEASURE[:3])
        yield Column(P, (f" of {title}",))


def _measures(results: Results, row: Row, column: str, metrics: Sequence[str]) -> list[TableCell]:
    compared = [(metric, column) for metric in metrics if metric in COMPARED]
    if not row["finished"]:
        return [*[_unfinished(results, row)] * len(metrics), *[NOTHING] * 2 * len(compared)]
    measured = [measure(figure_in(row, metric, column)) for metric in metrics]
    if row["minus_bce"] is None:
        first = TableCell("reference") if row["method"] == "bce" else NOTHING
        return [*measured, *[first, NOTHING] * len(compared)]
    return [*measured, *_differences(row["minus_bce"], compared, _parts(row["minus_bce"], row["finished"]))]


def _unfinished(results: Results, row: Row) -> TableCell:
    return TableCell("failed" if any(failures(results, [row])) else "not finished")


def _parts(gains: dict[str, Any], finished: int) -> str:
    return "" if gains["parts"] >= finished else f"on {gains['parts']} of {finished} parts"


def _differences(gains: dict[str, Any], shown: Sequence[tuple[str, str]], note: str = "") -> Iterator[TableCell]:
    """Yield each difference, followed by a note, and its corrected p."""
    for metric, column in shown:
        gain = figure_in(gains, metric, column)
        cell, p = measure(gain, signed=True), gain.get("p_holm")
        yield replace(cell, detail=f"{cell.detail} {note}".strip())
        yield NOTHING if p is None else TableCell("< 0.001" if p < 0.001 else f"{p:.3f}", numbers=(p,))


def _size(row: Row) -> TableCell:
    size = row.get("training_images", row["size"])
    return number(size) if size else TableCell("all")


def _proxies(row: Row) -> TableCell:
    proxies = row["proxies"]
    return TableCell(proxies, numbers=(int(proxies),) if proxies.isdigit() else ()) if proxies else NOTHING


def _counts(rows: Sequence[Row], column: str, seeds: int) -> str:
    most = max((row for row in rows if row["finished"]), key=lambda row: row["finished"], default=None)
    if most is None:
        return "No method is finished."
    count, left = most[column]["queries"], most[column]["queries_left_out"]
    why = {
        "positive queries": "they have no positive label, or none that the gallery has",
        "all queries": "they have an unknown and no positive label, or no label that the gallery has; having no "
        "finding at all counts as a label",
    }
    each = f" of {seeds} seeds" if seeds > 1 and most["finished"] == most["cells"] else ""
    return f"{count:,} queries{each} have an nDCG; {left:,} are left out ({why[column]})."


def _mark_best(
    table: Sequence[tuple[TableCell, ...]], rows: Sequence[Row], metrics: int
) -> tuple[tuple[TableCell, ...], ...]:
    """Mark the highest shown value of each metric among methods that finished all parts."""
    marked = [list(cells) for cells in table]
    finished = [i for i, row in enumerate(rows) if row["finished"] == row["cells"]]
    for j in range(1, 1 + metrics):
        shown = {i: round(value, 3) for i in finished if (value := table[i][j].numbers[0]) is not None}
        for i, value in shown.items():
            marked[i][j] = replace(table[i][j], best=value == max(shown.values()))
    return tuple(map(tuple, marked))
