"""What the header of a compressed frame says of it, read before a byte is decoded: its size, and the work that it asks
for.

A few bytes may claim gigabytes or hours: a scan of a progressive JPEG that changes nothing takes some 20 bytes, and a
pass over the whole image.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from cbmir.errors import DecodingError

#: Pixels of all scans together: the largest image, and twice the ten scans that encoders write.
_MOST_SCANNED = 1_000_000_000
#: Packets of JPEG 2000: the largest image in tiles of 64x64 pixels, of six resolutions, has 75,000.
_MOST_PACKETS = 200_000

_SIZ = b"\xff\x4f\xff\x51"  # JPEG 2000, Part 1 and HTJ2K: start of codestream, then its size (ISO/IEC 15444-1, A.5.1)
_COD, _SOT = 0xFF52, 0xFF90  # coding style (A.6.1); start of a tile's part, where the main header has ended
_SOS = b"\xff\xda"
#: Start-of-frame markers of JPEG (ISO/IEC 10918-1, table B.1: C0 to CF but for DHT, JPG and DAC) and JPEG-LS (F7).
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_BOXES = 4096  # bytes within which a JP2 file's boxes end and its codestream begins


class FrameShape(NamedTuple):
    """Of a frame: its size in pixels, and its components."""

    rows: int
    columns: int
    components: int


@dataclass(frozen=True)
class FrameHeader:
    """Of a JPEG, JPEG-LS or JPEG 2000 frame. `process` is its start-of-frame marker, 0 for JPEG 2000; a sample has
    `precision` bits."""

    shape: FrameShape
    precision: int
    process: int = 0


def frame_header(data: bytes | memoryview) -> FrameHeader | None:
    """The header of a frame; None where it has no valid one."""
    start = _start_of_jpeg_2000(data)
    if start < 0:
        return _jpeg_header(data)
    header = bytes(data[start : start + 43])
    if len(header) < 43:
        return None
    width, height, left, top = struct.unpack_from(">4I", header, 8)
    components, depth = struct.unpack_from(">HB", header, 40)
    return FrameHeader(FrameShape(height - top, width - left, components), (depth & 0x7F) + 1)


def _start_of_jpeg_2000(data: bytes | memoryview) -> int:
    return bytes(data[:_BOXES]).find(_SIZ)


def _jpeg_header(data: bytes | memoryview) -> FrameHeader | None:
    """Go from segment to segment (10918-1, B.1.1.4) up to the frame header (B.2.2)."""
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
            precision, rows, columns, components = struct.unpack(">BHHB", bytes(data[at + 4 : at + 10]))
            return FrameHeader(FrameShape(rows, columns, components), precision, marker)
        else:
            at += 2 + int.from_bytes(bytes(data[at + 2 : at + 4]), "big")
    return None


def check_scans(data: bytes, pixels: int, name: str) -> None:
    """Refuse JPEG data whose scans would go over too many pixels: `pixels` each.

    Args:
        data: May hold several JPEG images of so many pixels each, as the tiles of a TIFF.

    Raises:
        DecodingError: There are too many scans.
    """
    scans = data.count(_SOS)  # in coded data no byte but 0 and those of RSTn follows FF
    if scans * pixels > _MOST_SCANNED:
        raise DecodingError(
            f"{name}: expected at most {max(1, _MOST_SCANNED // pixels):,} JPEG scans of {pixels:,} pixels, found "
            f"{scans:,}; save the image again, as PNG or without progressive scans"
        )


def check_packets(data: bytes | memoryview, name: str) -> None:
    """Refuse JPEG 2000 data of too many packets: layers, times components, times precincts of all resolutions.

    Raises:
        DecodingError: The main header asks for too many. One that is damaged is left to the decoder.
    """
    start = _start_of_jpeg_2000(data)
    header = bytes(data[start : start + 2**16])
    if start < 0 or len(header) < 42:
        return
    width, height, left, top, tile_width, tile_height = struct.unpack_from(">6I", header, 8)
    (components,) = struct.unpack_from(">H", header, 40)
    at = 4 + int.from_bytes(header[4:6], "big")
    while at + 14 <= len(header):
        marker, length = struct.unpack_from(">HH", header, at)
        if marker == _SOT:
            return
        if marker == _COD:
            break
        at += 2 + length
    else:
        return
    style, _, layers, _, levels = header[at + 4], header[at + 5], *struct.unpack_from(">HBB", header, at + 6)
    tiles = -(-width // (tile_width or width or 1)) * -(-height // (tile_height or height or 1))
    precincts = 0
    for resolution in range(levels + 1):
        exponents = header[at + 14 + resolution : at + 15 + resolution] if style & 1 else b"\xff"
        across, down = (exponents[0] & 15, exponents[0] >> 4) if exponents else (15, 15)
        scale = levels - resolution
        columns, rows = _halved(width - left, scale), _halved(height - top, scale)
        precincts += max(tiles, _halved(columns, across) * _halved(rows, down))
    if (packets := layers * components * precincts) > _MOST_PACKETS:
        raise DecodingError(
            f"{name}: expected JPEG 2000 data of at most {_MOST_PACKETS:,} packets, found {packets:,}; save the image "
            f"again, in one layer, with larger tiles and precincts"
        )


def _halved(size: int, times: int) -> int:
    """Rounded up."""
    return -(-size // (1 << times))
