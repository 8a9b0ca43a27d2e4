"""Reading an image: PNG, JPEG, TIFF or DICOM, from a path, bytes or an array, into one grey `Radiograph`.

Intensities are never guessed: a format's full range becomes 0..255 (see `dicom_grayscale` for DICOM), or a model card's
policy applies. An image that cannot be an X-ray raises a typed error; an unusual one gets a warning.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from cbmir.errors import DamagedImageError, DecodingError, ImageSizeError, NotAnImageError, UserError
from cbmir.input_file import read_input
from cbmir.preprocessing import INTENSITIES, PreprocessSpec
from cbmir.runtime.imaging.codestream import check_scans
from cbmir.runtime.imaging.colour import to_grey
from cbmir.runtime.imaging.dicom_reader import is_dicom, read_dicom
from cbmir.runtime.imaging.image_warning import ImageWarning
from cbmir.runtime.imaging.picture_check import check_picture
from cbmir.runtime.imaging.radiograph import (
    PHANTOM,
    ImageLimits,
    Radiograph,
    check_contrast,
    collected_warnings,
    greys_of,
)
from cbmir.runtime.imaging.threads import beside

__all__ = ["ImageLimits", "Radiograph", "file_bytes", "read_image"]

# Pillow's classes are called directly: `Image.open` would add its own pixel limit, which is a global.
_PLUGINS: dict[type[ImageFile.ImageFile], tuple[bytes, ...]] = {
    PngImageFile: (b"\x89PNG\r\n\x1a\n",),
    JpegImageFile: (b"\xff\xd8\xff",),
    TiffImageFile: (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),  # the last two: BigTIFF
}
_FOREIGN = {
    b"GIF8": "GIF", b"BM": "BMP", b"RIFF": "WebP or another RIFF format", b"\x00\x00\x00\x0cjP  ": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000", b"%PDF": "PDF", b"PK\x03\x04": "ZIP", b"\x1f\x8b": "gzip", b"\x93NUMPY": "NumPy",
}  # fmt: skip
# All exceptions of Pillow's three readers for damaged content (a fuzz test checks this list).
_DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError,
    struct.error, zlib.error,
)  # fmt: skip
#: The transposition that undoes each EXIF orientation except 1.
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_EXIF = {"exif", "Raw profile type exif"}  # the second is ImageMagick's
_COMPRESSION, _JPEG_IN_TIFF = 259, (6, 7)  # a TIFF tag, and its values for JPEG
_READS = "PNG, JPEG, TIFF or DICOM"


def read_image(
    source: str | Path | bytes | bytearray | memoryview | NDArray[np.generic], *, limits: ImageLimits | None = None,
    intensity: str = "header", allow_lateral: bool = False, threads: int = 1, reduced_for: PreprocessSpec | None = None,
) -> Radiograph:  # fmt: skip
    """Read one image. Colour becomes luma (ITU-R 601), transparency is blended with black, EXIF orientation is applied.

    Warnings about the picture itself (`check_picture`) come first.

    Args:
        source: A path, a file's bytes, or an array, bone bright: uint8 [H,W] or [H,W,3] (RGB), uint16 [H,W] (0..65535).
        intensity: How stored values become grey, as in PreprocessSpec; a model needs images that were read with its own
            policy.
        allow_lateral: Accept lateral views in DICOM files, with a warning.
        threads: How many threads may decode one DICOM file.
        reduced_for: Decode a large JPEG 2000 image in a DICOM file at 1/2 or 1/4 of its resolution (`reduction`).
            `preprocess` with this spec then takes a fraction of the time, with the same result within one grey level,
            except for a few pixels at sharp edges. Signed values, files with padding or without a window, and crops
            that reach the border are still decoded in full. Pillow holds Python's lock, so threads take turns.

    Raises:
        ImageError: A subclass says why the image cannot be read.
        UserError: An unknown `intensity`.
        MissingDependencyError: DICOM support is not installed.
    """
    limits = limits or ImageLimits()
    if intensity not in INTENSITIES:
        raise UserError(f"expected intensity {', '.join(INTENSITIES)}, found {intensity!r}")
    if isinstance(source, np.ndarray):
        radiograph = _read_array(source, limits, intensity)
        return replace(radiograph, warnings=(*check_picture(radiograph), *radiograph.warnings))
    data, name = image_bytes(source, limits)
    with beside(threads, lambda: hashlib.sha256(data).hexdigest()) as digest:
        radiograph = decode_image(
            data, name, limits=limits, intensity=intensity, allow_lateral=allow_lateral, threads=threads,
            reduced_for=reduced_for,
        )  # fmt: skip
        return replace(radiograph, sha256=digest())


def decode_image(
    data: bytes, name: str, *, limits: ImageLimits, intensity: str, allow_lateral: bool, threads: int,
    reduced_for: PreprocessSpec | None,
) -> Radiograph:  # fmt: skip
    """Read a file's bytes as `read_image` does, but without computing their digest. `name` is for messages."""
    if is_dicom(data):
        radiograph = read_dicom(data, name, limits, intensity, allow_lateral, threads, reduced_for)
    else:
        radiograph = _read_picture(data, name, limits, intensity)
    return replace(radiograph, warnings=(*check_picture(radiograph), *radiograph.warnings))


def image_bytes(source: str | Path | bytes | bytearray | memoryview, limits: ImageLimits) -> tuple[bytes, str]:
    """Return a file's bytes, within the limits, and its name for messages. Raises NotAnImageError."""
    if isinstance(source, bytes | bytearray | memoryview):
        data, name = bytes(source), "image"
    elif isinstance(source, str | Path):
        data, name = file_bytes(Path(source), limits), str(source)
    else:
        raise NotAnImageError(f"expected a path, a file's bytes or a NumPy array, found {type(source).__name__}")
    if not data:
        raise NotAnImageError(f"{name}: expected {_READS}, found an empty file")
    limits.check_bytes(len(data), name)
    return data, name


def file_bytes(path: Path, limits: ImageLimits | None = None) -> bytes:
    """Read the bytes of an image file within the limits. Raises NotAnImageError."""
    limits = limits or ImageLimits()
    try:
        limits.check_bytes(path.stat().st_size, str(path))
        return read_input(path, limits.max_bytes)
    except FileNotFoundError:
        raise NotAnImageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise NotAnImageError(f"{path}: the file cannot be read: {reason}") from error


def _read_array(array: NDArray[Any], limits: ImageLimits, intensity: str) -> Radiograph:
    grey = array.ndim == 2 and array.dtype in (np.uint8, np.uint16)
    colour = array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8
    if not grey and not colour:
        raise NotAnImageError(
            f"array: expected uint8 [H,W] or [H,W,3], or uint16 [H,W]; found {array.dtype} {list(array.shape)}; "
            f"scale other types first, their range is not guessed"
        )
    limits.check_size(array.shape[1], array.shape[0], "array")
    array = np.array(array, order="C")  # a copy, because the caller may change the array
    stored, warnings = (array, ()) if grey else to_grey(Image.fromarray(array), "array")
    return _radiograph(stored, 16, "array", hashlib.sha256(array.data).hexdigest(), intensity, warnings)


def _radiograph(
    stored: NDArray[Any], bits: int, name: str, sha256: str, intensity: str, warnings: tuple[ImageWarning, ...]
) -> Radiograph:
    """Make a Radiograph of values [H,W]: uint8, or uint16 of which `bits` are used. Raises BlankImageError."""
    greys, values = greys_of(stored, bits, intensity)
    warnings = (*warnings, *check_contrast(stored, greys, name))
    return Radiograph(stored, name, sha256, warnings=warnings, greys=greys, intensity=intensity, values=values)


def _read_picture(data: bytes, name: str, limits: ImageLimits, intensity: str) -> Radiograph:
    plugin = next((plugin for plugin, signatures in _PLUGINS.items() if data.startswith(signatures)), None)
    if plugin is None:
        raise NotAnImageError(f"{name}: expected {_READS}, found {_kind(data)}")
    try:
        with collected_warnings() as collected:
            image = plugin(io.BytesIO(data))
            limits.check_size(*image.size, name)
            several = getattr(image, "is_animated", False)  # `n_frames` would read all pages of a TIFF
            _check_work(image, data, name)
            if not several and (plugin is TiffImageFile or b"acTL" in data):  # these may warn while decoding
                image.load()
        if several:
            raise NotAnImageError(f"{name}: expected one image, found several pages or frames; save one as PNG")
        image.load()  # outside the lock, so that threads decode in parallel
        orientation = 1
        if plugin is not TiffImageFile and not _EXIF.isdisjoint(image.info):  # Pillow turns a TIFF itself
            with collected_warnings() as later:  # only now: a PNG may have its EXIF after the pixels
                orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
            collected += later
        stored, bits, warnings = _decoded(image, name)
    except Image.DecompressionBombError as error:  # a TIFF tile may be larger than its image
        raise ImageSizeError(f"{name}: the {plugin.format} file's tiles exceed Pillow's limit: {error}") from error
    except _DECODE_ERRORS as error:
        raise DamagedImageError(
            f"{name}: the {plugin.format} file is damaged, cut off or of an unknown kind: {error}"
        ) from error
    if orientation in _TRANSPOSES:
        stored = np.asarray(Image.fromarray(stored).transpose(_TRANSPOSES[orientation]))
    radiograph = _radiograph(stored, bits, name, "", intensity, warnings)
    notes = (ImageWarning("nonstandard file", f"{plugin.format}: {warning}") for warning in dict.fromkeys(collected))
    is_phantom = image.info.get("Source") == PHANTOM
    return replace(radiograph, warnings=(*radiograph.warnings, *notes), is_phantom=is_phantom)


def _check_work(image: ImageFile.ImageFile, data: bytes, name: str) -> None:
    """Raise DecodingError for a JPEG, or a TIFF with JPEG tiles, whose scans cover too many pixels."""
    if isinstance(image, JpegImageFile):
        check_scans(data, image.width * image.height, name)
    elif isinstance(image, TiffImageFile) and image.tag_v2.get(_COMPRESSION) in _JPEG_IN_TIFF:
        width, height = (_number(image, tag) for tag in (322, 323))  # of a tile
        if not width * height:  # strips of a few rows each
            width, height = image.width, _number(image, 278) or image.height
        sizes = image.tag_v2.get(325) or image.tag_v2.get(279) or ()
        if sum(sizes if isinstance(sizes, tuple) else (sizes,)) > len(data):  # each would be decoded
            raise DecodingError(f"{name}: expected a TIFF file with separate tiles, found some that overlap")
        check_scans(data, min(width * height, image.width * image.height), name)


def _number(image: TiffImageFile, tag: int) -> int:
    value = image.tag_v2.get(tag)
    return value if isinstance(value, int) and value > 0 else 0


def _kind(data: bytes) -> str:
    """Describe bytes without quoting them, because they may name a patient."""
    for signature, kind in _FOREIGN.items():
        if data.startswith(signature):
            return f"{kind}, which cbmir does not read; convert it to PNG"
    try:
        text = data[:512].decode("utf-8", "ignore" if len(data) > 512 else "strict")
    except UnicodeDecodeError:
        text = "\0"
    return "text" if "".join(text.split()).isprintable() else "no known image format"


def _decoded(image: ImageFile.ImageFile, name: str) -> tuple[NDArray[Any], int, tuple[ImageWarning, ...]]:
    """Return a loaded image's values uint8 or uint16 [H,W], how many bits they have, and warnings."""
    if image.mode.startswith("I;16") or (image.mode == "I" and isinstance(image, PngImageFile)):  # "I": older Pillow
        bits, white_is_zero = 16, False
        if isinstance(image, TiffImageFile):
            bits, white_is_zero = image.tag_v2.get(258, (16,))[0], image.tag_v2.get(262) == 0
        values = np.asarray(image).astype(np.uint16, copy=False)
        return (np.uint16(2**bits - 1) - values if white_is_zero else values), bits, ()
    if image.mode in ("I", "F"):
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise NotAnImageError(
            f"{name}: expected 8 or 16 unsigned bits per pixel, found {kind} values, whose range is not guessed; "
            f"scale them to 16 bits first"
        )
    grey, warnings = to_grey(image, name)
    return grey, 8, warnings


def thumbnail_jpeg(pixels: NDArray[np.uint8], side: int = 256) -> bytes:
    """Make a small JPEG file of an image.

    Args:
        pixels: Grey, uint8 [H, W].
        side: The longest side of the result, in pixels. A smaller image is not enlarged.
    """
    picture = Image.fromarray(pixels)
    picture.thumbnail((side, side))
    jpeg = io.BytesIO()
    picture.save(jpeg, "JPEG", quality=85)
    return jpeg.getvalue()
