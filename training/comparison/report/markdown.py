"""The report as Markdown, as GitHub shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cbmir.training.comparison.figures.drawing import Picture
from cbmir.training.comparison.report.blocks import Block, Cell, Code, Heading, Items, Table, Text


def markdown(title: str, blocks: Iterable[Block]) -> str:
    """Text of report.md; pictures are linked as figures/NAME.png, tables as tables/NAME.csv."""
    return "\n\n".join([f"# {_escape(title)}", *map(_block, blocks)]) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_escape(text)}"
        case Text(text, notice):
            return f"> {_escape(text)}" if notice else _escape(text)
        case Items(items):
            return _items(items)
        case Code(text):  # indented, since no text can end it
            return "\n".join(f"    {line}" for line in text.splitlines())
        case Table():
            return _table(block)
        case Picture(name, title, caption):
            files = ", ".join(f"[{kind.upper()}](figures/{name}.{kind})" for kind in ("svg", "csv"))
            return (
                f"### {_escape(title)}\n\n![{_escape(title)}](figures/{name}.png)\n\n{_escape(caption)} Files: {files}."
            )


def _table(table: Table) -> str:
    lines = [
        [_escape(column.title) for column in table.columns],
        ["---:" if column.fields else "---" for column in table.columns],
        *([_cell(cell) for cell in row] for row in table.rows),
    ]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [_items(table.notes)] if table.notes else []
    return "\n\n".join([f"### {_escape(table.title)}", grid, *notes, f"Numbers: [CSV](tables/{table.name}.csv)."])


def _cell(cell: Cell) -> str:
    text = f"**{_escape(cell.text)}**" if cell.best else _escape(cell.text)
    return f"{text} {_escape(cell.detail)}".strip()


def _items(items: Iterable[str]) -> str:
    return "\n".join(f"- {_escape(item)}" for item in items)


def _escape(text: str) -> str:
    """One line in which nothing of `text` is read as markup, HTML or a link."""
    text = re.sub(r"([\\`*_~|<>&$])", r"\\\1", " ".join(text.split()))
    return text.replace("](", r"]\(")
