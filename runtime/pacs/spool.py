"""The files of the queue: each job's while it waits, and those that were given up."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cbmir.errors import PacsError
from cbmir.files import sync, write_json
from cbmir.runtime.pacs.jobs import content_digest

SPOOL, DEAD_LETTERS = "spool", "dead-letters"
#: Bytes of the disk that stay free: a queue that is full to the last byte could not be worked off.
FREE_SPACE = 2**29


class Spool:
    """Two folders of files `NAME.dcm`; the names are the queue's, and say nothing of a patient."""

    def __init__(self, folder: Path) -> None:
        """Makes the folders, for their owner only. Raises PacsError where that cannot be."""
        self._spool, self._dead = folder / SPOOL, folder / DEAD_LETTERS
        try:
            for part in (folder, self._spool, self._dead):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PacsError(f"{folder}: cannot make the queue's folder ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        """On disk when this returns, name and all. Raises OSError, and ENOSPC while there is some space left."""
        if shutil.disk_usage(self._spool).free < len(data) + FREE_SPACE:
            raise OSError(errno.ENOSPC, "no more is left than what stays free")
        with open(os.open(self._file(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:  # noqa: PTH123
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync(self._spool)

    def read(self, name: str, digest: bytes) -> bytes:
        """The file whose `content_digest` this is. Raises PacsError where it is gone or another."""
        try:
            data = self._file(name).read_bytes()
        except OSError as error:
            raise PacsError(f"job {name}: its file cannot be read ({error.strerror})") from None
        if content_digest(data) != digest:
            raise PacsError(f"job {name}: its file has changed on disk since it was received")
        return data

    def remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def keep_only(self, names: Collection[str]) -> None:
        """Remove what is of no job: it was never acknowledged, or is done."""
        for file in self._spool.iterdir():
            if file.suffix != ".dcm" or file.stem not in names:
                file.unlink()
        for name in set(self.buried()).intersection(names):  # ended while it was being buried
            self._reason(name).unlink()

    def bury(self, name: str, about: dict[str, Any]) -> None:
        """Make a file, where it is still there, a dead letter: first what is told about it, `NAME.json`."""
        write_json(self._reason(name), about)
        if self._file(name).exists():
            self._file(name).replace(self._dead / f"{name}.dcm")
        sync(self._dead)

    def is_buried(self, name: str) -> bool:
        return not self._file(name).exists() and (self._dead / f"{name}.dcm").exists()

    def buried(self) -> list[str]:
        """The names of the dead letters."""
        return sorted(path.stem for path in self._dead.glob("*.json"))

    def dig_up(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """A dead letter's file, and what was told about it. Raises OSError."""
        return (self._dead / f"{name}.dcm").read_bytes(), json.loads(self._reason(name).read_text("utf-8"))

    def forget(self, name: str) -> None:
        """Remove a dead letter."""
        (self._dead / f"{name}.dcm").unlink(missing_ok=True)
        self._reason(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._spool / f"{name}.dcm"

    def _reason(self, name: str) -> Path:
        return self._dead / f"{name}.json"
