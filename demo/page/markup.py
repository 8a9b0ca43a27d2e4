"""Text as HTML: everything that comes from data passes through here on its way into the page."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STATIC = Path(__file__).resolve().parent / "static"
#: Signs that Gradio's template engines would read (Handlebars, JavaScript), as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def static(*names: str) -> str:
    """Files of the folder `static`, one after the other."""
    return "".join((_STATIC / name).read_text("utf-8") for name in names)


def escape(text: str) -> str:
    """Text as HTML, in which no tag, attribute or template survives."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def percent(share: float) -> str:
    """Whole per cent; a share that is not nothing is never shown as 0%."""
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def data_uri(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first cell of a row names it."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return f'<table class="sheet"><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>'
