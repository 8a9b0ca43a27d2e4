"""REPORT: results.json, and what is read of it: index.html, report.md, tables/*.csv and figures/."""

from __future__ import annotations

import base64
import csv
import hashlib
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cbmir.errors import ImageError
from cbmir.files import replacing, write_json, write_text
from cbmir.training.comparison.figures.charts import draw_charts
from cbmir.training.comparison.figures.examples import draw_examples
from cbmir.training.comparison.figures.maps import draw_maps
from cbmir.training.comparison.plan import Plan
from cbmir.training.comparison.report.content import contents
from cbmir.training.comparison.results import make_results

log = logging.getLogger("cbmir")

#: A drawing above so many bytes (thousands of points) is shown as PNG if that is smaller.
LARGE = 200_000

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: Path, plan: Plan) -> Path:
    """Write the report of what is finished so far; it may be called again at any time, and replaces each file whole.

    Returns:
        The path of index.html, which is written last.
    """
    results, figures, tables = make_results(report, plan), report / "figures", report / "tables"
    for folder in (figures, tables):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(report / "results.json", results)
    pictures = [*draw_charts(results, figures), *draw_maps(report, plan, figures)]
    try:
        pictures += draw_examples(report, plan, figures)
    except ImageError as error:  # the report may be made where the images are not
        log.warning("No page of examples: %s", error)
    said = contents(results, pictures)
    text, html = markdown(said), page(said, figures)
    for table in [one for group in said["tables"].values() for one in group]:
        path = tables / f"{table.name}.csv"
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(table.records())
    write_text(report / "report.md", text)
    write_text(report / "index.html", html)
    return report / "index.html"


def markdown(said: dict[str, Any]) -> str:
    """Text of report.md; figures are linked as figures/NAME.png, tables as tables/NAME.csv."""
    return _environment(_escape_markdown).get_template("report.md.j2").render(said)


def page(said: dict[str, Any], figures: Path) -> str:
    """Text of index.html, with the pictures of the folder `figures` inside; files beside it are only linked."""
    style, script = ((_TEMPLATES / name).read_text("utf-8") for name in ("report.css", "report.js"))
    environment = _environment()
    environment.filters |= {"anchor": _anchor, "digest": _digest}
    template = environment.get_template("report.html.j2")
    return template.render(said, style=style, script=script, image=partial(_image, figures))


def _environment(finalize: Callable[[Any], Any] | None = None) -> Environment:
    return Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
    )  # fmt: skip


def _escape_markdown(value: Any) -> Any:
    """One line in which nothing of `value` is read as markup, HTML or a link; what a macro made is left alone."""
    if isinstance(value, Markup):
        return value
    text = re.sub(r"([\\`*_~|<>&$])", r"\\\1", " ".join(str(value).split()))
    return Markup(text.replace("](", r"]\("))  # no HTML: jinja would escape it once more


def _image(figures: Path, name: str) -> str:
    """A figure as a data: address; an image element runs no script of a drawing and keeps its ids apart."""
    drawing, pixels = (figures / f"{name}.{kind}" for kind in ("svg", "png"))
    small = drawing.stat().st_size <= max(LARGE, pixels.stat().st_size)
    path, kind = (drawing, "svg+xml") if small else (pixels, "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _digest(text: str) -> str:
    """What a Content-Security-Policy says of an inline style or script that it lets in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
