"""Download and unpack a publisher's archives, with resumption and checks of length and digest."""

from __future__ import annotations

import hashlib
import http.client
import platform
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cbmir.errors import DownloadError
from cbmir.files import write_json, write_text
from cbmir.input_file import read_json

_BLOCK = 2**20
_MOST_UNPACKED = 256 * 2**30  # the largest set of X-rays here has 16 GiB
_FILE = 4096  # bytes of overhead per file
_TRIES = 6
_SECONDS = 60  # timeout of a connection without data
_FAILURES = (urllib.error.URLError, http.client.HTTPException, OSError)  # of a connection


def download(
    url: str, path: Path, *, digest: str | None = None, tries: int = _TRIES, wait: Callable[[float], None] = time.sleep
) -> str:
    """Fetch a file, and write its digest beside it (`reports.tgz.sha256`).

    An existing file is kept if its digest matches. A partial download is continued if the server still has the same
    file, by its ETag or date; else it is restarted.

    Args:
        digest: The publisher's SHA-256 in hexadecimal, if known.
        tries: Number of attempts, with pauses of 1, 2, 4 … seconds by `wait`.

    Returns:
        The file's SHA-256 in hexadecimal.

    Raises:
        DownloadError: The server refuses, the connection broke too often, or the digest differs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = path.with_name(f"{path.name}.sha256")
    part = path.with_name(f".{path.name}.part")
    if path.exists():
        place, expected = path, digest or (record.read_text("utf-8").partition(" ")[0] if record.exists() else "")
    else:
        place, expected = part, digest or ""
        _fetch_whole(url, part, tries, wait)
    with place.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise DownloadError(f"{place}: expected SHA-256 {expected}, found {found}; delete the file and fetch it again")
    if place == part:
        part.replace(path)
        _state(part).unlink(missing_ok=True)
    write_text(record, f"{found}  {path.name}\n")
    return found


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into a folder, completely or not at all; an existing folder is kept.

    Leftovers of a process that was killed while unpacking are deleted.

    Raises:
        DownloadError: The archive is damaged, too large or has a path outside of it, or Python is older than 3.11.4.
    """
    if folder.is_dir():
        return
    if not hasattr(tarfile, "data_filter"):  # it rejects paths outside of the folder
        raise DownloadError(f"expected Python 3.11.4 or later, found {platform.python_version()}; unpack {archive} "
                            f"into {folder} yourself")  # fmt: skip
    prefix = f".{folder.name}.unpacked-"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as place:
        try:
            with tarfile.open(archive) as opened:
                room = _MOST_UNPACKED
                for member in tqdm(opened, desc=f"unpacking {archive.name}", unit="file", disable=None):
                    room -= member.size + _FILE
                    if room < 0:
                        raise tarfile.TarError(f"it unpacks to more than {_MOST_UNPACKED:,} bytes")
                    opened.extract(member, place, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DownloadError(f"{archive}: cannot be unpacked ({error}); delete it and fetch it again") from error
        Path(place).rename(folder)
        Path(place).mkdir()  # for the context to remove


def _fetch_whole(url: str, part: Path, tries: int, wait: Callable[[float], None]) -> None:
    """Fetch into `part`, from its current end, until it is complete."""
    for number in range(tries):
        try:
            if _fetch(url, part):
                return
            failure: Exception | str = "the connection ended early"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # the part does not belong to this file
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise DownloadError(f"{url}: the server refuses it ({error.code} {error.reason})") from error
            failure = error
        except _FAILURES as error:
            failure = error
        if number + 1 < tries:
            wait(2.0**number)
    size = part.stat().st_size if part.exists() else 0
    raise DownloadError(
        f"{url}: {failure}, {tries} times; {size:,} bytes are kept: run the same command again to continue"
    )


def _fetch(url: str, part: Path) -> bool:
    """Fetch over one connection; return whether the file is complete."""
    kept: dict[str, Any] = read_json(_state(part)) if _state(part).exists() else {}
    start = part.stat().st_size if part.exists() and kept.get("url") == url and kept.get("version") else 0
    if start and start == kept.get("length"):
        return True
    headers = {"Range": f"bytes={start}-", "If-Range": kept["version"]} if start else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as answer:
        if answer.status != 206 or not str(answer.headers["Content-Range"]).startswith(f"bytes {start}-"):
            start = 0
        length = int(answer.headers["Content-Length"]) + start if answer.headers["Content-Length"] else None
        etag = answer.headers["ETag"]
        version = etag if etag and not etag.startswith("W/") else answer.headers["Last-Modified"]
        write_json(_state(part), {"url": url, "version": version, "length": length})
        with (
            part.open("ab" if start else "wb") as file,
            tqdm(total=length, initial=start, desc=part.name[1:-5], unit="B", unit_scale=True, disable=None) as bar,
        ):
            while block := answer.read(_BLOCK):
                file.write(block)
                bar.update(len(block))
    return length is None or part.stat().st_size == length


def _state(part: Path) -> Path:
    return part.with_suffix(".part.json")
