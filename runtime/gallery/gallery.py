"""A gallery in a folder: entries, embeddings and thumbnails in SQLite, and the nearest of them to an image.

SQLite (with a write-ahead log) holds all data, read and written in transactions (`Reader`, `Writer`). Each change
raises the gallery's generation by one, and is acknowledged once it is on the disk, so it survives a crash or power
failure. Searches use data derived from it (`IndexCache`).
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

#: What the last build or addition left out, listed in the gallery's folder.
UNREADABLE, DUPLICATES, CHANGED, WARNINGS = LISTS = "unreadable.csv", "duplicates.csv", "changed.csv", "warnings.csv"
#: A picture of the gallery, where `cbmir index map` made one (`cbmir.runtime.gallery.projection`).
MAP = "map.npz"
_FILES = frozenset({DATABASE, LOG_FILE, SHARED_FILE, LAST_COMMIT, *LISTS, MAP})


def is_gallery_file(name: str) -> bool:
    """Whether a file or folder of this name in a gallery's folder is the gallery's own."""
    return name in _FILES or index_files.is_derived(name)


class Gallery(EditableGallery):
    """Made by `create` or `open`. Many threads and processes can use it at once: readers continue during a write, each
    with the generation that it began with, and writers wait for each other.

    An answer names its generation and includes all changes that were acknowledged before the search began. Every method
    may raise GalleryError, for a gallery that is closed, damaged, moved or replaced.
    """

    def __init__(self, connections: Connections, pseudonyms: Pseudonyms | None = None) -> None:
        """Owns the connections. Raises GalleryError if they do not lead to a complete gallery of this schema."""
        self.path, self.home = connections.folder, connections.home  # as asked for; where its files are now
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
        cls,
        path: str | Path,
        card: ModelCard,
        labels: LabelSet | None = None,
        *,
        pseudonyms: Pseudonyms | None = None,
        index: str = "auto",
        cells: CellCodec | None = None,
    ) -> Self:
        """Make an empty gallery in a new or empty folder.

        Args:
            labels: Those of its entries; by default the model's.
            pseudonyms: If given, the gallery keeps ids of patients and studies as pseudonyms. Paths, entry ids and
                reports are kept as they are given.
            index: How it is searched: "exact", with an index in "bf16" or "int8", or "auto", which depends on the size.
            cells: If given, the gallery keeps codes of each image's cells.

        Raises:
            GalleryError: There is something at `path`.
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
            pseudonyms: Needed if the gallery keeps pseudonyms and a patient's or study's id is looked up or written;
                only then a missing or wrong key is an error.
            wait: Seconds that a write waits for another write.
            read_only: Write nothing, for example on a read-only disk.

        Raises:
            GalleryError: The gallery is missing, damaged or of another schema.
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
        """`Pseudonyms.check` of the key for ids of patients and studies; empty where these are kept as they are."""
        return self._meta.keys.check

    @property
    def reference_distances(self) -> NDArray[np.float32]:
        """As of when the index files were last written; measured now if these do not exist, or held too few."""
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
        """One moment of the gallery, for any number of threads at once."""
        return Reader.begin(self._meta, self._connections)

    def writing(self) -> AbstractContextManager[Writer]:
        """One write transaction: all of it is there when the block has ended, none of it where the block raised.

        What is derived does not follow: `settle` sees to that.

        Raises:
            GalleryError: Another writer does not end in time, the disk is full or may not be written to, or another
                gallery has taken this one's place.
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
        """As `EditableGallery.remove`, which has its arguments and errors.

        The bytes are overwritten in place, and in the log as soon as there is no reader (see `compact`). Derived files
        that hold the same data are deleted at once and rebuilt.
        """
        with self.writing() as writer:
            removed = writer.remove(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
        if removed:
            if not self._connections.empty_log(wait=False):
                log.info("%s: another process is reading the gallery, so its log still holds what was removed; the "
                         "next 'cbmir index compact' deletes it", self.path)  # fmt: skip
            for name in (*LISTS, MAP):  # they may name the same images
                (self.path / name).unlink(missing_ok=True)
            self._index.drop_removed()
        return removed

    # -- what is derived

    def write_index(self) -> None:
        """Write the search files, unless they are up to date. Raises GalleryError where that fails."""
        self._index.write()

    def rebuild(self, setting: str | None = None) -> None:
        """Rebuild the search files from SQLite, with another setting (`create`) if one is given.

        Searches use the old files until then.

        Raises:
            GalleryError: It cannot be written.
        """
        self._index.check_writable()
        if setting is not None:
            with self.writing() as writer:
                writer.set_index(setting)
        self._index.rebuild()

    def settle(self) -> None:
        """What a writer does when it is done: make what searches need again where it was written and is outgrown."""
        self._index.settle()

    def compact(self) -> None:
        """Rewrite the database without free pages, and empty the log, so that no removed data is left.

        Needs room for two more copies, one of them in the folder for temporary files (`SQLITE_TMPDIR`), where no other
        process can open it.

        Raises:
            GalleryError: The gallery is damaged, and nothing was changed; or another process keeps reading, so that the
                log cannot be emptied.
        """
        self._index.save()  # now, while it is known what has changed since
        with self.writing() as writer:
            for _ in writer.columns():  # what is damaged must not be copied as if it were whole
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
        """As `SearchableGallery.search_many`; all answers are of one generation, and computed together."""
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
        raise GalleryError(f"{self.path}: expected the vectors in memory to be those stored, found others, even after "
                           "loading again; check memory and disk, and run 'cbmir index verify'")  # fmt: skip

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
        with self.reading() as reader:  # one moment
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
        with self._index.moment() as (_, snapshot):  # its rows are verified: a damaged index could hide a patient
            return any(map(snapshot.has_patient, numbers))

    def vector(self, id: str) -> NDArray[np.float32]:
        with self.reading() as reader:
            return reader.vectors([reader.number(id)]).reshape(-1)

    def thumbnails(self, ids: Sequence[str]) -> list[bytes | None]:
        with self.reading() as reader:
            return reader.thumbnails(map(reader.number, ids))

    def info(self) -> dict[str, Any]:
        """A description of the gallery and its content, in plain values for JSON.

        `search` says how it is searched; `changed`, how many entries have changed since what is derived was written
        (None: nothing is).
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
