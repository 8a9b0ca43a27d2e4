"""Small files that ask for hours of work: refused by their headers, before a byte is decoded."""

from __future__ import annotations

import io
import struct
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
    """A blank JPEG whose last scan comes so often."""
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


def test_strips_of_a_tiff_that_are_the_same_bytes() -> None:
    """Each would be decoded."""
    with pytest.raises(DecodingError, match="tiles lie apart, found some that overlap"):
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
        for end in range(len(absurd)):  # damage is left to the decoder
            with suppress(DecodingError):
                check_packets(absurd[:end], "image")


def test_a_scan_of_the_largest_image_is_never_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scans(b"\xff\xda" * 20, 50_000_000, "image")
    monkeypatch.setattr(codestream, "_MOST_SCANNED", 10)
    with pytest.raises(DecodingError, match="at most 1 JPEG scans"):
        check_scans(b"\xff\xda" * 2, 50_000_000, "image")
