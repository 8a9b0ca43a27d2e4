"""RLE Lossless (DICOM PS3.5 annex G): a plane of bytes a segment, the most significant first, packed by PackBits.

Both decoders are C and give a plane just the room that the image has. pydicom's own is a loop in Python, which a few
megabytes of short packets keep busy, and every other thread waiting, for seconds.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cbmir.runtime.together import together

_HEADER = 64  # bytes: the number of segments, and where each of up to 15 begins
_AT_ONCE = 2**15  # values put together at a time, so that they stay in the cache
_PADDING = 16  # so many bytes after a plane's end are none; the standard has at most one


def decode_rle(
    data: bytes | memoryview, shape: tuple[int, int], planes: int, imagecodecs: ModuleType | None, threads: int
) -> NDArray[Any]:
    """Bit patterns, uint8 (one plane) or uint16 (two) [H,W]. Raises ValueError for a damaged frame.

    imagecodecs unpacks several times as fast as Pillow, which decides where the former does not understand a segment.
    """
    if len(data) < _HEADER:
        raise ValueError("shorter than its header")
    header = np.frombuffer(data[:_HEADER], "<u4")
    edges = [*header[1 : planes + 1].tolist(), len(data)]
    if header[0] != planes or edges[0] < _HEADER or edges != sorted(edges):
        raise ValueError("the header does not fit")
    size = shape[0] * shape[1]
    segments = [data[first:last] for first, last in pairwise(edges)]
    unpacked = together(threads, *(partial(_unpacked, segment, size, imagecodecs) for segment in segments))
    if planes == 1:
        return unpacked[0].reshape(shape)
    high, low = unpacked
    return _joined(high, low, threads).reshape(shape)


def _unpacked(segment: bytes | memoryview, size: int, imagecodecs: ModuleType | None) -> NDArray[np.uint8]:
    if imagecodecs is not None:
        try:
            values: NDArray[np.uint8] = imagecodecs.packbits_decode(segment, out=np.empty(size, np.uint8))
        except (RuntimeError, ValueError, ImportError):  # it takes no padding, and may be built without
            values = np.empty(0, np.uint8)
        if len(values) == size:
            return values
    plane = _by_pillow(segment, size)
    if len(segment) > _PADDING and _is_whole(segment[:-_PADDING], size):
        raise ValueError("the segment goes on beyond the plane")
    return plane


def _by_pillow(segment: bytes | memoryview, size: int) -> NDArray[np.uint8]:
    """The plane, uint8 [size], as one row, since a packet may go on from row to row. ValueError where it is cut off."""
    return np.asarray(Image.frombytes("L", (size, 1), segment, "packbits", "L")).reshape(size)


def _is_whole(segment: bytes | memoryview, size: int) -> bool:
    try:
        _by_pillow(segment, size)
    except ValueError:
        return False
    return True


def _joined(high: NDArray[np.uint8], low: NDArray[np.uint8], threads: int) -> NDArray[np.uint16]:
    pixels = np.empty(len(high), np.uint16)

    def join(first: int, last: int) -> None:
        for start in range(first, last, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, last))
            pixels[part] = high[part]
            pixels[part] <<= 8
            pixels[part] |= low[part]

    edges = [len(high) * share // threads for share in range(threads + 1)]
    together(threads, *(partial(join, *ends) for ends in pairwise(edges)))
    return pixels
