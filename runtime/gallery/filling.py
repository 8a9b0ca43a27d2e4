"""Put the images of a manifest into a gallery that is under way, in batches that are a transaction each."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from cbmir.errors import ImageError, SplitError
from cbmir.manifest import Manifest, Row
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.engine import Engine
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.protocol import AnyGallery
from cbmir.runtime.picture import BATCH, Picture, Source, embed_pictures, read_picture

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
        from cbmir.runtime.bulk import work_through

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


def fill(gallery: AnyGallery, work: Work, tasks: Sequence[Task], known: Known, *, done: int = 0) -> Filled:
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
