"""The data that a search reads: the columns and vectors of one generation of a gallery.

Most rows are in the base, which was derived from SQLite and is mapped from files if it is large. Later changes are in
the tail, which is small and in memory. A base row that was changed or removed is dead. A reader therefore catches up
with a writer by reading only the difference, and a snapshot never changes.

Rows are addressed by position: first the rows of the base, then those of the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cbmir.runtime.gallery.filters import AllOf, Condition, Filter, HasLabel, parse
from cbmir.runtime.gallery.hnsw import HnswIndex
from cbmir.runtime.gallery.schema import UNKNOWN, Meta

_S = TypeVar("_S", bound=np.generic)
_BLOCK = 4096  # rows copied at a time
_FEW = 8  # up to this many ids are compared one by one, which is faster


@dataclass(frozen=True, eq=False)
class Columns:
    """n entries in the form that searches use, ordered by number.

    Patients and studies are numbers from `schema.patient_number` and `study_number`, dates are YYYYMMDD; 0 means
    unknown. Views and sources are positions in `names`. Labels are 1, 0, -1 (uncertain) or `schema.UNKNOWN`, with one
    row per label.
    """

    numbers: NDArray[np.int64]  # [n]
    patients: NDArray[np.int64]  # [n]
    studies: NDArray[np.int64]  # [n]
    views: NDArray[np.int32]  # [n]
    sources: NDArray[np.int32]  # [n]
    dates: NDArray[np.int32]  # [n]
    labels: NDArray[np.int8]  # [C, n]
    vectors: NDArray[np.float32]  # [n, D], unit norm
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def empty(cls, classes: int, dim: int) -> Columns:
        """Return columns without rows, for C labels and D dimensions."""
        none, codes = np.empty(0, np.int64), np.empty(0, np.int32)
        labels, vectors = np.empty((classes, 0), np.int8), np.empty((0, dim), np.float32)
        return cls(none, none, none, codes, codes, codes, labels, vectors, ())

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """Join the rows of one or more parts, ordered by number."""
        codes = {name: code for code, name in enumerate(sorted({name for part in parts for name in part.names}))}
        new = [np.array([codes[name] for name in part.names], np.int32) for part in parts]
        parts = [replace(p, views=of[p.views], sources=of[p.sources]) for p, of in zip(parts, new, strict=True)]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis=int(name == "labels"))
                  for name in ARRAYS}  # fmt: skip
        rows = cls(**arrays, names=tuple(codes))
        sorted_already = bool((rows.numbers[1:] > rows.numbers[:-1]).all())
        return rows if sorted_already else rows.take(np.argsort(rows.numbers))

    @classmethod
    def collected(cls, blocks: Iterable[Columns], vectors: NDArray[np.float32], classes: int) -> Columns:
        """Join blocks that are ordered by number, copying their vectors into the array `vectors` [n, D]."""
        end = 0

        def put(block: NDArray[np.float32]) -> None:
            nonlocal end
            vectors[end : end + len(block)] = block  # raises ValueError if there are more rows than expected
            end += len(block)

        rows = cls.streamed(blocks, put, classes)
        return replace(rows, vectors=vectors[:end])

    @classmethod
    def streamed(cls, blocks: Iterable[Columns], put: Callable[[NDArray[np.float32]], object], classes: int) -> Columns:
        """Join blocks that are ordered by number, without their vectors. These are passed to `put` block by block, so
        that they are never all in memory."""
        parts = [cls.empty(classes, 0)]
        for block in blocks:
            put(block.vectors)
            parts.append(replace(block, vectors=np.empty((len(block), 0), np.float32)))
        return cls.joined(parts)

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        """int64 [2, C]: for each label, the number of rows in which it is 1 or -1, and in which it is known."""
        return _label_counts(self.labels)

    def take(self, at: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Columns:
        """Return some of the rows."""
        arrays = {
            name: getattr(self, name)[..., at] if name == "labels" else getattr(self, name)[at] for name in ARRAYS
        }
        return Columns(**arrays, names=self.names)


def _label_counts(labels: NDArray[np.int8]) -> NDArray[np.int64]:
    return np.stack([np.count_nonzero(np.abs(labels) == 1, axis=1), np.count_nonzero(labels != UNKNOWN, axis=1)])


#: Names of the arrays of `Columns`, in order.
ARRAYS = tuple(one.name for one in fields(Columns) if one.name != "names")


class Selection:
    """A filter translated for one gallery, so that it can test rows of `Columns`."""

    def __init__(self, filter: Filter, meta: Meta) -> None:
        """Raises GalleryError as `filters.parse` does. Ids that the gallery does not contain exclude nothing."""
        self._patients = np.array(sorted(meta.patient_numbers(filter.exclude_patients)), np.int64)
        self._studies = np.array(sorted(meta.study_numbers(filter.exclude_studies)), np.int64)
        self._only = sorted(meta.patient_numbers(filter.only_patients)) if filter.only_patients else None
        self._where = parse(filter.where, meta.labels) if filter.where else None
        self._names = (filter.view.casefold(), filter.source.casefold())
        self._days = (filter.first_day, filter.last_day) if filter.since or filter.until else None

    def passes(self, rows: Columns, at: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
        """Return which of the rows `at` pass: bool [n]."""
        passing = np.ones(len(rows.numbers[at]), np.bool_)
        for excluded, column in ((self._patients, rows.patients), (self._studies, rows.studies)):
            for number in excluded if len(excluded) <= _FEW else ():
                passing &= column[at] != number
            if len(excluded) > _FEW:
                passing &= ~np.isin(column[at], excluded)
        if self._only is not None:
            passing &= np.isin(rows.patients[at], self._only)
        if self._where is not None:
            passing &= _holds(self._where, rows.labels, at)
        for wanted, names in zip(self._names, (rows.views, rows.sources), strict=True):
            if wanted:
                codes = [code for code, name in enumerate(rows.names) if name.casefold() == wanted]
                passing &= np.isin(names[at], codes)
        if self._days is not None:
            passing &= (rows.dates[at] >= max(self._days[0], 1)) & (rows.dates[at] <= self._days[1])
        return passing


def _holds(condition: Condition, labels: NDArray[np.int8], at: NDArray[np.int64] | slice) -> NDArray[np.bool_]:
    if isinstance(condition, HasLabel):
        values = labels[condition.index][at]
        known: NDArray[np.bool_] = np.abs(values) == 1 if condition.present else values == 0
        return known
    parts = [_holds(part, labels, at) for part in condition.parts]
    joint = np.logical_and if isinstance(condition, AllOf) else np.logical_or
    holding: NDArray[np.bool_] = joint.reduce(parts)
    return holding


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A gallery at one generation, with a base from the generation `since`.

    `live` bool [n] marks the rows of the base that are not dead; None if all are live. `index` covers the base's rows,
    if there is an index. `reference_distances` are those of the base (`cbmir.runtime.novelty`), empty unless the base
    is mapped from the derived files.
    """

    generation: int
    since: int
    base: Columns
    tail: Columns
    reference_distances: NDArray[np.float32]
    index: HnswIndex | None = None
    live: NDArray[np.bool_] | None = None
    is_mapped: bool = False

    @classmethod
    def whole(cls, generation: int, base: Columns) -> Snapshot:
        """Make a snapshot from a base in memory, without a tail or an index."""
        tail = Columns.empty(len(base.labels), base.vectors.shape[1])
        return cls(generation, generation, base, tail, np.empty(0, np.float32))

    def __len__(self) -> int:
        dead = 0 if self.live is None else int(np.count_nonzero(~self.live))
        return len(self.base) - dead + len(self.tail)

    @cached_property
    def label_shares(self) -> tuple[float | None, ...]:
        """As in `SearchableGallery.label_shares`, in the order of the labels."""
        counts = self.base.label_counts + self.tail.label_counts
        if self.live is not None:
            counts = counts - _label_counts(self.base.labels[:, ~self.live])
        return tuple(one / of if of else None for one, of in counts.T.tolist())

    @cached_property
    def holds_removed(self) -> bool:
        """Whether the base contains rows of removed entries."""
        if self.live is None:
            return False
        return not np.isin(self.base.numbers[~self.live], self.tail.numbers).all()

    def changed(self, generation: int, numbers: NDArray[np.int64], blocks: Iterable[Columns]) -> Snapshot:
        """Return the snapshot of a later generation, in which `blocks` replace the entries `numbers`."""
        live = self.live
        at = np.searchsorted(self.base.numbers, numbers)
        there = at < len(self.base)
        there[there] = self.base.numbers[at[there]] == numbers[there]
        if there.any():
            live = np.ones(len(self.base), np.bool_) if live is None else live.copy()
            live[at[there]] = False
        kept = self.tail.take(~np.isin(self.tail.numbers, numbers))
        return replace(self, generation=generation, tail=Columns.joined([kept, *blocks]), live=live)

    def has_patient(self, number: int) -> bool:
        """Return whether a live row belongs to the patient with this number."""
        rows = np.flatnonzero(self.base.patients == number)
        is_live = self.live is None or self.live[rows].any()
        return bool((len(rows) and is_live) or (self.tail.patients == number).any())

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of the rows at these positions: float32 [n, D]."""
        return self._gathered(rows, self.base.vectors, self.tail.vectors)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the rows at these positions: int64 [n]."""
        return self._gathered(rows, self.base.numbers, self.tail.numbers)

    def _gathered(self, rows: NDArray[np.int64], base: NDArray[_S], tail: NDArray[_S]) -> NDArray[_S]:
        if not len(self.tail):
            return base[rows]
        gathered = np.empty((len(rows), *base.shape[1:]), base.dtype)
        in_base = rows < len(base)
        gathered[in_base] = base[rows[in_base]]
        gathered[~in_base] = tail[rows[~in_base] - len(base)]
        return gathered

    def passing(self, selection: Selection | None) -> NDArray[np.bool_] | None:
        """Return which rows are live and pass: bool [positions], or None if all rows do."""
        if selection is None and self.live is None:
            return None
        whole = slice(None)
        parts = [
            np.ones(len(rows), np.bool_) if selection is None else selection.passes(rows, whole)
            for rows in (self.base, self.tail)
        ]
        if self.live is not None:
            parts[0] &= self.live
        return np.concatenate(parts)

    def count(self, selection: Selection) -> int:
        """Count the rows that are live and pass."""
        mask = self.passing(selection)
        assert mask is not None  # `passing` returns None only without a selection
        return int(np.count_nonzero(mask))

    def passing_base(self, selection: Selection | None, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of the given positions in the base whose rows are live and pass, in the same order."""
        if self.live is not None:
            rows = rows[self.live[rows]]
        return rows if selection is None else rows[selection.passes(self.base, rows)]

    def blocks(self) -> Iterator[Columns]:
        """Yield every live row, ordered by number, in blocks from which a new base is made."""
        tail = self.tail
        for start in range(0, len(self.base), _BLOCK):
            block = self.base.take(slice(start, start + _BLOCK))
            last = int(block.numbers[-1])
            if self.live is not None:
                block = block.take(self.live[start : start + _BLOCK])
            cut = int(np.searchsorted(tail.numbers, last))
            yield block if not cut else Columns.joined([block, tail.take(slice(cut))])
            tail = tail.take(slice(cut, None))
        if len(tail):
            yield tail
