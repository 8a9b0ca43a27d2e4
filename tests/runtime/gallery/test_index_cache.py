"""The data that searches use follows every write of any process, and keeps nothing that was removed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.runtime import novelty
from cbmir.runtime.gallery import index_cache, index_files
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.reader import EXACT_LIMIT, codes_for
from gallery_contents import derived_folders, nearest_id, stored_bytes

Make = Callable[..., Any]
COUNT = 60


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a gallery of 60 images count as large."""
    monkeypatch.setattr(index_cache, "SMALL", 10)
    for module in ("index_cache", "reader"):
        monkeypatch.setattr(f"cbmir.runtime.gallery.{module}.EXACT_LIMIT", 40)
    monkeypatch.setattr(index_cache, "TAIL_LIMIT", 20)


def test_own_writes_are_found_immediately(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    new = make_vectors(3, seed=9)
    assert nearest_id(gallery, make_vectors(COUNT)[5]) == "id0005"
    gallery.add(make_entries(3, COUNT), new)
    assert [nearest_id(gallery, vector) for vector in new] == ["id0060", "id0061", "id0062"]
    gallery.update([replace(gallery.entry("id0061"), report="Neu.")])
    assert gallery.search(new[1], 1).hits[0].entry.report == "Neu."
    gallery.remove(ids=["id0061"])
    assert nearest_id(gallery, new[1]) != "id0061"
    assert gallery.search(new[1], 1).generation == gallery.info()["generation"]


def test_writes_of_another_process_are_found_immediately(
    gallery: Gallery, make_entries: Make, make_vectors: Make
) -> None:
    new = make_vectors(2, seed=9)
    assert nearest_id(gallery, new[0]) != "id0060"
    with Gallery.open(gallery.path) as other:
        other.add(make_entries(2, COUNT), new)
        assert nearest_id(gallery, new[0]) == "id0060"
        other.remove(ids=["id0060"])
        assert nearest_id(gallery, new[0]) != "id0060" and nearest_id(gallery, new[1]) == "id0061"
        other.write_index()
        other.compact()  # the record of changes is gone
    assert nearest_id(gallery, new[1]) == "id0061"


def test_a_small_gallery_derives_nothing(store: Gallery, make_vectors: Make) -> None:
    store.close()
    with Gallery.open(store.path) as gallery:
        found = gallery.search(make_vectors(COUNT)[5], 1)
        assert (found.hits[0].entry.id, found.method) == ("id0005", "exact")
        assert derived_folders(gallery.path) == [] and gallery.info()["changed"] is None
        gallery.write_index()
        assert derived_folders(gallery.path) == ["derived-000000000001"] and gallery.info()["changed"] == 0


@pytest.mark.usefixtures("low_limits")
def test_a_large_gallery_derives_at_the_first_search(
    store: Gallery, make_vectors: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store.close()
    with caplog.at_level(logging.INFO, "cbmir"):
        for _ in range(2):
            with Gallery.open(store.path) as gallery:
                assert gallery.search(make_vectors(COUNT)[5], 1).method == "hnsw int8"
                assert gallery.info()["search"] == "hnsw int8"
    assert derived_folders(store.path) == ["derived-000000000001"]
    assert len([text for text in caplog.messages if "writing the search files of 60 entries" in text]) == 1


@pytest.mark.usefixtures("low_limits")
def test_an_outgrown_index_is_extended_by_the_writer(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    start = derived_folders(gallery.path)
    gallery.add(make_entries(20, COUNT), make_vectors(20, seed=9))
    assert derived_folders(gallery.path) == start and gallery.info()["changed"] == 20
    gallery.add(make_entries(1, COUNT + 20), make_vectors(1, seed=10))
    assert derived_folders(gallery.path) == ["derived-000000000004"] and gallery.info()["changed"] == 0
    assert nearest_id(gallery, make_vectors(20, seed=9)[3]) == "id0063"
    with gallery._index.moment() as (_, snapshot):
        assert len(snapshot.base) == COUNT + 21 and len(snapshot.tail) == 0 and len(snapshot.index or ()) == COUNT + 21


@pytest.mark.usefixtures("low_limits")
def test_another_process_uses_the_files_of_the_writer(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with Gallery.open(gallery.path) as reader:
        nearest_id(reader, make_vectors(1)[0])
        gallery.add(make_entries(30, COUNT), make_vectors(30, seed=9))
        assert nearest_id(reader, make_vectors(30, seed=9)[3]) == "id0063"
        with reader._index.moment() as (_, snapshot):
            assert len(snapshot.base) == COUNT + 30


def test_the_index_of_a_merge_is_written_on_request(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with gallery.writing() as writer:
        writer.add(make_entries(5, COUNT), make_vectors(5, seed=9))
    gallery.settle()  # nothing to do for five entries
    assert gallery.info()["changed"] == 5
    gallery.write_index()
    assert gallery.info()["changed"] == 0


def test_writing_an_existing_index_again_does_nothing(gallery: Gallery) -> None:
    before = (gallery.path / derived_folders(gallery.path)[0] / "about.json").stat()
    gallery.write_index()
    assert (gallery.path / derived_folders(gallery.path)[0] / "about.json").stat() == before


@pytest.mark.parametrize(
    "wanted", [{"ids": ["id0012"]}, {"patient_ids": ["patient0002"]}, {"study_ids": ["study0006"]}]
)
def test_removed_entries_leave_no_derived_data(gallery: Gallery, make_vectors: Make, wanted: Any) -> None:
    vector = make_vectors(COUNT)[12]
    with gallery._index.moment() as (_, snapshot):
        assert snapshot.index is not None
        code = snapshot.index._coded(vector[None]).tobytes()
    assert vector.tobytes() in stored_bytes(gallery.path) and code in stored_bytes(gallery.path)
    removed = gallery.remove(**wanted)
    assert "id0012" in removed
    gallery.compact()
    assert vector.tobytes() not in stored_bytes(gallery.path) and code not in stored_bytes(gallery.path)
    assert gallery.info()["changed"] == 0 and len(derived_folders(gallery.path)) == 1
    assert gallery.search(vector, COUNT).hits[0].entry.id != "id0012"


def test_rebuild_reads_everything_from_sqlite(gallery: Gallery, make_vectors: Make) -> None:
    (gallery.path / derived_folders(gallery.path)[0] / "vectors.npy").unlink()
    gallery.rebuild()
    assert index_files.problems(gallery.path, gallery.uuid) == [] and gallery.info()["changed"] == 0
    assert nearest_id(gallery, make_vectors(COUNT)[7]) == "id0007"
    gallery.rebuild("bf16")
    assert gallery.info()["index"] == "bf16" and gallery.search(make_vectors(1)[0], 1).method == "hnsw bf16"


def test_the_setting_selects_the_index(gallery: Gallery, make_vectors: Make) -> None:
    vector = make_vectors(COUNT)[7]
    for setting, method in (("bf16", "hnsw bf16"), ("exact", "exact"), ("int8", "hnsw int8"), ("auto", "exact")):
        gallery.rebuild(setting)
        assert gallery.search(vector, 1).method == method == gallery.info()["search"]
        assert gallery.search(vector, 1, exact=True).method == "exact"


def test_codes_for_each_setting() -> None:
    limit = EXACT_LIMIT
    assert [codes_for(one, limit) for one in ("auto", "exact", "bf16", "int8")] == [None, None, "bf16", "int8"]
    assert [codes_for(one, limit + 1) for one in ("auto", "exact", "bf16", "int8")] == ["int8", None, "bf16", "int8"]


def test_other_processes_follow_a_changed_setting(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = make_vectors(COUNT)[7]
    with Gallery.open(gallery.path) as reader:
        for setting, method in (("exact", "exact"), ("int8", "hnsw int8"), ("bf16", "hnsw bf16"), ("auto", "exact")):
            gallery.rebuild(setting)
            assert reader.search(vector, 1).method == method == reader.info()["search"]
        gallery.rebuild("int8")
        nearest_id(reader, vector)
        with gallery.writing() as writer:
            writer.set_index("exact")  # and nothing is derived again
        assert reader.search(vector, 1).method == "exact" == reader.info()["search"]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_removal_keeps_derived_files_without_the_entry(
    gallery: Gallery, make_entries: Make, make_vectors: Make, is_open: bool
) -> None:
    gallery.add(make_entries(2, COUNT), make_vectors(2, seed=9))
    if is_open:
        nearest_id(gallery, make_vectors(1)[0])
    about = gallery.path / derived_folders(gallery.path)[0] / "about.json"
    before = about.stat()
    with Gallery.open(gallery.path) as other:
        remover = gallery if is_open else other
        assert remover.remove(ids=["id0060"]) == ("id0060",)
        assert about.stat() == before
        assert nearest_id(remover, make_vectors(2, seed=9)[0]) != "id0060"
        remover.remove(ids=["id0061", "id0003"])
    assert not about.exists()


def test_reference_distances_are_measured_once_there_are_enough(gallery: Gallery, make_vectors: Make) -> None:
    first = replace(gallery.entry("id0000"), sha256="")
    for count in (39, 1):  # 60 images are there
        assert len(gallery.reference_distances) == 0
        rows = [replace(first, id=f"{count}-{n}", patient_id=f"{count}-{n}") for n in range(count)]
        gallery.add(rows, make_vectors(count, seed=count))
    assert len(gallery.reference_distances) == 100


def test_reference_distances_are_kept_with_derived_files(
    gallery: Gallery, tmp_path: Path, tiny_card: ModelCard
) -> None:
    assert len(gallery.reference_distances) == 0  # 60 images are too few
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
        saved = np.load(more.path / derived_folders(more.path)[0] / "reference_distances.npy")
        np.testing.assert_array_equal(saved, in_memory)


def test_reference_distances_of_a_gallery_that_was_small_when_it_was_opened(
    gallery: Gallery, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = novelty.reference_distances
    monkeypatch.setattr(novelty, "reference_distances", lambda *values: calls.append(1) or real(*values))
    gallery.close()
    shutil.rmtree(gallery.path / derived_folders(gallery.path)[0])
    with Gallery.open(gallery.path) as again:
        nearest_id(again, make_vectors(1)[0])
        assert calls == []  # not needed yet
        assert len(again.reference_distances) == 0
        again.add([Entry(f"new{n}", f"/{n}.png", "") for n in range(60)], make_vectors(60, seed=9))
        assert len(again.reference_distances) == 120
        asked = len(calls)
        assert len(again.reference_distances) == 120 and len(calls) == asked


def test_outgrown() -> None:
    assert [index_cache._outgrown(changed, 10_000) for changed in (5000, 5001)] == [False, True]
    assert [index_cache._outgrown(changed, 100_000) for changed in (10_000, 10_001)] == [False, True]
    assert [index_cache._outgrown(changed, 1_000_000) for changed in (20_000, 20_001)] == [False, True]
