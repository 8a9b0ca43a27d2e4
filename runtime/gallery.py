"""The gallery: labelled images to find neighbours among, with their embeddings, in one folder.

`gallery.sqlite` (`cbmir.runtime.store`) is the truth; the approximate index beside it (`cbmir.runtime.vector_index`) is
derived from it. A gallery belongs to one embedding space, named by the model card's fingerprint.

A gallery is patient data: chest radiographs identify patients. Its folder is readable by its owner only.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime.store import DATABASE, SCHEMA, Entry, Snapshot, Store
from cbmir.runtime.vector_index import ABOUT_FILE, INDEX_FILE, VectorIndex

log = logging.getLogger("cbmir")

UNREADABLE = "unreadable.csv"
#: Every file that a gallery's folder may hold.
FILES = frozenset({DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", INDEX_FILE, ABOUT_FILE, UNREADABLE})
#: Up to this many entries a matrix product is as fast as an index, and exact.
EXACT_LIMIT = 20_000


@dataclass(frozen=True)
class Hit:
    """A neighbour: `distance` is Euclidean between unit vectors, in [0, 2]; `cosine` in [-1, 1]."""

    entry: Entry
    distance: float
    cosine: float


class Gallery(Store):
    """Made by `create` or `open`. Reading and adding are safe from many threads; another process may add meanwhile."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        super().__init__(path, connection)
        self._index: tuple[int, VectorIndex] | None = None  # with its generation
        self._index_lock = threading.Lock()  # not the store's: all but approximate searches go on during a build

    def check_model(self, card: ModelCard) -> None:
        """Raise GalleryError unless the gallery's embeddings are of this model's space."""
        if card.fingerprint != self.card.fingerprint:
            raise GalleryError(
                f"{self.path}: expected a gallery of this model (fingerprint {card.fingerprint}), found one of another "
                f"(fingerprint {self.card.fingerprint}); their distances mean nothing. Build it again with "
                f"'cbmir index build'"
            )

    def search(
        self,
        embedding: NDArray[np.float32],
        k: int,
        *,
        exclude_patients: Collection[str] = frozenset(),
        exact: bool | None = None,
    ) -> list[Hit]:
        """The k nearest entries to a unit vector float32 [D], nearest first, ties in the order of their ids.

        All there are where there are fewer than k once the patients are left out. `exact` None searches exactly up to
        `EXACT_LIMIT` entries and approximately beyond; distances are exact either way. Raises GalleryError for a query
        of the wrong size or norm or with NaN, for k < 0, and where an embedding in the gallery is damaged.
        """
        if isinstance(exclude_patients, str):
            raise GalleryError("expected a set of patient ids to leave out, found a single text")
        self._check_vectors(embedding[None], 1)
        if k < 0:
            raise GalleryError(f"expected k >= 0 neighbours, found {k}")
        snapshot = self._snapshot()
        allowed = np.ones(len(snapshot.numbers), np.bool_)
        for patient in exclude_patients:
            allowed &= snapshot.patients != patient
        wanted = min(k, int(allowed.sum()))
        if not wanted:
            return []
        if exact if exact is not None else len(snapshot.numbers) <= EXACT_LIMIT:
            rows = np.flatnonzero(allowed)
            cosines = (snapshot.embeddings @ embedding)[rows]
            # Rounding differs from row to row in a matrix product: keep all that may be among the nearest.
            rows = rows[cosines >= np.partition(cosines, -wanted)[-wanted] - 1e-6]
        else:
            rows = self._approximate(snapshot, embedding, allowed, wanted)
        vectors = snapshot.embeddings[rows].astype(np.float64)
        distances = np.sqrt(np.square(vectors - embedding).sum(axis=1))
        order = np.lexsort((snapshot.ids[rows].astype(str), distances))[:wanted]
        entries = self._entries("number", snapshot.numbers[rows[order]].tolist())
        cosines = (vectors[order] * embedding).sum(axis=1)
        return [
            Hit(entry, float(distance), float(cosine))
            for entry, distance, cosine in zip(entries, distances[order], cosines, strict=True)
        ]

    def info(self) -> dict[str, Any]:
        """What the gallery is and holds, in plain values for JSON."""
        with self._database("read") as database:
            patients = database.execute("SELECT count(DISTINCT patient_id) FROM entry").fetchone()[0]
            labels = [json.loads(text) for (text,) in database.execute("SELECT labels FROM entry")]
            splits = dict(database.execute("SELECT split, count(*) FROM entry GROUP BY split ORDER BY split"))
        positives = Counter(name for own in labels for name, value in own.items() if value in (1, -1))
        return {
            "path": str(self.path.resolve()),
            "schema": SCHEMA,
            "fingerprint": self.card.fingerprint,
            "encoder": self.card.encoder,
            "dim": self.card.embedding_dim,
            "crop": self.card.preprocess.crop,
            "created": self.created,
            "generation": self._generation(),
            "images": len(labels),
            "patients": patients,
            "splits": splits,
            "labels": {name: positives[name] for name in self.labels.names},
            "search": "exact" if len(labels) <= EXACT_LIMIT else "approximate",
            "bytes": sum(file.stat().st_size for file in self.path.iterdir() if file.is_file()),
        }

    def write_index(self) -> None:
        """Build and write the approximate index now, rather than at the first search that needs it."""
        self._build_index(self._snapshot())

    def close(self) -> None:
        super().close()
        self._index = None

    def _approximate(
        self, snapshot: Snapshot, embedding: NDArray[np.float32], allowed: NDArray[np.bool_], wanted: int
    ) -> NDArray[np.int64]:
        """Rows of at least `wanted` allowed candidates: the index has no filter, so fetch more until enough remain."""
        index = self._current_index(snapshot)
        fetch = 4 * wanted + 64
        while True:
            rows = np.searchsorted(snapshot.numbers, index.search(embedding, fetch))
            rows = rows[allowed[rows]]
            if len(rows) >= wanted:
                return rows
            if fetch >= len(index):  # the graph does not reach some entries
                return np.flatnonzero(allowed)
            fetch *= 2

    def _current_index(self, snapshot: Snapshot) -> VectorIndex:
        with self._index_lock:
            if self._index is not None and self._index[0] == snapshot.generation:
                return self._index[1]
            index = VectorIndex.load(self.path, self._stamp(snapshot))
            if isinstance(index, str):
                log.info("The approximate index %s; building it for %d images.", index, len(snapshot.numbers))
                index = self._build_index(snapshot)
            self._index = (snapshot.generation, index)
            return index

    def _build_index(self, snapshot: Snapshot) -> VectorIndex:
        index = VectorIndex.build(snapshot.numbers.astype(np.uint64), snapshot.embeddings)
        if self._is_current(snapshot) and os.access(self.path, os.W_OK):
            index.save(self.path, self._stamp(snapshot))
        return index

    def _stamp(self, snapshot: Snapshot) -> dict[str, Any]:
        """What an index must have been built from. A folder may have been replaced under an open gallery."""
        return {"gallery": self._uuid, "generation": snapshot.generation, "count": len(snapshot.numbers)}
