"""What a gallery keeps: entries, embeddings and thumbnails in SQLite (write-ahead log), which is the truth.

Reading and writing are transactions (`Reader`, `Writer`). Every one that changes something raises the gallery's
generation by one; it is acknowledged once it is on the disk, whatever becomes of the process or the power after that.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.process import Closing
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.database import DATABASE, LOG_FILE, SHARED_FILE, WAIT, Connections, new_file
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.migration import migrate
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.reader import Columns, Reader
from cbmir.runtime.gallery.schema import (
    SCHEMA,
    UNKNOWN,
    WITNESS,
    LastCommit,
    Meta,
    check_index,
    check_schema,
    find_schema,
    first_values,
    read_meta,
    write_meta,
)
from cbmir.runtime.gallery.writer import Added, Writer, check_vectors

__all__ = ["DATABASE", "SCHEMA", "STORE_FILES", "UNKNOWN", "Added", "Columns", "Reader", "Store", "Writer"]

log = logging.getLogger("cbmir")

#: Every file in a gallery's folder that is the store's.
STORE_FILES = frozenset({DATABASE, LOG_FILE, SHARED_FILE, WITNESS})


class Store(Closing):
    """Entries by number, id and file digest: all of a gallery but the search (`cbmir.runtime.gallery.Gallery`).

    Made by `create` or `open`. All of it is safe from many threads and processes at once: readers go on during a write,
    each with the generation that it began with, and writers wait for each other.
    """

    def __init__(self, connections: Connections, pseudonyms: Pseudonyms | None = None) -> None:
        """Takes the connections over. Raises GalleryError where these lead to no whole gallery of this schema."""
        self.path = connections.folder
        self._connections = connections
        self._acknowledging = threading.Lock()
        seen = LastCommit.read(self.path)  # first: a writer may go on meanwhile
        with connections.use("read") as database:
            check_schema(find_schema(database, self.path), self.path)
            schema.check_tables(database, self.path)
            self._meta = Meta.load(database, self.path, pseudonyms)
            generation = int(read_meta(database, self.path, "generation")["generation"])
        if seen is not None and seen.uuid == self.uuid:
            seen.check(self.path, generation)
        elif self.writable:
            self._rename(pseudonyms)

    @classmethod
    def create(
        cls,
        path: str | Path,
        card: ModelCard,
        labels: LabelSet | None = None,
        *,
        pseudonyms: Pseudonyms | None = None,
        index: str = "auto",
    ) -> Self:
        """Make an empty gallery in a new or empty folder. `labels` (default: the model's) are those of its entries.

        With `pseudonyms` the gallery keeps ids of patients and studies as pseudonyms. Paths, entry ids and reports are
        kept as they are given. `index` is as `set_index` has it. Raises GalleryError if there is something at `path`.
        """
        check_index(index)
        path = Path(path)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise GalleryError(f"{path}: expected a new or empty folder for the gallery, found something there")
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
            new_file(path)
        except OSError as error:
            raise GalleryError(f"{path}: cannot make the gallery's folder ({error.strerror})") from error
        values = first_values(card, labels or card.labels, pseudonyms, index)
        connections = Connections(path)
        try:
            with connections.use("make") as database:
                database.execute("PRAGMA journal_mode = WAL").close()
                database.execute("BEGIN IMMEDIATE")
                schema.create_tables(database)
                write_meta(database, values)
                database.execute("COMMIT")
            LastCommit(str(values["gallery"]), 0).write(path)
            return cls(connections, pseudonyms)
        except BaseException:
            connections.close()
            raise

    @classmethod
    def open(
        cls, path: str | Path, *, pseudonyms: Pseudonyms | None = None, wait: float = WAIT, read_only: bool = False
    ) -> Self:
        """Open a gallery; one of an earlier schema is migrated. `wait`: seconds for which a write waits for another's.
        With `read_only` nothing is written, as where nothing can be.

        `pseudonyms` are needed where the gallery keeps pseudonyms and a patient's or study's id is looked up or
        written; a missing or another key is an error only then. Raises GalleryError where the gallery is missing,
        damaged or of a newer schema, and where one of an earlier schema cannot be written to.
        """
        path = Path(path)
        try:
            exists = (path / DATABASE).is_file()
        except OSError as error:
            raise GalleryError(f"{path}: cannot look into the gallery's folder ({error.strerror})") from error
        if not exists:
            found = "no gallery there" if path.is_dir() else "a file" if path.exists() else "nothing there"
            raise GalleryError(
                f"{path}: expected a gallery's folder with {DATABASE}, found {found}; "
                f"make one with 'cbmir index build MODEL MANIFEST -o GALLERY'"
            )
        connections = Connections(path, read_only=read_only, wait=wait)
        try:
            with connections.use("read") as database:
                found_schema = find_schema(database, path)
            if found_schema == 1:
                migrate(connections)
            return cls(connections, pseudonyms)
        except BaseException:
            connections.close()
            raise

    @property
    def card(self) -> ModelCard:
        """Of the model whose embeddings these are."""
        return self._meta.card

    @property
    def labels(self) -> LabelSet:
        """Those of the entries."""
        return self._meta.labels

    @property
    def created(self) -> str:
        """ISO 8601, UTC."""
        return self._meta.created

    @property
    def uuid(self) -> str:
        """Names this gallery: what was derived from another is not to be used. A copy gets a name of its own."""
        return self._meta.uuid

    @property
    def has_pseudonyms(self) -> bool:
        """Whether ids of patients and studies are kept as pseudonyms."""
        return bool(self.pseudonym_check)

    @property
    def finds_patients(self) -> bool:
        """Whether patients can be looked up by id: not where it keeps pseudonyms and was opened without their key."""
        return self._meta.keys.fits

    @property
    def pseudonym_check(self) -> str:
        """`Pseudonyms.check` of the key under which ids of patients and studies are kept; empty where they are kept as
        they are."""
        return self._meta.keys.check

    @property
    def index_setting(self) -> str:
        """How the gallery is searched: "auto", "exact", "bf16" or "int8"."""
        with self.reading() as reader:
            return reader.index_setting

    @property
    def writable(self) -> bool:
        """Whether the folder may be written to, and the gallery is still the one that stands there."""
        return self._connections.writable and not self._connections.replaced()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """One moment of the gallery, for any number of threads at once. Raises GalleryError where it is closed."""
        with self._connections.use("read") as database:
            database.execute("BEGIN").close()
            reader = Reader(self._meta, database)
            try:
                yield reader
            finally:
                reader.close()

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """One write transaction: all of it is there when the block has ended, none of it where the block raised.

        Raises GalleryError where another writer does not end in time, where the disk is full or may not be written to,
        and where another gallery has taken this one's place.
        """
        with self._connections.use("write to") as database:
            database.execute("BEGIN IMMEDIATE").close()
            writer = Writer(self._meta, database)
            try:
                yield writer
                generation = writer.finish()
            finally:
                writer.close()
            database.execute("COMMIT").close()
        with self._acknowledging:
            LastCommit(self.uuid, generation).write(self.path)

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None
    ) -> Added:
        """Add N entries with embeddings float32 [N, D] of unit norm, and JPEG thumbnails, in one transaction.

        An entry whose content (`sha256`) is there already is left out and reported. Raises GalleryError, and adds
        nothing, for an id that is there with other content, for unfit embeddings, and for labels that are not the
        gallery's.
        """
        with self.writing() as writer:
            return writer.add(entries, embeddings, thumbnails)

    def update(self, entries: Sequence[Entry]) -> int:
        """Replace what is said of entries (all but content, embedding and thumbnail) by their ids: how many changed.

        Raises GalleryError, and changes nothing, for an id that is not there, and one that is there with other content.
        """
        with self.writing() as writer:
            return writer.update(entries)

    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Remove entries with all that belongs to them: the ids that went, sorted. What is not there is passed over.

        With `patient_ids` and `study_ids`, only these studies of these patients. Raises GalleryError, and removes
        nothing, for a study id alone that several patients have: a study of one must not take another's along.
        Their bytes are overwritten where they stood, and in the log as soon as no one reads; see `compact`.
        """
        with self.writing() as writer:
            removed = writer.remove(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
        if removed and not self._connections.empty_log(wait=False):
            log.info("%s: someone is reading the gallery, so its log still holds what was removed; "
                     "it goes with the next 'cbmir index compact'", self.path)  # fmt: skip
        return removed

    def set_index(self, setting: str) -> None:
        """How to search: "exact", by an index in "bf16" or "int8", or "auto", as the size asks for."""
        with self.writing() as writer:
            writer.set_index(setting)

    def compact(self) -> None:
        """Write the database anew without free pages, and empty the log: nothing of what was removed is left in them.

        Indexes within the database are made anew too. Raises GalleryError where anything in it is damaged, and changes
        nothing then; and where someone goes on reading, so that the log cannot be emptied. Needs room for two more
        copies, one of them in the folder for temporary files (`SQLITE_TMPDIR`), where no other process can open it.
        """
        with self.writing() as writer:
            for _ in writer.columns():  # what is damaged must not be copied as if it were whole
                pass
            writer.tidy()
        with self._connections.use("compact") as database:
            database.execute("VACUUM").close()
        if not self._connections.empty_log(wait=True):
            raise GalleryError(f"{self.path}: the database is compact, but someone is reading the gallery, so its log "
                               f"still holds the old pages; compact it again when no one does")  # fmt: skip

    def entry(self, id: str) -> Entry:  # noqa: A002 - the field's own name
        """Raises GalleryError for an id that is not there."""
        with self.reading() as reader:
            return reader.entries([reader.number(id)])[0]

    def ids(self) -> list[str]:
        """Every id, in the order of adding."""
        with self.reading() as reader:
            return reader.ids()

    def every_entry(self) -> Iterator[Entry]:
        """All entries as of one moment, in the order of adding, read as they are asked for."""
        with self.reading() as reader:
            yield from reader.every_entry()

    def find(self, sha256: str) -> list[Entry]:
        """Every entry made from a file with this digest, in the order of adding."""
        with self.reading() as reader:
            return reader.entries(reader.find(sha256))

    def has_patient(self, patient_id: str) -> bool:
        """Whether an entry is of this patient."""
        with self.reading() as reader:
            return reader.has_patient(patient_id)

    def vector(self, id: str) -> NDArray[np.float32]:  # noqa: A002
        """float32 [D], unit norm. Raises GalleryError for an id that is not there."""
        with self.reading() as reader:
            vector: NDArray[np.float32] = reader.vectors([reader.number(id)])[0]
            return vector

    def thumbnail(self, id: str) -> bytes | None:  # noqa: A002
        """JPEG of about 256 pixels, or None where none was stored. Raises GalleryError for an id that is not there."""
        with self.reading() as reader:
            return reader.thumbnails([reader.number(id)])[0]

    def check_model(self, card: ModelCard) -> None:
        """Raise GalleryError unless the gallery's embeddings are of this model's space."""
        if card.fingerprint != self.card.fingerprint:
            raise GalleryError(
                f"{self.path}: expected a gallery of this model (fingerprint {card.fingerprint}), found one of another "
                f"(fingerprint {self.card.fingerprint}); their distances mean nothing. Build it again with "
                f"'cbmir index build'"
            )

    def __len__(self) -> int:
        with self.reading() as reader:
            return reader.count

    def close(self) -> None:
        """May be called again."""
        self._connections.close()

    def _check_vectors(self, vectors: NDArray[np.float32], count: int) -> None:
        check_vectors(vectors, count, self.card.embedding_dim)

    def _rename(self, pseudonyms: Pseudonyms | None) -> None:
        """Give a gallery without a witness of its own a new uuid, and a witness."""
        with self._connections.use("write to") as database:
            database.execute("BEGIN IMMEDIATE").close()
            self._meta = Meta.load(database, self.path, pseudonyms)
            seen = LastCommit.read(self.path)
            if seen is not None and seen.uuid == self.uuid:
                return  # another process was first
            write_meta(database, {"gallery": uuid.uuid4().hex})
            self._meta = Meta.load(database, self.path, pseudonyms)
            generation = int(read_meta(database, self.path, "generation")["generation"])
            # Before the next opener can begin, which would give another name still. Where this one does not get to the
            # end, the witness is of no gallery, and the next opener does the same.
            LastCommit(self.uuid, generation).write(self.path)
            database.execute("COMMIT").close()
