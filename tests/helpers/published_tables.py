"""Copy the invented tables of `../shared/tables` to a test's folder, and draw small images for their rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def copy_tables(shared: Path, name: str, folder: Path) -> Path:
    """A writable copy of `shared/tables/name` in `folder`."""
    place = folder / name
    shutil.copytree(shared / "tables" / name, place)
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the shared ones are read-only
    return place


def draw_images(folder: Path, names: Iterable[str], *, bits: int = 8, side: int = 32) -> None:
    """Write a readable image of noise for each name."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        dtype = np.uint8 if bits == 8 else np.uint16
        Image.fromarray(np.random.default_rng(number).integers(0, 2**bits, (side, side), dtype=dtype)).save(path)
