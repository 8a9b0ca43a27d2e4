"""Build a gallery from a manifest, or add to one: images are read in worker processes, embedded, and stored.

Both fill a hidden gallery beside the target (`cbmir.runtime.gallery.parts`), a transaction a batch, which at the end
takes the target's place, or goes into it in one transaction. So whatever stops them, the target is as it was, and the
same call goes on where it stopped without embedding an image again. A Milvus collection is filled in place, batch by
batch, and the same call goes on likewise.

Put the images of a manifest into a gallery that is under way, in batches that are a transaction each.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbmir.errors import GalleryError, ImageError, SplitError
from cbmir.files import replacing
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery import parts
from cbmir.runtime.gallery.database import DATABASE, is_passing
from cbmir.runtime.gallery.entry import Entry, entry_ids
from cbmir.runtime.gallery.gallery import CHANGED, DUPLICATES, UNREADABLE, Gallery
from cbmir.runtime.gallery.maintenance import merge, verify_database
from cbmir.runtime.gallery.pictures import BATCH, Picture, Source, embed_pictures, read_picture
from cbmir.runtime.gallery.protocol import EditableGallery, is_milvus
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.novelty import FEWEST

if TYPE_CHECKING:
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

log = logging.getLogger("cbmir")

#: The id of the entry with this content (SHA-256), None where there is none.
Known = Callable[[str], str | None]
#: Images by their paths, each with a reason or an id.
Listed = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Work:
    """Some rows of a manifest to put in: their `positions` in it, and how their images become pictures.

    They are read by `workers` processes and embedded by the engine, or taken from `blocks`.
    """

    engine: Engine
    manifest: Manifest
    positions: Sequence[int]
    workers: int | None = None
    reduced_jpeg2000: bool = False
    blocks: Blocks | None = None

    @classmethod
    def of(
        cls, engine: Engine, manifest: Manifest, splits: Sequence[str], workers: int | None, reduced_jpeg2000: bool,
        embeddings: str | Path | None,
    ) -> Work:  # fmt: skip
        """The rows of these splits ("all": every row). Raises SplitError where there is none."""
        positions = [at for at, row in enumerate(manifest) if "all" in splits or row.split in splits]
        if not positions:
            found = ", ".join(sorted({row.split or "(empty)" for row in manifest}))
            raise SplitError(f"expected images of the split {', '.join(splits)} in the manifest, found only {found}; "
                             f"choose others with --split, or --split all")  # fmt: skip
        blocks = None
        if embeddings is not None:
            blocks = Blocks.of(embeddings, engine.card, manifest.rows, reduced_jpeg2000=reduced_jpeg2000)
        return cls(engine, manifest, positions, workers, reduced_jpeg2000, blocks)

    @property
    def rows(self) -> list[Row]:
        return [self.manifest.rows[at] for at in self.positions]

    def digest(self, *more: str) -> str:
        """Of all that decides what goes in, 16 hexadecimal digits: names the gallery under way."""
        hashed = hashlib.blake2b(digest_size=8)
        start = (self.engine.card.fingerprint, self.reduced_jpeg2000, self.manifest.labels.names, more)
        for values in (start, *((str(row.image), *astuple(row)[1:]) for row in self.rows)):
            hashed.update(repr(values).encode("utf-8", "surrogatepass"))
        return hashed.hexdigest()

    def pictures(self, tasks: Sequence[Task]) -> Generator[Picture | ImageError, None, None]:
        """One a task, in order. Raises GalleryError where a block is missing or damaged, WorkerError."""
        from cbmir.runtime.imaging.workers import work_through

        if self.blocks is not None:
            return self.blocks.read_all([task.position for task in tasks])
        spec = self.engine.card.preprocess
        read = partial(read_picture, spec, spec if self.reduced_jpeg2000 else None)
        sources = (Source.of(task.row, task.there[1] if task.there else "") for task in tasks)
        return work_through(read, sources, workers=self.workers)


@dataclass(frozen=True)
class Task:
    """An image to put in: its row, its position in the manifest, and the id that it will have.

    `there` is (id, SHA-256) of the gallery's entry of the same path, where there is one: it is not put in again.
    """

    row: Row
    position: int
    id: str
    there: tuple[str, str] | None = None


@dataclass(frozen=True)
class Filled:
    """What became of the images: so many put in, and `there`, not changed as far as is known; the rest by their paths.

    `unreadable` holds (path, reason), also of those that are `there`; `duplicates` (path, id of the entry with the same
    content); `changed` (path, id of the entry of that path, which has other content).
    """

    images: int
    there: int
    unreadable: Listed
    duplicates: Listed
    changed: Listed


def fill(gallery: EditableGallery, work: Work, tasks: Sequence[Task], known: Known, *, done: int = 0) -> Filled:
    """Put the tasks' images in; `known` finds content in all galleries that matter, `done` images are there already.

    Stopped at any point, `gallery` holds the batches that were added, and no image of these needs to be embedded again.
    Raises ManifestError for a label that the gallery does not have.
    """
    from tqdm import tqdm

    names = [gallery.labels.names[gallery.labels.index(name)] for name in work.manifest.labels.names]
    unreadable, duplicates, changed = list[tuple[str, str]](), list[tuple[str, str]](), list[tuple[str, str]]()
    batch: dict[str, tuple[Entry, Picture]] = {}  # by content
    images = there = 0

    def add() -> int:
        pictures = [picture for _, picture in batch.values()]
        gallery.add(
            [entry for entry, _ in batch.values()],
            embed_pictures(work.engine, pictures),
            [picture.thumbnail for picture in pictures],
        )
        batch.clear()
        return len(pictures)

    bar = tqdm(total=done + len(tasks), initial=done, desc="Indexing", unit="image", disable=None)
    with closing(work.pictures(tasks)) as results, bar as progress:
        for task, result in zip(tasks, results, strict=True):
            path = str(task.row.image)
            if isinstance(result, ImageError):
                kept = "" if task.there is None else f"; it stays in the gallery as {task.there[0]!r}"
                log.warning("%s: %s%s", "Not read" if kept else "Left out", result, kept)
                unreadable.append((path, f"{result}{kept}"))
                there += bool(kept)
            elif task.there is not None:
                if result.sha256 == task.there[1]:
                    there += 1
                else:
                    changed.append((path, task.there[0]))
            elif result.sha256 in batch:
                duplicates.append((path, batch[result.sha256][0].id))
            elif (same := known(result.sha256)) is not None:
                duplicates.append((path, same))
            else:
                batch[result.sha256] = entry_of(task, names, result), result
            if len(batch) == BATCH:
                images += add()
            progress.update()
        if batch:
            images += add()
    return Filled(images, there, tuple(unreadable), tuple(duplicates), tuple(changed))


def entry_of(task: Task, names: Iterable[str], picture: Picture) -> Entry:
    """What the manifest says of an image, and where it says nothing what the DICOM file says of itself.

    `names` are the gallery's, of the labels of the row.
    """
    row = task.row
    return Entry(
        id=task.id,
        image=str(row.image),
        patient_id=row.patient_id,
        study_id=row.study_id or picture.study_uid,
        sop_instance_uid=picture.sop_instance_uid,
        view=row.view or picture.view,
        date=row.date or picture.date,
        split=row.split,
        report=row.report,
        labels=dict(zip(names, row.labels, strict=True)),
        sha256=picture.sha256,
    )


@dataclass(frozen=True)
class IndexReport:
    """What a build or an addition did.

    `images` are in by it, `resumed` of them by an earlier run that was stopped; `there` were in the gallery before, and
    stay even where their files cannot be read any more. Listed are `unreadable` (path, reason), `duplicates` (path, id
    of the entry with the same content), and `changed` (path, id of the entry of that path, made from other content).
    """

    images: int
    resumed: int = 0
    there: int = 0
    unreadable: Listed = ()
    duplicates: Listed = ()
    changed: Listed = ()


def build_gallery(
    engine: Engine,
    manifest: Manifest,
    path: str | Path,
    *,
    splits: Sequence[str] = ("train",),
    workers: int | None = None,
    reduced_jpeg2000: bool = False,
    embeddings: str | Path | None = None,
    pseudonyms: Pseudonyms | None = None,
    index: str = "auto",
    replace_others: bool = False,
) -> IndexReport:
    """Build the gallery at `path` from the manifest's rows of `splits` ("all": every row).

    `workers` is as `work_through` has it; what is built does not depend on it. `reduced_jpeg2000` is as for `Finder`.
    `embeddings` is a folder of blocks (`cbmir.runtime.embedding`) to take instead of reading images; `pseudonyms` and
    `index` are as `Gallery.create` has them.

    Images that cannot be read are left out, logged as warnings and listed in the gallery's `unreadable.csv`; those
    whose content is there already in `duplicates.csv`. The gallery is built beside `path` and renamed at the end, so a
    build that stops halfway leaves what was there; the same call goes on with it. Other unfinished work beside `path`
    is cleared once this build is done, with a warning. A gallery that is there is replaced where it holds these rows'
    images alone and keeps ids in the same way; any other only with `replace_others`. Raises SplitError if no row is of
    these splits, GalleryError for a gallery that is not to be replaced, if `path` holds anything but a gallery, if no
    image can be read, or while another process builds the same, WorkerError if a worker dies.
    """
    work = Work.of(engine, manifest, splits, workers, reduced_jpeg2000, embeddings)
    entry_ids(work.rows)  # raises for an image listed twice, before anything is touched
    if is_milvus(path):
        return _build_collection(str(path), work, pseudonyms, index)
    path = Path(path).resolve()
    check = "" if pseudonyms is None else pseudonyms.check
    digest = work.digest(index, check)
    with _writable(path):
        parts.put_back(path)
        parts.check_replaceable(path)
        if not replace_others:
            _check_nothing_lost(path, work, check)
        with parts.hidden_part(path, digest, "part") as part:
            with _opened(part, engine, manifest.labels, pseudonyms, index) as gallery:
                report = _fill(gallery, work)
                if len(gallery) >= FEWEST:  # else a first answer would wait while its own distances are measured
                    gallery.write_index()
            if not report.images:
                parts.drop_part(part)
                raise GalleryError(f"expected at least one readable image, found none among {len(work.rows)}; "
                                   f"'cbmir data check' says what is wrong with them")  # fmt: skip
            write_lists(part, report, work)
            if not replace_others:  # again, for others may have added to it meanwhile
                _check_nothing_lost(path, work, check)
            parts.take_place(part, path)
            parts.clear_unfinished(path)
    return report


def add_to_gallery(
    engine: Engine,
    manifest: Manifest,
    path: str | Path,
    *,
    splits: Sequence[str] = ("train",),
    workers: int | None = None,
    reduced_jpeg2000: bool = False,
    embeddings: str | Path | None = None,
    pseudonyms: Pseudonyms | None = None,
) -> IndexReport:
    """Add the manifest's rows of `splits` to the gallery at `path`; options are as `build_gallery` has them.

    An image whose path the gallery has stays as it is: it is read only to see whether its content has changed. One
    whose content is there under another path is left out and reported. All go in by one transaction at the end; a stop
    before that leaves the gallery as it was, and the same call goes on. Raises as `build_gallery`, and GalleryError for
    a gallery of another model, ManifestError for labels that the gallery does not have.
    """
    work = Work.of(engine, manifest, splits, workers, reduced_jpeg2000, embeddings)
    if is_milvus(path):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        with MilvusGallery.open(str(path), pseudonyms=pseudonyms) as collection:
            collection.check_model(engine.card)
            return _fill_collection(collection, work)
    path = Path(path).resolve()
    with _writable(path), Gallery.open(path, pseudonyms=pseudonyms) as gallery:
        gallery.check_model(engine.card)
        _check_key(gallery, pseudonyms)
        with parts.hidden_part(path, work.digest(gallery.uuid), "add") as part:
            with _opened(part, engine, gallery.labels, pseudonyms, "exact") as under_way:
                report = _fill(under_way, work, gallery)
                report = _merged(report, gallery, under_way)
            parts.drop_part(part)
        gallery.settle()
        write_lists(path, report, work)
    return report


def _check_nothing_lost(path: Path, work: Work, check: str) -> None:
    """Raise GalleryError where a gallery at `path` holds other images than the work, or keeps ids in another way."""
    if not (path / DATABASE).exists():
        return
    advice = "'cbmir index add' adds to it; --replace builds anew in its place"
    own = {str(row.image) for row in work.rows}
    try:
        with Gallery.open(path) as gallery:
            others = sum(entry.image not in own for entry in gallery.every_entry())
            same_key = gallery.pseudonym_check == check
    except GalleryError as error:
        if is_passing(error):
            raise
        raise GalleryError(f"{path}: expected a gallery whose images are all in this manifest, found one that cannot "
                           f"be read ({error}); --replace builds anew in its place") from error  # fmt: skip
    if others:
        raise GalleryError(f"{path}: expected a gallery whose images are all among the {len(own)} to build it of, "
                           f"found {others} others in it, which would be lost; {advice}")  # fmt: skip
    if not same_key:
        raise GalleryError(f"{path}: expected a gallery that keeps patients' ids as this build would, found one with "
                           f"other pseudonyms, or just one of the two with any; {advice}")  # fmt: skip


def _check_key(gallery: Gallery, pseudonyms: Pseudonyms | None) -> None:
    """Before the long work, not after it: the key must be that of the gallery's pseudonyms."""
    if (pseudonyms.check if pseudonyms else "") == gallery.pseudonym_check:
        return
    expected = "its key, with --pseudonyms" if gallery.pseudonym_check else "no key for pseudonyms"
    found = "another" if pseudonyms and gallery.pseudonym_check else "one" if pseudonyms else "none"
    kept = "pseudonyms" if gallery.pseudonym_check else "patients' ids as they are"
    raise GalleryError(f"{gallery.path}: keeps {kept}; expected {expected}, found {found}")


def _merged(report: IndexReport, gallery: Gallery, under_way: Gallery) -> IndexReport:
    """The report, once what is under way has gone into the gallery: others may have added the same meanwhile."""
    merged = merge(gallery, under_way)
    there = [(under_way.entry(id).image, same) for id, same in merged.duplicates if id != same]
    return replace(
        report,
        images=len(merged.ids),
        there=report.there + len(merged.duplicates) - len(there),
        duplicates=report.duplicates + tuple(there),
    )


def _build_collection(place: str, work: Work, pseudonyms: Pseudonyms | None, index: str) -> IndexReport:
    """Fill a new collection, or go on with one that holds nothing but some of the same images."""
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

    try:
        gallery = MilvusGallery.open(place, pseudonyms=pseudonyms)
    except GalleryError:  # says itself why, where it is for another reason than that there is none
        card, labels = work.engine.card, work.manifest.labels
        gallery = MilvusGallery.create(place, card, labels, pseudonyms=pseudonyms, index=index)
    with gallery:
        gallery.check_model(work.engine.card)
        own = {str(row.image) for row in work.rows}
        if any(entry.image not in own for entry in gallery.every_entry()):
            raise GalleryError(f"{place}: expected a new gallery, or one that an earlier run of this build began, "
                               f"found other images in it; drop its collections, choose another name, or add to it "
                               f"with 'cbmir index add'")  # fmt: skip
        return _fill_collection(gallery, work)


def _fill_collection(gallery: MilvusGallery, work: Work) -> IndexReport:
    report = _fill(gallery, work, gallery)
    gallery.calibrate()
    write_lists(Path(), report, work)
    return report


def write_lists(folder: Path, report: IndexReport, work: Work) -> None:
    """What was left out, in `unreadable.csv`, `duplicates.csv` and `changed.csv`; one with nothing in it goes.

    What an earlier run has listed of other images than this work's stays.
    """
    own = {str(row.image) for row in work.rows}
    for name, header, found in (
        (UNREADABLE, ("image", "reason"), report.unreadable),
        (DUPLICATES, ("image", "id"), report.duplicates),
        (CHANGED, ("image", "id"), report.changed),
    ):
        rows = [*(row for row in _listed(folder / name) if row[0] not in own), *found]
        if not rows:
            (folder / name).unlink(missing_ok=True)
            continue
        with replacing(folder / name) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([header, *rows])


def _listed(file: Path) -> Listed:
    """The rows of a list, without its header."""
    if not file.exists():
        return ()
    with file.open(newline="", encoding="utf-8") as stream:
        return tuple((row[0], row[1]) for row in list(csv.reader(stream))[1:])


def _fill(gallery: EditableGallery, work: Work, target: EditableGallery | None = None) -> IndexReport:
    """Put all of the work that is not done into a gallery: one under way, which is to go into `target` where there is
    one, or `target` itself."""
    there, taken = dict[str, tuple[str, str]](), set[str]()
    if target is not None:
        for entry in target.every_entry():
            there[entry.image] = entry.id, entry.sha256
            taken.add(entry.id)
    done = set[str]()
    if gallery is not target:
        _drop_clashing(gallery, target, taken)
        done = {entry.image for entry in gallery.every_entry()}
    if done:
        log.info("Going on with %d images that an earlier run embedded.", len(done))
    rows = list(zip(work.rows, work.positions, strict=True))
    new = [row for row, _ in rows if str(row.image) not in there]
    ids = dict(zip((str(row.image) for row in new), entry_ids(new, taken), strict=True))
    tasks = [
        Task(row, position, there[name][0] if name in there else ids[name], there.get(name))
        for row, position in rows
        if (name := str(row.image)) not in done
    ]

    def known(sha256: str) -> str | None:
        found = gallery.find(sha256)
        if not found and target is not None and target is not gallery:
            found = target.find(sha256)
        return found[0].id if found else None

    filled = fill(gallery, work, tasks, known, done=len(done))
    return IndexReport(
        filled.images + len(done), len(done), filled.there, filled.unreadable, filled.duplicates, filled.changed
    )


def _drop_clashing(gallery: EditableGallery, target: EditableGallery | None, taken: Collection[str]) -> None:
    """Of an addition that goes on, take out what has an id that others have meanwhile given to another image."""
    if target is None:
        return
    clashing = [
        entry.id
        for entry in gallery.every_entry()
        if entry.id in taken and target.entry(entry.id).sha256 != entry.sha256
    ]
    if clashing:
        gallery.remove(ids=clashing)


@contextmanager
def _opened(
    part: Path, engine: Engine, labels: LabelSet, pseudonyms: Pseudonyms | None, index: str
) -> Iterator[Gallery]:
    """The gallery under way in a folder, made where there is none; a damaged one is made anew.

    Raises GalleryError for one that cannot be read at this moment: what has been embedded is not thrown away for that.
    """
    gallery = _resumed(part, pseudonyms) if parts.is_marked(part) else None
    if gallery is None:
        for file in part.iterdir():  # the folder itself is locked
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        gallery = Gallery.create(part, engine.card, labels, pseudonyms=pseudonyms, index=index)
        parts.mark(part)
    with gallery:
        yield gallery


def _resumed(part: Path, pseudonyms: Pseudonyms | None) -> Gallery | None:
    """What an earlier run left, verified; None where it is damaged."""
    try:
        with Gallery.open(part) as left:
            what = next((problem.what for problem in verify_database(left)), "")
        if not what:
            return Gallery.open(part, pseudonyms=pseudonyms)
    except GalleryError as error:
        if is_passing(error):
            raise
        what = str(error)
    log.warning("%s: what an earlier run left is damaged, and all is embedded anew (%s)", part, what)
    return None


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GalleryError(f"{path}: cannot write the gallery there ({error}); choose another place") from error
