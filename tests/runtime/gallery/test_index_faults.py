"""Searches are correct during writes, with full disks, and with damaged or outdated files."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime.gallery import index_cache, index_files
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.hnsw import HnswIndex
from cbmir.runtime.gallery.reader import Reader
from gallery_contents import derived_folders, nearest_id, stored_bytes

Make = Callable[..., Any]
COUNT = 60


def test_a_killed_removal_is_finished_by_the_next_search(gallery: Gallery, make_vectors: Make) -> None:
    """A process was killed after removing the rows and before removing the derived files."""
    vector = make_vectors(COUNT)[12]
    with gallery.writing() as writer:
        writer.remove(ids=["id0012"])
    gallery.close()
    assert vector.tobytes() in stored_bytes(gallery.path)
    with Gallery.open(gallery.path) as again:
        assert nearest_id(again, vector) != "id0012"
        assert vector.tobytes() not in stored_bytes(gallery.path / derived_folders(gallery.path)[0])


def test_a_damaged_file_is_replaced(gallery: Gallery, make_vectors: Make) -> None:
    place = gallery.path / derived_folders(gallery.path)[0]
    gallery.close()
    for name in sorted(file.name for file in place.iterdir()):
        data = bytearray((place / name).read_bytes())
        data[len(data) // 2] ^= 4
        (place / name).write_bytes(data)
        with Gallery.open(gallery.path) as again:
            assert nearest_id(again, make_vectors(COUNT)[7]) == "id0007"
            assert index_files.problems(again.path, again.uuid) == []
            assert again.info()["search"] == "hnsw int8"


@pytest.mark.parametrize("is_derived", [True, False])
def test_searches_continue_on_a_read_only_disk(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, is_derived: bool
) -> None:
    gallery.close()
    if not is_derived:
        shutil.rmtree(gallery.path / derived_folders(gallery.path)[0])
        monkeypatch.setattr(index_cache, "SMALL", 10)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root could write anywhere
    before = sorted(file.name for file in gallery.path.iterdir())
    with Gallery.open(gallery.path) as again:
        assert nearest_id(again, make_vectors(COUNT)[7]) == "id0007"
        assert again.search(make_vectors(1)[0], 1).method == ("hnsw int8" if is_derived else "exact")
        for write in (again.write_index, again.rebuild):
            with pytest.raises(GalleryError, match="can be written to"):
                write()
    assert sorted(file.name for file in gallery.path.iterdir()) == before


def test_a_full_disk_does_not_stop_searches(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*values: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(gallery.path / derived_folders(gallery.path)[0])
    gallery.close()
    monkeypatch.setattr(index_cache, "SMALL", 10)
    monkeypatch.setattr(index_files, "write", refuse)
    with Gallery.open(gallery.path) as again:
        assert nearest_id(again, make_vectors(COUNT)[7]) == "id0007"
        assert "cannot write the search files" in caplog.text
        with pytest.raises(GalleryError, match="nothing is lost"):
            again.write_index()


def test_a_full_disk_does_not_fail_an_acknowledged_write(
    gallery: Gallery, make_entries: Make, make_vectors: Make, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(*values: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache, "TAIL_LIMIT", 0)
    monkeypatch.setattr(index_files, "write", refuse)
    assert len(gallery.add(make_entries(9, COUNT), make_vectors(9, seed=9)).ids) == 9
    assert "what was written to the gallery is safe" in caplog.messages[-1]
    assert gallery.remove(ids=["id0001"]) == ("id0001",)
    gallery.compact()
    assert derived_folders(gallery.path) == [] and len(gallery) == COUNT + 8
    assert nearest_id(gallery, make_vectors(9, seed=9)[3]) == "id0063"


@pytest.mark.parametrize("searches_between", [False, True])
def test_a_long_lived_reader_releases_files_with_removed_entries(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, searches_between: bool
) -> None:
    """Its mapped files would keep the bytes on the disk. It may search while the other process derives new files, and
    nothing is written after that."""
    with Gallery.open(gallery.path) as reader:
        nearest_id(reader, make_vectors(1)[0])
        with monkeypatch.context() as patch:
            patch.setattr(gallery._index, "_follow", lambda: None)
            gallery.remove(ids=["id0012"])
            if searches_between:
                nearest_id(reader, make_vectors(1)[0])
        gallery.write_index()
        nearest_id(reader, make_vectors(1)[0])
        with reader._index.moment() as (_, snapshot):
            assert not snapshot.holds_removed and len(snapshot.base) == COUNT - 1


def test_a_process_uses_an_index_written_by_another_meanwhile(
    store: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened during that write, and nothing is written to the gallery after that."""
    with store.writing() as changing:
        changing.set_index("int8")
    store.close()
    monkeypatch.setattr(index_cache, "SMALL", 10)
    vector = make_vectors(1)[0]
    with Gallery.open(store.path) as writer, Gallery.open(store.path) as reader:
        with index_files.lock(store.path, wait=True):
            assert reader.search(vector, 1).method == "exact"
        writer.write_index()
        assert reader.search(vector, 1).method == "hnsw int8"
        with reader._index.moment() as (_, snapshot):
            assert snapshot.is_mapped


def test_damaged_files_are_verified_only_once(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for newer files checks at each search, and must not read all of them each time."""
    monkeypatch.setattr(index_cache, "SMALL", 10)
    with (gallery.path / derived_folders(gallery.path)[0] / "vectors.npy").open("r+b") as stream:
        stream.truncate(200)
    loads = []
    real = index_files.load
    monkeypatch.setattr(index_files, "load", lambda *values: loads.append(1) or real(*values))
    with Gallery.open(gallery.path) as reader, index_files.lock(gallery.path, wait=True):
        for _ in range(3):
            assert reader.search(make_vectors(1)[0], 1).method == "exact"
    assert loads == [1]


def test_rebuild_deletes_nothing_before_it_has_written(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = derived_folders(gallery.path)
    with monkeypatch.context() as patch:
        patch.setattr(HnswIndex, "save", lambda *values: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(GalleryError, match="nothing is lost"):
            gallery.rebuild()
    assert derived_folders(gallery.path) == before and gallery.search(make_vectors(1)[0], 1).method == "hnsw int8"


@pytest.mark.parametrize("method", ["rebuild", "write_index"])
def test_no_transaction_is_held_while_an_index_is_built(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(index_cache, "SMALL", 10)
    index_files.drop(gallery.path)
    gallery._index.close()
    held = []
    real_reading, real_build = gallery._index._reading, HnswIndex.build

    @contextmanager
    def reading() -> Iterator[Any]:
        held.append(True)
        try:
            with real_reading() as reader:
                yield reader
        finally:
            held.pop()

    def build(*values: Any, **more: Any) -> HnswIndex:
        assert not held
        return real_build(*values, **more)

    monkeypatch.setattr(gallery._index, "_reading", reading)
    monkeypatch.setattr(HnswIndex, "build", build)
    getattr(gallery, method)()
    assert gallery.info()["changed"] == 0


def test_a_vector_damaged_in_place_is_not_returned(
    gallery: Gallery, make_vectors: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Mapped files were only verified when they were loaded."""
    vector = make_vectors(COUNT)[5]
    assert nearest_id(gallery, vector) == "id0005"
    for damage in (b"\0" * 4, b"\xff" * 4):  # NaN
        place = gallery.path / derived_folders(gallery.path)[0] / "vectors.npy"
        with place.open("r+b") as stream:
            stream.seek(-(COUNT - 5) * vector.nbytes, 2)
            stream.write(damage)
        found = gallery.search(vector, COUNT, exact=None)
        assert found.hits[0].entry.id == "id0005" and found.hits[0].distance == 0
        np.testing.assert_array_equal(found.vectors[0], vector)
        assert "differed from what was stored" in caplog.text
        caplog.clear()
        assert index_files.problems(gallery.path, gallery.uuid) == []


def test_persistently_wrong_vectors_are_an_error(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = make_vectors(COUNT)[5]
    monkeypatch.setattr(Reader, "vectors", lambda self, numbers: make_vectors(len(numbers), seed=9))
    with pytest.raises(GalleryError, match="loading them again"):
        gallery.search(vector, 3)


def test_searches_continue_while_another_writes_derived_files(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(gallery.path / derived_folders(gallery.path)[0])
    gallery.close()
    monkeypatch.setattr(index_cache, "SMALL", 10)
    with index_files.lock(gallery.path, wait=True), Gallery.open(gallery.path) as again:
        assert nearest_id(again, make_vectors(COUNT)[7]) == "id0007"
        assert derived_folders(gallery.path) == []


def test_others_search_and_read_during_an_index_build(
    gallery: Gallery, make_entries: Make, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes readers that need the latest writes."""
    started, go_on = threading.Event(), threading.Event()
    real = HnswIndex.build

    def slow(*values: Any, **more: Any) -> HnswIndex:
        started.set()
        assert go_on.wait(60)
        return real(*values, **more)

    nearest_id(gallery, make_vectors(1)[0])
    monkeypatch.setattr(HnswIndex, "build", slow)
    with ThreadPoolExecutor(2) as pool:
        try:
            setting = pool.submit(gallery.rebuild, "bf16")
            assert started.wait(60)
            gallery.add(make_entries(1, COUNT), make_vectors(1, seed=9))
            assert nearest_id(gallery, make_vectors(1, seed=9)[0]) == "id0060"
            assert gallery.entry("id0005").id == "id0005"
            assert not setting.done()
        finally:
            go_on.set()
        setting.result(60)
    assert nearest_id(gallery, make_vectors(1, seed=9)[0]) == "id0060"
    assert gallery.search(make_vectors(1)[0], 1).method == "hnsw bf16"
    assert gallery.info()["changed"] == 1


def test_derived_files_of_a_later_database_are_ignored(
    gallery: Gallery, make_entries: Make, make_vectors: Make, tmp_path: Path
) -> None:
    """Only the database is restored, and the record of the last commit is deleted, as the error advises."""
    gallery.close()
    shutil.copy(gallery.path / "gallery.sqlite", tmp_path / "copy")
    with Gallery.open(gallery.path) as later:
        later.add(make_entries(1, COUNT), make_vectors(1, seed=9))
        later.write_index()
    shutil.copy(tmp_path / "copy", gallery.path / "gallery.sqlite")
    (gallery.path / "gallery.generation").unlink()
    with Gallery.open(gallery.path) as earlier:
        assert nearest_id(earlier, make_vectors(1, seed=9)[0]) != "id0060"
        assert earlier.info()["changed"] == 0 and len(derived_folders(gallery.path)) == 1


def test_an_index_is_not_written_into_another_gallery(
    gallery: Gallery, make_vectors: Make, tmp_path: Path, tiny_card: ModelCard
) -> None:
    gallery.path.rename(tmp_path / "moved")
    Gallery.create(gallery.path, tiny_card).close()
    for ask in (lambda: nearest_id(gallery, make_vectors(COUNT)[3]), gallery.write_index):
        with pytest.raises(GalleryError, match="moved"):
            ask()
    assert derived_folders(gallery.path) == []
