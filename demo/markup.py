"""Text as HTML. Whatever comes from data passes through here on its way into the page."""

from __future__ import annotations

import base64
import html
from urllib.parse import quote

#: Signs that the page's template engines would read (Handlebars, JavaScript), as character references.
_TEMPLATE_SIGNS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape(text: str) -> str:
    """Text as HTML, in which no tag, attribute or template survives."""
    return html.escape(text).translate(_TEMPLATE_SIGNS)


def readable(label: str) -> str:
    """A label as people write it."""
    return label.replace("_", " ")


def thumbnail_url(name: str) -> str:
    """Where the server gives the thumbnail of an image of the gallery."""
    return f"thumbnail?id={quote(name, safe='')}"


def image_uri(data: bytes, kind: str = "jpeg") -> str:
    """An image file inside the page itself."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def unseen(text: str) -> str:
    """Words for screen readers alone."""
    return f'<span class="unseen">{escape(text)}</span>'
