"""What a search works on: the columns and vectors of a gallery as of one generation.

Nearly all of it is the base, which was derived from SQLite once and, where it is large, is mapped from files; what
changed since is the tail, small and in memory. A base row that was changed or removed is dead. So a reader follows a
writer by reading the difference alone, and a snapshot, once made, never changes.

A row is addressed by its position: those of the base first, then those of the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cbmir.runtime.gallery.filters import Selection
    from cbmir.runtime.gallery.hnsw import HnswIndex
    from cbmir.runtime.gallery.reader import Columns, Reader

_S = TypeVar("_S", bound=np.generic)
_BLOCK = 4096  # rows that are copied at once


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns of n entries, in the order of their numbers.

    Patients and studies by their numbers, 0 where there is none; `views` are positions in `names`; dates are YYYYMMDD,
    0 where there is none; labels are 1, 0, -1 (uncertain) or -2 (unknown), a row for each of the C labels.
    """

    numbers: NDArray[np.int64]  # [n]
    patients: NDArray[np.int64]  # [n]
    studies: NDArray[np.int64]  # [n]
    views: NDArray[np.int32]  # [n]
    dates: NDArray[np.int32]  # [n]
    labels: NDArray[np.int8]  # [C, n]
    vectors: NDArray[np.float32]  # [n, D]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, columns: Columns) -> Rows:
        """A block as the store gives it."""
        names = tuple(sorted(set(columns.views)))
        at = {name: position for position, name in enumerate(names)}
        return cls(
            columns.numbers, columns.patients, columns.studies,
            np.array([at[name] for name in columns.views], np.int32), columns.dates,
            np.ascontiguousarray(columns.labels.T), columns.vectors, names,
        )  # fmt: skip

    @classmethod
    def empty(cls, classes: int, dim: int) -> Rows:
        """No row, of C labels and D dimensions."""
        none = np.empty(0, np.int64)
        codes = np.empty(0, np.int32)
        return cls(none, none, none, codes, codes, np.empty((classes, 0), np.int8), np.empty((0, dim), np.float32), ())

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of one or more parts, in the order of their numbers."""
        names = tuple(sorted({name for part in parts for name in part.names}))
        views = [np.array([names.index(name) for name in part.names], np.int32)[part.views] for part in parts]
        rows = cls(
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.patients for part in parts]),
            np.concatenate([part.studies for part in parts]),
            np.concatenate(views),
            np.concatenate([part.dates for part in parts]),
            np.concatenate([part.labels for part in parts], axis=1),
            np.concatenate([part.vectors for part in parts]),
            names,
        )
        sorted_already = bool((rows.numbers[1:] > rows.numbers[:-1]).all())
        return rows if sorted_already else rows.take(np.argsort(rows.numbers))

    @classmethod
    def collected(cls, blocks: Iterable[Rows], vectors: NDArray[np.float32], classes: int) -> Rows:
        """All rows of blocks that are in the order of numbers, with their vectors in an array [n, D] of that size."""
        end = 0

        def put(block: NDArray[np.float32]) -> None:
            nonlocal end
            vectors[end : end + len(block)] = block  # which raises where there are more than expected
            end += len(block)

        rows = cls.columns(blocks, put, classes)
        return replace(rows, vectors=vectors[:end])

    @classmethod
    def columns(cls, blocks: Iterable[Rows], put: Callable[[NDArray[np.float32]], object], classes: int) -> Rows:
        """All rows of blocks that are in the order of numbers, but for their vectors: `put` is given these, block by
        block, so that they never are in memory as a whole."""
        parts = [cls.empty(classes, 0)]
        for block in blocks:
            put(block.vectors)
            parts.append(replace(block, vectors=np.empty((len(block), 0), np.float32)))
        return cls.joined(parts)

    def take(self, at: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Rows:
        """Some of the rows."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        taken = {name: value[..., at] if name == "labels" else value[at] for name, value in values.items()
                 if name != "names"}  # fmt: skip
        return Rows(**taken, names=self.names)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A gallery as of one generation; its base is of the generation `since`.

    `live` bool [n]: which rows of the base still count; None: all do. `index` is over the base's rows, where there is
    one; `reference_distances` is as `cbmir.runtime.novelty` has it, of the base, and empty where the base is not mapped
    from what was derived.
    """

    generation: int
    since: int
    base: Rows
    tail: Rows
    reference_distances: NDArray[np.float32]
    index: HnswIndex | None = None
    live: NDArray[np.bool_] | None = None
    is_mapped: bool = False

    @classmethod
    def whole(cls, generation: int, base: Rows) -> Snapshot:
        """One that is all base, in memory, and has no index."""
        tail = Rows.empty(len(base.labels), base.vectors.shape[1])
        return cls(generation, generation, base, tail, np.empty(0, np.float32))

    def __len__(self) -> int:
        dead = 0 if self.live is None else int(np.count_nonzero(~self.live))
        return len(self.base) - dead + len(self.tail)

    @cached_property
    def holds_removed(self) -> bool:
        """Whether the base has rows of entries that are gone."""
        if self.live is None:
            return False
        return not np.isin(self.base.numbers[~self.live], self.tail.numbers).all()

    def refreshed(self, reader: Reader) -> Snapshot | None:
        """As of the reader's generation, by what changed since this one's; None where that is not known any more.

        Raises GalleryError for a damaged row.
        """
        changed = reader.changes_since(self.generation)
        if changed is None:
            return None
        live = self.live
        at = np.searchsorted(self.base.numbers, changed)
        there = at < len(self.base)
        there[there] = self.base.numbers[at[there]] == changed[there]
        if there.any():
            live = np.ones(len(self.base), np.bool_) if live is None else live.copy()
            live[at[there]] = False
        kept = self.tail.take(~np.isin(self.tail.numbers, changed))
        new = (Rows.of(block) for block in reader.columns(changed))
        fresh = replace(self, generation=reader.generation, tail=Rows.joined([kept, *new]), live=live)
        return fresh if len(fresh) == reader.count else None  # a damaged page may hide an entry

    def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [n, D] of the rows at these positions."""
        return self._gathered(rows, self.base.vectors, self.tail.vectors)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n], numbers of the rows at these positions."""
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
        """bool [positions]: the rows that count and pass; None where all do."""
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

    def passing_base(self, selection: Selection | None, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the base's rows at these positions that count and pass, in their order."""
        if self.live is not None:
            rows = rows[self.live[rows]]
        return rows if selection is None else rows[selection.passes(self.base, rows)]

    def blocks(self) -> Iterator[Rows]:
        """Every row that counts, in the order of numbers, in blocks: what a new base is made of."""
        tail = self.tail
        for start in range(0, len(self.base), _BLOCK):
            block = self.base.take(slice(start, start + _BLOCK))
            last = int(block.numbers[-1])
            if self.live is not None:
                block = block.take(self.live[start : start + _BLOCK])
            cut = int(np.searchsorted(tail.numbers, last))
            yield block if not cut else Rows.joined([block, tail.take(slice(cut))])
            tail = tail.take(slice(cut, None))
        if len(tail):
            yield tail
