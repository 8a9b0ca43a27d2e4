"""The folder REPORT: results.json, and the files made from it: index.html, report.md, tables/*.csv and figures/."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cbmir.card import NOT_A_DEVICE
from cbmir.errors import ImageError
from cbmir.files import write_csv, write_json, write_text
from cbmir.labels import spelled
from cbmir.training.comparison.figures.charts import draw_charts
from cbmir.training.comparison.figures.examples import draw_examples
from cbmir.training.comparison.figures.maps import draw_maps
from cbmir.training.comparison.figures.sheet import ReportFigure
from cbmir.training.comparison.plan import Plan
from cbmir.training.comparison.protocols import PROTOCOLS, VALIDATION
from cbmir.training.comparison.report import tables
from cbmir.training.comparison.report.provenance import machine_table, options_table, selections_table, times_table
from cbmir.training.comparison.results import LEAST, YARDSTICK, Results, headline, make_results, metric_title, unclear
from cbmir.training.metrics import QUERIES
from cbmir.training.pool import RESAMPLES

log = logging.getLogger("cbmir")

#: An SVG of more bytes (thousands of points) is replaced by the PNG if that is smaller.
LARGE = 200_000

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: Path, plan: Plan) -> Path:
    """Write the report of all finished cells, each file atomically; return the path of index.html, written last."""
    results, figures, texts = make_results(report, plan), report / "figures", report / "tables"
    for folder in (figures, texts):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(report / "results.json", results)
    pictures = [*draw_charts(results, figures), *draw_maps(report, plan, figures)]
    try:
        pictures += draw_examples(report, plan, figures)
    except ImageError as error:  # the images may be on another machine
        log.warning("No page of examples: %s", error)
    said = contents(results, pictures)
    text, html = markdown(said), page(said, figures)
    for table in [one for group in said["tables"].values() for one in group]:
        write_csv(texts / f"{table.name}.csv", table.records())
    write_text(report / "report.md", text)
    write_text(report / "index.html", html)
    return report / "index.html"


def markdown(said: dict[str, Any]) -> str:
    """Return the text of report.md, with links to figures/NAME.png and tables/NAME.csv."""
    return _environment(_escape_markdown).get_template("report.md.j2").render(said)


def page(said: dict[str, Any], figures: Path) -> str:
    """Return the text of index.html. The figures in the folder `figures` are embedded; other files are only linked."""
    style, script = ((_TEMPLATES / name).read_text("utf-8") for name in ("report.css", "report.js"))
    environment = _environment()
    environment.filters |= {"anchor": _anchor, "digest": _digest}
    template = environment.get_template("report.html.j2")
    return template.render(said, style=style, script=script, image=partial(_image, figures))


def _environment(finalize: Callable[[Any], Any] | None = None) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
    )  # fmt: skip
    environment.filters["spelled"] = spelled
    return environment


def _escape_markdown(value: Any) -> Any:
    """Return `value` on one line, with markup, HTML and links escaped; the output of macros stays as it is."""
    if isinstance(value, Markup):
        return value
    text = re.sub(r"([\\`*_~|<>&$])", r"\\\1", " ".join(str(value).split()))
    return Markup(text.replace("](", r"]\("))  # as Markup, so that jinja does not escape it again


def _image(figures: Path, name: str) -> str:
    """Return a figure as a data: URL for an image element, which runs no scripts of an SVG and isolates its ids."""
    drawing, pixels = (figures / f"{name}.{kind}" for kind in ("svg", "png"))
    small = drawing.stat().st_size <= max(LARGE, pixels.stat().st_size)
    path, kind = (drawing, "svg+xml") if small else (pixels, "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _digest(text: str) -> str:
    """Return the Content-Security-Policy source that allows an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


PATIENTS_NOTICE = (
    "Figures may show images of patients, and selections/ and cells/ contain their identifiers and decoded images. "
    "Protect this folder like the images."
)


def contents(results: Results, pictures: Sequence[ReportFigure]) -> dict[str, Any]:
    """Return the variables of `templates/content.j2`; `tables` are in the order of the report, by section."""
    protocol = results["protocol"]
    table = "" if PROTOCOLS[protocol["name"]].labels else results["plan"]["manifest"]
    return {
        "results": results,
        "protocol": PROTOCOLS[protocol["name"]],
        "title": f"Benchmark: {table or protocol['title']}",
        "comparison": compared(results),
        "patients": " ".join([*results["notes"], NOT_A_DEVICE, PATIENTS_NOTICE]),
        "setting": _setting(results) if tables.is_sweep(results) else "",
        "best": best_statement(results),
        "sources": [f"{m['title']}: {m['source']}. {m['chosen']}".strip() for m in results["methods"].values()],
        "tables": report_tables(results),
        "pictures": pictures,
        "validation": VALIDATION,
        "resamples": RESAMPLES,
        "least": LEAST,
    }


def report_tables(results: Results) -> dict[str, list[tables.Table]]:
    """Return all tables by section, in the order of the report."""
    breakdowns = (tables.finding_table(results), tables.retrieval_table(results), *tables.breakdown_tables(results))
    return {
        "yardstick": [tables.yardstick_table(results), *tables.difference_tables(results)],
        "lists": [tables.lists_table(results)] if any(row["finished"] for row in headline(results)) else [],
        "methods": [tables.paper_table(results, column) for column in QUERIES],
        "sweeps": [tables.sweep_table(results, column) for column in QUERIES] if tables.is_sweep(results) else [],
        "breakdowns": [table for table in breakdowns if table.rows],
        "provenance": [selections_table(results), options_table(results), machine_table(results), times_table(results)],
    }


def compared(results: Results) -> str:
    """Describe in two sentences what was compared."""
    rows, plan, protocol = headline(results), results["plan"], results["protocol"]
    suffix = f"-{rows[0]['size']}" if rows and rows[0]["size"] else ""
    parts = [one for one in results["selections"] if re.fullmatch(rf"seed\d+(-fold\d+)?{suffix}", one["part"])]
    images, queries = (_range([one["images"][split] for one in parts]) for split in ("train", "test"))
    patients = _range([one["patients"]["test"] for one in parts])
    seeds = _number(plan["seeds"], "seed")
    folds = f", each in {plan['folds']} folds by patient" if plan["folds"] else ""
    methods, findings = _number(len(rows), "method"), _number(len(protocol["labels"]), "finding")
    return (
        f"{methods} by the protocol “{protocol['title']}” ({findings}), compared by the images that they retrieve for "
        f"a query: the {protocol['k']} nearest training images of other patients. Each part ({seeds}{folds}) has "
        f"{images} training images and {queries} queries of {patients} patients."
    )


def best_statement(results: Results) -> str:
    """State which method is best by the yardstick, or why no method is."""
    best, titles = results["best"], {name: method["title"] for name, method in results["methods"].items()}
    leaders = best["leaders"]
    if best["method"]:
        return (
            f"Best: {titles[best['method']]}. It leads every other method in AUC and in the corrected nDCG of all "
            "queries, with both gains; the interval of each of these differences lies above 0."
        )
    none = "No method is called best:"
    if len(leaders) < len(YARDSTICK):
        return f"{none} no method that has finished all of its parts has {'an AUC' if leaders else 'figures'}."
    if len(set(leaders.values())) > 1:
        led = (f"in {metric_title(results, metric)} {titles[name]}" for metric, name in leaders.items())
        return f"{none} different methods lead, {', '.join(led)}."
    if not best["differences"]:
        return f"{none} only one method has finished all of its parts."
    close = {other: unclear(lead) for other, lead in best["differences"].items()}
    others = "; ".join(
        f"{titles[other]} ({', '.join(metric_title(results, metric) for metric in metrics)})"
        for other, metrics in close.items() if metrics
    )  # fmt: skip
    return (
        f"{none} {titles[leaders['auc']]} has the highest AUC and corrected nDCGs, but intervals of its differences do "
        f"not lie above 0: {others}."
    )


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
