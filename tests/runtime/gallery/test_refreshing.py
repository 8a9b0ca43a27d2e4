"""Searches follow every write, and what is derived follows too, heals, and holds nothing that was removed."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime import novelty
from cbmir.runtime.gallery import index_cache, index_files
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.hnsw import HnswIndex
from cbmir.runtime.gallery.reader import EXACT_LIMIT, Reader, codes_for

Make = Callable[..., Any]
COUNT = 60


@pytest.fixture
def gallery(store: Gallery) -> Iterator[Gallery]:
    """The store's 60 entries, with an int8 index written."""
    store.close()
    with Gallery.open(store.path) as opened:
        opened.rebuild("int8")
        yield opened


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gallery of 60 be a large one."""
    monkeypatch.setattr(index_cache, "SMALL", 10)
    for module in ("index_cache", "reader"):
        monkeypatch.setattr(f"cbmir.runtime.gallery.{module}.EXACT_LIMIT", 40)
    monkeypatch.setattr(index_cache, "TAIL_LIMIT", 20)


def places(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("derived-"))


def first(gallery: Gallery, vector: np.ndarray[Any, Any]) -> str:
    """The nearest id, by the index and exactly."""
    by_index, exactly = (gallery.search(vector, 1, exact=exact) for exact in (None, True))
    assert by_index.hits == exactly.hits and by_index.generation == exactly.generation
    return by_index.hits[0].entry.id


def test_what_is_written_is_found_at_once(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    new = make_vectors(3, seed=9)
    assert first(gallery, make_vectors(COUNT)[5]) == "id0005"
    gallery.add(make_entries(3, COUNT), new)
    assert [first(gallery, vector) for vector in new] == ["id0060", "id0061", "id0062"]
    gallery.update([replace(gallery.entry("id0061"), report="Neu.")])
    assert gallery.search(new[1], 1).hits[0].entry.report == "Neu."
    gallery.remove(ids=["id0061"])
    assert first(gallery, new[1]) != "id0061"
    assert gallery.search(new[1], 1).generation == gallery.info()["generation"]


def test_what_another_writes_is_found_at_once(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    new = make_vectors(2, seed=9)
    assert first(gallery, new[0]) != "id0060"
    with Gallery.open(gallery.path) as other:
        other.add(make_entries(2, COUNT), new)
        assert first(gallery, new[0]) == "id0060"
        other.remove(ids=["id0060"])
        assert first(gallery, new[0]) != "id0060" and first(gallery, new[1]) == "id0061"
        other.write_index()
        other.compact()  # and it is not known any more what changed
    assert first(gallery, new[1]) == "id0061"


def test_a_small_gallery_derives_nothing_by_itself(store: Gallery, make_vectors: Make) -> None:
    store.close()
    with Gallery.open(store.path) as gallery:
        found = gallery.search(make_vectors(COUNT)[5], 1)
        assert (found.hits[0].entry.id, found.method) == ("id0005", "exact")
        assert places(gallery.path) == [] and gallery.info()["changed"] is None
        gallery.write_index()
        assert places(gallery.path) == ["derived-000000000001"] and gallery.info()["changed"] == 0


@pytest.mark.usefixtures("low_limits")
def test_a_large_one_derives_at_the_first_search(
    store: Gallery, make_vectors: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    with caplog.at_level(logging.INFO, "cbmir"):
        for _ in range(2):
            with Gallery.open(store.path) as gallery:
                assert gallery.search(make_vectors(COUNT)[5], 1).method == "hnsw int8"
                assert gallery.info()["search"] == "hnsw int8"
    assert places(store.path) == ["derived-000000000001"]
    assert len([text for text in caplog.messages if "writing what searches need of 60 entries" in text]) == 1


@pytest.mark.usefixtures("low_limits")
def test_an_outgrown_index_is_grown_by_the_writer(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    start = places(gallery.path)
    gallery.add(make_entries(20, COUNT), make_vectors(20, seed=9))
    assert places(gallery.path) == start and gallery.info()["changed"] == 20
    gallery.add(make_entries(1, COUNT + 20), make_vectors(1, seed=10))
    assert places(gallery.path) == ["derived-000000000004"] and gallery.info()["changed"] == 0
    assert first(gallery, make_vectors(20, seed=9)[3]) == "id0063"
    with gallery._index.moment() as (_, snapshot):
        assert len(snapshot.base) == COUNT + 21 and len(snapshot.tail) == 0 and len(snapshot.index or ()) == COUNT + 21


@pytest.mark.usefixtures("low_limits")
def test_another_process_takes_what_the_writer_derived(
    gallery: Gallery, make_entries: Make, make_vectors: Make
) -> None:
    with Gallery.open(gallery.path) as reader:
        first(reader, make_vectors(1)[0])
        gallery.add(make_entries(30, COUNT), make_vectors(30, seed=9))
        assert first(reader, make_vectors(30, seed=9)[3]) == "id0063"
        with reader._index.moment() as (_, snapshot):
            assert len(snapshot.base) == COUNT + 30


def test_a_merge_settles_when_its_writer_says_so(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with gallery.writing() as writer:
        writer.add(make_entries(5, COUNT), make_vectors(5, seed=9))
    gallery.settle()  # nothing to do: five are few
    assert gallery.info()["changed"] == 5
    gallery.write_index()
    assert gallery.info()["changed"] == 0


def test_writing_again_what_is_there_does_nothing(gallery: Gallery) -> None:
    before = (gallery.path / places(gallery.path)[0] / "about.json").stat()
    gallery.write_index()
    assert (gallery.path / places(gallery.path)[0] / "about.json").stat() == before


def stored_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "wanted", [{"ids": ["id0012"]}, {"patient_ids": ["patient0002"]}, {"study_ids": ["study0006"]}]
)
def test_nothing_derived_is_left_of_what_was_removed(gallery: Gallery, make_vectors: Make, wanted: Any) -> None:
    vector = make_vectors(COUNT)[12]
    with gallery._index.moment() as (_, snapshot):
        assert snapshot.index is not None
        code = snapshot.index._coded(vector[None]).tobytes()
    assert vector.tobytes() in stored_bytes(gallery.path) and code in stored_bytes(gallery.path)
    removed = gallery.remove(**wanted)
    assert "id0012" in removed
    gallery.compact()
    assert vector.tobytes() not in stored_bytes(gallery.path) and code not in stored_bytes(gallery.path)
    assert gallery.info()["changed"] == 0 and len(places(gallery.path)) == 1
    assert gallery.search(vector, COUNT).hits[0].entry.id != "id0012"


def test_a_removal_that_was_killed_is_finished_by_the_next_search(gallery: Gallery, make_vectors: Make) -> None:
    """The rows are gone and what is derived is not: one process was killed in between."""
    vector = make_vectors(COUNT)[12]
    with gallery.writing() as writer:
        writer.remove(ids=["id0012"])
    gallery.close()
    assert vector.tobytes() in stored_bytes(gallery.path)
    with Gallery.open(gallery.path) as again:
        assert first(again, vector) != "id0012"
        assert vector.tobytes() not in stored_bytes(gallery.path / places(gallery.path)[0])


def test_a_damaged_file_heals(gallery: Gallery, make_vectors: Make) -> None:
    place = gallery.path / places(gallery.path)[0]
    gallery.close()
    for name in sorted(file.name for file in place.iterdir()):
        data = bytearray((place / name).read_bytes())
        data[len(data) // 2] ^= 4
        (place / name).write_bytes(data)
        with Gallery.open(gallery.path) as again:
            assert first(again, make_vectors(COUNT)[7]) == "id0007"
            assert index_files.problems(again.path, again.uuid) == []
            assert again.info()["search"] == "hnsw int8"


def test_rebuild_takes_all_from_sqlite(gallery: Gallery, make_vectors: Make) -> None:
    (gallery.path / places(gallery.path)[0] / "vectors.npy").unlink()
    gallery.rebuild()
    assert index_files.problems(gallery.path, gallery.uuid) == [] and gallery.info()["changed"] == 0
    assert first(gallery, make_vectors(COUNT)[7]) == "id0007"
    gallery.rebuild("bf16")
    assert gallery.info()["index"] == "bf16" and gallery.search(make_vectors(1)[0], 1).method == "hnsw bf16"


def test_the_setting_decides_on_the_index(gallery: Gallery, make_vectors: Make) -> None:
    vector = make_vectors(COUNT)[7]
    for setting, method in (("bf16", "hnsw bf16"), ("exact", "exact"), ("int8", "hnsw int8"), ("auto", "exact")):
        gallery.rebuild(setting)
        assert gallery.search(vector, 1).method == method == gallery.info()["search"]
        assert gallery.search(vector, 1, exact=True).method == "exact"


def test_what_an_index_keeps() -> None:
    limit = EXACT_LIMIT
    assert [codes_for(one, limit) for one in ("auto", "exact", "bf16", "int8")] == [None, None, "bf16", "int8"]
    assert [codes_for(one, limit + 1) for one in ("auto", "exact", "bf16", "int8")] == ["int8", None, "bf16", "int8"]


@pytest.mark.parametrize("is_derived", [True, False])
def test_where_nothing_can_be_written_searches_go_on(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, is_derived: bool
) -> None:
    gallery.close()
    if not is_derived:
        shutil.rmtree(gallery.path / places(gallery.path)[0])
        monkeypatch.setattr(index_cache, "SMALL", 10)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    before = sorted(file.name for file in gallery.path.iterdir())
    with Gallery.open(gallery.path) as again:
        assert first(again, make_vectors(COUNT)[7]) == "id0007"
        assert again.search(make_vectors(1)[0], 1).method == ("hnsw int8" if is_derived else "exact")
        for write in (again.write_index, again.rebuild):
            with pytest.raises(GalleryError, match="can be written to"):
                write()
    assert sorted(file.name for file in gallery.path.iterdir()) == before


def test_a_full_disk_stops_no_search(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*values: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(gallery.path / places(gallery.path)[0])
    gallery.close()
    monkeypatch.setattr(index_cache, "SMALL", 10)
    monkeypatch.setattr(index_files, "write", refuse)
    with Gallery.open(gallery.path) as again:
        assert first(again, make_vectors(COUNT)[7]) == "id0007"
        assert "cannot write what searches need" in caplog.text
        with pytest.raises(GalleryError, match="nothing is lost"):
            again.write_index()


def test_a_full_disk_fails_no_write_that_was_acknowledged(
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
    assert places(gallery.path) == [] and len(gallery) == COUNT + 8
    assert first(gallery, make_vectors(9, seed=9)[3]) == "id0063"


@pytest.mark.parametrize("searches_between", [False, True])
def test_a_long_lived_reader_lets_go_of_what_was_removed(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch, searches_between: bool
) -> None:
    """Its mapped files would keep the bytes on the disk. It may search while the remover derives, and no one writes
    after that."""
    with Gallery.open(gallery.path) as reader:
        first(reader, make_vectors(1)[0])
        with monkeypatch.context() as patch:
            patch.setattr(gallery._index, "_follow", lambda: None)
            gallery.remove(ids=["id0012"])
            if searches_between:
                first(reader, make_vectors(1)[0])
        gallery.write_index()
        first(reader, make_vectors(1)[0])
        with reader._index.moment() as (_, snapshot):
            assert not snapshot.holds_removed and len(snapshot.base) == COUNT - 1


def test_a_process_takes_the_index_that_another_wrote_meanwhile(
    store: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened while that one was writing, and no one writes to the gallery after that."""
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


def test_what_cannot_be_trusted_is_verified_once(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is in want of something newer looks for it at each search, and must not read it all each time."""
    monkeypatch.setattr(index_cache, "SMALL", 10)
    with (gallery.path / places(gallery.path)[0] / "vectors.npy").open("r+b") as stream:
        stream.truncate(200)
    loads = []
    real = index_files.load
    monkeypatch.setattr(index_files, "load", lambda *values: loads.append(1) or real(*values))
    with Gallery.open(gallery.path) as reader, index_files.lock(gallery.path, wait=True):
        for _ in range(3):
            assert reader.search(make_vectors(1)[0], 1).method == "exact"
    assert loads == [1]


def test_a_setting_is_followed_by_other_processes(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = make_vectors(COUNT)[7]
    with Gallery.open(gallery.path) as reader:
        for setting, method in (("exact", "exact"), ("int8", "hnsw int8"), ("bf16", "hnsw bf16"), ("auto", "exact")):
            gallery.rebuild(setting)
            assert reader.search(vector, 1).method == method == reader.info()["search"]
        gallery.rebuild("int8")
        first(reader, vector)
        with gallery.writing() as writer:
            writer.set_index("exact")  # and nothing is derived anew
        assert reader.search(vector, 1).method == "exact" == reader.info()["search"]


def test_rebuild_takes_nothing_away_before_it_has_written(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = places(gallery.path)
    with monkeypatch.context() as patch:
        patch.setattr(HnswIndex, "save", lambda *values: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(GalleryError, match="nothing is lost"):
            gallery.rebuild()
    assert places(gallery.path) == before and gallery.search(make_vectors(1)[0], 1).method == "hnsw int8"


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


@pytest.mark.parametrize("is_open", [True, False])
def test_a_removal_of_what_is_in_no_derived_file_leaves_these(
    gallery: Gallery, make_entries: Make, make_vectors: Make, is_open: bool
) -> None:
    gallery.add(make_entries(2, COUNT), make_vectors(2, seed=9))
    if is_open:
        first(gallery, make_vectors(1)[0])
    about = gallery.path / places(gallery.path)[0] / "about.json"
    before = about.stat()
    with Gallery.open(gallery.path) as other:
        remover = gallery if is_open else other
        assert remover.remove(ids=["id0060"]) == ("id0060",)
        assert about.stat() == before
        assert first(remover, make_vectors(2, seed=9)[0]) != "id0060"
        remover.remove(ids=["id0061", "id0003"])
    assert not about.exists()


def test_a_vector_that_was_damaged_in_place_is_not_answered_with(
    gallery: Gallery, make_vectors: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """What is mapped was verified when it was loaded."""
    vector = make_vectors(COUNT)[5]
    assert first(gallery, vector) == "id0005"
    for damage in (b"\0" * 4, b"\xff" * 4):  # NaN
        place = gallery.path / places(gallery.path)[0] / "vectors.npy"
        with place.open("r+b") as stream:
            stream.seek(-(COUNT - 5) * vector.nbytes, 2)
            stream.write(damage)
        found = gallery.search(vector, COUNT, exact=None)
        assert found.hits[0].entry.id == "id0005" and found.hits[0].distance == 0
        np.testing.assert_array_equal(found.vectors[0], vector)
        assert "not what was stored" in caplog.text
        caplog.clear()
        assert index_files.problems(gallery.path, gallery.uuid) == []


def test_vectors_that_stay_wrong_are_an_error(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = make_vectors(COUNT)[5]
    monkeypatch.setattr(Reader, "vectors", lambda self, numbers: make_vectors(len(numbers), seed=9))
    with pytest.raises(GalleryError, match="loaded anew"):
        gallery.search(vector, 3)


def test_while_another_writes_what_is_derived_searches_go_on(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(gallery.path / places(gallery.path)[0])
    gallery.close()
    monkeypatch.setattr(index_cache, "SMALL", 10)
    with index_files.lock(gallery.path, wait=True), Gallery.open(gallery.path) as again:
        assert first(again, make_vectors(COUNT)[7]) == "id0007"
        assert places(gallery.path) == []


def test_others_search_and_read_while_an_index_is_built(
    gallery: Gallery, make_entries: Make, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those who must see what was written since."""
    started, go_on = threading.Event(), threading.Event()
    real = HnswIndex.build

    def slow(*values: Any, **more: Any) -> HnswIndex:
        started.set()
        assert go_on.wait(60)
        return real(*values, **more)

    first(gallery, make_vectors(1)[0])
    monkeypatch.setattr(HnswIndex, "build", slow)
    with ThreadPoolExecutor(2) as pool:
        try:
            setting = pool.submit(gallery.rebuild, "bf16")
            assert started.wait(60)
            gallery.add(make_entries(1, COUNT), make_vectors(1, seed=9))
            assert first(gallery, make_vectors(1, seed=9)[0]) == "id0060"
            assert gallery.entry("id0005").id == "id0005"
            assert not setting.done()
        finally:
            go_on.set()
        setting.result(60)
    assert first(gallery, make_vectors(1, seed=9)[0]) == "id0060"
    assert gallery.search(make_vectors(1)[0], 1).method == "hnsw bf16"
    assert gallery.info()["changed"] == 1


def test_an_earlier_database_does_not_believe_what_was_derived_of_a_later_one(
    gallery: Gallery, make_entries: Make, make_vectors: Make, tmp_path: Path
) -> None:
    """A copy of the database alone is brought back, and its witness deleted as the error says."""
    gallery.close()
    shutil.copy(gallery.path / "gallery.sqlite", tmp_path / "copy")
    with Gallery.open(gallery.path) as later:
        later.add(make_entries(1, COUNT), make_vectors(1, seed=9))
        later.write_index()
    shutil.copy(tmp_path / "copy", gallery.path / "gallery.sqlite")
    (gallery.path / "gallery.generation").unlink()
    with Gallery.open(gallery.path) as earlier:
        assert first(earlier, make_vectors(1, seed=9)[0]) != "id0060"
        assert earlier.info()["changed"] == 0 and len(places(gallery.path)) == 1


def test_an_index_is_not_written_into_another_gallery(
    gallery: Gallery, make_vectors: Make, tmp_path: Path, tiny_card: ModelCard
) -> None:
    gallery.path.rename(tmp_path / "moved")
    Gallery.create(gallery.path, tiny_card).close()
    for ask in (lambda: first(gallery, make_vectors(COUNT)[3]), gallery.write_index):
        with pytest.raises(GalleryError, match="moved"):
            ask()
    assert places(gallery.path) == []


def test_own_distances_are_kept_with_what_is_derived(gallery: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    assert len(gallery.reference_distances) == 0  # of 60 images nothing can be said
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 8))
    vectors = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    with Gallery.create(tmp_path / "more", tiny_card) as more:
        more.add(
            [replace(gallery.entry("id0000"), id=str(n), patient_id=str(n), sha256="") for n in range(300)], vectors
        )
        in_memory = more.reference_distances
        more.write_index()
    with Gallery.open(tmp_path / "more") as more:
        assert len(in_memory) == 300
        np.testing.assert_array_equal(more.reference_distances, in_memory)
        saved = np.load(more.path / places(more.path)[0] / "reference_distances.npy")
        np.testing.assert_array_equal(saved, in_memory)


def test_own_distances_of_a_gallery_that_was_small_when_it_was_opened(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = novelty.reference_distances
    monkeypatch.setattr(novelty, "reference_distances", lambda *values: calls.append(1) or real(*values))
    gallery.close()
    shutil.rmtree(gallery.path / places(gallery.path)[0])
    with Gallery.open(gallery.path) as again:
        first(again, make_vectors(1)[0])
        assert calls == []  # nobody has asked
        assert len(again.reference_distances) == 0
        again.add([Entry(f"new{n}", f"/{n}.png", "") for n in range(60)], make_vectors(60, seed=9))
        assert len(again.reference_distances) == 120
        asked = len(calls)
        assert len(again.reference_distances) == 120 and len(calls) == asked


def test_outgrown() -> None:
    assert [index_cache._outgrown(changed, 10_000) for changed in (5000, 5001)] == [False, True]
    assert [index_cache._outgrown(changed, 100_000) for changed in (10_000, 10_001)] == [False, True]
    assert [index_cache._outgrown(changed, 1_000_000) for changed in (20_000, 20_001)] == [False, True]
