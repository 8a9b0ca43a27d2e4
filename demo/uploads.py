"""The images of a browser session, read from uploaded files or from a study in a zip file.

A file's type is determined by its content, never by its name, and only paths inside the upload folder are accepted.
Files are read one at a time, and each is deleted before it is parsed. Zip files are never unpacked to the disk.
"""

from __future__ import annotations

import io
import secrets
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo.page.viewer import about_image, whole_image
from cbmir.errors import ImageError, ImageSizeError, NotAnImageError, UserError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.preprocess import centre_crop, preprocess
from cbmir.runtime.imaging.radiograph import Radiograph

T = TypeVar("T")

PICTURE_SIDE = 1024  # pixels, of the longer side of the picture on the page
_MOST_KEPT = 512 * 2**20
#: Maximum number of images in a study, of files in an upload, of files in a zip file, and of bytes in total.
MOST_IMAGES = 12
MOST_FILES = 60
_MOST_MEMBERS = 500
_MOST_BYTES = 512 * 2**20
#: The exceptions that the standard library raises for damaged, encrypted or unusual zip files.
_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError, ValueError)


@dataclass(frozen=True, eq=False)
class Upload:
    """The reduced copy of an image that a session keeps, since the image may have a hundred million pixels.

    `radiograph` has uint8 [resize, resize] pixels with the model's input in the centre. Preprocessing does not change
    them, so their analysis equals that of the whole image. `picture` is uint8 [H, W], at most PICTURE_SIDE long, and
    `name` its name. `key` is that of the whole image in `WholeImages`, empty if the picture shows everything. `about`
    is the result of `about_image`; `warnings` are added to those of the analysis.
    """

    radiograph: Radiograph
    picture: NDArray[np.uint8]
    about: dict[str, Any]
    caption: str
    warnings: tuple[str, ...] = ()
    key: str = ""
    name: str = field(default_factory=partial(secrets.token_urlsafe, 16))

    @classmethod
    def of(cls, radiograph: Radiograph, spec: PreprocessSpec, caption: str = "", threads: int = 1, **more: Any) -> Self:
        square = np.zeros((spec.resize, spec.resize), np.uint8)  # the model sees only its centre
        centre_crop(square, spec)[:] = preprocess(radiograph, spec, threads=threads)
        picture, about = picture_of(radiograph.pixels), about_image(radiograph)
        return cls(radiograph.with_pixels(square), picture, about, caption or radiograph.name, **more)


class WholeImages:
    """The most recently opened images and their DICOM files, at most `_MOST_KEPT` bytes in total. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._encoding = Lock(), Lock()
        self._images: OrderedDict[str, tuple[Radiograph, bytes]] = OrderedDict()  # least recently used first

    def keep(self, radiograph: Radiograph, dicom: bytes = b"", *, key: str = "") -> str:
        """Keep an image that has more to show than its picture, or a DICOM file.

        Args:
            key: Names an image that every visitor may see; by default the key is a secret.

        Returns:
            The key; empty if there is nothing to keep.
        """
        if max(radiograph.stored.shape) <= PICTURE_SIDE and radiograph.values is None and not dicom:
            return ""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
                return key
        key = key or secrets.token_urlsafe(16)
        own = deepcopy(replace(radiograph))  # copied: the decoder's buffer may be larger
        with self._lock:
            self._images[key] = (own, dicom)
            while len(self._images) > 1 and sum(map(_bytes_of, self._images.values())) > _MOST_KEPT:
                self._images.popitem(last=False)
        return key

    def forget(self, key: str) -> None:
        with self._lock:
            self._images.pop(key, None)

    def dicom(self, key: str) -> bytes:
        """Return the DICOM file of an image; empty if it is no longer kept or the image was not DICOM."""
        with self._lock:
            return self._images.get(key, (None, b""))[1]

    def show(self, key: object) -> dict[str, Any] | None:
        """Return the `whole_image` of a kept image, or None. Encodes one image at a time."""
        with self._lock:
            if not isinstance(key, str) or key not in self._images:
                return None
            self._images.move_to_end(key)
            radiograph, _ = self._images[key]
        with self._encoding:  # it takes several bytes per pixel
            return whole_image(radiograph)


def _bytes_of(kept: tuple[Radiograph, bytes]) -> int:
    radiograph, file = kept
    values = None if radiograph.values is None else radiograph.values.of_stored
    return len(file) + sum(one.nbytes for one in (radiograph.stored, radiograph.greys, values) if one is not None)


def picture_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Reduce an image uint8 [H, W] if its longer side exceeds PICTURE_SIDE."""
    picture = Image.fromarray(pixels)
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return np.array(picture)


def read_uploads(paths: Sequence[str], folder: Path, read: Callable[[bytes, str], T]) -> tuple[list[T], list[str]]:
    """Read at most `MOST_IMAGES` of the uploads in `folder`, including those in zip files, and delete all uploads.

    `read` takes a file's bytes and name. Returns the images, and one sentence for each file that was left out. Raises
    the first ImageError of `read` if nothing could be read, and UserError for other paths or more than `MOST_FILES`.
    """
    given = [_place(path, folder) for path in dict.fromkeys(paths)]
    places = [place for place in given if place is not None]
    found: list[T] = []
    errors: list[ImageError] = []
    left_out: list[str] = []
    try:
        if len(given) > MOST_FILES:
            raise UserError(f"expected at most {MOST_FILES} files, found {len(given)}; drop fewer, or a zip file")
        if len(places) < len(given):
            raise UserError("expected a file that was uploaded here, found none; drop it again")
        for name, content in _contents(places, folder):
            if len(found) == MOST_IMAGES:
                left_out.append(f"only the first {MOST_IMAGES} images were read, not {name} and later files")
                break
            try:
                if isinstance(content, ImageError):
                    raise content
                found.append(read(content, name))
            except ImageError as error:
                errors.append(type(error)(f"{name}: {str(error).partition(': ')[2] or error}"))
                left_out.append(str(errors[-1]))
    finally:
        for place in places:
            _delete(place, folder)
    if not found:
        raise errors[0] if errors else NotAnImageError("expected an X-ray, found no file")
    return found, left_out


def _place(path: str, folder: Path) -> Path | None:
    """Return the path, or None if it is not an upload."""
    place = Path(path)
    own = not place.is_symlink() and place.resolve().is_relative_to(folder.resolve()) and place.is_file()
    return place if own else None


def _delete(place: Path, folder: Path) -> None:
    """Delete an upload, if it exists, and its own folder."""
    place.unlink(missing_ok=True)
    own = place.resolve().parent
    if own != folder.resolve() and own.is_dir() and not any(own.iterdir()):
        own.rmdir()


def _contents(places: Sequence[Path], folder: Path) -> Iterator[tuple[str, bytes | ImageError]]:
    """Yield the name of each file, including those in zip files, and its content or why it cannot be read."""
    left = _MOST_BYTES
    for place in places:
        name = place.name
        try:
            data = place.read_bytes()
        except FileNotFoundError:
            yield name, NotAnImageError(f"{name}: expected an upload, found it deleted for newer ones; send it again")
            continue
        _delete(place, folder)
        zipped = data.startswith(b"PK\x03\x04")
        for member, size, content in _members(data, name) if zipped else [(name, len(data), partial(bytes, data))]:
            left -= size  # counted before unpacking, so that damaged files count too
            if left < 0:
                most = f"{_MOST_BYTES >> 20} MB in all"
                yield member, ImageSizeError(f"{member}: expected at most {most}, found more; the rest was not read")
                return
            yield member, content()


def _members(data: bytes, name: str) -> Iterator[tuple[str, int, Callable[[], bytes | ImageError]]]:
    """Yield the name and size in bytes of each file in a zip file, and a function that unpacks it."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except _DAMAGE as error:
        damage = NotAnImageError(f"{name}: expected a zip file that can be opened, found {error}")
        yield name, 0, lambda: damage
        return
    with archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) > _MOST_MEMBERS:
            many = ImageSizeError(f"{name}: expected at most {_MOST_MEMBERS} files, found {len(members)}")
            yield name, 0, lambda: many
            return
        for member in members:
            inner = PurePosixPath(member.filename).name
            yield inner, member.file_size, partial(_unpacked, archive, member, inner)


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> bytes | ImageError:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # Python unpacks others whole
        return NotAnImageError(f"{name}: expected a file deflated in its zip file, found another compression")
    try:
        with archive.open(member) as stream:
            return stream.read(member.file_size + 1)  # bounded, because the header may state a smaller size
    except _DAMAGE as error:
        return NotAnImageError(f"{name}: expected a file that can be unpacked, found {error}")
