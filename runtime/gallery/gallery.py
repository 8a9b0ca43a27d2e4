"""A gallery in a folder, with entries, embeddings and thumbnails in SQLite, that can be searched for neighbours.

SQLite (with a write-ahead log) holds all data. `Reader` and `Writer` use transactions: each change raises the gallery's
generation by one and survives a crash once it is acknowledged. Searches use data derived from SQLite (`IndexCache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.files import folder_size
from cbmir.labels import LabelSet
from cbmir.runtime.gallery import index_files, schema
from cbmir.runtime.gallery.cells import CellCodec, coded
from cbmir.runtime.gallery.columns import Selection, Snapshot
from cbmir.runtime.gallery.database import (
    DATABASE,
    GALLERY,
    LOG_FILE,
    POINTER,
    SHARED_FILE,
    WAIT,
    Connections,
    live_folder,
    new_file,
)
from cbmir.runtime.gallery.entry import Added, Entry, SearchResult
from cbmir.runtime.gallery.filters import EVERY, Filter
from cbmir.runtime.gallery.index_cache import IndexCache
from cbmir.runtime.gallery.protocol import EditableGallery
from cbmir.runtime.gallery.pseudonyms import Pseudonyms, case_id
from cbmir.runtime.gallery.reader import Reader
from cbmir.runtime.gallery.schema import LAST_COMMIT, SCHEMA
from cbmir.runtime.gallery.search import Nearest, agreeing, answer, nearest
from cbmir.runtime.gallery.writer import Writer, check_vectors

log = logging.getLogger("cbmir")

#: Lists of images that a build or addition left out, found changed or read with a warning, in the gallery's folder.
UNREADABLE, DUPLICATES, CHANGED, WARNINGS = LISTS = "unreadable.csv", "duplicates.csv", "changed.csv", "warnings.csv"
#: Map of the gallery, if `cbmir index map` has made one (`cbmir.runtime.gallery.projection`).
MAP = "map.npz"
_FILES = frozenset({DATABASE, LOG_FILE, SHARED_FILE, LAST_COMMIT, *LISTS, MAP})


def is_gallery_file(name: str) -> bool:
    """Return whether a file or folder with this name in a gallery's folder belongs to the gallery."""
    return name in _FILES or index_files.is_derived(name)


class Gallery(EditableGallery):
    """A gallery on disk, made by `create` or `open`.

    Many threads and processes can use it at the same time. Readers continue during a write, each with the generation
    that it began with, and writers wait for each other. A search result names its generation and includes all changes
    that were acknowledged before the search began. Every method may raise GalleryError if the gallery is closed,
    damaged, moved or replaced.
    """

    def __init__(self, connections: Connections, pseudonyms: Pseudonyms | None = None) -> None:
        """Take over the connections. Raises GalleryError if they do not lead to a complete gallery of this schema."""
        self.path, self.home = connections.folder, connections.home  # as requested; the folder of the live files
        self._connections = connections
        try:
            self._meta = meta = schema.open_meta(connections, pseudonyms)
        except BaseException:
            connections.close()
            raise
        self.card, self.labels, self.created, self.uuid = meta.card, meta.labels, meta.created, meta.uuid
        self._index = IndexCache(connections, self._meta)

    @classmethod
    def create(
        cls, path: str | Path, card: ModelCard, labels: LabelSet | None = None, *,
        pseudonyms: Pseudonyms | None = None, index: str = "auto", cells: CellCodec | None = None,
    ) -> Self:  # fmt: skip
        """Create an empty gallery in a new or empty folder.

        Args:
            labels: Labels of the entries; by default those of the model.
            pseudonyms: If given, ids of patients and studies are stored as pseudonyms. Paths, entry ids and reports are
                stored unchanged.
            index: "exact" for exact search, "bf16" or "int8" for an index of these codes, or "auto" to choose by size.
            cells: If given, the gallery stores codes of each image's cells.

        Raises:
            GalleryError: `path` exists and is not an empty folder, or cannot be written.
        """
        schema.check_index(index)
        path = Path(path)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise GalleryError(f"{path}: expected a new or empty folder for the gallery, found something there")
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
            new_file(path / DATABASE, GALLERY)
        except OSError as error:
            raise GalleryError(f"{path}: cannot make the gallery's folder ({error.strerror})") from error
        with Connections(path / DATABASE, GALLERY) as connections:
            schema.create(connections, card, labels or card.labels, pseudonyms, index, cells)
        return cls(Connections(path / DATABASE, GALLERY), pseudonyms)

    @classmethod
    def open(
        cls, path: str | Path, *, pseudonyms: Pseudonyms | None = None, wait: float = WAIT, read_only: bool = False
    ) -> Self:
        """Open a gallery.

        Args:
            pseudonyms: Key of a gallery that stores pseudonyms. A missing key is an error only when an id of a patient
                or study is looked up or written.
            wait: Seconds that a write waits for another one.
            read_only: Write nothing, for example on a read-only disk.

        Raises:
            GalleryError: The gallery is missing, damaged or of another schema, or the key is not its own.
        """
        path = Path(path)
        try:
            exists = ((live := live_folder(path)) / DATABASE).is_file()
        except OSError as error:
            raise GalleryError(f"{path}: cannot read the gallery's folder ({error.strerror})") from error
        if not exists:
            found = "no gallery there" if path.is_dir() else "a file" if path.exists() else "nothing there"
            if live != path:
                found = f"no gallery in {live.name}, which the file {POINTER!r} names"
            raise GalleryError(
                f"{path}: expected a gallery's folder with {DATABASE}, found {found}; "
                f"make one with 'cbmir index build MODEL MANIFEST -o GALLERY'"
            )
        return cls(Connections(path / DATABASE, GALLERY, read_only=read_only, wait=wait), pseudonyms)

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def finds_patients(self) -> bool:
        return self._meta.keys.fits

    @property
    def pseudonym_check(self) -> str:
        """`Pseudonyms.check` of the key for ids of patients and studies; empty if these are stored unchanged."""
        return self._meta.keys.check

    @property
    def reference_distances(self) -> NDArray[np.float32]:
        """Those of the index files; measured now if there are no such files, or if they hold too few entries."""
        return self._index.reference_distances()

    @property
    def cell_codec(self) -> CellCodec | None:
        return self._meta.cells

    @property
    def label_shares(self) -> dict[str, float | None]:
        with self._index.moment() as (_, snapshot):
            return dict(zip(self.labels.names, snapshot.label_shares, strict=True))

    # -- transactions

    def reading(self) -> AbstractContextManager[Reader]:
        """Begin a read transaction. Any number of threads can read at the same time."""
        return Reader.begin(self._meta, self._connections)

    def writing(self) -> AbstractContextManager[Writer]:
        """Begin a write transaction, committed when the block ends and rolled back if it raises.

        The derived files are not updated; call `settle` afterwards.

        Raises:
            GalleryError: Another writer does not finish in time, the disk is full or not writable, or the gallery was
                replaced.
        """
        return Writer.begin(self._meta, self._connections)

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None,
        cells: NDArray[np.float32] | None = None,
    ) -> Added:  # fmt: skip
        codes = None if cells is None else coded(self.cell_codec, cells)
        with self.writing() as writer:
            added = writer.add(entries, embeddings, thumbnails, codes)
        self.settle()
        return added

    def update(self, entries: Sequence[Entry]) -> int:
        with self.writing() as writer:
            changed = writer.update(entries)
        self.settle()
        return changed

    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries, with the arguments and errors of `EditableGallery.remove`.

        The bytes are overwritten in place, and in the log as soon as there is no reader (see `compact`). Derived files
        with the same data are deleted immediately and rebuilt.
        """
        with self.writing() as writer:
            removed = writer.remove(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
            for name in (*LISTS, MAP) if removed else ():  # may name the removed images, so they go first
                (self.path / name).unlink(missing_ok=True)
        if removed:
            if not self._connections.empty_log(wait=False):
                log.info("%s: another process is reading the gallery, so its log still holds what was removed; the "
                         "next 'cbmir index compact' deletes it", self.path)  # fmt: skip
            self._index.drop_removed()
        return removed

    # -- derived files

    def write_index(self) -> None:
        """Write the search files, unless they are up to date. Raises GalleryError if they cannot be written."""
        self._index.write()

    def rebuild(self, setting: str | None = None) -> None:
        """Rebuild the search files from SQLite, with another index setting (as in `create`) if one is given.

        Searches use the old files until the new ones are complete.

        Raises:
            GalleryError: The setting is unknown, or the files cannot be written.
        """
        self._index.check_writable()
        if setting is not None:
            with self.writing() as writer:
                writer.set_index(setting)
        self._index.rebuild()

    def settle(self) -> None:
        """Renew the search files if there are any and too many entries have changed. Call this after writing."""
        self._index.settle()

    def compact(self) -> None:
        """Rewrite the database without free pages and empty the log, so that no removed data is left.

        This needs space for two more copies, one of them in the folder for temporary files (`SQLITE_TMPDIR`), where no
        other process can open it.

        Raises:
            GalleryError: The gallery is damaged (nothing was changed), or another process keeps reading, so the log
                cannot be emptied.
        """
        self._index.save()  # before `tidy` clears the record of changes
        with self.writing() as writer:
            for _ in writer.columns():  # raises for damaged rows, which must not be copied
                pass
            writer.tidy()
        with self._connections.use("compact") as database:
            database.execute("VACUUM").close()
        if not self._connections.empty_log(wait=True):
            raise GalleryError(f"{self.path}: the database is compact, but another process is reading the gallery, so "
                               "its log still holds the old pages; compact it again later")  # fmt: skip

    # -- searching

    def search_many(
        self, embeddings: NDArray[np.float32], k: int, *, filters: Sequence[Filter] | None = None,
        exact: bool | None = None, vectors: int = 0, cells: bool = False,
    ) -> list[SearchResult]:  # fmt: skip
        """Search as `SearchableGallery.search_many` does. All results are from one generation."""
        count = len(embeddings)
        filters = [EVERY] * count if filters is None else filters
        if len(filters) != count:
            raise GalleryError(f"expected a filter for each of {count} embeddings, found {len(filters)}")

        def find(snapshot: Snapshot, selections: Sequence[Selection | None]) -> list[Nearest]:
            return nearest(snapshot, embeddings, max(k, vectors), selections, exact=bool(exact))

        return self._answers(embeddings, k, filters, vectors, find, cells=cells and self.cell_codec is not None)

    def search_by_agreement(
        self, embedding: NDArray[np.float32], probabilities: Mapping[str, float], k: int, *, filter: Filter = EVERY
    ) -> SearchResult:
        if not probabilities or not set(probabilities) <= set(self.labels.names):
            raise GalleryError(f"{self.path}: expected probabilities for labels among {', '.join(self.labels.names)}, "
                               f"found them for {', '.join(probabilities) or 'none'}")  # fmt: skip
        columns = {self.labels.index(name): p for name, p in probabilities.items()}

        def find(snapshot: Snapshot, selections: Sequence[Selection | None]) -> list[Nearest]:
            return [agreeing(snapshot, embedding, k, selections[0], columns)]

        return self._answers(embedding[None], k, [filter], 0, find)[0]

    def _answers(
        self, embeddings: NDArray[np.float32], k: int, filters: Sequence[Filter], vectors: int,
        find: Callable[[Snapshot, Sequence[Selection | None]], list[Nearest]], *, cells: bool = False,
    ) -> list[SearchResult]:  # fmt: skip
        if k < 0:
            raise GalleryError(f"expected k >= 0 neighbours, found {k}")
        count = len(embeddings)
        check_vectors(embeddings, count, self.card.embedding_dim)
        for _ in range(2):
            with self._index.moment() as (reader, snapshot):
                known = {one: Selection(one, self._meta) if one else None for one in set(filters)}
                found = find(snapshot, [known[one] for one in filters])
                answers = [answer(reader, snapshot, one, k, vectors, cells=cells) for one in found]
            trusted = [one for one in answers if one is not None]
            if len(trusted) == count:
                return trusted
            self._index.forget(snapshot)
        raise GalleryError(f"{self.path}: expected the vectors in memory to equal the stored ones, found others even "
                           "after loading them again; check memory and disk, and run 'cbmir index verify'")  # fmt: skip

    # -- looking up

    def count(self, filter: Filter) -> int:
        with self._index.moment() as (_, snapshot):
            return snapshot.count(Selection(filter, self._meta))

    def entries(self, ids: Sequence[str]) -> list[Entry]:
        with self.reading() as reader:
            return reader.entries(map(reader.number, ids))

    def ids(self) -> list[str]:
        with self.reading() as reader:
            return reader.ids()

    def every_entry(self) -> Iterator[Entry]:
        with self.reading() as reader:  # one transaction for all entries
            yield from reader.every_entry()

    def find(self, sha256: str) -> list[Entry]:
        with self.reading() as reader:
            return reader.entries(reader.find(sha256))

    def case_id(self, id: str) -> str:
        return case_id(self._meta.case_key, id)

    def find_case(self, case: str) -> Entry | None:
        with self.reading() as reader:
            return reader.find_case(case)

    def has_patient(self, patient_id: str) -> bool:
        numbers = self._meta.patient_numbers([patient_id])
        with self._index.moment() as (_, snapshot):  # made from verified rows: a damaged index could hide a patient
            return any(map(snapshot.has_patient, numbers))

    def vector(self, id: str) -> NDArray[np.float32]:
        with self.reading() as reader:
            return reader.vectors([reader.number(id)]).reshape(-1)

    def thumbnails(self, ids: Sequence[str]) -> list[bytes | None]:
        with self.reading() as reader:
            return reader.thumbnails(map(reader.number, ids))

    def info(self) -> dict[str, Any]:
        """Describe the gallery and its contents in values that JSON can represent.

        `search` is the search method; `changed` is the number of entries that have changed since the derived files were
        written, or None if there are no such files or the changes since then are no longer recorded.
        """
        with self.reading() as reader:
            counts = reader.counts()
            stamp = index_files.find(self.home, self.uuid)
            changed = None if stamp is None else reader.changes_since(stamp.generation)
        codes = None if stamp is None or changed is None or reader.codes is None else stamp.codes
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
            **counts,
            "pseudonyms": bool(self.pseudonym_check),
            "index": reader.index_setting,
            "search": "exact" if codes is None else f"hnsw {codes}",
            "changed": None if changed is None else len(changed),
            "cells": None if self.cell_codec is None else list(self.cell_codec.shape),
            "bytes": folder_size(self.path),
        }

    def __len__(self) -> int:
        with self.reading() as reader:
            return reader.count

    def close(self) -> None:
        self._connections.close()
        self._index.close()
