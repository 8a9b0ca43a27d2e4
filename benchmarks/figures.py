"""Shared by the benchmarks: Markdown for figures, filling in pages, and a placeholder model card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.preprocessing import PreprocessSpec


def filled(page: str, name: str, sections: Mapping[str, str]) -> str:
    """Fill in a page's sections between the marks `<!-- NAME:SECTION -->`. Raises UsageError if a mark is missing."""
    for section, text in sections.items():
        first, last = f"<!-- {name}:{section} -->", f"<!-- /{name}:{section} -->"
        pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
        if not pattern.search(page):
            raise click.UsageError(f"expected the marks {first} and {last} in the page, found none")
        page = pattern.sub(lambda _, new=f"{first}\n{text}\n{last}": new, page)
    return page


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def ratio_text(median: float, low: float, high: float) -> str:
    """Format a median with the 10th and 90th percentile."""
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def reached(aim: bool) -> str:
    """Return the cell of a table of aims."""
    return "reached" if aim else "not reached"


def any_card(labels: Sequence[str], embedding_dim: int, **facts: Any) -> ModelCard:
    """Return the card of an imaginary DenseNet121 at 224 pixels, for galleries and exports of random weights."""
    known = {
        "labels": LabelSet(tuple(labels)), "preprocess": PreprocessSpec.for_image_size(224), "encoder": "densenet121",
        "embedding_dim": embedding_dim, "head": "proxy", "sigma": 1.0, "proxies_per_class": (1,) * (len(labels) + 1),
        "negative_proxies": True, "thresholds": (None,) * len(labels), "calibration": (None,) * len(labels),
        "fingerprint": "random",
    }  # fmt: skip
    return ModelCard(**known | facts)
