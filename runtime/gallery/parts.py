"""Galleries under way: hidden folders beside the gallery that they will be, locked while somebody writes them.

`.NAME.DIGEST.part` is what a build has done so far, `.NAME.DIGEST.add` what is to be added; the digest tells what they
are made from, so that the same command goes on with them. `.NAME.….old` is a gallery that is being replaced.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cbmir.errors import GalleryError
from cbmir.files import sync
from cbmir.runtime.gallery.database import DATABASE
from cbmir.runtime.gallery.gallery import Gallery, is_gallery_file
from cbmir.runtime.gallery.pseudonyms import Pseudonyms

log = logging.getLogger("cbmir")

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_MARKER = ".under-way.part"


@contextmanager
def hidden_part(path: Path, digest: str, kind: str) -> Iterator[Path]:
    """The folder `.NAME.DIGEST.KIND` beside `path`, for its owner only, locked; it stays, whatever happens.

    Raises GalleryError while another process works on it.
    """
    part = path.with_name(f".{path.name}.{digest}.{kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        part.mkdir(mode=0o700, exist_ok=True)
        try:
            with _locked(part) as is_in_place:
                if not is_in_place:  # whoever held the lock has just finished it
                    continue
                yield part
                return
        except BlockingIOError as error:
            raise GalleryError(f"{path}: another process works on the same at this moment; wait for it") from error


def mark(part: Path) -> None:
    """Say that what is in a hidden folder now is this work; `is_marked` tells."""
    (part / _MARKER).write_text(part.name, "utf-8")


def is_marked(part: Path) -> bool:
    """Whether a hidden folder holds work to go on with. It does not where a build was killed when it had exchanged its
    gallery for the one of before, and so that one lies here."""
    marker = part / _MARKER
    return marker.is_file() and marker.read_text("utf-8") == part.name


def drop_part(part: Path) -> None:
    """Remove a folder under way, also where it is gone already."""
    if part.exists():
        shutil.rmtree(part)


def unfinished(path: Path) -> list[Path]:
    """Folders beside `path` in which a build or an addition was stopped, or is under way."""
    return [folder for folder, kind in _hidden(path) if kind != "old"]


def check_replaceable(path: Path) -> None:
    """Raise GalleryError unless `path` is nothing, an empty folder or a gallery, never one that holds something else;
    and unless it can be replaced by renaming."""
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


def take_place(part: Path, path: Path) -> None:
    """Let `part` be at `path`; what was there goes only once the new one stands in its place, whatever interrupts this.

    On Linux the two change places in one step, so that at every moment there is a gallery to open. Elsewhere there is
    none between two renames, and `put_back` brings it back after a kill just then.
    """
    if not path.exists():
        part.rename(path)
    else:
        identity = part.stat().st_ino
        with _locked(path):  # what is there will bear the name of `part` for a moment
            try:
                if not _exchanged(part, path):
                    _replace_by_renames(part, path)
            finally:
                if part.exists() and part.stat().st_ino != identity:
                    shutil.rmtree(part)
    (path / _MARKER).unlink(missing_ok=True)
    sync(path.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _replace_by_renames(new: Path, path: Path) -> None:
    import tempfile

    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    try:
        path.rename(old)  # onto an empty folder
        new.rename(path)
    finally:
        if path.exists():
            shutil.rmtree(old)
        else:
            old.rename(path)


def put_back(path: Path) -> None:
    """Where a build was killed while it replaced the gallery at `path`: put the old one back, or remove the rest."""
    (path / _MARKER).unlink(missing_ok=True)
    for folder, kind in _hidden(path):
        if kind != "old":
            continue
        try:
            with _locked(folder):
                if not path.exists() and (folder / DATABASE).exists():
                    log.warning("%s: put back; an earlier build was killed while it replaced this gallery", path)
                    folder.rename(path)
                else:
                    shutil.rmtree(folder)
        except BlockingIOError:
            log.info("%s: another build is putting it into place", folder)


def clear_unfinished(path: Path) -> None:
    """Remove what builds and additions that were stopped have left beside `path`: patient data that nobody sees."""
    for folder in unfinished(path):
        try:
            with _locked(folder):
                if count := _count(folder):
                    log.warning("%s: removed, with %s images of other work that was stopped", folder, count)
                shutil.rmtree(folder)
        except BlockingIOError:
            log.info("%s: another process is writing it", folder)


def remove_from_unfinished(path: Path, pseudonyms: Pseudonyms | None, **given: Sequence[str]) -> list[str]:
    """Take entries out of the unfinished work beside `path` as well; `given` is as `Gallery.remove` has it.

    Logs how many went, and returns of each folder where they may have stayed why.
    """
    failed = []
    for folder in unfinished(path):
        if not (folder / DATABASE).exists():
            continue
        try:
            with _locked(folder), Gallery.open(folder, pseudonyms=pseudonyms) as gallery:
                if removed := gallery.remove(**given):
                    log.info("%s: %d images removed from unfinished work", folder, len(removed))
        except BlockingIOError:
            failed.append(f"{folder}: another process is filling it; remove again when it has ended")
        except GalleryError as error:
            failed.append(f"{folder}: unfinished work that may hold the same images; delete the folder ({error})")
    return failed


def _count(folder: Path) -> int | str:
    """How many images a hidden gallery holds, in words where that cannot be read."""
    if not (folder / DATABASE).exists():
        return 0
    try:
        with Gallery.open(folder) as gallery:
            return len(gallery)
    except GalleryError:
        return "an unknown number of"


def _hidden(path: Path) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.\w+\.(part|add|old)")
    if not path.parent.is_dir():
        return []
    found = [(folder, pattern.fullmatch(folder.name)) for folder in sorted(path.parent.iterdir())]
    return [(folder, match[1]) for folder, match in found if match and folder.is_dir() and _is_ours(folder)]


def _is_ours(folder: Path) -> bool:
    """Whether a folder is empty or holds a gallery, and nothing but that."""
    names = {file.name for file in folder.iterdir()}
    known = {name for name in names if is_gallery_file(name)}
    half_written = {name for name in names if name.startswith(".") and name.endswith(".part")}
    return names == known | half_written and (not names or DATABASE in names)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, which ends with the process; says whether the folder still bears its name.

    Raises BlockingIOError while another holds it.
    """
    if sys.platform == "win32":  # no lock on a folder there: two builds of one gallery at once are the user's to avoid
        yield True
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
    finally:
        os.close(descriptor)
