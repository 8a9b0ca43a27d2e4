"""The audit trail: who asked for what, when, and what became of it; a line of JSON each, without patient data.

An image is named by the SHA-256 of its file: who holds the file can tell that it was analysed, nobody else. Cases that
were shown are named as they were shown.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cbmir.errors import UserError


class Audit:
    """Adds to a file that is opened for each line: it may be moved away (rotated) at any time."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where the file cannot be written."""
        self._path = path
        try:
            os.close(self._open())
        except OSError as error:
            raise UserError(f"{path}: cannot write the audit trail ({error.strerror})") from error

    def write(self, line: dict[str, Any]) -> None:
        """Raises OSError where that is not possible; nothing is half there then."""
        data = json.dumps(line).encode() + b"\n"
        descriptor = self._open()
        try:
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, data) < len(data):  # the disk is full
                os.ftruncate(descriptor, before)
                raise OSError("the audit trail's disk is full")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
