"""Derived files: written completely or not at all, and only used if every byte is intact."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import index_files
from cbmir.runtime.gallery.columns import Columns
from cbmir.runtime.gallery.hnsw import HnswIndex
from cbmir.runtime.gallery.index_files import Stamp

DIM, COUNT, GALLERY = 8, 150, "a" * 32
STAMP = Stamp(GALLERY, 7, COUNT, "int8")


def rows(count: int = COUNT, start: int = 1) -> Columns:
    rng = np.random.default_rng(start)
    values = rng.normal(size=(count, DIM))
    return Columns(
        np.arange(start, start + count), rng.integers(1, 40, count), rng.integers(1, 90, count),
        rng.integers(0, 2, count).astype(np.int32), rng.integers(0, 2, count).astype(np.int32),
        np.full(count, 20200101, np.int32),
        rng.choice([1, 0, -1, -2], (3, count)).astype(np.int8),
        (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32), ("AP", "PA"),
    )  # fmt: skip


def blocks(count: int = COUNT) -> list[Columns]:
    return [rows(count).take(slice(at, at + 40)) for at in range(0, count, 40)]


def write(folder: Path, stamp: Stamp = STAMP, **more: Any) -> None:
    index_files.write(folder, stamp, blocks(stamp.count), dim=DIM, classes=3, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def place(folder: Path) -> Path:
    (found,) = folder.glob("derived-*")
    return found


def assert_rows(found: Columns, expected: Columns) -> None:
    for name in ("numbers", "patients", "studies", "views", "sources", "dates", "labels", "vectors"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    assert found.names == expected.names


def test_round_trip(folder: Path) -> None:
    snapshot = index_files.load(folder, GALLERY)
    assert snapshot is not None and snapshot.generation == 7 and len(snapshot) == COUNT
    assert_rows(snapshot.base, rows())
    assert not snapshot.base.vectors.flags.writeable
    assert snapshot.index is not None and len(snapshot.index) == COUNT and snapshot.index.codes == "int8"
    assert snapshot.index.search(rows().vectors[5:6], COUNT)[0][0] == 5
    assert len(snapshot.reference_distances) == COUNT and (np.diff(snapshot.reference_distances) >= 0).all()
    assert index_files.find(folder, GALLERY) == STAMP
    assert index_files.exists(folder) and index_files.problems(folder, GALLERY) == []
    assert stat.S_IMODE(place(folder).stat().st_mode) == 0o700


def test_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, Stamp(GALLERY, 7, COUNT, None))
    snapshot = index_files.load(tmp_path, GALLERY)
    assert snapshot is not None and snapshot.index is None


def test_an_empty_gallery(tmp_path: Path) -> None:
    write(tmp_path, Stamp(GALLERY, 0, 0, "bf16"))
    snapshot = index_files.load(tmp_path, GALLERY)
    assert snapshot is not None and len(snapshot) == 0 and snapshot.base.labels.shape == (3, 0)


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in place(folder).iterdir())


NAMES = ("about.json", "codec.npz", "dates.npy", "index.usearch", "labels.npy", "numbers.npy", "patients.npy",
         "reference_distances.npy", "sources.npy", "studies.npy", "vectors.npy", "views.npy")  # fmt: skip


def flip(file: Path, rng: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_noticed(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert files(folder) == list(NAMES)
    whole = (place(folder) / name).read_bytes()
    for seed in range(10):
        flip(place(folder) / name, np.random.default_rng(seed))
        with caplog.at_level(logging.INFO, "cbmir"):
            assert index_files.load(folder, GALLERY) is None
        assert len(index_files.problems(folder, GALLERY)) == 1 and name in index_files.problems(folder, GALLERY)[0]
        assert name in caplog.messages[-1]
        (place(folder) / name).write_bytes(whole)
    assert index_files.load(folder, GALLERY) is not None


@pytest.mark.parametrize("name", NAMES)
def test_truncated_or_missing_files_are_noticed(folder: Path, name: str) -> None:
    file = place(folder) / name
    file.write_bytes(file.read_bytes()[:-1])
    assert index_files.load(folder, GALLERY) is None
    file.write_bytes(b"")
    assert index_files.load(folder, GALLERY) is None
    file.unlink()
    assert index_files.load(folder, GALLERY) is None
    assert index_files.problems(folder, GALLERY)


def reseal(folder: Path, **changes: Any) -> None:
    """Change values, and update the digest."""
    file = place(folder) / "about.json"
    about = json.loads(json.loads(file.read_text())["about"]) | changes
    text = json.dumps(about)
    file.write_text(json.dumps({"about": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.mark.parametrize("changes", [{"gallery": "b" * 32}, {"generation": 6}, {"format": 1}])
def test_files_of_another_gallery_or_generation_are_skipped(folder: Path, changes: dict[str, Any]) -> None:
    reseal(folder, **changes)
    assert index_files.load(folder, GALLERY) is None and index_files.find(folder, GALLERY) is None


def test_an_index_that_this_usearch_cannot_read(folder: Path) -> None:
    (place(folder) / "index.usearch").write_bytes(b"usearch of the future" * 99)
    about = json.loads(json.loads((place(folder) / "about.json").read_text())["about"])
    reseal(folder, files=about["files"] | {"index.usearch": index_files._digest(place(folder) / "index.usearch")})
    assert index_files.load(folder, GALLERY) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"about": 1, "sha256": ""}', "null"])
def test_a_damaged_about_file_is_ignored(folder: Path, text: str) -> None:
    (place(folder) / "about.json").write_text(text)
    assert index_files.load(folder, GALLERY) is None and index_files.find(folder, GALLERY) is None


def test_newer_files_replace_older_ones(folder: Path) -> None:
    """Mapped files stay unchanged: nothing overwrites them."""
    older = index_files.load(folder, GALLERY)
    write(folder, Stamp(GALLERY, 8, 100, "int8"))
    newer = index_files.load(folder, GALLERY)
    assert newer is not None and newer.generation == 8 and len(newer) == 100
    assert place(folder).name == "derived-000000000008"
    assert older is not None and older.index is not None
    assert_rows(older.base, rows())
    assert older.index.search(rows().vectors[140:141], COUNT)[0][0] == 140


def test_the_same_generation_is_written_again(folder: Path) -> None:
    flip(place(folder) / "vectors.npy", np.random.default_rng(0))
    write(folder)
    assert index_files.problems(folder, GALLERY) == [] and len(list(folder.iterdir())) == 1


def test_an_older_index_is_used_if_the_newer_one_is_damaged(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, Stamp(GALLERY, 9, 100, None))
    place(other).rename(folder / place(other).name)
    (folder / "derived-000000000009" / "dates.npy").unlink()
    snapshot = index_files.load(folder, GALLERY)
    assert snapshot is not None and snapshot.generation == 7


def test_a_former_index_is_extended(tmp_path: Path) -> None:
    former = HnswIndex.build("bf16", rows().vectors[:100])
    write(tmp_path, Stamp(GALLERY, 7, COUNT, "bf16"), former=former)
    snapshot = index_files.load(tmp_path, GALLERY)
    assert snapshot is not None and snapshot.index is not None and len(snapshot.index) == COUNT
    assert len(former) == 100
    assert snapshot.index.search(rows().vectors[140:141], COUNT)[0][0] == 140


def test_missing_rows_are_an_error(folder: Path) -> None:
    with pytest.raises(GalleryError, match="expected 151 entries, found 150"):
        index_files.write(folder, Stamp(GALLERY, 8, 151, None), blocks(), dim=DIM, classes=3)
    assert index_files.find(folder, GALLERY) == STAMP and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("at", ["save", "write_array_header_1_0", "fsync", "rename"])
def test_a_disk_error_is_raised_and_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def refuse(*values: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    owner = {"save": HnswIndex, "write_array_header_1_0": np.lib.format, "fsync": os, "rename": Path}[at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, at, refuse)
        with pytest.raises(OSError, match="No space left"):
            write(folder, Stamp(GALLERY, 8, 100, "int8"))
    snapshot = index_files.load(folder, GALLERY)
    assert snapshot is not None and snapshot.generation == 7 and len(list(folder.iterdir())) == 1


def test_files_left_by_a_killed_process_are_removed(folder: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from cbmir.runtime.gallery import index_files; from cbmir.runtime.gallery.columns import Columns\n"
        "def rows():\n    yield Columns.empty(3, 8)\n    os.kill(os.getpid(), 9)\n"
        "index_files.write(Path(sys.argv[1]), index_files.Stamp('a' * 32, 8, 5, None), rows(), dim=8, classes=3)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -9
    assert sorted(one.name for one in folder.iterdir()) == [".derived-000000000008.part", "derived-000000000007"]
    snapshot = index_files.load(folder, GALLERY)
    assert snapshot is not None and snapshot.generation == 7
    write(folder, Stamp(GALLERY, 9, 100, None))
    assert [one.name for one in folder.iterdir()] == ["derived-000000000009"]


def test_all_derived_files_are_dropped(folder: Path) -> None:
    (folder / ".derived-000000000008.part").mkdir()
    (folder / ".derived-000000000008.part" / "vectors.npy").write_bytes(b"patient data")
    (folder / "gallery.sqlite").touch()
    assert index_files.drop(folder) and not index_files.drop(folder)
    assert sorted(one.name for one in folder.iterdir()) == ["derived.lock", "gallery.sqlite"]
    assert not index_files.exists(folder)


def test_files_that_cannot_be_dropped_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    with pytest.raises(GalleryError, match="delete the folders"):
        index_files.drop(folder)


def test_files_being_written_by_another_process_are_not_dropped(folder: Path) -> None:
    part = folder / ".derived-000000000008.part"
    part.mkdir()
    with index_files.lock(folder, wait=True):
        assert index_files.drop(folder)
        assert sorted(one.name for one in folder.iterdir()) == [part.name, "derived.lock"]
        assert index_files.drop(folder), "the caller must wait for the writer, and then replace its files"
    assert index_files.drop(folder)
    assert [one.name for one in folder.iterdir()] == ["derived.lock"]


def test_nothing_is_derived_for_a_deleted_gallery(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert (
        index_files.load(gone, GALLERY) is None
        and index_files.find(gone, GALLERY) is None
        and not index_files.exists(gone)
    )


def test_only_one_process_at_a_time_may_write(tmp_path: Path) -> None:
    with index_files.lock(tmp_path, wait=True) as first, index_files.lock(tmp_path, wait=False) as second:
        assert first and not second
    with index_files.lock(tmp_path, wait=False) as third:
        assert third


def test_names_of_derived_files() -> None:
    ours = ("derived-000000000007", ".derived-000000000007.part", "derived.lock")
    others = ("derived-7", "derived", "derived-000000000007.txt", "gallery.sqlite", "notes.txt", ".part")
    assert [index_files.is_derived(name) for name in ours + others] == [True] * 3 + [False] * 6


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250])
def test_a_digest_covers_every_byte(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "_CHUNK", 100)
    file = tmp_path / "file"
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    digests = set()
    for at in range(-1, size):
        changed = data.copy()
        if at >= 0:
            changed[at] ^= 1
        file.write_bytes(changed.tobytes())
        digests.add(index_files._digest(file))
    for other in (data.tobytes() + b"\0", data.tobytes()[:-1] if size else b"x"):
        file.write_bytes(other)
        digests.add(index_files._digest(file))
    assert len(digests) == size + 3
