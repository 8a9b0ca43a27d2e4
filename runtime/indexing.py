"""Build a gallery from a manifest: read and preprocess in threads, embed, store; then take the old one's place."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import GalleryError, ImageError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engine import Engine, available_threads
from cbmir.runtime.gallery import FILES, UNREADABLE, Gallery
from cbmir.runtime.preprocess import preprocess
from cbmir.runtime.reading import read_image
from cbmir.runtime.store import DATABASE, Entry

log = logging.getLogger("cbmir")

THUMBNAIL_SIDE = 256
_BATCH = 32
_AHEAD = 2 * _BATCH  # images read while the engine is busy; bounds the memory


@dataclass(frozen=True)
class IndexReport:
    """How many images went in, and the (path, reason) of each that could not be read."""

    images: int
    unreadable: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class _Item:
    entry: Entry
    crop: NDArray[np.uint8]
    thumbnail: bytes


def build_gallery(
    engine: Engine, manifest: Manifest, path: str | Path, *, splits: Sequence[str] = ("train",)
) -> IndexReport:
    """Build the gallery at `path` from the manifest's rows of `splits` ("all": every row).

    Images that cannot be read are left out, logged as warnings and listed in the gallery's `unreadable.csv`. The
    gallery is built beside `path` and renamed at the end, so a build that stops halfway leaves what was there.
    Raises SplitError if no row is of these splits, GalleryError if `path` holds anything but a gallery or no image can
    be read.
    """
    path = Path(path).resolve()
    rows = (manifest if "all" in splits else manifest.split(*splits)).rows
    if not rows:
        found = ", ".join(sorted({row.split or "(empty)" for row in manifest}))
        raise SplitError(f"expected images of the split {', '.join(splits)} in the manifest, found only {found}; "
                         f"choose others with --split, or --split all")  # fmt: skip
    ids = entry_ids(rows)
    try:
        _check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        try:
            report = _write(part, engine, manifest.labels, rows, ids)
            _take_place(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise GalleryError(f"{path}: cannot write the gallery there ({error}); choose another -o") from error
    return report


def entry_ids(rows: Sequence[Row]) -> list[str]:
    """An id for each row: the image's name without suffix, and a digest of its path where that is not unique.

    Raises GalleryError where the same file is listed twice.
    """
    stems = Counter(row.image.stem for row in rows)
    ids = [
        row.image.stem + (f"-{hashlib.sha256(bytes(row.image)).hexdigest()[:8]}" if stems[row.image.stem] > 1 else "")
        for row in rows
    ]
    repeated = [name for name, count in Counter(ids).items() if count > 1]
    if repeated:
        images = ", ".join(str(row.image) for row, name in zip(rows, ids, strict=True) if name == repeated[0])
        raise GalleryError(f"expected each image once, found {images}; 'cbmir data check' lists them all")
    return ids


def _write(folder: Path, engine: Engine, labels: LabelSet, rows: Sequence[Row], ids: Sequence[str]) -> IndexReport:
    """A whole gallery in an empty folder."""
    with Gallery.create(folder, engine.card, labels) as gallery:
        report = _fill(gallery, engine, rows, ids)
        if not report.images:
            raise GalleryError(f"expected at least one readable image, found none among {len(rows)}; "
                               f"'cbmir data check' says what is wrong with them")  # fmt: skip
        gallery.write_index()
    if report.unreadable:
        with (folder / UNREADABLE).open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("image", "reason"), *report.unreadable])
    return report


def _fill(gallery: Gallery, engine: Engine, rows: Sequence[Row], ids: Sequence[str]) -> IndexReport:
    from tqdm import tqdm

    spec = engine.card.preprocess
    unreadable: list[tuple[str, str]] = []
    batch: list[_Item] = []
    images = 0
    with (
        ThreadPoolExecutor(available_threads(), thread_name_prefix="read") as pool,
        tqdm(total=len(rows), desc="Indexing", unit="image", disable=None) as progress,
    ):
        for row, future in _read_ahead(pool, rows, ids, gallery.labels.names, spec):
            try:
                batch.append(future.result())
            except ImageError as error:
                log.warning("Left out: %s", error)
                unreadable.append((str(row.image), str(error)))
            if len(batch) == _BATCH:
                _add(gallery, engine, batch)
                images += len(batch)
                batch.clear()
            progress.update()
        if batch:
            _add(gallery, engine, batch)
    return IndexReport(images + len(batch), tuple(unreadable))


def _read_ahead(
    pool: ThreadPoolExecutor, rows: Sequence[Row], ids: Sequence[str], labels: tuple[str, ...], spec: PreprocessSpec
) -> Iterator[tuple[Row, Future[_Item]]]:
    """Each row with its reading, in order, never more than `_AHEAD` of them under way."""
    waiting: deque[tuple[Row, Future[_Item]]] = deque()
    for row, name in zip(rows, ids, strict=True):
        waiting.append((row, pool.submit(_read, row, name, labels, spec)))
        if len(waiting) == _AHEAD:
            yield waiting.popleft()
    yield from waiting


def _read(row: Row, name: str, labels: tuple[str, ...], spec: PreprocessSpec) -> _Item:
    radiograph = read_image(row.image)
    picture = Image.fromarray(radiograph.pixels)
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=85)
    entry = Entry(
        id=name,
        image=str(row.image),
        patient_id=row.patient_id,
        study_id=row.study_id,
        view=row.view,
        split=row.split,
        report=row.report,
        labels=dict(zip(labels, row.labels, strict=True)),
        sha256=radiograph.sha256,
    )
    return _Item(entry, preprocess(radiograph.pixels, spec), jpeg.getvalue())


def _add(gallery: Gallery, engine: Engine, batch: Sequence[_Item]) -> None:
    outputs = engine.run(np.stack([item.crop for item in batch])[:, None])
    gallery.add([item.entry for item in batch], outputs.embedding, [item.thumbnail for item in batch])


def _check_replaceable(path: Path) -> None:
    """Only a gallery or an empty folder may be replaced: never a folder that holds something else."""
    if not path.exists():
        return
    if not path.is_dir():
        raise GalleryError(f"{path}: expected a folder for the gallery, found a file; choose another -o")
    names = {file.name for file in path.iterdir()}
    foreign = sorted(name for name in names - FILES if not (name.startswith(".") and name.endswith(".part")))
    if foreign or (names and DATABASE not in names):
        raise GalleryError(f"{path}: expected a gallery, an empty folder or none, found {', '.join(foreign or names)}; "
                           f"nothing was changed: choose another -o")  # fmt: skip


def _take_place(part: Path, path: Path) -> None:
    """Rename `part` to `path`; what was at `path` goes only once the new one stands there."""
    if not path.exists():
        part.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.rename(old)  # onto an empty folder
    try:
        part.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)
