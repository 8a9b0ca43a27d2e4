"""The generation last acknowledged, in a file beside the database: a second place to remember what the log may forget.

SQLite drops what a damaged or missing write-ahead log held without a word, and so the gallery would open as it was some
writes ago. The witness tells. It is written after each write and never synced, so it may lag behind (after a power
failure) but never runs ahead. A gallery without a witness of its own is a copy, or was brought back from one: it gets a
new uuid, since what was derived from the gallery of the old one may be of writes that it has never seen.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from cbmir.errors import GalleryError
from cbmir.runtime.gallery.schema import digest

log = logging.getLogger("cbmir")

WITNESS = "gallery.generation"
_LENGTH = 128


@dataclass(frozen=True)
class Witness:
    """That a generation of the gallery with this uuid has been acknowledged."""

    uuid: str
    generation: int

    def write(self, folder: Path) -> None:
        """Where that is not possible a warning says so, and no more: the write itself is on the disk already."""
        text = json.dumps([self.uuid, self.generation, digest((self.uuid, self.generation))]).encode()
        try:
            # In place, by one call and at one length: nothing is left over where the process is killed.
            descriptor = os.open(folder / WITNESS, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, text.ljust(_LENGTH))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: cannot write %s (%s); what was written to the gallery is safe", folder, WITNESS, error)

    @classmethod
    def read(cls, folder: Path) -> Witness | None:
        """None where there is none, or a damaged one."""
        try:
            uuid, generation, stamp = json.loads((folder / WITNESS).read_text("utf-8"))
        except (OSError, ValueError, TypeError):
            return None
        return cls(str(uuid), int(generation)) if stamp == digest((uuid, generation)) else None

    def check(self, folder: Path, generation: int) -> None:
        """Raise GalleryError where more was acknowledged than the gallery still has."""
        if self.generation > generation:
            raise GalleryError(
                f"{folder}: expected generation {self.generation}, the last that was acknowledged, found generation "
                f"{generation}: its write-ahead log was lost or damaged, or an older database put in its place. Bring "
                f"back a whole copy; to go on without the {self.generation - generation} writes that are lost, delete "
                f"{WITNESS}"
            )
