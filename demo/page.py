"""The page as it is before anything is asked: `static/page.html` with what this model and gallery put into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from cbmir.card import NOT_A_DEVICE
from cbmir.demo.card_page import card_html
from cbmir.demo.examples import Example
from cbmir.demo.findings import findings_html
from cbmir.demo.markup import RESTING, escape, image_uri
from cbmir.demo.similar_images import EMPTY
from cbmir.labels import readable
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.projection import NEAREST, GalleryProjection

STATIC = Path(__file__).resolve().parent / "static"


def page_html(finder: Finder, examples: Sequence[Example], chart: GalleryProjection | None) -> str:
    """Everything but scripts and styles. All that comes from data is escaped."""
    gallery = finder.gallery
    labels = () if gallery is None else gallery.labels.names
    views = [] if gallery is None else [str(view) for view in gallery.info().get("views", {}) if view]
    chips = "".join(
        f'<button type="button" class="chip" data-label="{escape(label)}" aria-pressed="false">'
        f"{escape(readable(label))}</button>"
        for label in finder.card.labels.names
    )
    return Template((STATIC / "page.html").read_text(encoding="utf-8")).substitute(
        device=escape(NOT_A_DEVICE), examples=examples_html(examples), having=_options(labels),
        views=_options(sorted(views)), map_labels=_options(labels), chips=chips, alerts=RESTING,
        findings=findings_html(finder.card), wall=EMPTY, card=card_html(finder.card), map_note=map_note(chart),
    )  # fmt: skip


def examples_html(examples: Sequence[Example]) -> str:
    """A button with a thumbnail for each example."""
    if not examples:
        return ""
    buttons = "".join(
        f'<button type="button" data-act="example" data-at="{at}" title="{escape(example.caption)}">'
        f'<img src="{image_uri(example.thumbnail)}" alt="Example {escape(example.caption)}" width="96" height="96">'
        "</button>"
        for at, example in enumerate(examples)
    )
    return (
        '<section class="panel offers" aria-label="Examples"><p class="fine-print">Or try an example</p>'
        f'<div class="examples">{buttons}</div></section>'
    )


def _options(values: Sequence[str]) -> str:
    return "".join(f'<option value="{escape(value)}">{escape(readable(value))}</option>' for value in values)


def map_note(chart: GalleryProjection | None, placeless: str = "") -> str:
    """The note below the map. `placeless`: why the image on the page has no place on it, empty if it has one."""
    if chart is None:
        return "This gallery has no map yet: make one with 'cbmir index map GALLERY' and start the demo anew."
    place = f"Your image is put amid the {NEAREST} of its nearest look-alikes that are on the map."
    if placeless:
        place = f"Your image has no place on the map: {placeless}."
    return f"Images that are alike lie near each other; distances between far ones mean little. {place}"
