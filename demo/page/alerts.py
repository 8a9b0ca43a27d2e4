"""Warnings by severity: those that make an answer worthless come first, in red; routine ones are last and small."""

from __future__ import annotations

from collections.abc import Sequence

from cbmir.card import OF_PHANTOMS, WITHOUT_FINDINGS
from cbmir.demo.page.markup import escape
from cbmir.errors import CbmirError, GalleryError
from cbmir.runtime.neighbours import IN_GALLERY, NOTHING_ALIKE, PATIENT_NOT_FOUND, PATIENT_UNKNOWN

#: Headlines of the kinds of image warnings that make findings and similar images worthless.
_GRAVE = {
    "not a chest": "This does not look like a chest X-ray",
    "part of a chest": "This looks like part of a chest X-ray",
    "inverted": "Black and white look swapped in this image",
    "turned": "This image looks rotated",
    "lateral view": "This is a lateral view",
    "probably not frontal": "This is probably not a frontal view",
    "animal": "This is an X-ray of an animal",
    "colour": "This is a colour picture",
    "contradictory polarity": "Black and white may be swapped in this image",
}
#: Kinds that many files have and that do not matter to a reader.
_ROUTINE = frozenset({
    "date left out", "spacing left out", "excess pixel data", "nonstandard file", "view unknown", "body part unknown",
    "modality unknown", "LUT rescaled", "invalid window skipped", "unknown window function", "no window",
    "unknown code", "stored in colour",
})  # fmt: skip
NOT_A_PHANTOM = (
    "The model was trained on phantoms, and the file does not say that this is one. If it is a real X-ray, its "
    "findings and similar images mean nothing."
)
_SHORT = {
    NOT_A_PHANTOM: "This model knows only phantoms, and this image may be a real X-ray",
    NOTHING_ALIKE: "Nothing in the gallery looks like this image",
    PATIENT_UNKNOWN: "Patient unknown: their other images may appear.",
    PATIENT_NOT_FOUND: "No image of this patient is in the gallery: nothing was left out.",
}


def is_grave(warning: str) -> bool:
    """Return whether the findings and similar images of an image with this warning are unreliable."""
    return warning in (NOTHING_ALIKE, NOT_A_PHANTOM) or getattr(warning, "kind", "") in _GRAVE


def alerts_html(warnings: Sequence[str], left_out: Sequence[str] = ()) -> str:
    """Render the warnings above an answer, without that of a phantom model, which has its own bar. May be empty."""
    grave = [warning for warning in warnings if is_grave(warning)]
    routine = [warning for warning in warnings if _is_routine(warning)]
    rest = [warning for warning in warnings if warning not in (*grave, *routine, OF_PHANTOMS)]
    heads = {warning: _SHORT.get(warning) or _GRAVE[getattr(warning, "kind", "")] for warning in grave}
    notes = [_note("bad", head, escape(warning)) for warning, head in heads.items()]
    notes += [_note("warn", "", escape(warning)) for warning in rest]
    if left_out:
        items = "".join(f"<li>{escape(one)}</li>" for one in left_out[:10])
        more = f"<li>and {len(left_out) - 10} more</li>" * (len(left_out) > 10)
        notes.append(_note("warn", f"{len(left_out)} of the files are not shown", f"<ul>{items}{more}</ul>"))
    small = " ".join(escape(_SHORT.get(warning, warning)) for warning in routine)
    return "".join(notes) + (f'<p class="routine">{small}</p>' if small else "")


def words_of(error: CbmirError) -> str:
    """Return the message for a visitor. A gallery's own message would name its files."""
    if isinstance(error, GalleryError):
        return "The gallery no longer has this image, or cannot be read."
    return str(error)


def error_html(text: str) -> str:
    return f'<div class="note bad" role="alert"><strong>{escape(text)}</strong></div>'


def _is_routine(warning: str) -> bool:
    known = (PATIENT_UNKNOWN, PATIENT_NOT_FOUND, IN_GALLERY, WITHOUT_FINDINGS)
    return warning in known or getattr(warning, "kind", "") in _ROUTINE


def _note(kind: str, headline: str, text: str) -> str:
    """Render a note. `headline` is plain text; `text` is HTML, folded under the headline if there is one."""
    if not headline:
        return f'<div class="note {kind}">{text}</div>'
    head = f"<summary><strong>{escape(headline)}</strong></summary>"
    return f'<details class="note {kind}">{head}<div>{text}</div></details>'
