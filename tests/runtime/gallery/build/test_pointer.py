"""The file `current`, which names a gallery's live folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import GalleryError
from cbmir.manifest import Manifest
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.gallery.build import build_gallery
from cbmir.runtime.gallery.database import live_folder


def test_a_damaged_pointer(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    for text in (b"", b"../elsewhere", b"\xff", b"gallery-0123456789abcdef\ngallery-0"):
        (tmp_path / "g" / "current").write_bytes(text)
        with pytest.raises(GalleryError, match="current: expected the name of a folder beside it"):
            Gallery.open(tmp_path / "g")
    with pytest.raises(GalleryError, match="current: expected the name of a folder beside it"):
        build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    (tmp_path / "g" / "current").unlink()
    assert build_gallery(engine, manifest, tmp_path / "g").images == 20


def test_a_pointer_written_by_hand(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    live = live_folder(tmp_path / "g")
    (tmp_path / "g" / "current").write_text(f"{live.name}\n")
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20
    live.rename(tmp_path / "elsewhere")
    with pytest.raises(GalleryError, match=f"found no gallery in {live.name}, which the file 'current' names"):
        Gallery.open(tmp_path / "g")
    assert build_gallery(engine, manifest, tmp_path / "g").images == 20
