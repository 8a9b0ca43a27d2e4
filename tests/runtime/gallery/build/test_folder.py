"""The folder of a gallery: versions behind links, and removals from unfinished work."""

from __future__ import annotations

import shutil
from pathlib import Path

from cbmir.manifest import Manifest
from cbmir.runtime import Engine, Gallery, build_gallery
from cbmir.runtime.gallery.build.folder import GalleryFolder
from cbmir.runtime.gallery.database import live_folder


def test_a_removal_reaches_unfinished_work(tmp_path: Path, engine: Engine, tiny_gallery: Path) -> None:
    folder = GalleryFolder(shutil.copytree(tiny_gallery, tmp_path / "g"))
    parts = [folder.path / "gallery-0123456789abcdef", folder.path / "shards-0123456789abcdef" / "000001"]
    for part in parts:
        shutil.copytree(tiny_gallery, part)
    (parts[1] / "unreadable.csv").write_text("image,reason\nimage_06.png,damaged\n")
    with folder.locked():
        (failed,) = folder.remove_from_unfinished(None, patient_ids=["patient_03"])
    assert failed.endswith("wait until it has finished; then remove again, so that the unfinished work is covered too")
    assert folder.remove_from_unfinished(None, patient_ids=["patient_03"]) == []
    for part in parts:
        with Gallery.open(part) as gallery:
            assert not gallery.has_patient("patient_03")
    assert not (parts[1] / "unreadable.csv").exists(), "it may name what is removed"
    (live_folder(parts[0]) / "gallery.sqlite").write_bytes(b"no database")
    (failed,) = folder.remove_from_unfinished(None, patient_ids=["patient_03"])
    assert "unfinished work that may hold the same images; delete the folder" in failed


def test_a_version_may_be_a_link(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    """Someone moved it to another disk."""
    build_gallery(engine, manifest, tmp_path / "g")
    former = live_folder(tmp_path / "g")
    shutil.move(former, tmp_path / "elsewhere")
    former.symlink_to(tmp_path / "elsewhere")
    assert build_gallery(engine, manifest, tmp_path / "g", index="exact").images == 20
    assert not former.exists() and live_folder(tmp_path / "g") != former


def test_a_removal_notices_a_build_that_has_written_nothing_yet(tmp_path: Path, tiny_gallery: Path) -> None:
    """A build with cells first fits their codec, for minutes."""
    folder = GalleryFolder(shutil.copytree(tiny_gallery, tmp_path / "g"))
    with folder.locked():
        (failed,) = folder.remove_from_unfinished(None, patient_ids=["patient_03"])
    assert "wait until it has finished; then remove again" in failed


def test_a_removal_deletes_the_gallery_that_a_killed_build_replaced(
    tmp_path: Path, engine: Engine, manifest: Manifest, tiny_gallery: Path
) -> None:
    """The replaced gallery had no pointer file."""
    flat = live_folder(tiny_gallery)
    build_gallery(engine, manifest, tmp_path / "g")
    shutil.copytree(flat, tmp_path / "g", dirs_exist_ok=True)
    (tmp_path / "g" / "map.npz").touch()
    assert GalleryFolder(tmp_path / "g").unfinished() == [tmp_path / "g"]
    assert GalleryFolder(tmp_path / "g").remove_from_unfinished(None, patient_ids=["patient_03"]) == []
    left = {file.name for file in (tmp_path / "g").iterdir()}
    assert left == {"current", "build.lock", "map.npz", live_folder(tmp_path / "g").name}
