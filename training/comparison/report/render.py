"""REPORT: results.json, and what is read of it: index.html, report.md, tables/*.csv and figures/."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

from cbmir.errors import ImageError
from cbmir.files import replacing, write_json, write_text
from cbmir.training.comparison.figures.examples import draw_examples
from cbmir.training.comparison.figures.figures import draw_figures
from cbmir.training.comparison.figures.maps import draw_maps
from cbmir.training.comparison.plan import Plan
from cbmir.training.comparison.report.blocks import Table
from cbmir.training.comparison.report.content import contents, report_title
from cbmir.training.comparison.report.markdown import markdown
from cbmir.training.comparison.report.page import page
from cbmir.training.comparison.results import make_results

log = logging.getLogger("cbmir")


def write_report(report: Path, plan: Plan) -> Path:
    """Write the report of what is finished so far, and return the path of index.html, which is written last.

    May be called again at any time: each file is replaced as a whole.
    """
    results, figures, tables = make_results(report, plan), report / "figures", report / "tables"
    for folder in (figures, tables):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(report / "results.json", results)
    pictures = [*draw_figures(results, figures), *draw_maps(report, plan, figures)]
    try:
        pictures += draw_examples(report, plan, figures)
    except ImageError as error:  # the report may be made where the images are not
        log.warning("No page of examples: %s", error)
    title, blocks = report_title(results), list(contents(results, pictures))
    text, html = markdown(title, blocks), page(title, blocks, figures)
    for block in blocks:
        if isinstance(block, Table):
            _write_table(block, tables)
    write_text(report / "report.md", text)
    write_text(report / "index.html", html)
    return report / "index.html"


def _write_table(table: Table, folder: Path) -> None:
    path = folder / f"{table.name}.csv"
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(table.records())
