"""The gallery: entries, and the nearest of them to an image."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import index_files
from cbmir.runtime.gallery.columns import Snapshot
from cbmir.runtime.gallery.entry import Hit, SearchResult
from cbmir.runtime.gallery.filters import Filter, Selection
from cbmir.runtime.gallery.refreshing import (
    CHANGED,
    DUPLICATES,
    LISTS,
    MAP,
    SMALL,
    UNREADABLE,
    RefreshingStore,
    codes_for,
)
from cbmir.runtime.gallery.schema import SCHEMA
from cbmir.runtime.gallery.search import Nearest, nearest
from cbmir.runtime.gallery.store import STORE_FILES, Reader

__all__ = ["CHANGED", "DUPLICATES", "SMALL", "UNREADABLE", "Gallery", "is_gallery_file"]


def is_gallery_file(name: str) -> bool:
    """Whether a file or folder of this name in a gallery's folder is the gallery's own."""
    return name in STORE_FILES or name in (*LISTS, MAP) or index_files.is_derived(name)


class Gallery(RefreshingStore):
    """Made by `create` or `open`. Searching and writing are safe from many threads and processes at once.

    An answer is of one generation, which it names, and all that was acknowledged before the search began is in it.
    """

    def search(
        self,
        embedding: NDArray[np.float32],
        k: int,
        *,
        filter: Filter = Filter(),  # noqa: A002, B008 - the field's own name; it never changes
        exact: bool | None = None,
        vectors: int = 0,
    ) -> SearchResult:
        """The k nearest of the entries that pass the filter to a unit vector float32 [D], nearest first.

        All there are where fewer than k pass. Distances are exact and float64, equal ones in the order of their ids.
        With `exact` every entry is compared; without, those that the index proposes, where there is one (`info`): of
        equal images, it may then propose others than the first by id. With `vectors` > k the embeddings of so many
        nearest are answered, at a fraction of what so many hits would take. Raises GalleryError for a query of another
        size or norm or with NaN, for k < 0, for a filter that does not fit the gallery's labels, and where what was
        found is damaged.
        """
        return self.search_many(embedding[None], k, filters=[filter], exact=exact, vectors=vectors)[0]

    def search_many(
        self,
        embeddings: NDArray[np.float32],
        k: int,
        *,
        filters: Sequence[Filter] | None = None,
        exact: bool | None = None,
        vectors: int = 0,
    ) -> list[SearchResult]:
        """`search` for each of float32 [M, D], with a filter each: all of one generation, and multiplied together."""
        if k < 0:
            raise GalleryError(f"expected k >= 0 neighbours, found {k}")
        count = len(embeddings)
        self._check_vectors(embeddings, count)
        filters = [Filter()] * count if filters is None else filters
        if len(filters) != count:
            raise GalleryError(f"expected a filter for each of {count} embeddings, found {len(filters)}")
        for _ in range(2):
            with self._moment() as (reader, snapshot):
                known = {one: Selection(one, self.labels, reader) if one else None for one in set(filters)}
                found = nearest(
                    snapshot, embeddings, max(k, vectors), [known[one] for one in filters], exact=bool(exact)
                )
                answers = [_answer(reader, snapshot, one, k, vectors) for one in found]
            trusted = [one for one in answers if one is not None]
            if len(trusted) == count:
                return trusted
            self._forget(snapshot)
        raise GalleryError(f"{self.path}: expected to answer from vectors as they were stored, found others, even once "
                           f"loaded anew; check memory and disk, and run 'cbmir index verify'")  # fmt: skip

    def info(self) -> dict[str, Any]:
        """What the gallery is and holds, in plain values for JSON.

        `search` says how it is searched; `changed`, how many entries have changed since what is derived was written
        (None: nothing is).
        """
        with self.reading() as reader:
            counts = reader.counts()
            stamp = index_files.find(self.path, self.uuid)
            changed = None if stamp is None else reader.changes_since(stamp.generation)
        wanted = codes_for(reader.index_setting, reader.count)
        codes = None if stamp is None or changed is None or wanted is None else stamp.codes
        return {
            "path": str(self.path.resolve()),
            "schema": SCHEMA,
            "fingerprint": self.card.fingerprint,
            "encoder": self.card.encoder,
            "dim": self.card.embedding_dim,
            "crop": self.card.preprocess.crop,
            "created": self.created,
            "generation": reader.generation,
            "images": reader.count,
            "patients": counts.patients,
            "studies": counts.studies,
            "splits": counts.splits,
            "views": counts.views,
            "labels": counts.labels,
            "days": [counts.first, counts.last],
            "pseudonyms": self.has_pseudonyms,
            "index": reader.index_setting,
            "search": "exact" if codes is None else f"hnsw {codes}",
            "changed": None if changed is None else len(changed),
            "bytes": _bytes(self.path),
        }


def _answer(reader: Reader, snapshot: Snapshot, found: Nearest, k: int, vectors: int) -> SearchResult | None:
    """None where the vectors that it would answer with are not those that are stored: mapped files are verified when
    they are loaded, and may be damaged after."""
    order = _ordered(reader, snapshot, found, k)[: max(k, vectors)]
    numbers = snapshot.numbers(found.rows[order])
    distances, cosines = found.distances[order].tolist(), found.cosines[order].tolist()
    entries = reader.entries(numbers[:k])
    stored = snapshot.vectors(found.rows[order])
    if not np.array_equal(stored, reader.vectors(numbers)):
        return None
    hits = tuple(Hit(*one) for one in zip(entries, distances, cosines, strict=False))
    return SearchResult(snapshot.generation, hits, found.method, stored)


def _ordered(reader: Reader, snapshot: Snapshot, found: Nearest, k: int) -> NDArray[np.int64]:
    """Positions in `found`, equal distances in the order of the ids as far as the first k go."""
    distances = found.distances
    order = np.arange(len(distances))
    near = int(np.searchsorted(distances, distances[k - 1], side="right")) if 0 < k < len(distances) else len(distances)
    differences = np.diff(distances[:near])
    if k == 0 or differences.all():  # no two are equal
        return order
    groups = [group for group in np.split(order[:near], np.flatnonzero(differences) + 1) if len(group) > 1]
    numbers = snapshot.numbers(found.rows)
    sql = "SELECT number, id FROM entry WHERE number IN (SELECT value FROM json_each(?))"
    ids = dict(reader.query(sql, json.dumps(numbers[np.concatenate(groups)].tolist())))
    for group in groups:
        order[group] = sorted(group.tolist(), key=lambda at: str(ids.get(int(numbers[at]), "")))
    return order


def _bytes(folder: Path) -> int:
    """Of all files; what another process removes meanwhile counts as nothing."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(place, name).stat().st_size
    return size
