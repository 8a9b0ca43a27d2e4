"""Files derived from SQLite for fast searches: a folder of arrays and the index, rebuilt when needed.

`derived-<generation>/` is written under a hidden name, synced, and renamed into place; then its predecessor is removed.
Its files never change, since other processes may have mapped them. `about.json` holds the digest of each file, which is
verified before the file is used: a flipped bit would give wrong answers, and in the index it would crash the process.
An invalid folder is ignored, since everything in it can be rebuilt from SQLite.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from cbmir.errors import GalleryError
from cbmir.files import sync
from cbmir.input_file import open_input, parse_json, read_json
from cbmir.process import available_threads
from cbmir.runtime.gallery.columns import ARRAYS, Columns, Snapshot
from cbmir.runtime.gallery.hnsw import Codes, HnswIndex, PcaInt8Codec
from cbmir.runtime.novelty import reference_distances

log = logging.getLogger("cbmir")

LOCK = "derived.lock"
_FOLDER = re.compile(r"derived-(\d{12,})")
_PART = re.compile(r"\.derived-\d{12,}\.part")
_ABOUT, _INDEX, _CODEC, _REFERENCE = "about.json", "index.usearch", "codec.npz", "reference_distances.npy"
_FORMAT = 3
_CHUNK = 4 << 20  # bytes that one thread hashes at a time


@dataclass(frozen=True)
class Stamp:
    """The source of a derived folder: the gallery's uuid, the generation and the number of entries; and the codes of
    its index, None if it has none."""

    gallery: str
    generation: int
    count: int
    codes: Codes | None


def is_derived(name: str) -> bool:
    """Return whether a name in a gallery's folder is that of a derived folder, complete or not, or of the lock."""
    return name == LOCK or bool(_FOLDER.fullmatch(name) or _PART.fullmatch(name))


def exists(folder: Path) -> bool:
    """Return whether there is any derived folder, complete or not."""
    return bool(_folders(folder) or _leftovers(folder))


def find(folder: Path, gallery: str) -> Stamp | None:
    """Return the stamp of this gallery's newest derived folder, without verifying its files."""
    for place in _folders(folder):
        with suppress(ValueError):
            about = _read_about(place, gallery)
            return Stamp(*(about[one.name] for one in fields(Stamp)))
    return None


def newest(folder: Path) -> tuple[int, int] | None:
    """Return the generation of the newest derived folder, and its inode, which distinguishes it from an earlier folder
    of this name, or None. The derived folder is not verified, so this only lists the gallery's folder."""
    try:
        return next(((_generation(place), place.stat().st_ino) for place in _folders(folder)), None)
    except FileNotFoundError:  # just removed
        return None


def is_unfinished(folder: Path) -> bool:
    """Return whether there is anything besides one complete derived folder: an incomplete one, or one that was replaced
    and not removed yet."""
    return len(_folders(folder)) > 1 or bool(_leftovers(folder))


def load(folder: Path, gallery: str) -> Snapshot | None:
    """Verify and map the newest valid derived folder, or return None. The log says why others are invalid."""
    tried: list[Path] = []
    while untried := [place for place in _folders(folder) if place not in tried]:  # another process may add one
        place = untried[0]
        tried.append(place)
        try:
            return _mapped(place, _verified(place, gallery))
        except (OSError, ValueError, GalleryError) as error:  # also if it was removed, or another usearch wrote it
            log.info("%s: %s; it is rebuilt when needed", place, error)
    return None


def problems(folder: Path, gallery: str) -> list[str]:
    """Verify the derived folders and return a text for each invalid one."""
    found = []
    for place in _folders(folder):
        try:
            _verified(place, gallery)
        except (OSError, ValueError) as error:
            found.append(f"{place.name}: {error}")
    return found


def write(
    folder: Path, stamp: Stamp, rows: Iterable[Columns], *, dim: int, classes: int, former: HnswIndex | None = None
) -> Snapshot:
    """Write a derived folder from rows, given in blocks ordered by number, and remove the existing ones.

    The rows have `dim` dimensions and `classes` labels. `former` is an index of the first rows, which is extended. Call
    this only under `lock`. Raises OSError if it cannot be written, GalleryError if the number of rows does not match
    the stamp.
    """
    part = folder / f".derived-{stamp.generation:012}.part"
    place = folder / f"derived-{stamp.generation:012}"
    _remove(_leftovers(folder))
    part.mkdir(mode=0o700)
    try:
        about = _write(part, stamp, rows, dim, classes, former)
        if place.exists():  # from the same generation, but invalid or with other settings
            _remove([place])
        part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync(folder)
    _remove(other for other in _folders(folder) if other != place)
    return _mapped(place, about)


def drop(folder: Path) -> bool:
    """Remove all derived folders, which hold data that was removed from SQLite. Return whether there were or are any.

    A folder that another process is writing stays until the next writer, under `lock`, removes it: the caller has to
    write after it. Raises GalleryError if a folder cannot be removed.
    """
    places = _folders(folder)
    try:
        _remove(places)
        with lock(folder, wait=False) as is_ours:
            if is_ours:
                places += _leftovers(folder)
                _remove(_leftovers(folder))
        sync(folder)
    except OSError as error:
        raise GalleryError(f"{folder}: cannot remove the derived files there ({error}), which still hold what was "
                           "removed from the gallery; delete the folders derived-* by hand") from error  # fmt: skip
    return bool(places or _leftovers(folder))


@contextmanager
def lock(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock for writing; yields whether it was obtained. The lock ends with the process."""
    from filelock import FileLock, Timeout  # takes 0.1 s, and most processes only search

    held = FileLock(folder / LOCK, timeout=-1 if wait else 0, mode=0o600)
    try:
        held.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


# -- writing


def _write(
    part: Path, stamp: Stamp, rows: Iterable[Columns], dim: int, classes: int, former: HnswIndex | None
) -> dict[str, Any]:
    """Write all files into an empty folder; return the contents of `about.json`."""
    with (part / "vectors.npy").open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": (stamp.count, dim)}
        np.lib.format.write_array_header_1_0(stream, header)
        columns = Columns.streamed(rows, lambda block: stream.write(block.astype("<f4").tobytes()), classes)
    if len(columns) != stamp.count:
        raise GalleryError(f"{part.parent}: expected {stamp.count} entries, found {len(columns)}; "
                           f"'cbmir index verify' says what is damaged")  # fmt: skip
    for name in ARRAYS:
        if name != "vectors":
            np.save(part / f"{name}.npy", getattr(columns, name))
    vectors = _map(part / "vectors.npy")
    np.save(part / _REFERENCE, reference_distances(vectors, columns.patients))
    if stamp.codes is not None:
        index = None if former is None or former.codes != stamp.codes else former.extended(vectors)
        if index is None:
            index = HnswIndex.build(stamp.codes, vectors)
        index.save(part / _INDEX)
        if index.codec is not None:
            index.codec.save(part / _CODEC)
    names = sorted(file.name for file in part.iterdir())
    for name in names:
        sync(part / name)
    digests = {name: _digest(part / name) for name in names}
    about = {"format": _FORMAT, **asdict(stamp), "names": list(columns.names), "files": digests}
    text = json.dumps(about, ensure_ascii=False)
    sealed = {"about": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (part / _ABOUT).write_text(json.dumps(sealed), "utf-8")
    sync(part / _ABOUT)
    sync(part)
    return about


def _digest(path: Path) -> str:
    """Return the SHA-256 of the SHA-256s of a file's chunks, which several threads compute without mapping the file."""

    def chunk(start: int) -> bytes:
        with open_input(path) as stream:
            stream.seek(start)
            return hashlib.sha256(stream.read(_CHUNK)).digest()

    with ThreadPoolExecutor(available_threads()) as pool:
        return hashlib.sha256(b"".join(pool.map(chunk, range(0, max(path.stat().st_size, 1), _CHUNK)))).hexdigest()


# -- reading


def _folders(folder: Path) -> list[Path]:
    """Return the derived folders, newest first."""
    return sorted(_named(folder, _FOLDER), key=_generation, reverse=True)


def _leftovers(folder: Path) -> list[Path]:
    """Return the incomplete folders of processes that are writing or were killed."""
    return _named(folder, _PART)


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if pattern.fullmatch(one.name)]
    except FileNotFoundError:  # the gallery was moved or deleted while open
        return []


def _generation(place: Path) -> int:
    return int(place.name.rpartition("-")[2])


def _remove(places: Iterable[Path]) -> None:
    """Remove folders; another process may do so at the same time. Raises OSError if one cannot be removed."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
        if place.exists():
            raise OSError(f"{place} cannot be removed")


def _read_about(place: Path, gallery: str) -> dict[str, Any]:
    """Read `about.json`. Raises ValueError, with the reason, if it is invalid."""
    try:
        sealed = read_json(place / _ABOUT)
        text = sealed["about"]
        is_whole = hashlib.sha256(text.encode()).hexdigest() == sealed["sha256"]
        about: dict[str, Any] = parse_json(text)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{_ABOUT} cannot be read ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise ValueError(f"{_ABOUT} is damaged")
    if about["format"] != _FORMAT:
        raise ValueError(f"its format is {about['format']}, and this cbmir reads {_FORMAT}")
    if about["gallery"] != gallery or _generation(place) != about["generation"]:
        raise ValueError("it belongs to another gallery, or to another state of it")
    return about


def _verified(place: Path, gallery: str) -> dict[str, Any]:
    """Read `about.json` and verify every file. Raises ValueError as `_read_about`, or OSError."""
    about = _read_about(place, gallery)
    if damaged := [name for name, expected in about["files"].items() if _digest(place / name) != expected]:
        raise ValueError(f"{', '.join(damaged)} damaged")
    return about


def _mapped(place: Path, about: dict[str, Any]) -> Snapshot:
    """Map verified files as a snapshot."""
    columns = {name: _map(place / f"{name}.npy") for name in ARRAYS}
    codes = about["codes"]
    codec = PcaInt8Codec.load(place / _CODEC) if codes == "int8" else None
    index = None if codes is None else HnswIndex.view(place / _INDEX, codec)
    base = Columns(**columns, names=tuple(about["names"]))
    tail = Columns.empty(len(base.labels), base.vectors.shape[1])
    generation, reference = about["generation"], np.load(place / _REFERENCE, allow_pickle=False)
    return Snapshot(generation, generation, base, tail, reference, index, is_mapped=True)


def _map(path: Path) -> Any:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)  # indexed faster than a memmap
