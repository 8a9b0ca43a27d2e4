"""Building blocks of HTML. All text that comes from data is escaped here."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STATIC = Path(__file__).resolve().parent / "static"
#: Characters that Gradio's template engines (Handlebars, JavaScript) would interpret, as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def static(*names: str) -> str:
    """Read and concatenate files of the folder `static`."""
    return "".join((_STATIC / name).read_text("utf-8") for name in names)


def escape(text: str) -> str:
    """Escape text for HTML, including tags, attributes and template syntax."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def percent(share: float) -> str:
    """Format a share as whole per cent. Small shares become <1%, never 0%."""
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def data_uri(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table. Its cells are already HTML, and the first cell of each row is its header."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return f'<table class="sheet"><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>'
