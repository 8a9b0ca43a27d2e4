"""Text as HTML: whatever comes from data passes through here on its way into the page.

And what a reader must see before the findings: the flag that nothing looks like this image, warnings, and errors.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from cbmir.runtime.finder import NOTHING_ALIKE
from cbmir.runtime.novelty import QUANTILE, Novelty

#: Signs that the page's template engines would read (Handlebars, JavaScript), as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Text as HTML, in which no tag, attribute or template survives."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def thumbnail_url(name: str) -> str:
    """The address of the thumbnail of an image of the gallery."""
    return f"thumbnail?id={quote(name, safe='')}"


def image_uri(data: bytes, kind: str = "jpeg") -> str:
    """An image file inside the page itself."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def unseen(text: str) -> str:
    """Words for screen readers alone."""
    return f'<span class="unseen">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; the first cell of a row names it."""
    columns = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, *cells in rows
    )
    return f'<table class="sheet"><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>'


RESTING = '<p class="note quiet">Flags and warnings about an image appear here, before its findings.</p>'


def error_html(text: str) -> str:
    """Why there is no answer."""
    return f'<div class="note bad"><strong>Not analysed.</strong> {escape(text)}</div>'


def alerts_html(warnings: Sequence[str]) -> str:
    """The flag first and by itself, then the other warnings, or a note that there are no warnings."""
    others = [warning for warning in warnings if warning != NOTHING_ALIKE]
    flag = f'<div class="note bad"><strong>Caution.</strong> {escape(NOTHING_ALIKE)}</div>'
    items = "".join(f"<li>{escape(warning)}</li>" for warning in others)
    notes = f'<div class="note warn"><strong>Please note</strong><ul>{items}</ul></div>'
    parts = (flag if NOTHING_ALIKE in warnings else "") + (notes if others else "")
    return parts or '<p class="note fine">No warnings for this image.</p>'


def novelty_html(novelty: Novelty | None) -> str:
    """How far from the gallery the image is, in a line; None where that is not known."""
    if novelty is None:
        text = "Cannot tell whether the gallery has anything like this image: it is too small."
    else:
        text = (
            f"This image is farther from the gallery than {novelty.percentile:.1f}% of its own images; from "
            f"{100 * QUANTILE:.0f}% on it is flagged."
        )
    return f'<p class="fine-print">{text}</p>'
