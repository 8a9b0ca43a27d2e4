"""Stores uploaded files until a question uses them, and limits their size per visitor and in total while they arrive.

It replaces Gradio's own route, which keeps incomplete uploads, limits only single files, and derives a file's path from
its content. Here paths cannot be guessed, and the oldest files are deleted to make room.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from gradio_client.utils import strip_invalid_filename_characters
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from cbmir.demo.uploads import MOST_FILES
from cbmir.runtime.serving.limits import body_chunks
from cbmir.runtime.serving.problems import Problem

MOST_OF_FILE = 64 * 2**20
#: Maximum bytes of unread uploads per visitor (IP address) and in total.
MOST_OF_VISITOR = 512 * 2**20
MOST_IN_ALL = 2**30
UPLOAD_S = 120.0  # to receive the body of an upload
_LEAST = 2**20  # every upload counts as at least this many bytes, which also limits the number of small ones
_MOST_FIELDS = 8


class _FormOnDisk(MultiPartParser):
    spool_max_size = 1  # files go to the disk immediately, unnamed: they vanish with the process


@dataclass(eq=False)
class _Held:
    """The files of one request. `places` is empty while they arrive."""

    visitor: str
    size: int
    places: tuple[Path, ...] = ()


class UploadStore:
    """Uploads below `folder`. Their paths are added to `registered`, so that Gradio deletes old ones."""

    def __init__(self, folder: Path, registered: set[str]) -> None:
        self._folder, self._registered = folder, registered
        self._held: list[_Held] = []  # oldest first

    async def take(self, request: Request) -> list[str]:
        """Store the files of a form and return their paths. Raises Problem: as `body_chunks`; 413 if a file is too
        large, 415 or 400 if the form is damaged or has too many parts, 429 if other uploads leave no room."""
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Problem(415, "media-type", "Expected files in a form (multipart/form-data), found something else.")
        self._held = [one for one in self._held if not one.places or any(place.exists() for place in one.places)]
        held = _Held(request.client.host if request.client else "", _LEAST)
        self._held.append(held)
        try:
            self._make_room(held)
            parser = _FormOnDisk(request.headers, self._counted(request, held), max_files=MOST_FILES,
                             max_fields=_MOST_FIELDS, max_part_size=_LEAST)  # fmt: skip
            form = await parser.parse()
            try:
                files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
                if any((file.size or 0) > MOST_OF_FILE for file in files):
                    raise Problem(413, "too-large", f"Expected files of at most {MOST_OF_FILE >> 20} MB, found more.")
                held.places = tuple(await run_in_threadpool(self._keep, files))
            finally:
                await form.close()
        except MultiPartException as error:
            raise Problem(400, "form", f"Expected a form with at most {MOST_FILES} files, found another: "
                                       f"{error.message}") from error  # fmt: skip
        finally:
            if not held.places:
                self._held.remove(held)
        self._registered.update(map(str, held.places))
        return [str(place) for place in held.places]

    async def _counted(self, request: Request, held: _Held) -> AsyncGenerator[bytes, None]:
        taken = 0
        async for chunk in body_chunks(request, MOST_OF_VISITOR, UPLOAD_S):
            taken += len(chunk)
            if taken > held.size:
                held.size = taken
                self._make_room(held)
            yield chunk

    def _make_room(self, held: _Held) -> None:
        """Delete the oldest uploads that exceed the limits, the visitor's own first."""
        own = [one for one in self._held if one.visitor == held.visitor]
        for most, those in ((MOST_OF_VISITOR, own), (MOST_IN_ALL, self._held)):
            excess = sum(one.size for one in those) - most
            for old in [one for one in those if one.places]:
                if excess > 0:
                    _delete(old.places)
                    self._held.remove(old)
                    excess -= old.size
            if excess > 0:
                raise Problem(429, "busy", f"Expected at most {most >> 20} MB of uploads at once, found more; try "
                                           f"again later.", retry_after=10)  # fmt: skip

    def _keep(self, files: Iterable[UploadFile]) -> list[Path]:
        places: list[Path] = []
        try:
            for file in files:
                name = strip_invalid_filename_characters(Path(file.filename or "").name)
                place = self._folder / secrets.token_urlsafe(24) / ("file" if name in ("", ".", "..") else name)
                place.parent.mkdir(parents=True)
                places.append(place)
                with place.open("xb") as stream:
                    shutil.copyfileobj(file.file, stream, 2**20)
        except BaseException:
            _delete(places)
            raise
        return places


def _delete(places: Iterable[Path]) -> None:
    for place in places:
        shutil.rmtree(place.parent, ignore_errors=True)  # it may just have been read and deleted
