"""Warnings about single images, each with a kind by which they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cbmir.files import write_csv

#: Kinds of warnings, each clear enough for a table of counts.
Kind = Literal[
    "modality unknown", "body part unknown", "view unknown", "probably not frontal", "lateral view", "animal",
    "unknown code", "no window", "invalid window skipped", "unknown window function", "LUT rescaled",
    "contradictory polarity", "colour", "stored in colour", "little contrast", "date left out", "spacing left out",
    "excess pixel data", "nonstandard file", "not a chest", "part of a chest", "inverted", "turned", "perhaps mirrored",
]  # fmt: skip
SEPARATOR = "; "  # between kinds in one text


class ImageWarning(str):
    """A sentence for the user, without a patient's name or ID. `kind` names its subject."""

    kind: Kind

    def __new__(cls, kind: Kind, sentence: str) -> ImageWarning:
        warning = super().__new__(cls, sentence)
        warning.kind = kind
        return warning

    def __getnewargs__(self) -> tuple[Kind, str]:  # type: ignore[override]  # for pickle: workers send warnings
        return self.kind, str(self)


def kinds_text(warnings: Iterable[ImageWarning]) -> str:
    """Join the kinds of one image's warnings, each once, into one text: `body part unknown; view unknown`."""
    return SEPARATOR.join(dict.fromkeys(warning.kind for warning in warnings))


def count_kinds(texts: Iterable[str]) -> dict[str, int]:
    """Count the images that have each kind in their `kinds_text`, most frequent kind first."""
    counts = Counter(kind for text in texts if text for kind in text.split(SEPARATOR))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def write_warnings(warnings: Mapping[Path, Sequence[ImageWarning]], path: Path) -> dict[str, int]:
    """Write a table of all warnings of all images, or delete it if no image has one; returns the `count_kinds`."""
    path.unlink(missing_ok=True)
    if any(warnings.values()):
        rows = ((image, warning.kind, str(warning)) for image, said in warnings.items() for warning in said)
        write_csv(path, [("image", "kind", "warning"), *rows], private=True)
    return count_kinds(map(kinds_text, warnings.values()))
