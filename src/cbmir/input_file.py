"""Read untrusted files: only regular files, with limits on bytes and on the depth of JSON. A refusal is an OSError or a
ValueError, as for any unreadable file.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON = 32 * 2**20  # bytes; a data set's annotations have a few million
MOST_TABLE = 2**30  # bytes of an unpacked table; 400,000 reports need less than half of it
MOST_MODEL = 16 * 2**30  # bytes of a model file; an ONNX file has at most 2 GiB, a plan of a large model more
_DEEPEST = 64  # levels of lists and objects; cbmir's own files have fewer than ten
_BLOCK = 2**20
# Do not wait for a pipe's writer or take control of a terminal. Windows only has O_BINARY.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))


def open_input(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: The file does not exist, cannot be read, or is a folder, device, pipe or socket.
        ValueError: The name is not valid.
    """
    _check_regular(Path(path).stat().st_mode, path)  # before opening: some devices react to that
    descriptor = os.open(path, _FLAGS)
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)  # the open file: the path may have changed
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def existing(path: Path) -> Path | None:
    """Return the path of a file, or None if it is missing or its name is not valid (`Path.is_file` would raise)."""
    return path if os.path.isfile(path) else None  # noqa: PTH113


def _check_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file, found a folder", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a file, found a device or pipe", str(path))


def read_input(path: str | Path, most: int) -> bytes:
    """Read the bytes of a regular file. Raises as `open_input`, and OSError for more than `most` bytes."""
    with open_input(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(min(size, most) + 1)
        if len(data) > size:  # it is growing, or its file system does not report sizes
            data += stream.read(max(most + 1 - len(data), 0))
    if len(data) > most:
        raise _too_large(path, most)
    return data


def _too_large(path: str | Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {most:,} bytes, found more", str(path))


def input_digest(path: str | Path, most: int) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal. Raises as `read_input`."""
    digest, left = hashlib.sha256(), most
    with open_input(path) as stream:
        while block := stream.read(_BLOCK):
            left -= len(block)
            if left < 0:
                raise _too_large(path, most)
            digest.update(block)
    return digest.hexdigest()


def read_unpacked(path: Path, most: int = MOST_TABLE) -> bytes:
    """Read the bytes of a regular file, unpacked if its name ends in `.gz`. Raises as `read_input`, where `most` also
    limits the unpacked bytes, and ValueError for a damaged archive."""
    data = read_input(path, most)
    if path.suffix.lower() != ".gz":
        return data
    unpacked = io.BytesIO()
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            while block := stream.read(_BLOCK):
                if unpacked.tell() + len(block) > most:
                    raise _too_large(path, most)
                unpacked.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"a damaged gzip file ({error})") from error
    return unpacked.getvalue()


def read_text(path: str | Path) -> str:
    """Read a regular file as UTF-8 text. Raises as `read_input`, and ValueError for other bytes."""
    return read_input(path, MOST_JSON).decode("utf-8")


def read_json(path: str | Path) -> Any:
    """Read the value of a JSON file. Raises as `read_input` and `parse_json`."""
    return parse_json(read_text(path))


def parse_json(text: str, errors: str = "strict") -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON, JSON that is nested too deeply, and lone
    surrogates; `errors="surrogateescape"` accepts surrogates from file names that are not UTF-8."""
    if len(text) > MOST_JSON:
        raise ValueError(f"more than {MOST_JSON:,} characters")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"lists and objects nested more than {_DEEPEST} deep") from None
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for one in level if isinstance(one, list | dict) and one
                 for inner in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
        if not level:
            break
    else:
        raise ValueError(f"lists and objects nested more than {_DEEPEST} deep")
    if "\\u" in text:  # a lone surrogate is not a character, and cannot be written to a file
        json.dumps(value, ensure_ascii=False).encode("utf-8", errors)
    return value
