"""Writing files so that none is ever half there."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder, which takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Let a file's bytes, or a folder's names, be on the disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_empty(folder: Path) -> bool:
    """Whether a folder is missing or holds nothing but what a process that was killed left half written."""
    return not folder.exists() or all(path.name.endswith(".part") for path in folder.iterdir())


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def json_text(data: Any) -> str:
    """JSON, indented, with a line end."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Write JSON, indented, in UTF-8."""
    write_text(path, json_text(data))
