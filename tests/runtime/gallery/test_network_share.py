"""Galleries and queues on a network share are not written to. The mount table is made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, QueueError
from cbmir.runtime.gallery import Gallery, database
from cbmir.runtime.pacs.jobs import open_database


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, system: str) -> None:
    """Pretend that `folder` is on this kind of file system."""
    device = folder.stat().st_dev
    table = folder.parent / "mountinfo"
    table.write_text(
        "22 27 0:4000 / /proc rw,relatime - proc proc rw\n"
        f"27 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 master:2 - {system} server:/x rw\n"
    )
    monkeypatch.setattr(database, "_MOUNTS", table)


@pytest.mark.parametrize("system", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"])
def test_a_gallery_on_a_share_is_refused(
    store: Gallery, tmp_path: Path, tiny_card: ModelCard, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    store.close()
    mounted(monkeypatch, store.path, system)
    with pytest.raises(GalleryError, match=rf"network share \({system}\).* keep it on a local disk"):
        Gallery.open(store.path)
    with Gallery.open(store.path, read_only=True) as read:
        assert len(read) > 0
    with pytest.raises(GalleryError, match="network share"):
        Gallery.create(tmp_path / "new", tiny_card)
    assert list((tmp_path / "new").iterdir()) == []  # so that it can be tried again on another mount


def test_a_queue_on_a_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "queue"
    folder.mkdir()
    mounted(monkeypatch, folder, "nfs4")
    with pytest.raises(QueueError, match="network share"):
        open_database(folder)


@pytest.mark.parametrize("system", ["ext4", "xfs", "overlay", "fuse.unknown"])
def test_other_file_systems_are_accepted(store: Gallery, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    store.close()
    mounted(monkeypatch, store.path, system)
    Gallery.open(store.path).close()


def test_without_a_table_of_mounts_nothing_is_refused(
    store: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.close()
    monkeypatch.setattr(database, "_MOUNTS", tmp_path / "none")
    Gallery.open(store.path).close()
