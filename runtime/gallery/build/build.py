"""Build a gallery or one shard of it from a manifest, and add to a gallery.

A build writes a new version in the gallery's folder (`GalleryFolder`), one transaction per batch, which becomes the
gallery at the end. If it is stopped, the old gallery stays as it was, and the same call continues without embedding an
image again. An addition, and any build on Milvus, writes its batches into the gallery itself: if it is stopped,
finished batches stay, and the same call continues.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, UserError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery.build.folder import GalleryFolder, digest_of
from cbmir.runtime.gallery.build.shard import Shard
from cbmir.runtime.gallery.build.work import IndexReport, Task, Work, read_list, with_all_warnings, write_lists
from cbmir.runtime.gallery.cells import CellCodec
from cbmir.runtime.gallery.database import is_passing
from cbmir.runtime.gallery.entry import entry_ids
from cbmir.runtime.gallery.gallery import CHANGED, DUPLICATES, UNREADABLE, WARNINGS, Gallery
from cbmir.runtime.gallery.maintenance import verify_database
from cbmir.runtime.gallery.protocol import is_milvus
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.novelty import FEWEST

if TYPE_CHECKING:
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

log = logging.getLogger("cbmir")


def build_gallery(
    engine: Engine, manifest: Manifest, path: str | Path, *, splits: Sequence[str] = ("train",),
    workers: int | None = None, reduced_jpeg2000: bool = False, pseudonyms: Pseudonyms | None = None,
    index: str = "auto", replace_others: bool = False, shard: tuple[int, int] | None = None, cells: bool = False,
) -> IndexReport:  # fmt: skip
    """Build the gallery at `path` from the manifest's rows of `splits` ("all": every row).

    Images that cannot be read are left out, logged as warnings and listed in the gallery's `unreadable.csv`; copies of
    other images are listed in `duplicates.csv`. If a build is stopped, the old gallery stays, and the same call
    continues. Other unfinished work in the gallery's folder is removed when this build is done.

    Args:
        workers: Number of processes that read images, as in `work_through`. It does not change the result.
        reduced_jpeg2000: As in `Finder`.
        pseudonyms: As in `Gallery.create`.
        index: As in `Gallery.create`.
        replace_others: Replace a gallery even if it holds images that are not among these rows, or stores ids in
            another way.
        shard: Build only part i of n, given as (i, n), to be joined by `merge_galleries`. An existing shard is kept. A
            shard may be empty if none of its images can be read.
        cells: Store codes of each image's cells (`CellCodec`), fitted to a sample of these images, which a search by
            region uses to rerank its first candidates.

    Raises:
        SplitError: No row belongs to these splits.
        UserError: `shard` or `cells` is given for a Milvus collection.
        GalleryError: The existing gallery must not be replaced, `path` holds something other than a gallery, no image
            can be read, or another process is building here.
        WorkerError: A worker died.
    """
    work = Work.of(engine.card, manifest, splits, reduced_jpeg2000, workers)
    ids = entry_ids(work.rows)  # of all rows, even for a shard, so that ids are unique across shards
    digest = work.digest(index, pseudonyms.check if pseudonyms else "", *["cells"] * cells)
    if is_milvus(path):
        if shard is not None:
            raise UserError("expected a folder for a shard, found a Milvus collection; build it without a shard")
        if cells:
            raise UserError("expected a folder for a gallery that keeps cells, found a Milvus collection")
        return _fill_collection(str(path), engine, work, pseudonyms, index)
    folder, whole = GalleryFolder(path), work  # `whole`, so that all shards fit their codec to the same images
    part = None if shard is None else Shard(*shard, digest)
    if part is not None:
        if part == Shard.load(folder.path):  # an earlier run built it
            with Gallery.open(folder.path) as gallery:
                images = len(gallery)
            lists = (read_list(folder.path / name) for name in (UNREADABLE, DUPLICATES, CHANGED, WARNINGS))
            return IndexReport(images, images, 0, *lists)
        rows = part.rows(len(ids))
        ids, work, digest = ids[rows], replace(work, rows=work.rows[rows]), digest_of(part)

    def fill(gallery: Gallery) -> IndexReport:
        done = {entry.image for entry in gallery.every_entry()}
        if done:
            log.info("Continuing with %d images that an earlier run embedded.", len(done))
        tasks = [Task(row, own) for row, own in zip(work.rows, ids, strict=True) if str(row.image) not in done]
        return work.fill(gallery, engine, tasks, resumed=len(done))

    with folder.locked(make=True):
        return build_version(
            folder, digest, fill, work.card, work.labels, pseudonyms,
            index=index, images=None if replace_others else work.images, shard=part,
            cells=partial(whole.fit_cells, engine) if cells else None,
        )  # fmt: skip


def add_to_gallery(
    engine: Engine, manifest: Manifest, path: str | Path, *, splits: Sequence[str] = ("train",),
    workers: int | None = None, reduced_jpeg2000: bool = False, pseudonyms: Pseudonyms | None = None,
) -> IndexReport:  # fmt: skip
    """Add the manifest's rows of `splits` to the gallery at `path`; the arguments are those of `build_gallery`.

    An image whose path is in the gallery stays as it is: it is only read to check whether its content has changed. An
    image whose content is in the gallery under another path is left out and reported. Each batch is a transaction: if
    the call is stopped, finished batches stay, and the same call continues.

    Returns:
        The images that were added, and those that were left out and why.

    Raises:
        SplitError: No row belongs to these splits.
        GalleryError: The gallery is for another model or stores ids in another way, or another process is building it
            or adding to it.
        ManifestError: The manifest has labels that the gallery lacks.
        WorkerError: A worker died.
    """
    work = Work.of(engine.card, manifest, splits, reduced_jpeg2000, workers)
    if is_milvus(path):
        return _fill_collection(str(path), engine, work, pseudonyms)
    folder = GalleryFolder(path)
    with Gallery.open(folder.path, pseudonyms=pseudonyms) as gallery:
        gallery.check_model(engine.card)
        gallery.has_patient("anyone")  # raises without the key, before the long work starts
        with folder.locked():
            report, everything = work.fill_in_place(gallery, engine)
            write_lists(folder.path, everything, work.images)
    return report


def build_version(
    folder: GalleryFolder, digest: str, fill: Callable[[Gallery], IndexReport], card: ModelCard, labels: LabelSet,
    pseudonyms: Pseudonyms | None, *, index: str, images: Collection[str] | None, shard: Shard | None = None,
    cells: Callable[[], CellCodec] | None = None,
) -> IndexReport:  # fmt: skip
    """Call `fill` on a new or unfinished version of a gallery, and publish it. Call this under the lock.

    `images` are those to add: a gallery that holds others is not replaced, unless `images` is None. `cells` returns the
    codec of a new version that stores cells.
    """
    check = pseudonyms.check if pseudonyms else ""
    if images is not None:
        _check_nothing_lost(folder, images, check)
    part = folder.version(digest)
    with _under_construction(part, card, labels, pseudonyms, index, cells) as gallery:
        report = with_all_warnings(fill(gallery), gallery)  # including those of an earlier run
        if shard is None and len(gallery) >= FEWEST:  # so that the first search need not measure reference distances
            gallery.write_index()
    if shard is None and not report.images:
        shutil.rmtree(part)
        raise GalleryError(f"expected at least one readable image, found none among {len(report.unreadable)}; "
                           f"'cbmir data check' says what is wrong with them")  # fmt: skip
    if images is not None:  # again, since another process may have added to it meanwhile
        _check_nothing_lost(folder, images, check)
    folder.publish(part)
    write_lists(folder.path, report)
    if shard is not None:
        shard.save(part)  # last: a shard that has this file is not built again
    return report


@contextmanager
def _under_construction(
    part: Path, card: ModelCard, labels: LabelSet, pseudonyms: Pseudonyms | None, index: str,
    cells: Callable[[], CellCodec] | None,
) -> Iterator[Gallery]:  # fmt: skip
    """Open the gallery in a build's folder, or create it if it is missing or damaged.

    Raises GalleryError if it cannot be read at the moment, instead of throwing away finished embeddings.
    """
    if part.exists() and (what := _damage(part)):
        log.warning("%s: unfinished work is damaged; all images are embedded again (%s)", part, what)
        shutil.rmtree(part)
    if part.exists():
        gallery = Gallery.open(part, pseudonyms=pseudonyms)
    else:
        codec = None if cells is None else cells()
        gallery = Gallery.create(part, card, labels, pseudonyms=pseudonyms, index=index, cells=codec)
    with gallery:
        yield gallery


def _damage(part: Path) -> str:
    """Describe the first damage in a gallery that an earlier run left; empty without damage."""
    try:
        with Gallery.open(part) as left:
            return next((problem.what for problem in verify_database(left)), "")
    except GalleryError as error:
        if is_passing(error):
            raise
        return str(error)


def _check_nothing_lost(folder: GalleryFolder, images: Collection[str], check: str) -> None:
    """Raise GalleryError if the existing gallery holds other images, or stores ids in another way."""
    if not folder.has_gallery():
        return
    advice = "'cbmir index add' adds to it; --replace replaces it"
    try:
        with Gallery.open(folder.path) as gallery:
            paths = Counter(entry.image for entry in gallery.every_entry())  # a merge may keep two with the same path
            others = sum(count - (path in images) for path, count in paths.items())
            same_key = gallery.pseudonym_check == check
    except GalleryError as error:
        if is_passing(error):
            raise
        raise GalleryError(f"{folder.path}: expected a gallery whose images are all in this manifest, found one that "
                           f"cannot be read ({error}); --replace replaces it") from error  # fmt: skip
    if others:
        raise GalleryError(f"{folder.path}: expected a gallery that holds only images of this build ({len(images)}), "
                           f"found {others} others in it, which would be lost; {advice}")  # fmt: skip
    if not same_key:
        raise GalleryError(f"{folder.path}: expected a gallery that stores patients' ids as this build does, found "
                           f"other pseudonyms, or pseudonyms in only one of the two; {advice}")  # fmt: skip


def open_collection(
    place: str, card: ModelCard, labels: LabelSet, pseudonyms: Pseudonyms | None, index: str | None
) -> MilvusGallery:
    """Open a Milvus collection. With `index`, create it if it is missing."""
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

    try:
        return MilvusGallery.open(place, pseudonyms=pseudonyms)
    except GalleryError as opening:
        if index is None:
            raise
        try:
            return MilvusGallery.create(place, card, labels, pseudonyms=pseudonyms, index=index)
        except GalleryError as error:  # it exists and cannot be opened, or the server cannot be reached
            same = str(error) == str(opening)
            raise error if same else GalleryError(f"{opening}; a new one cannot be made: {error}") from opening


def _fill_collection(
    place: str, engine: Engine, work: Work, pseudonyms: Pseudonyms | None, index: str | None = None
) -> IndexReport:
    """Add to a Milvus collection. With `index`, build one that is new or holds only some of the manifest's images."""
    with open_collection(place, work.card, work.labels, pseudonyms, index) as collection:
        collection.check_model(work.card)
        if index is not None and not {entry.image for entry in collection.every_entry()} <= work.images:
            raise GalleryError(f"{place}: expected a new gallery, or one that an earlier run of this build began, "
                               f"found other images in it; drop its collections, choose another name, or add to it "
                               f"with 'cbmir index add'")  # fmt: skip
        report, everything = work.fill_in_place(collection, engine)
        collection.calibrate()
    write_lists(Path(), everything, work.images)
    return report if index is None else everything
