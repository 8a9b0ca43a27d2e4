"""The files and answers of a gallery on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.gallery.gallery import Gallery


def stored_bytes(folder: Path) -> bytes:
    """The contents of all files in a folder."""
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def derived_folders(folder: Path) -> list[str]:
    """The names of the folders with derived files, oldest first."""
    return sorted(path.name for path in folder.glob("derived-*"))


def generation(gallery: Gallery) -> int:
    """The current generation."""
    with gallery.reading() as reader:
        return reader.generation


def nearest_id(gallery: Gallery, vector: NDArray[np.float32]) -> str:
    """The id of the nearest entry, by the index and exactly."""
    by_index, exactly = (gallery.search(vector, 1, exact=exact) for exact in (None, True))
    assert by_index.hits == exactly.hits and by_index.generation == exactly.generation
    return by_index.hits[0].entry.id
