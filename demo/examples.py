"""Images to begin with: those of a folder, or some of the gallery."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from cbmir.errors import ImageError, UserError
from cbmir.runtime.finder import Finder
from cbmir.runtime.reading import read_image

log = logging.getLogger("cbmir")

MOST = 6
_SIDE = 192


@dataclass(frozen=True)
class Example:
    """An image file, a small JPEG of it, and what it is called."""

    path: Path
    thumbnail: bytes
    caption: str


def find_examples(finder: Finder, folder: Path | None = None) -> list[Example]:
    """Up to MOST images: of `folder` in the order of their names, else from all over the gallery.

    Files that cannot be read are left out. Raises UserError where the folder is missing or none in it can be read.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder}: expected a folder of example images, found none")
    examples: list[Example] = []
    for path in _of_gallery(finder) if folder is None else sorted(p for p in folder.iterdir() if p.is_file()):
        try:
            examples.append(Example(path, _thumbnail(path), path.stem))
        except ImageError as error:
            log.warning("Not an example: %s", error)
        if len(examples) == MOST:
            break
    if folder is not None and not examples:
        raise UserError(f"{folder}: expected X-rays as examples, found none that can be read")
    return examples


def _of_gallery(finder: Finder) -> list[Path]:
    """Evenly spaced over the gallery, those whose file is still there."""
    if finder.gallery is None:
        return []
    ids = finder.gallery.ids()
    paths = [Path(finder.gallery.entry(id).image) for id in ids[:: max(1, len(ids) // MOST)][:MOST]]  # noqa: A001
    return [path for path in paths if path.is_file()]


def _thumbnail(path: Path) -> bytes:
    picture = Image.fromarray(read_image(path).pixels)
    picture.thumbnail((_SIDE, _SIDE))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue()
