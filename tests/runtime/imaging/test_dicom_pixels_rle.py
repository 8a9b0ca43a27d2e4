"""RLE Lossless: planes in any valid packing; never unpacks more than the image has room for."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.errors import DamagedImageError
from cbmir.runtime.imaging.dicom_pixels import decode_rle
from cbmir.runtime.imaging.reader import read_image
from dicom_files import SIDE, STORED, make_dicom

SHAPE = (3, 5)
PLANE = np.arange(15, dtype=np.uint8).reshape(SHAPE)
LITERAL = bytes([14]) + PLANE.tobytes()


def frame(*segments: bytes) -> bytes:
    starts = [64 + sum(map(len, segments[:number])) for number in range(len(segments))]
    return np.array([len(segments), *starts] + [0] * (15 - len(starts)), "<u4").tobytes() + b"".join(segments)


def decode(data: bytes, planes: int = 1) -> list[list[list[int]]]:
    return [plane.tolist() for plane in decode_rle(data, SHAPE, planes, threads=2)]


@pytest.mark.parametrize(
    "segment",
    [
        LITERAL,  # one packet across rows
        b"".join(bytes([0, value]) for value in PLANE.ravel()),
        b"".join(bytes([128, 0, value]) for value in PLANE.ravel()),  # 128 is ignored
        LITERAL + b"\0",  # padded to an even length
        LITERAL + b"\0" * 15,
    ],
)
def test_a_plane_in_every_kind_of_packet(segment: bytes) -> None:
    assert decode(frame(segment)) == [PLANE.tolist()]


def test_a_byte_that_is_repeated() -> None:
    assert decode(frame(bytes([257 - 15, 7]))) == [[[7] * 5] * 3]


def test_the_first_plane_has_the_high_bytes() -> None:
    frames = frame(bytes([257 - 15, 3]), LITERAL)
    assert decode(frames, planes=2) == [[[3] * 5] * 3, PLANE.tolist()]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        frame(LITERAL)[:63],
        frame(LITERAL)[:-1],
        frame(b""),
        frame(LITERAL, LITERAL),  # two planes for an image with one
        frame(LITERAL).replace(b"\x40", b"\x3f", 1),  # a segment inside the header
        frame(LITERAL).replace(b"\x40", b"\xff", 1),  # or beyond the end
        frame(LITERAL + LITERAL + LITERAL),  # three times as many rows
        frame(bytes([129, 7]) * 200_000),  # two bytes become 128
    ],
)
def test_damage_and_bombs_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_the_slow_decoder_of_pydicom_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of one-byte packets keep it busy for seconds, and block all other threads."""
    monkeypatch.setattr("pydicom.pixels.decoders.base.Decoder.as_array", None)
    pixels = (STORED // 16).astype(np.uint8)
    packets = b"".join(bytes([0, value]) for value in pixels.ravel())
    window = {"WindowCenter": 128, "WindowWidth": 256}
    read = read_image(make_dicom(pixels, syntax="1.2.840.10008.1.2.5", frame=frame(packets), **window))
    assert np.array_equal(read.pixels, pixels)
    assert read.pixels.shape == (SIDE, SIDE)
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\) \(RLE Lossless\)"):
        read_image(make_dicom(pixels, syntax="1.2.840.10008.1.2.5", frame=frame(packets * 2), **window))
