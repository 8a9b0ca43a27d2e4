"""Checks of a compressed frame's header before anything is decoded: the frame's size, and the work to decode it.

A few bytes may cost gigabytes or hours: a scan of a progressive JPEG that changes nothing has about 20 bytes, but
passes over the whole image.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from cbmir.errors import DecodingError

#: Pixels of all scans together: the largest image with 20 scans, twice as many as encoders write.
_MOST_SCANNED = 1_000_000_000
#: Packets in JPEG 2000: the largest image in tiles of 64x64 pixels with six resolutions has 75,000.
_MOST_PACKETS = 200_000

_SIZ = b"\xff\x4f\xff\x51"  # JPEG 2000, Part 1 and HTJ2K: start of codestream, then its size (ISO/IEC 15444-1, A.5.1)
#: Coding style (A.6.1); start of a tile-part; start of its data, which ends its header; end of the codestream.
_COD, _SOT, _SOD, _EOC = 0xFF52, 0xFF90, 0xFF93, 0xFFD9
#: Other segments that OpenJPEG knows and that do not change the number of packets: quantisation, lengths, comments etc.
_NEUTRAL = frozenset({0xFF50, 0xFF55, *range(0xFF57, 0xFF5A), *range(0xFF5C, 0xFF5F), 0xFF60, 0xFF61, 0xFF63, 0xFF64})
_SOS = b"\xff\xda"
#: Start-of-frame markers of JPEG (ISO/IEC 10918-1, table B.1: C0 to CF except DHT, JPG and DAC) and JPEG-LS (F7).
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_BOXES = 4096  # bytes in which a JP2 file's codestream begins, after its boxes


class FrameShape(NamedTuple):
    """A frame's size in pixels, and its number of components."""

    rows: int
    columns: int
    components: int


@dataclass(frozen=True)
class FrameHeader:
    """The header of a JPEG, JPEG-LS or JPEG 2000 frame. `precision` is in bits per sample; `process` is the
    start-of-frame marker, 0 for JPEG 2000."""

    shape: FrameShape
    precision: int
    process: int = 0


def frame_header(data: bytes | memoryview) -> FrameHeader | None:
    """Read the header of a frame; None if it has no valid one."""
    if bytes(data[:4]) != _SIZ:
        return _jpeg_header(data)
    header = bytes(data[:43])
    if len(header) < 43:
        return None
    width, height, left, top = struct.unpack_from(">4I", header, 8)
    components, depth = struct.unpack_from(">HB", header, 40)
    return FrameHeader(FrameShape(height - top, width - left, components), (depth & 0x7F) + 1)


def without_boxes(data: bytes) -> bytes:
    """Remove a JP2 file's boxes before the codestream. They are not allowed in DICOM (PS3.5 A.4.4), but some devices
    write them. Without them, the decoder decodes the data that was checked."""
    return data[max(0, data[:_BOXES].find(_SIZ)) :]


def _jpeg_header(data: bytes | memoryview) -> FrameHeader | None:
    """Walk through the segments (10918-1, B.1.1.4) up to the frame header (B.2.2)."""
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
    """Refuse JPEG data whose scans, each over `pixels` pixels, would cover too many pixels in total.

    Args:
        data: One or several JPEG images of this size, such as the tiles of a TIFF.

    Raises:
        DecodingError: There are too many scans.
    """
    scans = data.count(_SOS)  # in coded data, FF is only followed by 0 or RSTn
    if scans * pixels > _MOST_SCANNED:
        raise DecodingError(
            f"{name}: expected at most {max(1, _MOST_SCANNED // pixels):,} JPEG scans of {pixels:,} pixels, found "
            f"{scans:,}; save the image again, as PNG or without progressive scans"
        )


def check_packets(data: bytes, name: str) -> None:
    """Refuse a JPEG 2000 codestream with too many packets: layers times components times precincts of all resolutions.

    Raises:
        DecodingError: There are too many, or their number is unknown because tiles or components may differ in coding
            style. Damaged and truncated data is left to the decoder.
    """
    coding = _coding_style(data)
    if coding is None:
        raise DecodingError(
            f"{name}: expected JPEG 2000 data of one coding style for all tiles and components, found one that may "
            f"change it; save the image again, with the same options for all tiles"
        )
    if len(coding) < 10:
        return
    width, height, left, top, tile_width, tile_height = struct.unpack_from(">6I", data, 8)
    (components,) = struct.unpack_from(">H", data, 40)
    style, _, layers, _, levels = struct.unpack_from(">BBHBB", coding, 4)
    tiles = -(-width // (tile_width or width or 1)) * -(-height // (tile_height or height or 1))
    precincts = 0
    for resolution in range(levels + 1):
        exponents = coding[14 + resolution : 15 + resolution] if style & 1 else b"\xff"
        across, down = (exponents[0] & 15, exponents[0] >> 4) if exponents else (15, 15)
        scale = levels - resolution
        columns, rows = _halved(width - left, scale), _halved(height - top, scale)
        precincts += max(tiles, _halved(columns, across) * _halved(rows, down))
    if (packets := layers * components * precincts) > _MOST_PACKETS:
        raise DecodingError(
            f"{name}: expected JPEG 2000 data of at most {_MOST_PACKETS:,} packets, found {packets:,}; save the image "
            f"again, in one layer, with larger tiles and precincts"
        )


def _coding_style(data: bytes) -> bytes | None:
    """Return the COD segment of the main header, which all tiles share; empty if the data ends before it. None if
    another segment, even in a tile-part's header, may override it (15444-1, A.3)."""
    at, part, found = 4 + int.from_bytes(data[4:6], "big"), 0, b""
    for _ in range(_MOST_PACKETS):
        if at + 4 > len(data):
            return found
        marker, length = struct.unpack_from(">HH", data, at)
        if marker == _EOC:
            return found
        if marker == _SOD:
            length = int.from_bytes(data[part + 6 : part + 10], "big")  # of the tile-part; 0: up to the end
            if length == 0:
                return found
            if part + length < at + 2:
                return None
            at = part + length
            continue
        if marker == _SOT:
            part = at
        elif marker == _COD and not part and not found:
            found = data[at : at + 2 + length]
        elif marker not in _NEUTRAL:
            return None
        at += 2 + length
    return None


def _halved(size: int, times: int) -> int:
    """Halve a size `times` times, rounding up."""
    return -(-size // (1 << times))
