"""The nearest rows of a snapshot by matrix product and by index, with narrow and wide filters, against brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.runtime.gallery import search as module
from cbmir.runtime.gallery.columns import Columns, Selection, Snapshot
from cbmir.runtime.gallery.hnsw import HnswIndex
from cbmir.runtime.gallery.search import Nearest, nearest

DIM, BASE, TAIL = 16, 900, 60


def unit(count: int, seed: int) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).normal(size=(count, DIM))
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def rows(vectors: NDArray[np.float32], start: int) -> Columns:
    count = len(vectors)
    none, codes = np.zeros(count, np.int64), np.zeros(count, np.int32)
    return Columns(
        np.arange(start, start + count), none, none, codes, codes, codes, np.zeros((1, count), np.int8), vectors, ("",)
    )


class OneIn:
    """A selection of the rows whose number is a multiple of `n`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def passes(self, own: Columns, at: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        passing: NDArray[np.bool_] = own.numbers[at] % self.n == 0
        return passing


def one_in(n: int) -> Selection:
    return cast(Selection, OneIn(n))


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    """A base with an index, where every tenth row is dead, and a tail."""
    base = rows(unit(BASE, 0), 1)
    live = np.arange(BASE) % 10 != 3
    index = HnswIndex.build("int8", base.vectors)
    return Snapshot(5, 1, base, rows(unit(TAIL, 1), BASE + 1), np.empty(0, np.float32), index, live)


def brute_force(snapshot: Snapshot, query: NDArray[np.float32], k: int, selection: Selection | None) -> list[int]:
    mask = snapshot.passing(selection)
    at = np.arange(len(snapshot.base) + len(snapshot.tail)) if mask is None else np.flatnonzero(mask)
    distances = np.linalg.norm(snapshot.vectors(at).astype(np.float64) - query, axis=1)
    return at[np.argsort(distances)][:k].tolist()


@pytest.mark.parametrize("k", [0, 1, 10, 200, 5000])
@pytest.mark.parametrize("selection", [None, one_in(2), one_in(9), one_in(100), one_in(480), one_in(5000)])
@pytest.mark.parametrize("block", [16_384, 64])
def test_by_product(
    snapshot: Snapshot, k: int, selection: Selection | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_QUERIES", 3)
    queries = unit(7, 2)
    found = nearest(snapshot, queries, k, [selection] * 7, exact=True)
    for query, one in zip(queries, found, strict=True):
        assert one.rows.tolist() == brute_force(snapshot, query, k, selection)
        vectors = snapshot.vectors(one.rows).astype(np.float64)
        np.testing.assert_allclose(one.distances, np.linalg.norm(vectors - query, axis=1), rtol=1e-12)
        np.testing.assert_allclose(one.cosines, vectors @ query, rtol=1e-12)
        assert one.method == "exact"


@pytest.mark.parametrize("k", [1, 10, 200, 5000])
@pytest.mark.parametrize("selection", [None, one_in(2), one_in(9), one_in(100), one_in(480), one_in(5000)])
@pytest.mark.parametrize("rows_per_candidate", [0, 1, 16])
def test_by_index(
    snapshot: Snapshot, k: int, selection: Selection | None, rows_per_candidate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k rows are returned if k pass, never dead ones, and nearly all are the nearest: both if the index is asked for
    more and more candidates (0), and if all rows that pass are compared because that is cheaper."""
    monkeypatch.setattr(module, "_ROWS_PER_CANDIDATE", rows_per_candidate)
    queries = unit(20, 2)
    expected = [brute_force(snapshot, query, k, selection) for query in queries]
    found = nearest(snapshot, queries, k, [selection] * 20, exact=False)
    assert [len(one.rows) for one in found] == [len(own) for own in expected]
    hits = sum(len(set(one.rows.tolist()) & set(own)) for one, own in zip(found, expected, strict=True))
    assert hits >= 0.97 * sum(map(len, expected))
    for one in found:
        assert (np.diff(one.distances) >= 0).all()


def test_few_matching_rows_are_compared_exactly(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS_PER_CANDIDATE", 1)
    wide, narrow = nearest(snapshot, unit(2, 2), 5, [one_in(2), one_in(100)], exact=False)
    assert (wide.method, narrow.method) == ("hnsw int8", "exact")


@pytest.mark.parametrize("rows_per_candidate", [0, 16])
def test_a_filter_passed_only_by_distant_rows(
    snapshot: Snapshot, rows_per_candidate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the index's nearest candidates passes: it is asked for more, or not used."""
    monkeypatch.setattr(module, "_ROWS_PER_CANDIDATE", rows_per_candidate)
    query = snapshot.base.vectors[0]
    order = np.argsort(-(snapshot.base.vectors @ query))
    numbers = snapshot.base.numbers.copy()
    numbers[order[:450]] = 2 * np.arange(1, 451) - 1  # odd, so they do not pass
    numbers[order[450:]] = 2 * np.arange(1, 451)
    far = replace(snapshot, base=replace(snapshot.base, numbers=numbers), tail=Columns.empty(1, DIM), live=None)
    (found,) = nearest(far, query[None], 10, [one_in(2)], exact=False)
    assert found.rows.tolist() == order[450:460].tolist()


@pytest.mark.parametrize("exact", [True, False])
def test_a_batch_of_queries_agrees_with_single_ones(snapshot: Snapshot, exact: bool) -> None:
    """The product of one query rounds differently from that of many, so candidates have some slack."""
    queries = unit(40, 3)
    selections = [None, one_in(2), one_in(7), one_in(90)] * 10
    together = nearest(snapshot, queries, 10, selections, exact=exact)
    for query, selection, one in zip(queries, selections, together, strict=True):
        (alone,) = nearest(snapshot, query[None], 10, [selection], exact=exact)
        assert alone.rows.tolist() == one.rows.tolist()
        assert alone.distances.tolist() == one.distances.tolist()


@pytest.mark.parametrize("exact", [True, False])
def test_all_rows_tied_with_the_last_are_returned(exact: bool) -> None:
    """Their ids decide which of them stay."""
    vectors = unit(300, 0)
    vectors[50:90] = vectors[7]
    own = Snapshot(
        1, 1, rows(vectors, 1), Columns.empty(1, DIM), np.empty(0, np.float32), HnswIndex.build("bf16", vectors)
    )
    (found,) = nearest(own, vectors[7:8], 3, [None], exact=exact)
    if exact:
        assert sorted(found.rows.tolist()) == [7, *range(50, 90)]
    assert len(found.rows) >= 3 and set(found.distances.tolist()) == {0.0}


def test_the_tail_is_compared_by_product(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering its rows for each query would take many times as long."""
    gathered = []
    real = Snapshot.vectors
    monkeypatch.setattr(Snapshot, "vectors", lambda self, at: gathered.append(at) or real(self, at))
    queries = unit(5, 2)
    for selection in (None, one_in(2)):
        gathered.clear()
        nearest(snapshot, queries, 3, [selection] * 5, exact=False)
        assert max(int((at >= BASE).sum()) for at in gathered) <= 5


@pytest.mark.parametrize("exact", [True, False])
def test_a_filter_is_evaluated_once_for_many_queries(
    snapshot: Snapshot, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    real = OneIn.passes

    def passes(self: OneIn, own: Columns, at: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        calls.append(at if isinstance(at, slice) else None)
        return real(self, own, at)

    monkeypatch.setattr(OneIn, "passes", passes)
    nearest(snapshot, unit(40, 2), 3, [one_in(1)] * 40, exact=exact)
    assert sum(isinstance(at, slice) for at in calls) == (2 if exact else 1)  # for base and tail


def test_a_cosine_is_at_most_one() -> None:
    vectors = unit(300, 0)
    own = Snapshot(1, 1, rows(vectors, 1), Columns.empty(1, DIM), np.empty(0, np.float32))
    for found in nearest(own, vectors, 1, [None] * 300, exact=True):
        assert found.cosines[0] <= 1


def test_without_an_index_answers_are_exact(snapshot: Snapshot) -> None:
    (found,) = nearest(replace(snapshot, index=None), unit(1, 2), 3, [None], exact=False)
    assert found.method == "exact"


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_to_find(exact: bool) -> None:
    empty = Columns.empty(1, DIM)
    own = Snapshot(1, 1, empty, empty, np.empty(0, np.float32), HnswIndex.build("int8", empty.vectors))
    for found in nearest(own, unit(2, 0), 3, [None, one_in(2)], exact=exact):
        assert isinstance(found, Nearest) and len(found.rows) == 0
    assert nearest(own, unit(0, 0), 3, [], exact=exact) == []
