"""The data for searches: a snapshot that follows every write, and the index files beside the database.

These files are written when a build ends (`write`), by a writer whose changes have outgrown them (`settle`), and by a
search that finds no valid ones. One process at a time writes them; others keep using what they have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import index_files
from cbmir.runtime.gallery.columns import Columns, Snapshot
from cbmir.runtime.gallery.database import Connections
from cbmir.runtime.gallery.index_files import Stamp
from cbmir.runtime.gallery.reader import EXACT_LIMIT, Reader
from cbmir.runtime.gallery.schema import Meta
from cbmir.runtime.novelty import FEWEST, reference_distances

log = logging.getLogger("cbmir")

#: With no more entries than this a search writes nothing by itself: they are read from SQLite as fast.
SMALL = 1000
#: The files have been outgrown when a tenth of their entries have changed since: but not before so many have, and in
#: any case when so many have, for each search compares them all.
TAIL_LIMIT, TAIL_MOST = 5000, 20_000


class IndexCache:
    """Of one gallery; safe from many threads."""

    def __init__(self, connections: Connections, meta: Meta) -> None:
        self._connections = connections
        self._meta = meta
        self._path = connections.home
        self._snapshot: Snapshot | None = None
        self._refreshing = threading.Lock()
        self._seen: tuple[int, int] | None = None  # the newest index folder that this process has tried or written
        self._measured: tuple[int, NDArray[np.float32]] | None = None  # reference distances, of so many entries
        self._measuring = threading.Lock()

    @contextmanager
    def moment(self) -> Iterator[tuple[Reader, Snapshot]]:
        """A reader, and the snapshot of the same generation."""
        snapshot = None
        while snapshot is None:
            with self._reading() as reader:
                snapshot = self._at(reader)
                if snapshot is not None:
                    yield reader, snapshot

    def reference_distances(self) -> NDArray[np.float32]:
        """As `Gallery.reference_distances`."""
        with self.moment() as (_, snapshot):
            pass
        base_tells = len(snapshot.base) >= max(FEWEST, len(snapshot.tail))
        if snapshot.is_mapped and base_tells:
            return snapshot.reference_distances
        with self._measuring:
            count = len(snapshot.base) if base_tells else len(snapshot)
            if self._measured is None or abs(count - self._measured[0]) > self._measured[0] // 10:
                rows = snapshot.base if base_tells else Columns.joined(list(snapshot.blocks()) or [snapshot.tail])
                self._measured = count, reference_distances(rows.vectors, rows.patients)
            return self._measured[1]

    # -- files

    def check_writable(self) -> None:
        """Raise GalleryError unless the folder may be written to, and still holds this gallery."""
        if not self._writable:
            raise GalleryError(f"{self._path}: expected a gallery that can be written to, found one that cannot, or "
                               f"that has been moved or replaced; check its permissions, or open it again")  # fmt: skip

    def write(self) -> None:
        """Write the files, unless they are there as of this moment. Raises GalleryError where that fails."""
        self.check_writable()
        with index_files.lock(self._path, wait=True):
            if index_files.newest(self._path) is None:
                self._replace_by_sqlite()
                return
        with self.moment():  # which may write them already
            pass
        with index_files.lock(self._path, wait=True):
            with self.moment() as (reader, snapshot):
                if self._is_current(reader):
                    return
                stamp = self._stamp(reader)
            # From the snapshot, outside of the transaction: so this holds up neither searches nor the log.
            self._replace(stamp, snapshot.blocks(), snapshot)

    def rebuild(self) -> None:
        """Write the files from SQLite alone. Raises GalleryError where they cannot be written."""
        self.check_writable()
        with index_files.lock(self._path, wait=True):
            self._replace_by_sqlite()

    def save(self) -> None:
        """`write` where there are files. A failure is a warning."""
        if index_files.exists(self._path):
            self._follow()

    def settle(self) -> None:
        """`write` where there are files, and a writer's changes have outgrown them. A failure is a warning."""
        stamp = index_files.find(self._path, self._meta.uuid)
        if stamp is None:
            return
        with self._reading() as reader:
            changed = reader.changes_since(stamp.generation)
        if changed is None or _outgrown(len(changed), stamp.count):
            self._follow()

    def drop_removed(self) -> None:
        """Remove the files if they may hold removed entries, and write them again. Raises GalleryError where they
        cannot be removed."""
        if self._may_hold_removed() and index_files.drop(self._path):
            self._follow()

    def forget(self, snapshot: Snapshot) -> None:
        """Load again, as what this snapshot holds cannot be trusted any more."""
        log.warning("%s: the search data in memory differed from what was stored, and was loaded again; memory or the "
                    "disk may be failing: 'cbmir index verify' checks it", self._path)  # fmt: skip
        with self._refreshing:
            if self._snapshot is snapshot:
                self._snapshot = None

    def close(self) -> None:
        self._snapshot = None

    # -- the snapshot

    def _at(self, reader: Reader) -> Snapshot | None:
        """As of the reader's generation; None where a later one is here already: begin again, then."""
        snapshot = self._snapshot
        if (
            snapshot is not None
            and snapshot.generation == reader.generation
            and not self._should_load(reader, snapshot)
        ):
            return snapshot
        with self._refreshing:
            former = fresh = self._snapshot
            if fresh is not None and fresh.generation > reader.generation:
                return None
            if fresh is not None and fresh.generation < reader.generation:
                fresh = refreshed(fresh, reader)
            if fresh is None or self._should_load(reader, fresh):
                self._seen = index_files.newest(self._path)
                loaded = index_files.load(self._path, self._meta.uuid)
                if loaded is not None and loaded.generation > reader.generation and self._has_reached(loaded):
                    self._seen = None
                    return None
                newer = None if loaded is None else refreshed(loaded, reader)
                fresh = fresh if newer is None else newer
            if former is None or fresh is None or _outgrown(len(fresh.tail), len(fresh.base)):
                fresh = self._written_or_read(reader, fresh)
            if fresh.index is not None and reader.codes is None:
                fresh = replace(fresh, index=None)
            self._snapshot = fresh
            return fresh

    def _should_load(self, reader: Reader, snapshot: Snapshot) -> bool:
        """Whether to load the files that others have written, as this snapshot is not what it should be: far from its
        base, or of another setting, or in memory for want of files, or holding on to what was removed."""
        codes = None if snapshot.index is None else snapshot.index.codes
        fits = (
            codes == reader.codes
            and (snapshot.is_mapped or len(snapshot.base) <= SMALL)
            and not _outgrown(len(snapshot.tail), len(snapshot.base))
            and not snapshot.holds_removed
        )
        return not fits and index_files.newest(self._path) not in (None, self._seen)

    def _has_reached(self, snapshot: Snapshot) -> bool:
        """Whether a reader that begins now sees what was derived: not where an earlier database was put in place."""
        with self._reading() as reader:
            return snapshot.generation <= reader.generation

    def _may_hold_removed(self) -> bool:
        """Not where what was removed is newer than all files."""
        newest = index_files.newest(self._path)
        if newest is None or index_files.is_unfinished(self._path):
            return index_files.exists(self._path)
        snapshot = self._snapshot
        if snapshot is None or not snapshot.is_mapped or snapshot.since != newest[0]:
            snapshot = index_files.load(self._path, self._meta.uuid)
        if snapshot is None or snapshot.since != newest[0]:
            return True
        with self._reading() as reader:
            fresh = refreshed(snapshot, reader)
        return fresh is None or fresh.holds_removed

    def _written_or_read(self, reader: Reader, snapshot: Snapshot | None) -> Snapshot:
        """The snapshot, written where it must be; read into memory if it is missing and nothing is written."""
        if self._writable and _must_be_written(self._path, reader, snapshot):
            with index_files.lock(self._path, wait=False) as is_ours:
                if is_ours:
                    waiting = "" if reader.codes is None else " with an index: this search and SQLite's cleanup wait"
                    log.info("%s: writing the search files of %d entries%s", self._path, reader.count, waiting)
                    blocks = reader.columns() if snapshot is None else snapshot.blocks()
                    try:
                        return self._write(self._stamp(reader), blocks, snapshot)
                    except OSError as error:
                        log.warning("%s: cannot write the search files (%s); going without", self._path, error)
        if snapshot is not None:
            return snapshot
        vectors = np.empty((reader.count, self._meta.card.embedding_dim), np.float32)
        base = Columns.collected(reader.columns(), vectors, len(self._meta.labels))
        return Snapshot.whole(reader.generation, base)

    # -- writing

    @property
    def _writable(self) -> bool:
        return self._connections.writable and not self._connections.replaced()

    def _reading(self) -> AbstractContextManager[Reader]:
        return Reader.begin(self._meta, self._connections)

    def _stamp(self, reader: Reader) -> Stamp:
        return Stamp(self._meta.uuid, reader.generation, reader.count, reader.codes)

    def _write(self, stamp: Stamp, blocks: Iterator[Columns], former: Snapshot | None) -> Snapshot:
        """Under the lock. An index whose rows are all there still is added to."""
        index = None if former is None or former.holds_removed else former.index
        dim, classes = self._meta.card.embedding_dim, len(self._meta.labels)
        written = index_files.write(self._path, stamp, blocks, dim=dim, classes=classes, former=index)
        self._seen = index_files.newest(self._path)
        return written

    def _replace(self, stamp: Stamp, blocks: Iterator[Columns], former: Snapshot | None) -> None:
        """`_write`, and go on with it. Raises GalleryError where it cannot be written."""
        try:
            written = self._write(stamp, blocks, former)
        except OSError as error:
            raise GalleryError(f"{self._path}: cannot write the search files ({error}); nothing is lost: make room, "
                               f"then 'cbmir index rebuild'") from error  # fmt: skip
        with self._refreshing:
            self._snapshot = written

    def _replace_by_sqlite(self) -> None:
        """`_replace` with what SQLite holds, by a transaction that ends before the index is built."""
        with ExitStack() as stack:
            reader = stack.enter_context(self._reading())

            def blocks() -> Iterator[Columns]:
                yield from reader.columns()
                stack.close()

            self._replace(self._stamp(reader), blocks(), None)

    def _follow(self) -> None:
        """`write` after a write to the gallery, which has been acknowledged and must not seem to have failed."""
        try:
            self.write()
        except GalleryError as error:
            log.warning("%s; what was written to the gallery is safe", error)

    def _is_current(self, reader: Reader) -> bool:
        stamp = index_files.find(self._path, self._meta.uuid)
        if stamp is None or stamp.codes != reader.codes:
            return False
        changed = reader.changes_since(stamp.generation)
        return changed is not None and not len(changed)


def refreshed(snapshot: Snapshot, reader: Reader) -> Snapshot | None:
    """As of the reader's generation, by what changed since the snapshot's; None where that is not known any more.

    Raises GalleryError for a damaged row.
    """
    changed = reader.changes_since(snapshot.generation)
    if changed is None:
        return None
    fresh = snapshot.changed(reader.generation, changed, reader.columns(changed))
    return fresh if len(fresh) == reader.count else None  # a damaged page may hide an entry


def _must_be_written(path: Path, reader: Reader, snapshot: Snapshot | None) -> bool:
    if snapshot is None:
        return reader.count > SMALL or index_files.exists(path)
    if snapshot.holds_removed:
        return True
    # Where there is an index, though outgrown, a large one is a writer's to make: a search would wait for minutes.
    return _outgrown(len(snapshot.tail), len(snapshot.base)) and len(snapshot) <= EXACT_LIMIT


def _outgrown(changed: int, count: int) -> bool:
    return changed > max(TAIL_LIMIT, min(count // 10, TAIL_MOST))
