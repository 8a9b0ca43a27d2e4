"""Compressed frames: values and refusals."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from pydicom.uid import (
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

import cbmir.runtime.imaging.dicom_pixels as module
from cbmir.errors import DamagedImageError, ImageError, MissingDependencyError
from cbmir.runtime.imaging.dicom_header import LARGE
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

imagecodecs = pytest.importorskip("imagecodecs")

SHAPE = (61, 47)
X_RAY: NDArray[np.uint16] = np.add.outer(np.arange(61) * 40, np.arange(47) * 30).astype(np.uint16)
X_RAY += np.random.default_rng(0).integers(0, 60, SHAPE, dtype=np.uint16)  # up to 12 bits


def packed(pixels: NDArray[Any]) -> bytes:
    """RLE by PS3.5 annex G: literal runs that end with each row, the most significant byte's plane first."""
    planes = pixels.astype(pixels.dtype.newbyteorder(">")).view(np.uint8).reshape(*pixels.shape, -1)
    segments = []
    for plane in range(planes.shape[2]):
        segment = b"".join(bytes([len(row) - 1]) + row.tobytes() for row in planes[:, :, plane])
        segments.append(segment + bytes(len(segment) % 2))
    starts = [64 + sum(map(len, segments[:number])) for number in range(len(segments))]
    return np.array([len(segments), *starts] + [0] * (15 - len(starts)), "<u4").tobytes() + b"".join(segments)


ENCODERS: dict[str, tuple[str, Callable[[NDArray[Any]], bytes]]] = {
    "rle": (RLELossless, packed),
    "lossless": (JPEGLosslessSV1, lambda pixels: imagecodecs.ljpeg_encode(pixels, bitspersample=12)),
    "jpegls": (JPEGLSLossless, imagecodecs.jpegls_encode),
    "j2k": (JPEG2000Lossless, lambda pixels: imagecodecs.jpeg2k_encode(pixels, codecformat="J2K", level=0)),
}


def compressed(kind: str, pixels: NDArray[Any], frame: bytes | None = None) -> bytes:
    """A file with the encoded `pixels`, or with another frame."""
    syntax, encode = ENCODERS[kind]
    frame = encode(pixels) if frame is None else frame
    return make_dicom(pixels, syntax=syntax, frame=frame, WindowCenter=None, WindowWidth=None)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8, np.int16])
@pytest.mark.parametrize("kind", ENCODERS)
def test_values(kind: str, dtype: Any) -> None:
    if dtype != np.uint16 and kind != "rle":
        dtype = np.uint16
    pixels = (X_RAY // 16 if dtype == np.uint8 else X_RAY).astype(dtype) - (2000 if dtype == np.int16 else 0)
    assert np.array_equal(read_image(compressed(kind, pixels), threads=2).stored.view(dtype), pixels)


@pytest.mark.parametrize("kind", ENCODERS)
def test_damage_is_refused(kind: str) -> None:
    """A file that is cut off or has changed bytes gives an image or a typed error."""
    pixels = np.tile(X_RAY, (1, 2))[:, :90]
    frame = ENCODERS[kind][1](pixels)
    generator = np.random.default_rng(0)
    refused = 0
    for trial in range(40):
        broken = bytearray(frame)
        if trial % 4 == 0:
            broken = broken[: int(generator.integers(2, len(frame)))]
        else:
            for position in generator.integers(0, (100, len(frame))[trial % 2], 2):
                broken[position] = int(generator.integers(256))
        try:
            read_image(compressed(kind, pixels, bytes(broken)))
        except ImageError:
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("kind", ENCODERS)
def test_without_imagecodecs_a_compressed_file_says_what_to_install(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    data = compressed(kind, X_RAY)
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(MissingDependencyError, match='extra "dicom"'):
        read_image(data)


SIGNED = X_RAY.astype(np.int16) // 2 - 1000  # 12 bits
TAGS = {"WindowCenter": 0, "WindowWidth": 4096}
TWELVE = SIGNED.view(np.uint16) & 0xFFF


@pytest.mark.parametrize(
    ("syntax", "frame"),
    [
        (JPEG2000Lossless, imagecodecs.jpeg2k_encode(SIGNED, codecformat="J2K", level=0)),
        (JPEG2000Lossless, imagecodecs.jpeg2k_encode(TWELVE, codecformat="J2K", level=0, bitspersample=12)),
        (HTJ2KLossless, imagecodecs.htj2k_encode(SIGNED, reversible=True)),
        (JPEGLSLossless, imagecodecs.jpegls_encode(SIGNED.view(np.uint16))),
        (JPEGLosslessSV1, imagecodecs.ljpeg_encode(SIGNED.view(np.uint16), bitspersample=16)),
        (JPEGLosslessSV1, imagecodecs.ljpeg_encode(TWELVE, bitspersample=12)),
        (RLELossless, packed(SIGNED)),
    ],
)
def test_signed_values_in_every_form_of_codestream(syntax: str, frame: bytes) -> None:
    """The codestream may be signed, or have two's complement of all 16 bits or of the 12 stored ones."""
    radiograph = read_image(make_dicom(SIGNED, syntax=syntax, frame=frame, **TAGS))
    signed = np.left_shift(radiograph.stored.view(np.int16), 4) >> 4  # ignore the bits above
    assert np.array_equal(signed, SIGNED)


def test_a_progressive_jpeg_is_refused() -> None:
    """PS3.5, 8.2.1 only allows sequential processes."""
    pixels = (X_RAY // 16).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", progressive=True)
    for syntax in (JPEGBaseline8Bit, JPEGExtended12Bit, JPEGLosslessSV1, JPEGLSLossless):
        with pytest.raises(
            DamagedImageError, match="expected a frame of the transfer syntax, found JPEG with the frame marker FFC2"
        ):
            read_image(make_dicom(pixels, syntax=syntax, frame=stream.getvalue()))
    with pytest.raises(DamagedImageError, match="found JPEG 2000"):
        read_image(make_dicom(X_RAY, syntax=JPEGLSLossless, frame=ENCODERS["j2k"][1](X_RAY)))


def test_jpeg_2000_uses_the_given_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, int]] = []

    real = imagecodecs.jpeg2k_decode

    def decode(data: bytes, **options: int) -> Any:
        given.append(options)
        return real(data, **options)

    monkeypatch.setattr(imagecodecs, "jpeg2k_decode", decode)
    read_image(compressed("j2k", X_RAY), threads=3)
    assert given == [{"numthreads": 3}]


def test_lack_of_memory_is_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(imagecodecs, "jpegls_decode", decode)
    with pytest.raises(MemoryError):
        read_image(compressed("jpegls", X_RAY))


def test_pixels_are_decoded_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads meet inside the decoder, which would be impossible behind one lock."""
    data = compressed("jpegls", X_RAY)
    expected = read_image(data).pixels
    met = threading.Barrier(4)
    decode = module.Frame._by_imagecodecs

    def meet(*args: Any) -> Any:
        met.wait(timeout=60)
        return decode(*args)

    monkeypatch.setattr(module.Frame, "_by_imagecodecs", meet)
    with ThreadPoolExecutor(4) as pool:
        for radiograph in pool.map(read_image, [data] * 4):
            assert np.array_equal(radiograph.pixels, expected)


def test_a_native_frame_is_not_copied() -> None:
    """Stored values are a view of the file's bytes, and pixels are computed once."""
    pixels = np.tile(X_RAY, (16, 20))
    dataset = dcmread(io.BytesIO(compressed("rle", X_RAY)))
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.PixelData = pixels.tobytes()
    dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OW", False
    stream = io.BytesIO()
    dataset.save_as(stream)
    data = stream.getvalue()
    assert pixels.nbytes > LARGE
    radiograph = read_image(data)
    assert np.shares_memory(radiograph.stored, np.frombuffer(data, np.uint8))
    assert np.array_equal(radiograph.stored, pixels)
    assert radiograph.pixels is radiograph.pixels
