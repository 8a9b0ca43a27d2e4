"""What a compressed frame says of its own size, read from its header: decoders make room for that, and ask no tag.

A few bytes may claim gigabytes, so this is looked at before anything is decoded.
"""

from __future__ import annotations

import struct

_SIZ = b"\xff\x4f\xff\x51"  # JPEG 2000, Part 1 and HTJ2K: start of codestream, then its size (ISO/IEC 15444-1, A.5.1)
#: Start-of-frame markers of JPEG (ISO/IEC 10918-1, table B.1: C0 to CF but for DHT, JPG and DAC) and JPEG-LS (F7).
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_BOXES = 4096  # bytes within which a JP2 file's boxes end and its codestream begins


def codestream_shape(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """(rows, columns, components) of a JPEG, JPEG-LS or JPEG 2000 frame; None where its header is none."""
    start = bytes(data[:_BOXES]).find(_SIZ)
    return _jpeg_2000(bytes(data[start : start + 42])) if start >= 0 else _jpeg(data)


def _jpeg_2000(header: bytes) -> tuple[int, int, int] | None:
    if len(header) < 42:
        return None
    width, height, left, top = struct.unpack_from(">4I", header, 8)
    (components,) = struct.unpack_from(">H", header, 40)
    return height - top, width - left, components


def _jpeg(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Goes from segment to segment (10918-1, B.1.1.4) up to the frame header (B.2.2)."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            if at + 10 > len(data):
                return None
            rows, columns, components = struct.unpack(">HHB", bytes(data[at + 5 : at + 10]))
            return rows, columns, components
        else:
            at += 2 + int.from_bytes(bytes(data[at + 2 : at + 4]), "big")
    return None
