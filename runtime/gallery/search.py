"""Rank the rows of a snapshot for a query: by distance, exactly or with the index (`nearest`), or by how well their
labels match the query's probabilities (`agreeing`).

Both rank candidates in the same way: first by their float32 vectors, then the nearest of them in float64, always in the
same order of operations, so that equal images have equal distances at any position.
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

#: Largest error in the difference of two float32 cosines: norms are rounded, and the order of summation varies.
_SLACK = 2e-6
_BLOCK = 16_384  # rows multiplied at a time
_GATHERED = 2048  # rows gathered at a time, as many as fit into the cache
_QUERIES = 256
_FEW = 256
#: The index is asked for `_MORE` * k + `_AND` candidates: the more it visits, the fewer neighbours it misses.
_MORE, _AND = 3, 34
#: The first `_RANKED` * k + `_AND_RANKED` are ranked by their vectors: the codes give almost the right order.
_RANKED, _AND_RANKED = 1.5, 5
#: If a smaller share of the candidates passes the filter, the index is asked for more, to maintain the recall.
_LEFT = 0.75
#: Weight of the cosine relative to an expected agreement in [0, 1]: small, but it decides between equal labels.
NEARNESS = 0.1
#: Number of rows that can be compared in the time that the index takes to find one more candidate.
_ROWS_PER_CANDIDATE = 8


@dataclass(frozen=True, eq=False)
class Nearest:
    """Ranked rows with ties left open, so more than k if the k-th is tied. Distances and cosines are float64.

    `keys` float64 [n] increase with the rank and are equal for ties, which ids decide. They are the distances, unless
    rows are ranked by something else.
    """

    rows: Rows
    keys: NDArray[np.float64]
    distances: NDArray[np.float64]
    cosines: NDArray[np.float64]
    method: str


_NOTHING = Nearest(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0), "exact")


def nearest(snapshot: Snapshot, queries: Vectors, k: int, selections: Selections, *, exact: bool) -> list[Nearest]:
    """Find, for each unit vector of float32 [M, D], the k nearest rows that pass its selection, or all if fewer pass.
    Without an index the search is exact."""
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
    """Find the k rows that pass and have the highest `expected_agreement` + `NEARNESS` * cosine.

    Ties are ordered by distance. `probabilities` maps positions of labels to the query's probabilities.
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
    parts = [compared(snapshot.vectors(rows[at : at + _GATHERED]), query) for at in range(0, len(rows), _GATHERED)]
    distances, cosines = map(np.concatenate, zip(*parts, strict=True))
    values = agreement + NEARNESS * cosines
    order = np.lexsort((distances, -values))
    steps = (np.diff(values[order]) != 0) | (np.diff(distances[order]) != 0)
    keys = np.r_[0.0, np.cumsum(steps)]
    order = order[: np.searchsorted(keys, keys[wanted - 1], side="right")]
    return Nearest(rows[order], keys[: len(order)], distances[order], np.clip(cosines[order], -1, 1), "exact")


def expected_agreement(probabilities: Sequence[float], labels: Sequence[NDArray[np.int8]]) -> NDArray[np.float64]:
    """Compute how well the labels of n images are expected to match those of a query with probabilities p.

    This is the expected Jaccard index of the two sets of labels, approximated by sum(p y) / (sum(p) + sum(y) -
    sum(p y)), where y is 1 for a positive or uncertain label and 0 for a negative or unknown one, so unknown labels
    give an image no advantage. "No finding" counts as one more label: its y is 1 if all labels are known to be
    negative, and its p is the product of 1 - p over the labels, as if they were independent.

    Args:
        probabilities: One per label.
        labels: For each label, int8 [n] of 1, 0, -1 (uncertain) or `schema.UNKNOWN`.

    Returns:
        float64 [n] in [0, 1]; 0 for an image without known labels.
    """
    both, theirs = np.zeros((2, len(labels[0])))
    none = np.ones(len(labels[0]), np.bool_)
    for p, values in zip(probabilities, labels, strict=True):  # per label, so that a row's position cannot change sums
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
    """Build a search's result, or return None if a vector differs from the one in SQLite: mapped files are verified
    when they are loaded, but may be damaged later."""
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
    """Return positions in `found`, with ties that affect the first k ordered by id."""
    keys = found.keys
    order = np.arange(len(keys))
    near = int(np.searchsorted(keys, keys[k - 1], side="right")) if 0 < k < len(keys) else len(keys)
    differences = np.diff(keys[:near])
    if k == 0 or differences.all():  # no ties
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
    if len(rows) > min(2 * wanted + _AND_RANKED, _FEW):  # with fewer rows, computing all in float64 is faster
        rows = rows[_near(_cosines(snapshot, query, rows), wanted)]
    distances, cosines = compared(snapshot.vectors(rows), query)
    order = np.argsort(distances, kind="stable")
    order = order[: np.searchsorted(distances[order], distances[order[wanted - 1]], side="right")]
    return Nearest(rows[order], distances[order], distances[order], np.clip(cosines[order], -1, 1), method)


def _cosines(snapshot: Snapshot, query: Vectors, rows: Rows) -> Vectors:
    parts = (rows[at : at + _GATHERED] for at in range(0, len(rows), _GATHERED))
    return np.concatenate([products(query[None], snapshot.vectors(part))[0] for part in parts])


def compared(vectors: Vectors, query: Vectors) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the distances and cosines of unit vectors float32 [n, D] to a query float32 [D]: float64 [n] each."""
    exactly, own = vectors.astype(np.float64), query.astype(np.float64)
    differences = exactly - own
    return np.sqrt(np.vecdot(differences, differences)), np.vecdot(exactly, own)


def _near(cosines: NDArray[np.floating], wanted: int) -> Mask:
    """Mark the rows that may be among the `wanted` nearest, allowing for rounding, and NaN from a damaged file."""
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
            one: np.flatnonzero(mask)  # `_ranked` compares all of them
            for one, mask in masks.items()
            if mask is not None and 4 * np.count_nonzero(mask) <= len(mask)
        }
        found.update((at + number, few[one]) for number, one in enumerate(some) if one in few)
        together = [number for number, one in enumerate(some) if one not in few]
        rows = _best(parts, queries[at : at + _QUERIES][together], k, [masks[some[number]] for number in together])
        found.update((at + number, own) for number, own in zip(together, rows, strict=True))
    return [(found[number], "exact") for number in range(len(queries))]


def _best(parts: Sequence[Vectors], queries: Vectors, k: int, passing: Sequence[Mask | None]) -> list[Rows]:
    """Return, for each query, rows that include its k nearest, numbered through all parts. Products are computed block
    by block, and only rows that reach the k-th best so far are kept."""
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
    """Find the candidates in the base with the index, and those in the tail with a product."""
    fetch = _MORE * k + _AND
    proposed = index.search(queries, fetch)
    tail = _near_in_tail(snapshot, queries, k, selections)
    every: dict[Selection | None, Rows] = {}  # all rows of the base that pass, computed only when needed
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
    """Return, for each query, rows of the tail that include the tail's k nearest."""
    if not len(snapshot.tail):
        return [np.empty(0, np.int64)] * len(queries)
    found: list[Rows] = []
    for at in range(0, len(queries), _QUERIES):
        some = selections[at : at + _QUERIES]
        masks = {one: None if one is None else one.passes(snapshot.tail, slice(None)) for one in set(some)}
        found += _best([snapshot.tail.vectors], queries[at : at + _QUERIES], k, [masks[one] for one in some])
    return [rows + len(snapshot.base) for rows in found]


def _with_growth(index: HnswIndex, query: Vectors, wanted: int, rows: Rows, near: Rows) -> tuple[Rows, str]:
    """Ask the index, which cannot filter, for more candidates until enough of them pass. If that would cost more than
    comparing all `rows` that pass, return these."""
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
