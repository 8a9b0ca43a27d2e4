"""Concurrent readers and writers, full disks, and folders replaced under an open gallery: nothing is lost."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, GalleryReplacedError
from cbmir.runtime.gallery.database import DATABASE, GALLERY, Connections
from cbmir.runtime.gallery.entry import Added, Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import export, verify
from cbmir.runtime.gallery.schema import LastCommit
from gallery_contents import generation

COUNT = 60
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]


def test_a_reader_stays_at_its_snapshot(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    with store.reading() as before:
        store.add(make_entries(1, start=COUNT), make_vectors(1))
        store.remove(ids=["id0000"])
        with store.reading() as after:
            assert (before.generation, before.count) == (1, COUNT)
            assert (after.generation, after.count) == (3, COUNT)
            assert before.ids()[0] == "id0000"
            assert after.ids()[0] == "id0001"
            assert [block.numbers[-1] for block in before.columns()] == [60]
    assert generation(store) == 3


def test_a_partly_read_result_blocks_no_later_reader(store: Gallery) -> None:
    """A block iterator that is dropped half-way must not hold the next reader at its snapshot."""
    with store.reading() as reader:
        blocks = reader.columns(size=10)
        next(blocks)
    store.remove(ids=["id0000"])
    assert generation(store) == 2
    assert len(store.ids()) == COUNT - 1
    for late in (lambda: next(blocks), reader.ids, lambda: reader.entries([5])):
        with pytest.raises(GalleryError, match="found one after its end"):
            late()


def test_threads_read_and_write_concurrently(store: Gallery, make_vectors: MakeVectors) -> None:
    vectors = make_vectors(40, seed=1)

    def write(n: int) -> None:
        store.add([Entry(f"new{n}", "", "p")], vectors[n : n + 1])

    def read(_: int) -> bool:
        with store.reading() as reader:
            return len(reader.ids()) == reader.count == COUNT + reader.generation - 1

    with ThreadPoolExecutor(8) as pool:
        written = [pool.submit(write, n) for n in range(40)]
        assert all(pool.map(read, range(80)))
        for one in written:
            one.result()
    assert len(store) == COUNT + 40
    assert generation(store) == 41


def test_a_second_writer_waits_then_is_refused(
    store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors
) -> None:
    new = make_entries(2, start=COUNT)
    with store.writing() as writer:
        writer.add(new[:1], make_vectors(1))
        with Gallery.open(store.path, wait=0.05) as other:
            assert len(other) == COUNT  # readers continue
            with pytest.raises(GalleryError, match="another process is writing to it"):
                other.add(new[1:], make_vectors(1))
    assert len(store) == COUNT + 1
    with Gallery.open(store.path) as other, ThreadPoolExecutor(1) as pool:
        started = threading.Event()

        def add() -> Added:
            started.set()
            return other.add(new[1:], make_vectors(1))

        with store.writing() as writer:
            waiting = pool.submit(add)
            assert started.wait(60)
            writer.remove(ids=["id0000"])
        assert waiting.result(60).ids == ("id0061",)
    assert generation(store) == 4


def test_an_exception_within_a_write_rolls_it_back(store: Gallery) -> None:
    with pytest.raises(KeyboardInterrupt), store.writing() as writer:
        writer.remove(ids=["id0000"])
        raise KeyboardInterrupt
    assert len(store) == COUNT
    assert generation(store) == 1


_FILL = """
import resource, signal, sys
import numpy as np
from cbmir.errors import GalleryError
from cbmir.runtime.gallery.entry import Added, Entry
from cbmir.runtime.gallery.gallery import Gallery
with Gallery.open(sys.argv[1]) as store:
    store.add([Entry("first", "", "p")], np.eye(8, dtype=np.float32)[:1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        store.add([Entry("large", "", "p", report="x" * 1_000_000)], np.eye(8, dtype=np.float32)[:1])
    except GalleryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.add([Entry("last", "", "p")], np.eye(8, dtype=np.float32)[:1])
"""


def test_a_disk_error_is_raised_and_loses_nothing(store: Gallery) -> None:
    """Files of a process cannot grow beyond 300 kB, as on a full disk; later there is room again."""
    ids = store.ids()
    done = subprocess.run(
        [sys.executable, "-c", _FILL, str(store.path), "300000"], capture_output=True, text=True, check=True
    )
    assert "nothing was changed: make room" in done.stdout
    assert store.ids() == [*ids, "first", "last"]
    assert verify(store.path) == []


def test_a_full_database_raises_an_error_and_loses_nothing(store: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on pages makes SQLite answer as for a full disk."""
    pages = (store.path / "gallery.sqlite").stat().st_size // 4096
    real = sqlite3.connect

    def small(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = real(*arguments, **options)  # type: ignore[call-overload]
        connection.execute(f"PRAGMA max_page_count = {pages + 10}").close()
        return connection  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", small)
    with Gallery.open(store.path) as other:
        with pytest.raises(GalleryError, match="the disk is full; nothing was changed"):
            other.add([Entry("large", "", "p", report="x" * 1_000_000)], np.eye(8, dtype=np.float32)[:1])
        other.add([Entry("small", "", "p")], np.eye(8, dtype=np.float32)[:1])
    assert len(store) == COUNT + 1
    assert verify(store.path) == []


def test_a_gallery_is_readable_only_by_its_owner(store: Gallery, tmp_path: Path) -> None:
    export(store, tmp_path / "copy")
    with Gallery.open(tmp_path / "copy") as copy:
        copy.remove(ids=["id0000"])
        for folder in (store.path, copy.path):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {path.name for path in folder.iterdir()} == {
                "gallery.sqlite", "gallery.sqlite-wal", "gallery.sqlite-shm", "gallery.generation",
            }  # fmt: skip
            assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_read_only_gallery_can_be_read(store: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root could write anywhere
    before = sorted(file.name for file in store.path.iterdir())
    with Gallery.open(store.path) as again:
        assert len(again.ids()) == COUNT
        with pytest.raises(GalleryError, match="is not writable"):
            again.remove(ids=["id0000"])
    assert sorted(file.name for file in store.path.iterdir()) == before


def test_a_read_only_gallery_shows_the_writes_of_others(
    store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both while the writer runs and shares its log, and after it has ended; then the file was read as it was."""
    store.close()
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)  # root could write anywhere
        reader, searched = Gallery.open(store.path), Gallery.open(store.path)
    with pytest.raises(GalleryError, match="can be written to"):
        reader.rebuild()
    for connections in (reader._connections, searched._connections):
        monkeypatch.setattr(connections, "_mode", partial(as_if_unwritable, store.path))
    query = make_vectors(COUNT)[7]

    def seen() -> tuple[bool, int, int, str]:
        hit = searched.search(query, 1).hits[0].entry
        return reader.has_patient("patient0001"), len(reader), generation(reader), hit.id

    with reader, searched:
        assert seen() == (True, COUNT, 1, "id0007")
        with Gallery.open(store.path) as writer:
            writer.remove(patient_ids=["patient0001"])
            now = seen()
            assert now[:3] == (False, COUNT - 6, 2)
            assert now[3] != "id0007"
        assert seen() == now
        with Gallery.open(store.path) as writer:
            writer.add([make_entries(8)[7]], query[None])
        assert seen() == (True, COUNT - 5, 3, "id0007")


def as_if_unwritable(folder: Path) -> str:
    return "ro" if (folder / "gallery.sqlite-wal").exists() else "ro&immutable=1"


def test_an_open_gallery_notices_its_replacement(store: Gallery, tiny_card: ModelCard) -> None:
    store.path.rename(store.path.with_name("moved"))
    for _ in range(2):  # nothing there, then another gallery
        with pytest.raises(GalleryError, match="moved or replaced"):
            store.rebuild()
        for use in (lambda: store.entry("id0003"), lambda: store.remove(ids=["id0003"])):
            with pytest.raises(GalleryError, match="was moved, deleted or replaced; open it again"):
                use()
        if not store.path.exists():
            Gallery.create(store.path, tiny_card).close()
    with Gallery.open(store.path) as new:
        assert len(new) == 0


def test_a_reader_finishes_although_its_gallery_is_replaced(store: Gallery) -> None:
    with store.reading() as reader:
        store.path.rename(store.path.with_name("moved"))
        assert len(reader.ids()) == reader.count == COUNT


def test_another_database_in_the_same_file_is_noticed(store: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    """File systems may reuse the inode number of a deleted file."""
    store.close()
    Gallery.create(tmp_path / "other", tiny_card).close()
    with Gallery.open(store.path, read_only=True) as reader:
        assert len(reader) == COUNT
        (store.path / "gallery.sqlite").write_bytes((tmp_path / "other" / "gallery.sqlite").read_bytes())
        with pytest.raises(GalleryError, match="the gallery was replaced; open it again"):
            len(reader)


def test_a_lost_log_is_noticed(store: Gallery, tmp_path: Path, make_vectors: MakeVectors) -> None:
    """A careless backup copies the database without its log: it is intact, but lacks acknowledged writes."""
    copy = tmp_path / "copy"
    copy.mkdir()
    store.remove(ids=["id0000"])  # which empties the log
    database = (store.path / "gallery.sqlite").read_bytes()
    store.add([Entry("new", "", "p")], make_vectors(1))
    (copy / "gallery.sqlite").write_bytes(database)
    (copy / "gallery.generation").write_bytes((store.path / "gallery.generation").read_bytes())
    with pytest.raises(GalleryError, match="expected generation 3, the last that was acknowledged, found generation 2"):
        Gallery.open(copy)
    (copy / "gallery.generation").unlink()
    with Gallery.open(copy) as again:
        assert len(again) == COUNT - 1
        assert again.uuid != store.uuid  # it is a different gallery now, so later derived files are not used
        name = again.uuid
        again.add([Entry("other", "", "p")], make_vectors(1))
    for damage, same in (("", True), ("{", False)):
        with (copy / "gallery.generation").open("r+") as record:
            record.write(damage)
        with Gallery.open(copy) as again:
            assert (again.uuid == name) is same


def test_concurrent_openers_give_a_restored_copy_one_identity(store: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process can intervene between the new identity and its record."""
    store.close()
    (store.path / "gallery.generation").unlink()
    real = LastCommit.write

    def write(record: LastCommit, folder: Path) -> None:
        with pytest.raises(GalleryError, match="another process is writing to it"):
            Gallery.open(folder, wait=0.01)
        real(record, folder)

    monkeypatch.setattr(LastCommit, "write", write)
    with Gallery.open(store.path) as one, Gallery.open(store.path) as other:
        assert one.uuid == other.uuid != store.uuid
        assert len(one) == len(other) == COUNT


def test_opening_during_writes_does_not_report_a_loss(store: Gallery, make_vectors: MakeVectors) -> None:
    """A writer continues between reading the two places that are compared."""
    vectors = make_vectors(30, seed=1)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: [store.add([Entry(f"new{n}", "", "p")], vectors[n : n + 1]) for n in range(30)])
        while not writing.done():
            Gallery.open(store.path).close()
        writing.result()


def test_a_waiting_writer_does_not_write_into_a_replaced_gallery(store: Gallery, tmp_path: Path) -> None:
    """Its turn may come only after a build has replaced the gallery's file."""
    file, other = store.home / DATABASE, tmp_path / "other"
    other.touch()
    live = iter([file, file, other])  # at opening, at connecting, and at the start of the write
    kind = replace(GALLERY, live=lambda _: next(live))
    with (
        Connections(file, kind) as connections,
        pytest.raises(GalleryReplacedError, match="moved, deleted or replaced"),
        connections.transaction(),
    ):
        pytest.fail("began to write")
    assert generation(store) == 1
