"""Images to begin with: those of a folder, or some of the gallery."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import ImageError, UserError
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery.protocol import SearchableGallery
from cbmir.runtime.imaging.reader import read_image, thumbnail_jpeg

log = logging.getLogger("cbmir")

MOST = 6


@dataclass(frozen=True)
class Example:
    """An image file, a small JPEG of it, and what it is called."""

    path: Path
    thumbnail: bytes
    caption: str


def find_examples(finder: Finder, folder: Path | None = None) -> list[Example]:
    """Up to MOST images: those of `folder` that can be read, in the order of their names, else of the gallery. Raises
    UserError where the folder is missing or nothing in it can be read."""
    if folder is not None:
        return _of_folder(folder)
    return [] if finder.gallery is None else _of_gallery(finder.gallery)


def _of_gallery(gallery: SearchableGallery) -> list[Example]:
    """Evenly spaced over the gallery, those whose file is still there; it is read only when chosen."""
    ids, examples = gallery.ids(), []
    for name in ids[:: max(1, len(ids) // MOST)][:MOST]:
        path, thumbnail = Path(gallery.entry(name).image), gallery.thumbnail(name)
        if thumbnail is not None and path.is_file():
            examples.append(Example(path, thumbnail, path.stem))
    return examples


def _of_folder(folder: Path) -> list[Example]:
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder of example images, found none")
    examples: list[Example] = []
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        try:
            examples.append(Example(path, thumbnail_jpeg(read_image(path).pixels), path.stem))
        except ImageError as error:
            log.warning("Not an example: %s", type(error).__name__)  # a file's name may be a patient's
        if len(examples) == MOST:
            break
    if not examples:
        raise UserError(f"{folder}: expected X-rays as examples, found none that can be read")
    return examples
