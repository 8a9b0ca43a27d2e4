"""The folder in which a gallery is built: one version is live, another may be under construction.

`current` names the live version, an inner folder `gallery-…`. A build fills another version and then changes the
pointer with one `os.replace`. A gallery that was not built (`Gallery.create`, an export) has no pointer: its files are
in the folder itself.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from cbmir.errors import GalleryError
from cbmir.files import replacing, sync
from cbmir.runtime.gallery.database import DATABASE, POINTER, VERSION, live_folder
from cbmir.runtime.gallery.gallery import LISTS, MAP, Gallery, is_gallery_file
from cbmir.runtime.gallery.pseudonyms import Pseudonyms

log = logging.getLogger("cbmir")

_LOCK = "build.lock"
_SHARDS = re.compile(r"shards-[0-9a-f]{16}")


class GalleryFolder:
    """The folder of a gallery for builds and additions. It may not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    def has_gallery(self) -> bool:
        """Return whether there is a live gallery, damaged or not."""
        return (live_folder(self.path) / DATABASE).exists()

    @contextmanager
    def locked(self, *, make: bool = False) -> Iterator[None]:
        """Hold the lock for building and adding, which ends with the process.

        Args:
            make: Create the folder if necessary, readable only by its owner.

        Raises:
            GalleryError: Another process holds the lock, or something cannot be written within the block; with `make`,
                also if the folder holds something other than a gallery.
        """
        try:
            if make:
                self._make()
            with FileLock(self.path / _LOCK, timeout=0, mode=0o600):
                yield
        except Timeout as error:
            raise GalleryError(f"{self.path}: another process is building this gallery or adding to it; wait until it "
                               "has finished") from error  # fmt: skip
        except OSError as error:
            raise GalleryError(
                f"{self.path}: cannot write the gallery there ({error}); choose another place"
            ) from error

    def version(self, digest: str) -> Path:
        """Return the folder that a build with this digest fills. It stays the same until another version is live, so
        that a build does not continue with a version that was replaced."""
        live = live_folder(self.path)
        return self.path / f"gallery-{digest_of(digest, live.name if live != self.path else '')}"

    def publish(self, version: Path) -> None:
        """Make a finished version live in one step; then remove the former one and other unfinished work."""
        former = live_folder(self.path)
        with replacing(self.path / POINTER) as temporary:
            temporary.write_text(version.name, "utf-8")
            sync(temporary)
        sync(self.path)
        for place in self.path.iterdir():
            if place == version or place.name in (POINTER, _LOCK) or not _is_own(place.name):
                continue
            if VERSION.fullmatch(place.name) and place != former:
                log.warning("%s: removed the unfinished work of a build that was stopped", place)
            _delete(place)

    def unfinished(self) -> list[Path]:
        """Return the folders of other databases than the live one: of stopped or running builds, and of a gallery that
        was just replaced."""
        live = live_folder(self.path)
        places = [place for place in sorted(self.path.glob("*-*")) if place != live and _is_version(place.name)]
        stale = [self.path] if live != self.path and (self.path / DATABASE).exists() else []
        return stale + [file.parent for place in places for file in sorted(place.rglob(DATABASE))]

    def remove_from_unfinished(self, pseudonyms: Pseudonyms | None, **given: Sequence[str]) -> list[str]:
        """Remove entries from unfinished work too; `given` has the arguments of `Gallery.remove`.

        Returns:
            One line for each place in which entries may remain, with the reason.
        """
        try:
            # A build that runs may have written nothing yet. A gallery that was not built has no lock.
            with self.locked() if self.unfinished() or (self.path / _LOCK).exists() else nullcontext():
                return list(filter(None, (self._remove_from(one, pseudonyms, given) for one in self.unfinished())))
        except GalleryError as error:
            return [f"{error}; then remove again, so that the unfinished work is covered too"]

    def _remove_from(self, place: Path, pseudonyms: Pseudonyms | None, given: dict[str, Sequence[str]]) -> str:
        """Remove entries from one place; return why some may remain, or an empty text."""
        if place == self.path:  # the pointer names another folder, so this one was replaced: delete all of it
            for file in self.path.iterdir():
                if is_gallery_file(file.name) and file.name not in (*LISTS, MAP):
                    _delete(file)
            return ""
        try:
            with Gallery.open(place, pseudonyms=pseudonyms) as gallery:
                if removed := gallery.remove(**given):
                    log.info("%s: %d images removed from unfinished work", place, len(removed))
                    for name in LISTS:  # of a shard, outside its version
                        (place.parent / name).unlink(missing_ok=True)
        except GalleryError as error:
            return f"{place}: unfinished work that may hold the same images; delete the folder ({error})"
        return ""

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise GalleryError(f"{self.path}: expected a folder for the gallery, found a file; choose another -o")
        self.path.mkdir(parents=True, exist_ok=True)
        names = sorted(file.name for file in self.path.iterdir())
        if not all(map(_is_own, names)) or (names and not {DATABASE, POINTER, _LOCK} & set(names)):
            raise GalleryError(f"{self.path}: expected a gallery, an empty folder or a new one, found "
                               f"{', '.join(names)}; nothing was changed: choose another -o")  # fmt: skip
        self.path.chmod(0o700)


def digest_of(*values: object) -> str:
    """Return 16 hexadecimal digits that identify values."""
    hashed = hashlib.blake2b(digest_size=8)
    for value in values:
        hashed.update(repr(value).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def _delete(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()


def _is_version(name: str) -> bool:
    return bool(VERSION.fullmatch(name) or _SHARDS.fullmatch(name))


def _is_own(name: str) -> bool:
    half_written = name.startswith(".") and name.endswith(".part")
    return is_gallery_file(name) or name in (POINTER, _LOCK) or _is_version(name) or half_written
