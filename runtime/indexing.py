"""Build a gallery from a manifest: read and preprocess in worker processes, embed, store; then replace the old one."""

from __future__ import annotations

import csv
import logging
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import GalleryError, ImageError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engine import Engine
from cbmir.runtime.gallery import EXACT_LIMIT, FILES, UNREADABLE, Gallery
from cbmir.runtime.preprocess import preprocess
from cbmir.runtime.reading import read_image
from cbmir.runtime.store import DATABASE, Entry
from cbmir.runtime.thumbnail import thumbnail_jpeg

log = logging.getLogger("cbmir")

_BATCH = 32


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


#: What workers do with a row and its id.
Reader = Callable[[tuple[Row, str]], _Item]


def build_gallery(
    engine: Engine,
    manifest: Manifest,
    path: str | Path,
    *,
    splits: Sequence[str] = ("train",),
    workers: int | None = None,
    reduced_jpeg2000: bool = False,
) -> IndexReport:
    """Build the gallery at `path` from the manifest's rows of `splits` ("all": every row).

    `workers` is as `work_through` has it; what is built does not depend on it. `reduced_jpeg2000` is as for `Finder`.

    Images that cannot be read are left out, logged as warnings and listed in the gallery's `unreadable.csv`. The
    gallery is built beside `path` and renamed at the end, so a build that stops halfway leaves what was there; what
    one that was killed left, the next clears away. Raises SplitError if no row is of these splits, GalleryError if
    `path` holds anything but a gallery or no image can be read, WorkerError if a worker dies.
    """
    path = Path(path).resolve()
    rows = (manifest if "all" in splits else manifest.split(*splits)).rows
    if not rows:
        found = ", ".join(sorted({row.split or "(empty)" for row in manifest}))
        raise SplitError(f"expected images of the split {', '.join(splits)} in the manifest, found only {found}; "
                         f"choose others with --split, or --split all")  # fmt: skip
    ids, spec = entry_ids(rows), engine.card.preprocess
    read = partial(_read, manifest.labels.names, spec, spec if reduced_jpeg2000 else None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(path)
        _check_replaceable(path)
        part = _hidden_folder(path, "part")
        try:
            with _locked(part):
                report = _write(part, engine, manifest.labels, rows, ids, read, workers)
                _take_place(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise GalleryError(f"{path}: cannot write the gallery there ({error}); choose another -o") from error
    return report


def entry_ids(rows: Sequence[Row]) -> list[str]:
    """An id for each row: the image's name, with as many of its folders as tell it from the others.

    `patient00001/study1/view1_frontal`, say. File suffixes are left out, unless they alone tell two images apart. The
    folder in which all of them lie plays no part. Raises GalleryError where the same file is listed twice.
    """
    paths = [row.image.as_posix() for row in rows]
    path, count = Counter(paths).most_common(1)[0]
    if count > 1:
        raise GalleryError(f"expected each image once, found {path} more than once; 'cbmir data check' lists them all")
    root = os.path.commonpath([path[: path.rfind("/") + 1] for path in paths])
    names = [path[len(root) :].lstrip("/") for path in paths]
    stems = [name.removesuffix(row.image.suffix) for name, row in zip(names, rows, strict=True)]
    parts = [name.split("/") for name in (stems if len(set(stems)) == len(stems) else names)]
    ids = [""] * len(parts)
    undecided, depth = list(range(len(parts))), 1
    while undecided:
        for row in undecided:
            ids[row] = "/".join(parts[row][-depth:])
        counts = Counter(ids[row] for row in undecided)
        undecided = [row for row in undecided if counts[ids[row]] > 1]
        depth += 1
    return ids


def _write(
    folder: Path, engine: Engine, labels: LabelSet, rows: Sequence[Row], ids: Sequence[str], read: Reader,
    workers: int | None,
) -> IndexReport:  # fmt: skip
    """A whole gallery in an empty folder."""
    with Gallery.create(folder, engine.card, labels) as gallery:
        report = _fill(gallery, engine, rows, ids, read, workers)
        if not report.images:
            raise GalleryError(f"expected at least one readable image, found none among {len(rows)}; "
                               f"'cbmir data check' says what is wrong with them")  # fmt: skip
        if report.images > EXACT_LIMIT:
            gallery.write_index()
    if report.unreadable:
        with (folder / UNREADABLE).open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("image", "reason"), *report.unreadable])
    return report


def _fill(
    gallery: Gallery, engine: Engine, rows: Sequence[Row], ids: Sequence[str], read: Reader, workers: int | None
) -> IndexReport:
    from tqdm import tqdm

    from cbmir.runtime.bulk import work_through

    results = work_through(read, zip(rows, ids, strict=True), workers=workers)
    unreadable: list[tuple[str, str]] = []
    batch: list[_Item] = []
    images = 0
    with closing(results), tqdm(total=len(rows), desc="Indexing", unit="image", disable=None) as progress:
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, ImageError):
                log.warning("Left out: %s", result)
                unreadable.append((str(row.image), str(result)))
            else:
                batch.append(result)
            if len(batch) == _BATCH:
                _add(gallery, engine, batch)
                images += len(batch)
                batch.clear()
            progress.update()
        if batch:
            _add(gallery, engine, batch)
    return IndexReport(images + len(batch), tuple(unreadable))


def _read(
    labels: tuple[str, ...], spec: PreprocessSpec, reduced_for: PreprocessSpec | None, image: tuple[Row, str]
) -> _Item:
    row, name = image
    radiograph = read_image(row.image, reduced_for=reduced_for)
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
    return _Item(entry, preprocess(radiograph, spec), thumbnail_jpeg(radiograph.pixels))


def _add(gallery: Gallery, engine: Engine, batch: Sequence[_Item]) -> None:
    outputs = engine.run(np.stack([item.crop for item in batch])[:, None])
    gallery.add([item.entry for item in batch], outputs.embedding, [item.thumbnail for item in batch])


def _check_replaceable(path: Path) -> None:
    """Only a gallery or an empty folder may be replaced, never one that holds something else; and only by renaming."""
    if not path.exists():
        return
    if not path.is_dir():
        raise GalleryError(f"{path}: expected a folder for the gallery, found a file; choose another -o")
    if not _is_ours(path):
        found = ", ".join(sorted(file.name for file in path.iterdir()))
        raise GalleryError(f"{path}: expected a gallery, an empty folder or none, found {found}; "
                           f"nothing was changed: choose another -o")  # fmt: skip
    if path.is_mount():
        raise GalleryError(f"{path}: expected a folder that can be renamed, found a mount point; choose one below it")


def _is_ours(folder: Path) -> bool:
    """Whether a folder is empty or holds a gallery, and nothing but that."""
    names = {file.name for file in folder.iterdir()}
    known = {name for name in names if name in FILES or (name.startswith(".") and name.endswith(".part"))}
    return names == known and (not names or DATABASE in names)


def _take_place(part: Path, path: Path) -> None:
    """Rename `part` to `path`; what was at `path` goes only once the new one stands there, whatever interrupts this."""
    if not path.exists():
        part.rename(path)
        return
    old = _hidden_folder(path, "old")
    try:
        path.rename(old)  # onto an empty folder
        part.rename(path)
    finally:
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def _hidden_folder(path: Path, kind: str) -> Path:
    """A new folder beside `path`, for its owner only, that `_clear_leftovers` knows by its name."""
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=f".{kind}", dir=path.parent))


def _clear_leftovers(path: Path) -> None:
    """Put back or remove what a killed build of `path` left beside it: hidden, it is patient data all the same."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.\w+\.(part|old)")
    for folder in sorted(path.parent.iterdir()):
        match = pattern.fullmatch(folder.name)
        if match is None or not folder.is_dir() or not _is_ours(folder):
            continue
        if match[1] == "old" and not path.exists() and (folder / DATABASE).exists():
            log.warning("%s: put back; an earlier build was killed while it replaced this gallery", path)
            folder.rename(path)
            continue
        try:
            with _locked(folder):
                shutil.rmtree(folder)
        except BlockingIOError:
            log.info("%s: another build is writing it", folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process. Raises BlockingIOError while another holds it."""
    if sys.platform == "win32":  # no lock on a folder there: two builds of one gallery at once are the user's to avoid
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
