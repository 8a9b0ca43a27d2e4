"""Readers' feedback, stored as CSV without images, patients and file names."""

from __future__ import annotations

import csv
import errno
import io
import os
from datetime import UTC, datetime
from pathlib import Path

from cbmir.errors import UserError

#: `image` and `similar` are case ids of the gallery, or the SHA-256 of a file that the gallery does not have.
#: `value` is 1 if `similar` is alike, or `label` is present; 0 if not; empty if the feedback was withdrawn.
COLUMNS = ("time", "model", "image", "similar", "label", "value")
_MOST_BYTES = 256 * 2**20


class Feedback:
    """A CSV file of COLUMNS with one line per answer of a reader. The last answer to the same question counts."""

    def __init__(self, path: Path) -> None:
        """Create the file, readable only by its owner, or append to an existing one.

        Raises:
            UserError: The file cannot be written, or is not a feedback table.
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
        """Append a line. Raises UserError if the file is too large or the disk is full."""
        line = _line(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", model, image, similar, label, value)
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                raise UserError("The feedback was not saved: its file is full.")
            self._write(line)
        except OSError as error:
            raise UserError("The feedback was not saved: its file cannot be written.") from error

    def _write(self, data: bytes) -> None:
        """Write in one call, so that lines of several processes do not mix."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if (written := os.write(descriptor, data)) < len(data):  # the disk is full, and only a part was written
                if os.fstat(descriptor).st_size == (end := os.lseek(descriptor, 0, os.SEEK_CUR)):
                    os.ftruncate(descriptor, end - written)  # no other process has appended since
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _line(*cells: object) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
