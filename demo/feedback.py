"""What readers say of answers, kept in a table that has no image, no patient and no name of a file."""

from __future__ import annotations

import csv
import errno
import io
import os
from datetime import UTC, datetime
from pathlib import Path

from cbmir.errors import UserError

#: `image` and `similar` are a case id of the gallery; of an image that it does not have, the SHA-256 of its file.
#: `value` is 1 where `similar` is alike, or `label` is there; 0 where it is not; empty where that was taken back.
COLUMNS = ("time", "model", "image", "similar", "label", "value")
_MOST_BYTES = 256 * 2**20


class Feedback:
    """A CSV file of COLUMNS, one line for each time that something was said: the last one of a pair counts."""

    def __init__(self, path: Path) -> None:
        """Make the file, readable by its owner alone, or go on with one that is there.

        Raises:
            UserError: It cannot be written, or is another table.
        """
        self._path = path
        head = _line(*COLUMNS)
        try:
            self._write(b"")
            with path.open("rb") as stream:
                found = stream.readline(2 * len(head))
            if not found:
                self._write(head)
        except OSError as error:
            raise UserError(f"{path}: expected a file that can be written, found {error.strerror}") from error
        if found not in (b"", head):
            raise UserError(f"{path}: expected a table of feedback, found another file; name a new one")

    def add(self, model: str, image: str, *, similar: str = "", label: str = "", value: int | None) -> None:
        """Raises UserError where the file is full or its disk is."""
        line = _line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", model, image, similar, label, value)
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                raise UserError("The feedback was not kept: its file is full.")
            self._write(line)
        except OSError as error:
            raise UserError("The feedback was not kept: its file cannot be written.") from error

    def _write(self, data: bytes) -> None:
        """In one piece, so that lines of several processes do not mix."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if (written := os.write(descriptor, data)) < len(data):  # the disk became full in the middle of it
                if os.fstat(descriptor).st_size == (end := os.lseek(descriptor, 0, os.SEEK_CUR)):
                    os.ftruncate(descriptor, end - written)  # it is still the last line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _line(*cells: object) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
