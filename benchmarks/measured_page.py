"""A page of the documentation whose figures a benchmark writes between marks: `<!-- NAME:SECTION -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import click


def filled(page: str, name: str, sections: Mapping[str, str]) -> str:
    """The page with each section between its marks. Raises UsageError for a section whose marks it lacks."""
    for section, text in sections.items():
        first, last = f"<!-- {name}:{section} -->", f"<!-- /{name}:{section} -->"
        pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
        if not pattern.search(page):
            raise click.UsageError(f"expected the marks {first} and {last} in the page, found none")
        page = pattern.sub(lambda _, new=f"{first}\n{text}\n{last}": new, page)
    return page


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
