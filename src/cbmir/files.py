"""Write files completely or not at all, write private files, and read secrets."""

from __future__ import annotations

import csv
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cbmir.errors import UserError

_MOST_BYTES = 4096  # limit for a secret
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a formula, after any apostrophes


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` when the block ends without an error.

    Args:
        private: Make the file readable by its owner only, since it holds patient data (POSIX).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        if private:
            temporary.touch(mode=0o600)
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def folder_size(folder: Path) -> int:
    """Return the total bytes of the files in a folder; files that another process removes meanwhile count as 0."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(place, name).stat().st_size
    return size


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_empty(folder: Path) -> bool:
    """Return whether a folder is missing, empty, or holds only unfinished files of a killed process."""
    return not folder.exists() or all(path.name.endswith(".part") for path in folder.iterdir())


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write text in UTF-8; `private` as in `replacing`."""
    with replacing(path, private=private) as temporary:
        temporary.write_text(text, "utf-8")


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Write JSON, indented, in UTF-8; `private` as in `replacing`."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n", private=private)


def write_csv(path: Path, rows: Iterable[Sequence[Any]], *, private: bool = False) -> None:
    """Write a CSV table in UTF-8 with `defused` cells; `private` as in `replacing`."""
    with replacing(path, private=private) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(
            [defused(str(cell)) if isinstance(cell, str | Path) else cell for cell in row] for row in rows
        )


def defused(cell: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would run as a formula. Numbers and other text stay as is."""
    if not cell.lstrip("'").startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def undefused(cell: str) -> str:
    """Undo `defused`."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


def read_secret(place: str, what: str, advice: str, error: type[UserError] = UserError) -> bytes:
    """Read a secret, without surrounding whitespace. No message quotes it.

    Args:
        place: A file, or `env:NAME` for an environment variable.
        what: The name of the secret in messages.
        advice: Advice on how to get one, for messages.
        error: The class of the error to raise.

    Raises:
        UserError: `error`, if it is missing, longer than 4,096 bytes, or in a file that others may read (POSIX).
    """
    if place.startswith("env:"):
        name = place.removeprefix("env:")
        text = os.environ.get(name)
        if text is None:
            raise error(f"expected {what} in the environment variable {name}, found none; {advice}")
        data = os.fsencode(text)
    else:
        try:
            with Path(place).open("rb") as file:
                # Check the open file: the path may be replaced meanwhile.
                if os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077:
                    raise error(f"{place}: expected {what} in a file that only its owner may read, found one open to "
                                f"others; run: chmod 600 {place}")  # fmt: skip
                data = file.read(_MOST_BYTES + 1)
        except OSError as failure:
            raise error(f"{place}: cannot read {what} ({failure.strerror}); {advice}") from failure
    if len(data) > _MOST_BYTES:
        raise error(f"{place}: expected {what} of {_MOST_BYTES} bytes at most, found more; {advice}")
    return data.strip()
