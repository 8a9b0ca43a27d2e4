"""The images of a study, each a button, and what of it was left out."""

from __future__ import annotations

from collections.abc import Sequence

from cbmir.demo.markup import escape
from cbmir.demo.sessions import View

_TOLD = 10  # reasons that are listed


def members_html(view: View) -> str:
    """Empty for a single image of which nothing was left out."""
    return _buttons(view) + _left_out(view.left_out)


def _buttons(view: View) -> str:
    if len(view.images) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-act="member" data-at="{at}" aria-pressed="{str(at == view.at).lower()}">'
        f"{at + 1}. {escape(image.caption)}</button>"
        for at, image in enumerate(view.images)
    )
    return f'<p class="fine-print">{len(view.images)} images in this study</p><div class="members">{buttons}</div>'


def _left_out(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    told = [*reasons[:_TOLD], *([f"and {len(reasons) - _TOLD} more"] if len(reasons) > _TOLD else [])]
    items = "".join(f"<li>{escape(reason)}</li>" for reason in told)
    return f'<div class="note warn"><strong>Not all of it is shown.</strong><ul>{items}</ul></div>'
