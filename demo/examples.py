"""Example images: those of a folder, or some of the gallery."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import ImageError, UserError
from cbmir.labels import spelled
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.imaging.reader import read_image, thumbnail_jpeg

log = logging.getLogger("cbmir")

MOST = 6
_LOOKED_AT = 500
RULE = (
    "Chosen by rule: for each common finding, the gallery's first image with it, if possible not of the training split."
)
_SPLITS = {"test": " (test split)", "val": " (validation split)"}


@dataclass(frozen=True)
class Example:
    """An image file, its thumbnail as JPEG, and its caption."""

    path: Path
    thumbnail: bytes
    caption: str


def find_examples(finder: Finder, folder: Path | None = None) -> list[Example]:
    """Return up to MOST images: the readable ones of `folder`, by name, or some of the gallery. Raises UserError if the
    folder is missing or nothing in it can be read."""
    if folder is not None:
        return _of_folder(folder)
    return [] if finder.gallery is None else _of_gallery(finder.gallery)


def _of_gallery(gallery: SearchableGallery) -> list[Example]:
    """Choose an image for each of the most common findings: the first whose file still exists, each of another patient,
    held-out images before those that the model was trained on. Searches `_LOOKED_AT` images, evenly spaced over the
    gallery; images are read only when a visitor chooses them."""
    ids = gallery.ids()
    entries = [gallery.entry(name) for name in ids[:: max(1, len(ids) // _LOOKED_AT)]]
    entries = [entry for entry in entries if Path(entry.image).is_file()]
    entries.sort(key=lambda entry: entry.split not in _SPLITS)  # stable
    common = Counter(label for entry in entries for label in entry.positive)
    chosen: dict[str, Entry] = {}
    for label, _ in common.most_common(MOST):
        patients = {entry.patient_id for entry in chosen.values()} - {""}
        new = (entry for entry in entries if label in entry.positive and entry.patient_id not in patients)
        entry = next((entry for entry in new if entry.id not in chosen), None)
        if entry is not None:
            chosen[entry.id] = entry
    for entry in entries:  # the gallery has few labels or none
        if len(chosen) < MOST:
            chosen.setdefault(entry.id, entry)
    captions = {
        name: (", ".join(map(spelled, entry.positive)) or entry.without_positive.capitalize())
        + _SPLITS.get(entry.split, "")
        for name, entry in chosen.items()
    }
    thumbnails = ((entry, gallery.thumbnail(name)) for name, entry in chosen.items())
    return [Example(Path(entry.image), jpeg, captions[entry.id]) for entry, jpeg in thumbnails if jpeg is not None]


def _of_folder(folder: Path) -> list[Example]:
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder of example images, found none")
    examples: list[Example] = []
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        try:
            examples.append(Example(path, thumbnail_jpeg(read_image(path).pixels), path.stem))
        except ImageError as error:
            log.warning("Not an example: %s", type(error).__name__)  # a file name may contain a patient's name
        if len(examples) == MOST:
            break
    if not examples:
        raise UserError(f"{folder}: expected X-rays as examples, found none that can be read")
    return examples
