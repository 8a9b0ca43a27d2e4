"""The report as one HTML file that needs nothing beside it: style, script and pictures are inside.

Style and script of index.html. The page reads the same without the script, which sorts tables.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from cbmir.training.comparison.figures.drawing import Picture
from cbmir.training.comparison.report.blocks import Block, Cell, Code, Column, Heading, Items, Table, Text

STYLE = """
:root {
  --ink: #1b1f24; --muted: #57606a; --paper: #ffffff; --panel: #f6f8fa; --line: #d5dbe1; --strong: #8c959f;
  --link: #0550ae; --notice: #fff8e1; --notice-line: #9a6700;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ed; --muted: #a3acb7; --paper: #14171b; --panel: #1c2127; --line: #353c45; --strong: #6e7883;
    --link: #82b7ff; --notice: #2a2410; --notice-line: #d4a72c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 80rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
h1, h2, h3 { line-height: 1.25; text-wrap: pretty; }
h1 { margin: 0 0 1.5rem; font-size: clamp(1.6rem, 1.2rem + 1.8vw, 2.3rem); letter-spacing: -0.015em; }
h2 { margin: 3.25rem 0 0.9rem; padding-bottom: 0.35rem; border-bottom: 1px solid var(--line); font-size: 1.4rem; }
h3 { margin: 1.9rem 0 0.6rem; font-size: 1.06rem; }
p, li, figcaption { max-width: 46rem; overflow-wrap: anywhere; }
p { margin: 0.7rem 0; }
ul, ol { padding-left: 1.3rem; }
li { margin: 0.3rem 0; }
a { color: var(--link); text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
nav { margin: 0 0 1.75rem; font-size: 0.92rem; }
nav h2 { margin: 0 0 0.35rem; padding: 0; border: 0; font-size: 0.92rem; color: var(--muted); }
nav ol { display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem; margin: 0; padding: 0; list-style: none; }
nav li { margin: 0; }
.notice {
  padding: 0.7rem 1rem; background: var(--notice); border-left: 4px solid var(--notice-line);
  border-radius: 0 6px 6px 0;
}
.file { margin-left: 0.4rem; font-size: 0.8rem; font-weight: 400; }
pre {
  margin: 0.8rem 0; padding: 0.9rem 1rem; overflow-x: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; font: 0.88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.scroll { width: fit-content; max-width: 100%; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums lining-nums; }
th, td { padding: 0.42rem 0.55rem; text-align: left; vertical-align: top; }
thead th { border-bottom: 1px solid var(--strong); background: var(--panel); vertical-align: bottom; font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { position: sticky; left: 0; min-width: 9rem; background: var(--paper); font-weight: 500; }
thead th:first-child { position: sticky; left: 0; }
tbody tr:hover > * { background: var(--panel); }
.number { text-align: right; white-space: nowrap; }
thead .number, .number small { white-space: normal; }
strong { font-weight: 750; }
small { display: block; color: var(--muted); font-size: 0.86em; line-height: 1.35; }
.notes { margin: 0.6rem 0 0; color: var(--muted); font-size: 0.88rem; }
figure { margin: 2rem 0; }
.card {
  padding: 1rem; overflow-x: auto; background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  text-align: center;
}
.card img { max-width: 100%; height: auto; }
figcaption { margin-top: 0.6rem; color: var(--muted); font-size: 0.92rem; }
th button {
  all: unset; cursor: pointer; font: inherit; text-align: inherit;
  text-decoration: underline dotted var(--strong); text-underline-offset: 0.25em;
}
th button:focus-visible { outline: 2px solid var(--link); outline-offset: 3px; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 1rem 3rem; }
  table { font-size: 0.84rem; }
  th, td { padding: 0.4rem 0.5rem; }
  tbody th { min-width: 7rem; max-width: 9rem; }
  .card { padding: 0.4rem; text-align: left; }
  .card img { max-width: 180%; }
}
@media print {
  :root {
    --ink: #000000; --muted: #333333; --paper: #ffffff; --panel: #ffffff; --line: #bbbbbb; --strong: #000000;
    --link: #000000; --notice: #ffffff; --notice-line: #000000;
  }
  @page { size: A4 landscape; margin: 12mm; }
  html { font-size: 9pt; }
  body { max-width: none; padding: 0; }
  nav, .file { display: none; }
  .scroll { width: auto; overflow: visible; border: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: 2pt 4pt; }
  tbody th, thead th:first-child { position: static; }
  h2, h3 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
}
"""

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], original = Array.from(body.rows);
  table.querySelectorAll("thead th").forEach((head, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort; a third click restores the order";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
      const now = head.ariaSort === first ? second : head.ariaSort === second ? null : first;
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      if (now) head.setAttribute("aria-sort", now);
      const sign = now === "descending" ? -1 : 1;
      const value = (row) => Number(row.cells[index].dataset.value ?? NaN);
      const compare = (a, b) => {
        if (!numeric) return sign * a.cells[index].textContent.localeCompare(b.cells[index].textContent);
        const [x, y] = [value(a), value(b)];
        return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || 0;
      };
      body.append(...(now ? [...original].sort(compare) : original));
    });
  });
}
"""


#: A drawing above so many bytes (thousands of points) is shown as PNG if that is smaller.
LARGE = 200_000

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="cbmir">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1></header>
<nav aria-labelledby="contents"><h2 id="contents">Contents</h2>
<ol>
$contents
</ol></nav>
<main>
$main
</main>
<script>$script</script>
</body>
</html>
"""
)


def page(title: str, blocks: Iterable[Block], figures: Path) -> str:
    """Text of index.html, with the pictures of the folder `figures` inside; files beside it are only linked."""
    blocks = list(blocks)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    headings = [block.text for block in blocks if isinstance(block, Heading)]
    return _PAGE.substitute(
        title=escape(title),
        policy=policy,
        style=STYLE,
        script=SCRIPT,
        contents="\n".join(f'<li><a href="#{_anchor(text)}">{escape(text)}</a></li>' for text in headings),
        main="\n".join(_block(block, figures) for block in blocks),
    )


def _block(block: Block, figures: Path) -> str:
    match block:
        case Heading(text):
            return f'<h2 id="{_anchor(text)}">{escape(text)}</h2>'
        case Text(text, notice):
            return f'<p class="notice">{escape(text)}</p>' if notice else f"<p>{escape(text)}</p>"
        case Items(items):
            return _items(items)
        case Code(text):
            return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'
        case Table():
            return _table(block)
        case Picture():
            return _picture(block, figures)


def _table(table: Table) -> str:
    name = f"table-{table.name}"
    head = "".join(f'<th scope="col"{_numeric(column)}>{escape(column.title)}</th>' for column in table.columns)
    body = "\n".join(_row(table.columns, row) for row in table.rows)
    notes = _items(table.notes, "notes") if table.notes else ""
    return (
        f'<section><h3 id="{name}">{escape(table.title)} {_link(f"tables/{table.name}.csv", "CSV", table.title)}</h3>\n'
        f'<div class="scroll" role="region" aria-labelledby="{name}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n{notes}</section>"
    )


def _row(columns: tuple[Column, ...], row: tuple[Cell, ...]) -> str:
    first = f'<th scope="row">{escape(row[0].text)}</th>'
    return f"<tr>{first}{''.join(map(_cell, columns[1:], row[1:]))}</tr>"


def _cell(column: Column, cell: Cell) -> str:
    text = f"<strong>{escape(cell.text)}</strong>" if cell.best else escape(cell.text)
    detail = escape(cell.detail).replace(", ", ",&nbsp;").replace("± ", "±&nbsp;")  # may break before ± alone
    detail = f" <small>{detail}</small>" if detail else ""
    order = f' data-value="{cell.numbers[0]:.10g}"' if cell.numbers and cell.numbers[0] is not None else ""
    return f"<td{_numeric(column)}{order}>{text}{detail}</td>"


def _numeric(column: Column) -> str:
    return ' class="number"' if column.fields else ""


def _picture(picture: Picture, figures: Path) -> str:
    files = " ".join(
        _link(f"figures/{picture.name}.{kind}", kind.upper(), picture.title) for kind in ("png", "svg", "csv")
    )
    title = escape(picture.title)
    return (
        f"<figure><h3>{title} {files}</h3>\n"
        f'<div class="card" tabindex="0"><img alt="{title}" src="{_data(picture.name, figures)}"></div>\n'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _data(name: str, figures: Path) -> str:
    """The picture as a data: address; an image element runs no script of a drawing and keeps its ids apart."""
    drawing, pixels = (figures / f"{name}.{kind}" for kind in ("svg", "png"))
    small = drawing.stat().st_size <= max(LARGE, pixels.stat().st_size)
    path, kind = (drawing, "svg+xml") if small else (pixels, "png")
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _items(items: Iterable[str], kind: str = "") -> str:
    start = f'<ul class="{kind}">' if kind else "<ul>"
    return start + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _link(address: str, kind: str, title: str) -> str:
    return f'<a class="file" href="{escape(address)}" aria-label="{kind}: {escape(title)}">{kind}</a>'


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _hash(text: str) -> str:
    """What a Content-Security-Policy says of an inline style or script that it lets in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
