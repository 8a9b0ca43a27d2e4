"""A snapshot that follows a store by differences always equals the store's content."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime.gallery.columns import Columns, Snapshot
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.index_cache import refreshed
from cbmir.runtime.gallery.reader import Reader

Make = Callable[..., Any]
COUNT = 60


def whole(reader: Reader) -> Snapshot:
    vectors = np.empty((reader.count, 8), np.float32)
    return Snapshot.whole(reader.generation, Columns.collected(reader.columns(size=7), vectors, 3))


def as_dict(rows: Columns) -> dict[int, tuple[Any, ...]]:
    return {
        int(number): (
            rows.patients[at], rows.studies[at], rows.names[rows.views[at]], rows.names[rows.sources[at]],
            rows.dates[at],
            tuple(rows.labels[:, at]), rows.vectors[at].tobytes(),
        )
        for at, number in enumerate(rows.numbers)
    }  # fmt: skip


def assert_same(snapshot: Snapshot, reader: Reader) -> None:
    """Check that all accessors return the same rows."""
    expected = whole(reader).base
    blocks = list(snapshot.blocks())
    found = Columns.joined([Columns.empty(3, 8), *blocks])
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert np.concatenate([np.empty(0, np.int64), *(block.numbers for block in blocks)]).tolist() == sorted(
        found.numbers
    )
    assert as_dict(found) == as_dict(expected)
    assert len(snapshot) == reader.count and snapshot.generation == reader.generation
    passing = snapshot.passing(None)
    rows = np.arange(len(snapshot.base) + len(snapshot.tail)) if passing is None else np.flatnonzero(passing)
    assert sorted(snapshot.numbers(rows)) == expected.numbers.tolist()
    order = np.argsort(snapshot.numbers(rows))
    np.testing.assert_array_equal(snapshot.vectors(rows)[order], expected.vectors)


def test_rows_of_the_store(store: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with store.reading() as reader:
        rows = whole(reader).base
    assert rows.names == ("", "AP", "Klinik Süd", "Mercy Hospital", "PA")
    assert [rows.names[view] for view in rows.views] == [entry.view for entry in make_entries(COUNT)]
    assert [rows.names[source] for source in rows.sources] == [entry.source for entry in make_entries(COUNT)]
    assert rows.labels.shape == (3, COUNT) and rows.labels.flags.c_contiguous
    np.testing.assert_array_equal(rows.vectors, make_vectors(COUNT))
    assert {name.name for name in fields(Columns)} - {"names", "vectors"} == {
        "numbers", "patients", "studies", "views", "sources", "dates", "labels"
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_follows_writes(
    store: Gallery, make_entries: Make, make_vectors: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several random writes happen between two checks; entries of base and tail change and are removed."""
    monkeypatch.setattr("cbmir.runtime.gallery.columns._BLOCK", 8)
    rng = np.random.default_rng(seed)
    with store.reading() as reader:
        snapshot = whole(reader)
    ids, fresh = [entry.id for entry in make_entries(COUNT)], COUNT
    for _ in range(15):
        for _ in range(rng.integers(1, 4)):
            kind, some = rng.integers(3), [str(one) for one in rng.choice(ids, min(5, len(ids)), replace=False)]
            if kind == 0:
                count = int(rng.integers(1, 6))
                store.add(make_entries(count, fresh), make_vectors(count, seed=fresh))
                ids += [entry.id for entry in make_entries(count, fresh)]
                fresh += count
            elif kind == 1:
                new = {"view": "LATERAL", "source": f"clinic {rng.integers(3)}", "date": "", "labels": {"Effusion": -1}}
                store.update([replace(store.entry(one), **new) for one in some])
            else:
                removed = store.remove(ids=some)
                ids = [one for one in ids if one not in removed]
        with store.reading() as reader:
            later = refreshed(snapshot, reader)
            assert later is not None
            assert_same(later, reader)
        there = set(later.tail.numbers) | set(later.base.numbers[later.live if later.live is not None else slice(None)])
        assert later.holds_removed == (not set(later.base.numbers) <= there)
        snapshot = later


def test_an_earlier_snapshot_is_unchanged(store: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with store.reading() as reader:
        before = whole(reader)
    store.remove(ids=["id0003"])
    store.add(make_entries(1, COUNT), make_vectors(1, seed=9))
    with store.reading() as reader:
        after = refreshed(before, reader)
    assert after is not None and len(after) == COUNT and after.holds_removed
    assert len(before) == COUNT and before.live is None and len(before.tail) == 0
    assert after.base is before.base  # not copied: it may be mapped and large


def test_a_snapshot_that_cannot_be_refreshed_is_read_again(store: Gallery) -> None:
    with store.reading() as reader:
        snapshot = whole(reader)
    store.remove(ids=["id0003"])
    store.compact()
    with store.reading() as reader:
        assert refreshed(snapshot, reader) is None
        assert refreshed(replace(snapshot, generation=9), reader) is None


def test_an_empty_store(tmp_path: Path, tiny_card: ModelCard, make_entries: Make, make_vectors: Make) -> None:
    with Gallery.create(tmp_path / "empty", tiny_card) as store:
        with store.reading() as reader:
            snapshot = whole(reader)
            assert_same(snapshot, reader)
        store.add(make_entries(3), make_vectors(3))
        with store.reading() as reader:
            later = refreshed(snapshot, reader)
            assert later is not None and len(later.tail) == 3
            assert_same(later, reader)


def test_vectors_are_in_memory_only_once(tmp_path: Path, tiny_card: ModelCard) -> None:
    count, dim = 1500, 1024
    vectors = np.eye(dim, dtype=np.float32)[np.arange(count) % dim]
    with Gallery.create(tmp_path / "wide", tiny_card.with_(embedding_dim=dim)) as store:
        store.add([Entry(str(n), "/x.png", "p") for n in range(count)], vectors)
        with store.reading() as reader:
            tracemalloc.start()
            try:
                into = np.empty((count, dim), np.float32)
                rows = Columns.collected(reader.columns(size=100), into, 3)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    np.testing.assert_array_equal(rows.vectors, vectors)
    assert peak < 1.5 * vectors.nbytes


def test_extra_rows_raise_an_error(store: Gallery) -> None:
    with store.reading() as reader, pytest.raises(ValueError, match="broadcast"):
        Columns.collected(reader.columns(), np.empty((COUNT - 1, 8), np.float32), 3)


def test_a_damaged_row_is_an_error(store: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with store.reading() as reader:
        snapshot = whole(reader)
    store.add(make_entries(1, COUNT), make_vectors(1, seed=9))
    with store.writing() as writer:
        writer.database.execute("UPDATE embedding SET vector = zeroblob(32) WHERE number = ?", (COUNT + 1,)).close()
    with store.reading() as reader, pytest.raises(GalleryError, match="damaged"):
        refreshed(snapshot, reader)
