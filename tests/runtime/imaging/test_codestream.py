"""Small files that would take hours to decode are refused by their headers, before decoding."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image
from pydicom.uid import JPEG2000, HTJ2KLossless, JPEGBaseline8Bit

from cbmir.errors import DecodingError
from cbmir.runtime.imaging import codestream
from cbmir.runtime.imaging.codestream import check_packets, check_scans
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

imagecodecs = pytest.importorskip("imagecodecs")

SIDE = 700


def many_scans(times: int, *, progressive: bool = True, mode: str = "L") -> bytes:
    """A blank JPEG whose last scan is repeated."""
    stream = io.BytesIO()
    Image.new(mode, (SIDE, SIDE)).save(stream, "JPEG", progressive=progressive)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * times + b"\xff\xd9"


def tiff_of(jpeg: bytes, strips: int = 1) -> bytes:
    """A TIFF whose strips are all the same JPEG data."""
    lists = 8 + 2 + 9 * 12 + 4
    where = lists + 8 * strips
    tags = [
        (256, 4, 1, SIDE), (257, 4, 1, SIDE), (258, 3, 1, 8), (259, 3, 1, 7), (262, 3, 1, 1), (277, 3, 1, 1),
        (273, 4, strips, lists if strips > 1 else where), (278, 4, 1, -(-SIDE // strips)),
        (279, 4, strips, lists + 4 * strips if strips > 1 else len(jpeg)),
    ]  # fmt: skip
    header = b"II*\x00" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return header + bytes(4) + struct.pack("<I", where) * strips + struct.pack("<I", len(jpeg)) * strips + jpeg


@pytest.mark.parametrize("wrapped", [bytes, tiff_of], ids=["JPEG", "TIFF"])
def test_the_scans_of_a_jpeg_are_counted(wrapped: type[bytes]) -> None:
    with pytest.raises(DecodingError, match=r"at most 2,040 JPEG scans of 490,000 pixels, found 3,00\d"):
        read_image(wrapped(many_scans(3000)))


def test_a_progressive_jpeg_is_read() -> None:
    stream = io.BytesIO()
    ramp = np.add.outer(np.arange(64) * 2, np.arange(64) * 2).astype(np.uint8)
    Image.fromarray(ramp).convert("RGB").save(stream, "JPEG", progressive=True, quality=95)
    assert stream.getvalue().count(b"\xff\xda") == 10
    assert np.abs(read_image(stream.getvalue()).pixels.astype(int) - ramp).max() < 8


def test_overlapping_strips_of_a_tiff_are_refused() -> None:
    """The decoder would decode each of them."""
    with pytest.raises(DecodingError, match="with separate tiles, found some that overlap"):
        read_image(tiff_of(many_scans(100), strips=10))


def test_scans_within_a_dicom_frame() -> None:
    grey = np.zeros((SIDE, SIDE), np.uint8)
    data = make_dicom(grey, syntax=JPEGBaseline8Bit, frame=many_scans(3000, progressive=False))
    with pytest.raises(DecodingError, match=r"PixelData \(7FE0,0010\): expected at most 2,040 JPEG scans"):
        read_image(data)


@pytest.mark.parametrize(("syntax", "encode"), [
    (JPEG2000, lambda pixels: imagecodecs.jpeg2k_encode(pixels, codecformat="J2K", level=0)),
    (HTJ2KLossless, imagecodecs.htj2k_encode),
])  # fmt: skip
def test_the_packets_of_jpeg_2000_are_counted(syntax: str, encode: type[bytes]) -> None:
    pixels = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    frame = bytearray(encode(pixels))
    check_packets(bytes(frame), "image")
    at = frame.index(b"\xff\x52")
    frame[at + 6 : at + 8] = b"\xff\xff"  # layers
    with pytest.raises(DecodingError, match=r"at most 200,000 packets, found \d{3},\d{3}"):
        read_image(make_dicom(pixels, syntax=syntax, frame=bytes(frame)))


def test_precincts_and_tiles_of_jpeg_2000_are_counted() -> None:
    def header(side: int, tile: int, style: int, precincts: bytes) -> bytes:
        size = struct.pack(">H8IH3B", 0, side, side, 0, 0, tile, tile, 0, 0, 1, 11, 1, 1)
        coding = struct.pack(">BBHBBBBBB", style, 0, 1, 0, 1, 4, 4, 0, 1) + precincts
        return b"\xff\x4f" + b"".join(
            marker + struct.pack(">H", len(content) + 2) + content
            for marker, content in ((b"\xff\x51", size), (b"\xff\x52", coding), (b"\xff\x90", bytes(8)))
        )

    check_packets(header(7000, 7000, 0, b""), "image")
    check_packets(header(7000, 64, 0, b""), "image")
    check_packets(header(7000, 7000, 1, b"\x77\x88"), "image")
    for absurd in (header(7000, 8, 0, b""), header(7000, 7000, 1, b"\x11\x11")):
        with pytest.raises(DecodingError):
            check_packets(absurd, "image")
        for end in range(len(absurd)):  # the decoder handles damage
            with suppress(DecodingError):
                check_packets(absurd[:end], "image")


PIXELS = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
#: Coding style of one component, and a progression (15444-1, A.6.2 and A.6.6).
COC, POC = (
    b"\xff\x53" + struct.pack(">H7B", 9, 0, 0, 5, 4, 4, 0, 1),
    b"\xff\x5f" + struct.pack(">H2BH3B", 9, 0, 0, 1, 6, 1, 0),
)


def coding_style(frame: bytes) -> bytes:
    """The COD segment of a codestream, with the maximum number of layers."""
    at = frame.index(b"\xff\x52")
    segment = bytearray(frame[at : at + 2 + int.from_bytes(frame[at + 2 : at + 4], "big")])
    segment[6:8] = b"\xff\xff"
    return bytes(segment)


def with_segment(frame: bytes, segment: bytes, before: bytes) -> bytes:
    """Insert a segment into the main header (before b"\xff\x90") or the tile-part's (before b"\xff\x93")."""
    at, part = frame.index(before), frame.index(b"\xff\x90")
    longer = frame[:at] + segment + frame[at:]
    if at == part:
        return longer
    length = int.from_bytes(frame[part + 6 : part + 10], "big")
    return longer[: part + 6] + struct.pack(">I", length + len(segment)) + longer[part + 10 :]


@pytest.mark.parametrize("before", [b"\xff\x90", b"\xff\x93"], ids=["main header", "tile's part"])
@pytest.mark.parametrize("segment", [coding_style, lambda _: COC, lambda _: POC, lambda _: b"\xff\x30\x00\x02"],
                         ids=["COD", "COC", "POC", "unknown"])  # fmt: skip
def test_a_segment_that_would_change_the_count_is_refused(segment: Callable[[bytes], bytes], before: bytes) -> None:
    frame: bytes = imagecodecs.jpeg2k_encode(PIXELS, codecformat="J2K", level=0)
    read_image(make_dicom(PIXELS, syntax=JPEG2000, frame=with_segment(frame, b"\xff\x64\x00\x04\x00\x01", before)))
    changed = with_segment(frame, segment(frame), before)
    with pytest.raises(DecodingError, match="one coding style for all tiles and components"):
        read_image(make_dicom(PIXELS, syntax=JPEG2000, frame=changed))


def test_every_part_of_a_tile_is_checked() -> None:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "JPEG2000", no_jp2=True, tile_size=(32, 32))
    frame = stream.getvalue()
    assert frame.count(b"\xff\x90\x00\x0a") == 4
    last = frame.rindex(b"\xff\x90")
    check_packets(frame, "image")
    changed = frame[:last] + with_segment(frame[last:], coding_style(frame), b"\xff\x93")
    with pytest.raises(DecodingError, match="one coding style"):
        check_packets(changed, "image")
    for lie in (1, 12, 13):  # false tile-part lengths: OpenJPEG continues after 12 bytes
        with pytest.raises(DecodingError, match="one coding style"):
            check_packets(changed[: last + 6] + struct.pack(">I", lie) + changed[last + 10 :], "image")


def test_a_header_within_a_box_of_a_jp2_file() -> None:
    """The check must read the same header as the decoder."""
    frame: bytes = imagecodecs.jpeg2k_encode(PIXELS, codecformat="J2K", level=0)
    other: bytes = imagecodecs.jpeg2k_encode(PIXELS[::-1].copy(), codecformat="J2K", level=0)
    file: bytes = imagecodecs.jpeg2k_encode(PIXELS, codecformat="JP2", level=0)
    at = file.index(b"jp2h") - 4
    box = struct.pack(">I4s", 24 + len(other), b"uuid") + bytes(16) + other
    images = [
        read_image(make_dicom(PIXELS, syntax=JPEG2000, frame=each))
        for each in (frame, other, file[:at] + box + file[at:])
    ]
    assert np.array_equal(images[2].pixels, images[1].pixels)
    assert not np.array_equal(images[2].pixels, images[0].pixels)


def test_one_scan_of_the_largest_image_is_always_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scans(b"\xff\xda" * 20, 50_000_000, "image")
    monkeypatch.setattr(codestream, "_MOST_SCANNED", 10)
    with pytest.raises(DecodingError, match="at most 1 JPEG scans"):
        check_scans(b"\xff\xda" * 2, 50_000_000, "image")
