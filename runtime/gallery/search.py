"""Which rows of a snapshot come first for a query: the nearest, by comparing all or by the index, and under a
selection; or those that agree most with what is expected of the query (`agreeing`).

Both ways end in the same ranking: candidates are compared by their float32 vectors first, then those near enough to
matter in float64, in one order of operations, so that equal images have equal distances wherever they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.gallery.columns import Selection, Snapshot
from cbmir.runtime.gallery.entry import Hit, SearchResult
from cbmir.runtime.gallery.hnsw import HnswIndex, products
from cbmir.runtime.gallery.reader import Reader

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Selections = Sequence[Selection | None]

#: By so much two cosines may be off in float32, as norms are rounded and products are summed in varying order.
_SLACK = 2e-6
_BLOCK = 16_384  # rows that are multiplied at once
_GATHERED = 2048  # rows that are copied together at once: as many as the cache holds
_QUERIES = 256
_FEW = 256
#: The index is asked for so many times k, and some more: the wider its walk, the fewer near ones it misses.
_MORE, _AND = 3, 34
#: So many times k of what it finds, and some more, are ranked by their vectors: its codes tell them nearly in order.
_RANKED, _AND_RANKED = 1.5, 5
#: So large a share of what it finds must pass a filter; else it is asked for more, to miss no more than without one.
_LEFT = 0.75
#: What a cosine of 1 adds to an expected agreement in [0, 1]: little, but it decides among equal labels.
NEARNESS = 0.1
#: The index finds one more candidate in the time in which so many rows are compared.
_ROWS_PER_CANDIDATE = 8


@dataclass(frozen=True, eq=False)
class Nearest:
    """Rows in their order, ties undecided: more than k where the k-th is tied. Distances and cosines are float64.

    `keys` float64 [n] rise with the order, and are equal where ids decide: the distances, unless rows are ranked by
    something else.
    """

    rows: Rows
    keys: NDArray[np.float64]
    distances: NDArray[np.float64]
    cosines: NDArray[np.float64]
    method: str


_NOTHING = Nearest(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0), "exact")


def nearest(snapshot: Snapshot, queries: Vectors, k: int, selections: Selections, *, exact: bool) -> list[Nearest]:
    """For each of the unit vectors float32 [M, D] the k nearest of the rows that its selection lets pass, or all where
    there are fewer. Without an index all answers are exact."""
    if k == 0:
        found = [(np.empty(0, np.int64), "exact")] * len(queries)
    elif exact or snapshot.index is None:
        found = _by_product(snapshot, queries, k, selections)
    else:
        found = _by_index(snapshot, snapshot.index, queries, k, selections)
    return [_ranked(snapshot, query, k, rows, method) for query, (rows, method) in zip(queries, found, strict=True)]


def agreeing(
    snapshot: Snapshot, query: Vectors, k: int, selection: Selection | None, probabilities: Mapping[int, float]
) -> Nearest:
    """The k of all rows that pass with the greatest `expected_agreement` + `NEARNESS` * cosine.

    Ties are in the order of distances. `probabilities` has the query's for columns of the labels.
    """
    mask = snapshot.passing(selection)
    rows = np.arange(len(snapshot.base) + len(snapshot.tail)) if mask is None else np.flatnonzero(mask)
    wanted = min(k, len(rows))
    if not wanted:
        return _NOTHING
    columns = [np.concatenate([snapshot.base.labels[at], snapshot.tail.labels[at]])[rows] for at in probabilities]
    agreement = expected_agreement([*probabilities.values()], columns)
    near = _near(agreement + NEARNESS * _cosines(snapshot, query, rows), wanted)
    rows, agreement = rows[near], agreement[near]
    parts = [_compared(snapshot, query, rows[at : at + _GATHERED]) for at in range(0, len(rows), _GATHERED)]
    distances, cosines = map(np.concatenate, zip(*parts, strict=True))
    values = agreement + NEARNESS * cosines
    order = np.lexsort((distances, -values))
    steps = (np.diff(values[order]) != 0) | (np.diff(distances[order]) != 0)
    keys = np.r_[0.0, np.cumsum(steps)]
    order = order[: np.searchsorted(keys, keys[wanted - 1], side="right")]
    return Nearest(rows[order], keys[: len(order)], distances[order], np.clip(cosines[order], -1, 1), "exact")


def expected_agreement(probabilities: Sequence[float], labels: Sequence[NDArray[np.int8]]) -> NDArray[np.float64]:
    """How far n images are expected to have the labels of a query of which only probabilities p are known.

    The expected Jaccard index of both sets of labels, approximated by sum(p y) / (sum(p) + sum(y) - sum(p y)), where
    y is 1 for a positive or uncertain label, and 0 for a negative one and for one that is not known: an image is not
    preferred because less is known of it. "No finding" is one more label: its y is 1 where all of them are known to
    be negative, and its p is the product of 1 - p over the labels, as if these were independent.

    Args:
        probabilities: One per label.
        labels: For each label int8 [n]: 1, 0, -1 (uncertain) or `schema.UNKNOWN`.

    Returns:
        float64 [n] in [0, 1]; 0 where nothing is known of an image.
    """
    both, theirs = np.zeros((2, len(labels[0])))
    none = np.ones(len(labels[0]), np.bool_)
    for p, values in zip(probabilities, labels, strict=True):  # label by label: the same sum wherever a row lies
        positive = np.abs(values) == 1
        both += p * positive
        theirs += positive
        none &= values == 0
    no_finding = float(np.prod([1 - p for p in probabilities]))
    both += no_finding * none
    union = sum(probabilities) + no_finding + theirs + none - both
    return np.divide(both, union, out=np.zeros_like(both), where=union > 0)


def answer(
    reader: Reader, snapshot: Snapshot, found: Nearest, k: int, vectors: int, *, cells: bool
) -> SearchResult | None:
    """What a search answers. None where the vectors that it would answer with are not those that are stored: mapped
    files are verified when they are loaded, and may be damaged after."""
    order = _ordered(reader, snapshot, found, k)[: max(k, vectors)]
    numbers = snapshot.numbers(found.rows[order])
    distances, cosines = found.distances[order].tolist(), found.cosines[order].tolist()
    entries = reader.entries(numbers[:k])
    stored = snapshot.vectors(found.rows[order])
    if not np.array_equal(stored, reader.vectors(numbers)):
        return None
    hits = tuple(Hit(*one) for one in zip(entries, distances, cosines, strict=False))
    codes = reader.cells(numbers[:k]) if cells else None
    return SearchResult(snapshot.generation, hits, found.method, stored, codes)


def _ordered(reader: Reader, snapshot: Snapshot, found: Nearest, k: int) -> Rows:
    """Positions in `found`, equal keys in the order of the ids as far as the first k go."""
    keys = found.keys
    order = np.arange(len(keys))
    near = int(np.searchsorted(keys, keys[k - 1], side="right")) if 0 < k < len(keys) else len(keys)
    differences = np.diff(keys[:near])
    if k == 0 or differences.all():  # no two are equal
        return order
    groups = [group for group in np.split(order[:near], np.flatnonzero(differences) + 1) if len(group) > 1]
    numbers = snapshot.numbers(found.rows)
    ids = reader.ids_of(numbers[np.concatenate(groups)])
    for group in groups:
        order[group] = sorted(group.tolist(), key=lambda at: ids.get(int(numbers[at]), ""))
    return order


def _ranked(snapshot: Snapshot, query: Vectors, k: int, rows: Rows, method: str) -> Nearest:
    wanted = min(k, len(rows))
    if not wanted:
        return replace(_NOTHING, method=method)
    if len(rows) > min(2 * wanted + _AND_RANKED, _FEW):  # else float64 for all costs less than to tell which need it
        rows = rows[_near(_cosines(snapshot, query, rows), wanted)]
    distances, cosines = _compared(snapshot, query, rows)
    order = np.argsort(distances, kind="stable")
    order = order[: np.searchsorted(distances[order], distances[order[wanted - 1]], side="right")]
    return Nearest(rows[order], distances[order], distances[order], np.clip(cosines[order], -1, 1), method)


def _cosines(snapshot: Snapshot, query: Vectors, rows: Rows) -> Vectors:
    parts = (rows[at : at + _GATHERED] for at in range(0, len(rows), _GATHERED))
    return np.concatenate([products(query[None], snapshot.vectors(part))[0] for part in parts])


def _compared(snapshot: Snapshot, query: Vectors, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances and cosines of rows, float64."""
    exactly, own = snapshot.vectors(rows).astype(np.float64), query.astype(np.float64)
    differences = exactly - own
    return np.sqrt(np.vecdot(differences, differences)), np.vecdot(exactly, own)


def _near(cosines: NDArray[np.floating], wanted: int) -> Mask:
    """Which may be among the `wanted` nearest, for all that rounding can do; also NaN, of a file that was damaged."""
    near: Mask = ~(cosines < np.partition(cosines, -wanted)[-wanted] - _SLACK)
    return near


# -- all rows


def _by_product(snapshot: Snapshot, queries: Vectors, k: int, selections: Selections) -> list[tuple[Rows, str]]:
    found: dict[int, Rows] = {}
    parts = (snapshot.base.vectors, snapshot.tail.vectors)
    for at in range(0, len(queries), _QUERIES):
        some = selections[at : at + _QUERIES]
        masks = {one: snapshot.passing(one) for one in set(some)}
        few = {
            one: np.flatnonzero(mask)  # `_ranked` compares them all
            for one, mask in masks.items()
            if mask is not None and 4 * np.count_nonzero(mask) <= len(mask)
        }
        found.update((at + number, few[one]) for number, one in enumerate(some) if one in few)
        together = [number for number, one in enumerate(some) if one not in few]
        rows = _best(parts, queries[at : at + _QUERIES][together], k, [masks[some[number]] for number in together])
        found.update((at + number, own) for number, own in zip(together, rows, strict=True))
    return [(found[number], "exact") for number in range(len(queries))]


def _best(parts: Sequence[Vectors], queries: Vectors, k: int, passing: Sequence[Mask | None]) -> list[Rows]:
    """For each query, rows of the parts, counted through, among which its k nearest are: a block of products after the
    other, of which is kept what reaches the k-th best so far."""
    kept = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
    least = np.full(len(queries), -np.inf, np.float32)
    start = 0
    for part in parts:
        for at in range(0, len(part) if len(queries) else 0, _BLOCK):
            cosines = products(queries, part[at : at + _BLOCK])
            for number, mask in enumerate(passing):
                if mask is not None:
                    cosines[number, ~mask[start : start + cosines.shape[1]]] = -np.inf
            reaching = (cosines >= least[:, None]) & (cosines > -np.inf)
            for number in np.flatnonzero(reaching.any(axis=1)).tolist():
                columns = np.flatnonzero(reaching[number])
                rows = np.concatenate([kept[number][0], columns + start])
                values = np.concatenate([kept[number][1], cosines[number, columns]])
                if k and len(rows) > k:
                    least[number] = np.partition(values, -k)[-k] - _SLACK
                    near = values >= least[number]
                    rows, values = rows[near], values[near]
                kept[number] = (rows, values)
            start += cosines.shape[1]
    return [rows for rows, _ in kept]


# -- the index


def _by_index(
    snapshot: Snapshot, index: HnswIndex, queries: Vectors, k: int, selections: Selections
) -> list[tuple[Rows, str]]:
    """The base's candidates by the index, and the tail's by product."""
    fetch = _MORE * k + _AND
    proposed = index.search(queries, fetch)
    tail = _near_in_tail(snapshot, queries, k, selections)
    every: dict[Selection | None, Rows] = {}  # rows of the base that pass, where that had to be known
    found = []
    for number, (query, selection) in enumerate(zip(queries, selections, strict=True)):
        near, method = snapshot.passing_base(selection, proposed[number]), f"hnsw {index.codes}"
        if len(near) < fetch * _LEFT:
            if selection not in every:
                every[selection] = snapshot.passing_base(selection, np.arange(len(index)))
            near, method = _with_growth(index, query, fetch, every[selection], near)
        if method != "exact":
            near = near[: int(_RANKED * k) + _AND_RANKED]
        found.append((np.concatenate([near, tail[number]]), method))
    return found


def _near_in_tail(snapshot: Snapshot, queries: Vectors, k: int, selections: Selections) -> list[Rows]:
    """For each query, rows among which the k nearest of the tail are."""
    if not len(snapshot.tail):
        return [np.empty(0, np.int64)] * len(queries)
    found: list[Rows] = []
    for at in range(0, len(queries), _QUERIES):
        some = selections[at : at + _QUERIES]
        masks = {one: None if one is None else one.passes(snapshot.tail, slice(None)) for one in set(some)}
        found += _best([snapshot.tail.vectors], queries[at : at + _QUERIES], k, [masks[one] for one in some])
    return [rows + len(snapshot.base) for rows in found]


def _with_growth(index: HnswIndex, query: Vectors, wanted: int, rows: Rows, near: Rows) -> tuple[Rows, str]:
    """The index has no filter. Where too few of its candidates are among the rows that pass, it is asked for more, as
    long as that costs less than to compare them all."""
    passing = np.zeros(len(index), np.bool_)
    passing[rows] = True
    fetch = wanted
    while len(near) < min(wanted * _LEFT, len(rows)):
        fetch = max(2 * fetch, wanted * len(index) // max(len(rows), 1))
        if len(rows) <= _ROWS_PER_CANDIDATE * fetch or fetch >= len(index):
            return rows, "exact"
        (found,) = index.search(query[None], fetch)
        near = found[passing[found]]
    return near, f"hnsw {index.codes}"
