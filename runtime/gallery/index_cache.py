"""The data for searches: a snapshot that follows every write, and the index files beside the database.

These files are written at the end of a build (`write`), by a writer after too many changes (`settle`), and by a search
that finds no valid ones. One process at a time writes them, while others keep using what they have.
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

#: Up to this many entries, a search creates no files, since reading from SQLite is just as fast.
SMALL = 1000
#: The files are outgrown when more than `TAIL_LIMIT` and a tenth of their entries have changed, or more than
#: `TAIL_MOST`, since each search compares all changed entries.
TAIL_LIMIT, TAIL_MOST = 5000, 20_000


class IndexCache:
    """The search data of one gallery. Thread-safe."""

    def __init__(self, connections: Connections, meta: Meta) -> None:
        self._connections = connections
        self._meta = meta
        self._path = connections.home
        self._snapshot: Snapshot | None = None
        self._refreshing = threading.Lock()
        self._seen: tuple[int, int] | None = None  # the newest index folder that this process tried or wrote
        self._measured: tuple[int, NDArray[np.float32]] | None = None  # number of entries, their reference distances
        self._measuring = threading.Lock()

    @contextmanager
    def moment(self) -> Iterator[tuple[Reader, Snapshot]]:
        """Yield a reader and the snapshot of the same generation."""
        snapshot = None
        while snapshot is None:
            with self._reading() as reader:
                snapshot = self._at(reader)
                if snapshot is not None:
                    yield reader, snapshot

    def reference_distances(self) -> NDArray[np.float32]:
        """Return `Gallery.reference_distances`."""
        with self.moment() as (_, snapshot):
            pass
        base_tells = len(snapshot.base) >= max(FEWEST, len(snapshot.tail))
        if snapshot.is_mapped and base_tells:
            return snapshot.reference_distances
        with self._measuring:
            count = len(snapshot.base) if base_tells else len(snapshot)
            before = -1 if self._measured is None else self._measured[0]
            if self._measured is None or abs(count - before) > before // 10 or before < FEWEST <= count:
                rows = snapshot.base if base_tells else Columns.joined(list(snapshot.blocks()) or [snapshot.tail])
                self._measured = count, reference_distances(rows.vectors, rows.patients)
            return self._measured[1]

    # -- files

    def check_writable(self) -> None:
        """Raise GalleryError unless the folder is writable and still holds this gallery."""
        if not self._writable:
            raise GalleryError(f"{self._path}: expected a gallery that can be written to, found one that cannot, or "
                               f"that has been moved or replaced; check its permissions, or open it again")  # fmt: skip

    def write(self) -> None:
        """Write the files, unless they are up to date. Raises GalleryError if they cannot be written."""
        self.check_writable()
        with index_files.lock(self._path, wait=True):
            if index_files.newest(self._path) is None:
                self._replace_by_sqlite()
                return
        with self.moment():  # may already write them
            pass
        with index_files.lock(self._path, wait=True):
            with self.moment() as (reader, snapshot):
                if self._is_current(reader):
                    return
                stamp = self._stamp(reader)
            # From the snapshot, outside the transaction, so that neither searches nor the log have to wait.
            self._replace(stamp, snapshot.blocks(), snapshot)

    def rebuild(self) -> None:
        """Write the files from SQLite alone. Raises GalleryError if they cannot be written."""
        self.check_writable()
        with index_files.lock(self._path, wait=True):
            self._replace_by_sqlite()

    def save(self) -> None:
        """Call `write` if there are files. A failure is only logged."""
        if index_files.exists(self._path):
            self._follow()

    def settle(self) -> None:
        """Call `write` if there are files and too many entries have changed since. A failure is only logged."""
        stamp = index_files.find(self._path, self._meta.uuid)
        if stamp is None:
            return
        with self._reading() as reader:
            changed = reader.changes_since(stamp.generation)
        if changed is None or _outgrown(len(changed), stamp.count):
            self._follow()

    def drop_removed(self) -> None:
        """Remove the files if they may hold removed entries, and write new ones. Raises GalleryError if they cannot be
        removed."""
        if self._may_hold_removed() and index_files.drop(self._path):
            self._follow()

    def forget(self, snapshot: Snapshot) -> None:
        """Drop a damaged snapshot, so that the data is loaded again."""
        log.warning("%s: the search data in memory differed from what was stored, and was loaded again; memory or the "
                    "disk may be failing: 'cbmir index verify' checks it", self._path)  # fmt: skip
        with self._refreshing:
            if self._snapshot is snapshot:
                self._snapshot = None

    def close(self) -> None:
        self._snapshot = None

    # -- the snapshot

    def _at(self, reader: Reader) -> Snapshot | None:
        """Return the snapshot of the reader's generation; None if a later one exists, so the caller must start over."""
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
        """Return whether there are files that were not tried yet, and the snapshot should be replaced: it has outgrown
        its base, has another setting, holds removed entries, or is in memory for lack of files."""
        codes = None if snapshot.index is None else snapshot.index.codes
        fits = (
            codes == reader.codes
            and (snapshot.is_mapped or len(snapshot.base) <= SMALL)
            and not _outgrown(len(snapshot.tail), len(snapshot.base))
            and not snapshot.holds_removed
        )
        return not fits and index_files.newest(self._path) not in (None, self._seen)

    def _has_reached(self, snapshot: Snapshot) -> bool:
        """Return whether a reader that begins now reaches the snapshot's generation. It does not if an older database
        was restored."""
        with self._reading() as reader:
            return snapshot.generation <= reader.generation

    def _may_hold_removed(self) -> bool:
        """Return whether the files may hold removed entries; entries that were added after them do not count."""
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
        """Write the snapshot to files if necessary; without files and without a snapshot, read it into memory."""
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
        """Write the files, under the lock. The former index is extended if none of its entries were removed."""
        index = None if former is None or former.holds_removed else former.index
        dim, classes = self._meta.card.embedding_dim, len(self._meta.labels)
        written = index_files.write(self._path, stamp, blocks, dim=dim, classes=classes, former=index)
        self._seen = index_files.newest(self._path)
        return written

    def _replace(self, stamp: Stamp, blocks: Iterator[Columns], former: Snapshot | None) -> None:
        """Call `_write` and use the new snapshot. Raises GalleryError if it cannot be written."""
        try:
            written = self._write(stamp, blocks, former)
        except OSError as error:
            raise GalleryError(f"{self._path}: cannot write the search files ({error}); nothing is lost: make room, "
                               f"then 'cbmir index rebuild'") from error  # fmt: skip
        with self._refreshing:
            self._snapshot = written

    def _replace_by_sqlite(self) -> None:
        """Call `_replace` with rows from SQLite, in a transaction that ends before the index is built."""
        with ExitStack() as stack:
            reader = stack.enter_context(self._reading())

            def blocks() -> Iterator[Columns]:
                yield from reader.columns()
                stack.close()

            self._replace(self._stamp(reader), blocks(), None)

    def _follow(self) -> None:
        """Call `write` after an acknowledged write to the gallery, which must not seem to have failed."""
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
    """Bring a snapshot to the reader's generation; return None if the changes since then are no longer recorded.

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
    # Replacing a large, outgrown snapshot takes minutes, so a search leaves it to the next writer.
    return _outgrown(len(snapshot.tail), len(snapshot.base)) and len(snapshot) <= EXACT_LIMIT


def _outgrown(changed: int, count: int) -> bool:
    return changed > max(TAIL_LIMIT, min(count // 10, TAIL_MOST))
