"""What a report is made of: headings, text, tables and pictures, before they become Markdown or HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cbmir.training.comparison.figures.drawing import Picture

#: What a figure's column is called in a CSV file: the value, the ends of its interval, the sd over seeds.
MEASURE = ("", " low", " high", " sd")


@dataclass(frozen=True)
class Cell:
    """`detail` is read after `text`, in smaller type. `numbers` go to the CSV file in place of both."""

    text: str
    detail: str = ""
    numbers: tuple[float | None, ...] = ()
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A column of numbers has as many `fields` in the CSV file, named by their endings; a column of text has none."""

    title: str
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """`name` is that of its CSV file; `notes` stand below it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def records(self) -> Iterator[list[str]]:
        """The CSV file, header first: numbers unrounded, what has no value left empty."""
        yield [column.title + field for column in self.columns for field in column.fields or ("",)]
        for row in self.rows:
            yield [text for column, cell in zip(self.columns, row, strict=True) for text in _record(column, cell)]


@dataclass(frozen=True)
class Heading:
    """Of a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `notice` sets it apart."""

    text: str
    notice: bool = False


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Shown as it is."""

    text: str


Block = Heading | Text | Items | Code | Table | Picture


def _record(column: Column, cell: Cell) -> list[str]:
    if not column.fields:
        return [cell.text]
    if not cell.numbers:  # a word in a column of numbers: failed, reference
        return [cell.text, *[""] * (len(column.fields) - 1)]
    numbers = (*cell.numbers, *[None] * len(column.fields))[: len(column.fields)]
    return ["" if number is None else f"{number:.10g}" for number in numbers]
