"""Fill a gallery: workers read a manifest's images, which are embedded and added in batches."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, ImageError, SplitError
from cbmir.files import undefused, write_csv
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery.build.folder import digest_of
from cbmir.runtime.gallery.cells import SAMPLE, CellCodec
from cbmir.runtime.gallery.entry import Entry, entry_ids, with_row
from cbmir.runtime.gallery.gallery import CHANGED, DUPLICATES, UNREADABLE, WARNINGS
from cbmir.runtime.gallery.maintenance import file_digest
from cbmir.runtime.gallery.protocol import EditableGallery
from cbmir.runtime.imaging.image_warning import SEPARATOR, kinds_text
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.reader import read_image, thumbnail_jpeg
from cbmir.text_table import read_table

log = logging.getLogger("cbmir")

#: Number of images that are embedded and added together.
BATCH = 32
#: Paths of images, each with a reason or an id.
Listed = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class IndexReport:
    """The result of a build or an addition.

    `images` were added, `resumed` of them by an earlier run that was stopped; `there` were in the gallery before, and
    stay even if their files can no longer be read. The lists are `unreadable` (path, reason), `duplicates` (path, id of
    the entry with the same content), `changed` (path, id of the entry with this path but other content), and `warned`
    (path, kind; one row per warning), for all images of a build, or only for those that an addition added.
    """

    images: int
    resumed: int = 0
    there: int = 0
    unreadable: Listed = ()
    duplicates: Listed = ()
    changed: Listed = ()
    warned: Listed = ()


@dataclass(frozen=True)
class Task:
    """An image to add, and its id.

    `there` is (id, SHA-256) of the gallery's entry with the same path, if there is one: it is not added again.
    """

    row: Row
    id: str
    there: tuple[str, str] | None = None


@dataclass(frozen=True)
class Work:
    """Rows of a manifest to add to a gallery of one model, and settings for reading their images."""

    card: ModelCard
    labels: LabelSet
    rows: Sequence[Row]
    reduced_jpeg2000: bool
    workers: int | None

    @classmethod
    def of(
        cls, card: ModelCard, manifest: Manifest, splits: Sequence[str], reduced_jpeg2000: bool, workers: int | None
    ) -> Work:
        """Select the rows of these splits; every row for "all", and for "train" if no row has a split. Raises
        SplitError if no row is selected."""
        if tuple(splits) == ("train",) and not any(row.split for row in manifest):
            log.info("The manifest has no splits: all images are used.")
            splits = ("all",)
        rows = [row for row in manifest if "all" in splits or row.split in splits]
        if not rows:
            found = ", ".join(sorted({row.split or "(empty)" for row in manifest}))
            raise SplitError(f"expected images of the split {', '.join(splits)} in the manifest, found only {found}; "
                             f"choose others with --split, or --split all")  # fmt: skip
        return cls(card, manifest.labels, rows, reduced_jpeg2000, workers)

    @property
    def images(self) -> set[str]:
        return {str(row.image) for row in self.rows}

    def digest(self, *more: str) -> str:
        """Return 16 hexadecimal digits that name a build, made from everything that determines its result."""
        start = (self.card.fingerprint, self.card.precision, self.reduced_jpeg2000, self.labels.names, more)
        return digest_of(start, *((str(row.image), *astuple(row)[1:]) for row in self.rows))

    def fill(self, gallery: EditableGallery, engine: Engine, tasks: Sequence[Task], resumed: int = 0) -> IndexReport:
        """Add the tasks' images to a gallery, one transaction per batch; it already has `resumed` others.

        Raises ManifestError for a label that the gallery lacks.
        """
        from tqdm import tqdm

        names = {name: gallery.labels.names[gallery.labels.index(name)] for name in self.labels.names}
        unreadable, duplicates, changed = list[tuple[str, str]](), list[tuple[str, str]](), list[tuple[str, str]]()
        warned = list[tuple[str, str]]()
        batch: dict[str, tuple[Entry, Picture]] = {}  # by content
        images, there = resumed, 0

        def add() -> None:
            pictures = [picture for _, picture in batch.values()]
            embeddings, maps = embed_pictures(engine, pictures, cells=gallery.cell_codec is not None)
            gallery.add([entry for entry, _ in batch.values()], embeddings, [one.thumbnail for one in pictures], maps)
            batch.clear()

        bar = tqdm(total=resumed + len(tasks), initial=resumed, desc="Indexing", unit="image", disable=None)
        with closing(self._read(tasks)) as results, bar as progress:
            for task, result in zip(tasks, results, strict=True):
                path = str(task.row.image)
                if isinstance(result, ImageError):
                    kept = "" if task.there is None else f"; it stays in the gallery as {task.there[0]!r}"
                    log.warning("%s: %s%s", "Not read" if kept else "Left out", result, kept)
                    unreadable.append((path, f"{result}{kept}"))
                    there += bool(kept)
                elif task.there is not None:
                    if result.entry.sha256 == task.there[1]:
                        there += 1
                    else:
                        changed.append((path, task.there[0]))
                elif (sha256 := result.entry.sha256) in batch:
                    duplicates.append((path, batch[sha256][0].id))
                elif same := gallery.find(sha256):
                    duplicates.append((path, same[0].id))
                else:
                    batch[sha256] = with_row(replace(result.entry, id=task.id), task.row, names), result
                    warned += _kinds_of(batch[sha256][0])
                    images += 1
                if len(batch) == BATCH:
                    add()
                progress.update()
            if batch:
                add()
        return IndexReport(images, resumed, there, *map(tuple, (unreadable, duplicates, changed, warned)))

    def fill_in_place(self, gallery: EditableGallery, engine: Engine) -> tuple[IndexReport, IndexReport]:
        """Add the rows that a gallery lacks, and check whether the images of the others have changed.

        Returns:
            The report; and the same report with the warnings of all images in the gallery.
        """
        there, earlier = dict[str, tuple[str, str]](), list[tuple[str, str]]()
        for entry in gallery.every_entry():
            there[entry.image] = entry.id, entry.sha256
            earlier += _kinds_of(entry)
        new = [row for row in self.rows if str(row.image) not in there]
        free = iter(entry_ids(new, {known for known, _ in there.values()}))
        tasks = [Task(row, "" if (old := there.get(str(row.image))) else next(free), old) for row in self.rows]
        report = self.fill(gallery, engine, tasks)
        ids = set(gallery.ids())  # some may have been removed meanwhile
        return report, replace(report, warned=(*(one for one in earlier if there[one[0]][0] in ids), *report.warned))

    def fit_cells(self, engine: Engine) -> CellCodec:
        """Fit a codec to the cells of a sample of these images, which is the same in every run.

        Raises GalleryError if no image of the sample can be read.
        """
        chosen = np.random.default_rng(0).permutation(len(self.rows))[:SAMPLE]
        with closing(self._read([Task(self.rows[at], "") for at in np.sort(chosen)])) as results:
            pictures = [result for result in results if not isinstance(result, ImageError)]
        if not pictures:
            raise GalleryError(f"expected readable images to fit cells to, found none among {len(chosen)}; "
                               f"'cbmir data check' says what is wrong with them")  # fmt: skip
        parts = (pictures[at : at + BATCH] for at in range(0, len(pictures), BATCH))
        maps = [embed_pictures(engine, part, cells=True)[1] for part in parts]
        return CellCodec.fitted(np.concatenate([one for one in maps if one is not None]))

    def _read(self, tasks: Sequence[Task]) -> Generator[Picture | ImageError, None, None]:
        from cbmir.runtime.imaging.workers import work_through

        spec = self.card.preprocess
        read = partial(_read_picture, spec, spec if self.reduced_jpeg2000 else None)
        sources = ((task.row.image, task.row.view == "LATERAL", task.there[1] if task.there else "") for task in tasks)
        return work_through(read, sources, workers=self.workers)


@dataclass(frozen=True, eq=False)
class Picture:
    """An image that was read, with the model's input `crop` (uint8 [S, S]). `entry` has no id yet, only the file's
    digest and warnings and, from DICOM, study, SOP instance, view and date."""

    entry: Entry
    thumbnail: bytes = b""
    crop: NDArray[np.uint8] | None = None


def _read_picture(spec: PreprocessSpec, reduced_for: PreprocessSpec | None, source: tuple[Path, bool, str]) -> Picture:
    """Read an image in a worker. `source` is its path, whether a lateral view is allowed, and its known SHA-256.

    If the digest has not changed, only the digest is returned. `reduced_for` is as in `read_image`.
    """
    path, lateral, known = source
    if known and file_digest(path) == known:
        return Picture(Entry("", str(path), "", sha256=known))
    radiograph = read_image(path, intensity=spec.intensity, allow_lateral=lateral, reduced_for=reduced_for)
    entry = Entry(
        "", str(path), "", radiograph.study_id, radiograph.sop_instance_uid, radiograph.view, date=radiograph.date,
        sha256=radiograph.sha256, warnings=kinds_text(radiograph.warnings),
    )  # fmt: skip
    return Picture(entry, thumbnail_jpeg(radiograph.pixels), preprocess(radiograph, spec))


def embed_pictures(
    engine: Engine, pictures: Sequence[Picture], *, cells: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Embed the pictures' crops: float32 [N, D], unit norm; and with `cells`, their feature maps.

    A CPU engine with one thread embeds them one by one, as each stream of a larger engine does, so in throughput mode
    the values do not depend on the number of threads.
    """
    crops = np.stack([picture.crop for picture in pictures if picture.crop is not None])[:, None]
    size = 1 if engine.streams and engine.threads == 1 else len(crops)
    found = [engine.run(crops[at : at + size], feature_map=cells) for at in range(0, len(crops), size)]
    maps = [one.feature_map for one in found if one.feature_map is not None]
    return np.concatenate([one.embedding for one in found]), np.concatenate(maps) if cells else None


def write_lists(folder: Path, report: IndexReport, images: Iterable[str] = ()) -> None:
    """Write `unreadable.csv`, `duplicates.csv`, `changed.csv` and `warnings.csv`; remove a list that is empty.

    Rows from earlier runs stay, except those of these `images`. Warnings are written for the whole gallery.
    """
    own = set(images)
    for name, second, found in (
        (UNREADABLE, "reason", report.unreadable),
        (DUPLICATES, "id", report.duplicates),
        (CHANGED, "id", report.changed),
        (WARNINGS, "kind", report.warned),
    ):
        earlier = () if name == WARNINGS else read_list(folder / name)
        rows = [*(row for row in earlier if row[0] not in own), *found]
        if not rows:
            (folder / name).unlink(missing_ok=True)
            continue
        write_csv(folder / name, [("image", second), *rows], private=True)


def _kinds_of(entry: Entry) -> list[tuple[str, str]]:
    """Return (path, kind) for each warning of an entry."""
    return [(entry.image, kind) for kind in entry.warnings.split(SEPARATOR)] if entry.warnings else []


def with_all_warnings(report: IndexReport, gallery: EditableGallery) -> IndexReport:
    """Return the report with the warnings of all images in the gallery, including those of earlier runs."""
    return replace(report, warned=tuple(one for entry in gallery.every_entry() for one in _kinds_of(entry)))


def read_list(file: Path) -> Listed:
    """Read a list without its header; empty if there is no file. Raises ManifestError or GalleryError if invalid."""
    rows = read_table(file, recognise=False).rows if file.exists() else []
    if any(len(row) != 2 for row in rows):
        raise GalleryError(f"{file}: expected a list of two columns as cbmir writes it, found another; delete it")
    return tuple((undefused(image), undefused(reason)) for image, reason in rows)
