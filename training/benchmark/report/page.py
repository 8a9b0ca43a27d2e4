"""The report as one HTML file that needs nothing beside it: style, script and pictures are inside."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from cbmir.training.benchmark.pictures.drawing import Picture
from cbmir.training.benchmark.report.blocks import Block, Cell, Code, Column, Heading, Items, Table, Text
from cbmir.training.benchmark.report.style import SCRIPT, STYLE

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
