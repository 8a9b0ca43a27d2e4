"""A store with a snapshot of it for searches, which follows every write, and with what is derived kept beside it.

What is derived is written when a build ends (`write_index`), by a writer whose changes have outgrown it (`settle`), and
by a search that finds none to trust. One process at a time writes it; others go on with what they have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.runtime.gallery import index_files
from cbmir.runtime.gallery.columns import Rows, Snapshot
from cbmir.runtime.gallery.database import Connections
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.hnsw import Codes
from cbmir.runtime.gallery.index_files import Stamp
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.store import Added, Reader, Store

log = logging.getLogger("cbmir")

#: What the last build or addition left out, listed in the gallery's folder.
UNREADABLE, DUPLICATES, CHANGED = LISTS = "unreadable.csv", "duplicates.csv", "changed.csv"
#: A picture of the gallery, where `cbmir index map` made one (`cbmir.runtime.gallery.projection`).
MAP = "map.npz"
#: Up to this many entries a gallery whose setting is "auto" is searched exactly.
EXACT_LIMIT = 20_000
#: With no more entries than this a search writes nothing by itself: they are read from SQLite as fast.
SMALL = 1000
#: What is derived has been outgrown when a tenth of its entries have changed since: but not before so many have, and in
#: any case when so many have, for each search compares them all.
TAIL_LIMIT, TAIL_MOST = 5000, 20_000


class RefreshingStore(Store):
    """All of a gallery but the search itself."""

    def __init__(self, connections: Connections, pseudonyms: Pseudonyms | None = None) -> None:
        super().__init__(connections, pseudonyms)
        self._snapshot: Snapshot | None = None
        self._refreshing = threading.Lock()
        self._seen: tuple[int, int] | None = None  # the newest derived folder that this process has tried or written
        self._own: tuple[int, NDArray[np.float32]] | None = None  # own distances, of so many entries
        self._measuring = threading.Lock()

    @property
    def reference_distances(self) -> NDArray[np.float32]:
        """float32 [m], sorted: `novelty.reference_distances` of the entries as of when they were last derived;
        empty where they are too few. Where they were too few then, or nothing is derived, it is measured here."""
        from cbmir.runtime.novelty import FEWEST, reference_distances

        with self._moment() as (_, snapshot):
            pass
        base_tells = len(snapshot.base) >= max(FEWEST, len(snapshot.tail))
        if snapshot.is_mapped and base_tells:
            return snapshot.reference_distances
        with self._measuring:
            count = len(snapshot.base) if base_tells else len(snapshot)
            if self._own is None or abs(count - self._own[0]) > self._own[0] // 10:
                rows = snapshot.base if base_tells else Rows.joined(list(snapshot.blocks()) or [snapshot.tail])
                self._own = count, reference_distances(rows.vectors, rows.patients)
            return self._own[1]

    def write_index(self) -> None:
        """Write what searches need, unless it is there as of this moment. Raises GalleryError where it cannot be."""
        self._check_writable()
        with index_files.lock(self.path, wait=True):
            if index_files.newest(self.path) is None:
                self._replace_by_sqlite()
                return
        with self._moment():  # which may write it already
            pass
        with index_files.lock(self.path, wait=True):
            with self._moment() as (reader, snapshot):
                if self._is_current(reader):
                    return
                codes = codes_for(reader.index_setting, reader.count)
            # From the snapshot, outside of the transaction: so this holds up neither searches nor the log.
            self._replace(snapshot.generation, len(snapshot), snapshot.blocks(), codes, snapshot)

    def rebuild(self, setting: str | None = None) -> None:
        """Make what searches need anew, from SQLite alone, by another setting if one is given (`set_index`).

        Searches go on with what is there until then. Raises GalleryError where it cannot be written.
        """
        self._check_writable()
        if setting is not None:
            super().set_index(setting)
        with index_files.lock(self.path, wait=True):
            self._replace_by_sqlite()

    def settle(self) -> None:
        """What a writer does when it is done: make what searches need anew where it has been outgrown. Nothing where it
        was never written."""
        stamp = index_files.find(self.path, self.uuid)
        if stamp is None:
            return
        with self.reading() as reader:
            changed = reader.changes_since(stamp.generation)
        if changed is None or _outgrown(len(changed), stamp.count):
            self._follow()

    def add(
        self, entries: Sequence[Entry], embeddings: NDArray[np.float32], thumbnails: Sequence[bytes] | None = None
    ) -> Added:
        """As `Store.add`; then `settle`."""
        added = super().add(entries, embeddings, thumbnails)
        self.settle()
        return added

    def update(self, entries: Sequence[Entry]) -> int:
        """As `Store.update`; then `settle`."""
        updated = super().update(entries)
        self.settle()
        return updated

    def remove(
        self, *, ids: Collection[str] = (), patient_ids: Collection[str] = (), study_ids: Collection[str] = ()
    ) -> tuple[str, ...]:
        """As `Store.remove`. What was derived goes at once if it holds the same, and is made anew."""
        removed = super().remove(ids=ids, patient_ids=patient_ids, study_ids=study_ids)
        for name in (*LISTS, MAP) if removed else ():
            (self.path / name).unlink(missing_ok=True)  # they may name the same images
        if removed and self._derived_may_hold_removed() and index_files.drop(self.path):
            self._follow()
        return removed

    def set_index(self, setting: str) -> None:
        """As `Store.set_index`. An index of the other kind that is there is made anew."""
        super().set_index(setting)
        if index_files.exists(self.path):
            self._follow()

    def compact(self) -> None:
        """As `Store.compact`."""
        if index_files.exists(self.path):
            self._follow()  # now, while it is known what has changed since
        super().compact()

    def close(self) -> None:
        super().close()
        self._snapshot = None

    @contextmanager
    def _moment(self) -> Iterator[tuple[Reader, Snapshot]]:
        """A reader, and the snapshot of the same generation."""
        snapshot = None
        while snapshot is None:
            with self.reading() as reader:
                snapshot = self._at(reader)
                if snapshot is not None:
                    yield reader, snapshot

    def _at(self, reader: Reader) -> Snapshot | None:
        """As of the reader's generation; None where a later one is here already: begin again, then."""
        snapshot = self._snapshot
        if snapshot is not None and snapshot.generation == reader.generation and not self._look(reader, snapshot):
            return snapshot
        with self._refreshing:
            former = fresh = self._snapshot
            if fresh is not None and fresh.generation > reader.generation:
                return None
            if fresh is not None and fresh.generation < reader.generation:
                fresh = fresh.refreshed(reader)
            if fresh is None or self._look(reader, fresh):
                self._seen = index_files.newest(self.path)
                loaded = index_files.load(self.path, self.uuid)
                if loaded is not None and loaded.generation > reader.generation and self._has_reached(loaded):
                    self._seen = None
                    return None
                newer = None if loaded is None else loaded.refreshed(reader)
                fresh = fresh if newer is None else newer
            if former is None or fresh is None or _outgrown(len(fresh.tail), len(fresh.base)):
                fresh = self._made(reader, fresh)
            if fresh.index is not None and codes_for(reader.index_setting, reader.count) is None:
                fresh = replace(fresh, index=None)
            self._snapshot = fresh
            return fresh

    def _look(self, reader: Reader, snapshot: Snapshot) -> bool:
        """Whether to load what others have derived anew, as this snapshot is not what it should be: far from its base,
        or of another setting, or in memory for want of something derived, or holding on to what was removed."""
        codes = None if snapshot.index is None else snapshot.index.codes
        fits = (
            codes == codes_for(reader.index_setting, reader.count)
            and (snapshot.is_mapped or len(snapshot.base) <= SMALL)
            and not _outgrown(len(snapshot.tail), len(snapshot.base))
            and not snapshot.holds_removed
        )
        return not fits and index_files.newest(self.path) not in (None, self._seen)

    def _derived_may_hold_removed(self) -> bool:
        """Not where what was removed is newer than all that is derived."""
        newest = index_files.newest(self.path)
        if newest is None or index_files.is_unfinished(self.path):
            return index_files.exists(self.path)
        snapshot = self._snapshot
        if snapshot is None or not snapshot.is_mapped or snapshot.since != newest[0]:
            snapshot = index_files.load(self.path, self.uuid)
        if snapshot is None or snapshot.since != newest[0]:
            return True
        with self.reading() as reader:
            fresh = snapshot.refreshed(reader)
        return fresh is None or fresh.holds_removed

    def _has_reached(self, snapshot: Snapshot) -> bool:
        """Whether a reader that begins now sees what was derived: not where an earlier database was put in place."""
        with self.reading() as reader:
            return snapshot.generation <= reader.generation

    def _made(self, reader: Reader, snapshot: Snapshot | None) -> Snapshot:
        """The snapshot, written anew where it must be; read into memory where there is none and nothing is written."""
        if self.writable and self._must_be_written(reader, snapshot):
            with index_files.lock(self.path, wait=False) as is_ours:
                if is_ours:
                    codes = codes_for(reader.index_setting, reader.count)
                    waiting = "" if codes is None else " with an index: this search, and the end of SQLite's log, wait"
                    log.info("%s: writing what searches need of %d entries%s", self.path, reader.count, waiting)
                    blocks = map(Rows.of, reader.columns()) if snapshot is None else snapshot.blocks()
                    try:
                        return self._write(reader.generation, reader.count, blocks, codes, snapshot)
                    except OSError as error:
                        log.warning("%s: cannot write what searches need (%s); going on without", self.path, error)
        if snapshot is not None:
            return snapshot
        vectors = np.empty((reader.count, self.card.embedding_dim), np.float32)
        base = Rows.collected(map(Rows.of, reader.columns()), vectors, len(self.labels))
        return Snapshot.whole(reader.generation, base)

    def _must_be_written(self, reader: Reader, snapshot: Snapshot | None) -> bool:
        if snapshot is None:
            return reader.count > SMALL or index_files.exists(self.path)
        if snapshot.holds_removed:
            return True
        # Where there is an index, though outgrown, a large one is a writer's to make: a search would wait for minutes.
        return _outgrown(len(snapshot.tail), len(snapshot.base)) and len(snapshot) <= EXACT_LIMIT

    def _write(
        self, generation: int, count: int, blocks: Iterator[Rows], codes: Codes | None, former: Snapshot | None
    ) -> Snapshot:
        """Under the lock. An index whose rows are all there still is added to."""
        index = None if former is None or former.holds_removed else former.index
        dim, classes = self.card.embedding_dim, len(self.labels)
        stamp = Stamp(self.uuid, generation, count, codes)
        written = index_files.write(self.path, stamp, blocks, dim=dim, classes=classes, former=index)
        self._seen = index_files.newest(self.path)
        return written

    def _replace(
        self, generation: int, count: int, blocks: Iterator[Rows], codes: Codes | None, former: Snapshot | None
    ) -> None:
        """`_write`, and go on with it. Raises GalleryError where it cannot be written."""
        try:
            written = self._write(generation, count, blocks, codes, former)
        except OSError as error:
            raise GalleryError(f"{self.path}: cannot write what searches need ({error}); nothing is lost: make room, "
                               f"then 'cbmir index rebuild'") from error  # fmt: skip
        with self._refreshing:
            self._snapshot = written

    def _replace_by_sqlite(self) -> None:
        """`_replace` with what SQLite holds, by a transaction that ends before the index is built."""
        with ExitStack() as stack:
            reader = stack.enter_context(self.reading())

            def blocks() -> Iterator[Rows]:
                yield from map(Rows.of, reader.columns())
                stack.close()

            codes = codes_for(reader.index_setting, reader.count)
            self._replace(reader.generation, reader.count, blocks(), codes, None)

    def _forget(self, snapshot: Snapshot) -> None:
        """Load or make anew, as what it holds cannot be trusted any more."""
        log.warning("%s: what a search answered from is not what was stored, and is loaded anew; memory or the disk "
                    "may be failing: 'cbmir index verify' tells", self.path)  # fmt: skip
        with self._refreshing:
            if self._snapshot is snapshot:
                self._snapshot = None

    def _follow(self) -> None:
        """`write_index` after a write, which has been acknowledged and must not seem to have failed."""
        try:
            self.write_index()
        except GalleryError as error:
            log.warning("%s; what was written to the gallery is safe", error)

    def _is_current(self, reader: Reader) -> bool:
        stamp = index_files.find(self.path, self.uuid)
        if stamp is None or stamp.codes != codes_for(reader.index_setting, reader.count):
            return False
        changed = reader.changes_since(stamp.generation)
        return changed is not None and not len(changed)

    def _check_writable(self) -> None:
        if not self.writable:
            raise GalleryError(f"{self.path}: expected a gallery that can be written to, found one that cannot, or "
                               f"that has been moved or replaced; check its permissions, or open it again")  # fmt: skip


def codes_for(setting: str, count: int) -> Codes | None:
    """What an index of so many entries keeps of each vector, by the gallery's setting; None where there is no index."""
    if setting == "bf16":
        return "bf16"
    return "int8" if setting == "int8" or (setting == "auto" and count > EXACT_LIMIT) else None


def _outgrown(changed: int, count: int) -> bool:
    return changed > max(TAIL_LIMIT, min(count // 10, TAIL_MOST))
