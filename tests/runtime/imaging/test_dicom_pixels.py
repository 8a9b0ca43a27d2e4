"""Compressed frames: imagecodecs decodes to pydicom's values, and damage is refused all the same."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import Decoder
from pydicom.uid import (
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

import cbmir.runtime.imaging.dicom_pixels as module
from cbmir.errors import ImageError
from cbmir.runtime.imaging.dicom_header import LARGE
from cbmir.runtime.imaging.reader import Radiograph, read_image

imagecodecs = pytest.importorskip("imagecodecs")

SHAPE = (61, 47)
X_RAY: NDArray[np.uint16] = np.add.outer(np.arange(61) * 40, np.arange(47) * 30).astype(np.uint16)
X_RAY += np.random.default_rng(0).integers(0, 60, SHAPE, dtype=np.uint16)  # up to 12 bits


def packed(pixels: NDArray[Any]) -> bytes:
    """RLE by PS3.5 annex G: literal runs of each row alone, the most significant byte's plane first."""
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
    """A file around a frame of `pixels`, or around another."""
    syntax, encode = ENCODERS[kind]
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.SOPClassUID, dataset.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.1", "1.2.3"
    dataset.Modality, dataset.BodyPartExamined, dataset.ViewPosition = "CR", "CHEST", "PA"
    dataset.PhotometricInterpretation, dataset.SamplesPerPixel = "MONOCHROME2", 1
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.BitsAllocated = 8 * pixels.dtype.itemsize
    dataset.BitsStored = min(12, dataset.BitsAllocated)
    dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, int(pixels.dtype.kind == "i")
    dataset.PixelData = encapsulate([encode(pixels) if frame is None else frame])
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def by_pydicom(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Radiograph:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_imagecodecs", lambda: None)
        return read_image(data)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8, np.int16])
@pytest.mark.parametrize("kind", ENCODERS)
def test_values_are_those_of_pydicom(kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype != np.uint16 and kind != "rle":
        dtype = np.uint16
    pixels = (X_RAY // 16 if dtype == np.uint8 else X_RAY).astype(dtype) - (2000 if dtype == np.int16 else 0)
    data = compressed(kind, pixels)
    calls: list[str] = []
    real = Decoder.as_array

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append("pydicom")
        return real(*args, **options)

    monkeypatch.setattr(Decoder, "as_array", recorded)
    radiograph = read_image(data, threads=2)
    assert not calls
    expected = by_pydicom(data, monkeypatch)
    assert bool(calls) == (kind != "rle")  # which is never left to pydicom
    assert np.array_equal(radiograph.stored.view(dtype), pixels)
    assert np.array_equal(radiograph.pixels, expected.pixels)
    assert radiograph.warnings == expected.warnings


@pytest.mark.parametrize("kind", ENCODERS)
def test_damage_is_refused_as_pydicom_refuses_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, and with bytes changed: an image or a typed error, and for RLE the same by either decoder."""
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
        data = compressed(kind, pixels, bytes(broken))
        outcomes: list[NDArray[np.uint8] | None] = []
        for read in (read_image, lambda data: by_pydicom(data, monkeypatch)):
            try:
                outcomes.append(read(data).pixels)
            except ImageError:
                outcomes.append(None)
        refused += outcomes[0] is None
        if kind == "rle":
            ours, theirs = outcomes
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or np.array_equal(ours, theirs)
    assert refused > 5


def test_an_imagecodecs_that_does_not_import_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libbrotli.so.1: cannot open shared object file")

    data = compressed("rle", X_RAY)
    expected = read_image(data).pixels
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=broken))
    assert np.array_equal(read_image(data).pixels, expected)


def test_jpeg_2000_takes_as_many_threads_as_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, int]] = []

    def decode(data: bytes, **options: int) -> NDArray[Any]:
        given.append(options)
        decoded: NDArray[Any] = imagecodecs.jpeg2k_decode(data, **options)
        return decoded

    monkeypatch.setattr(module, "_imagecodecs", lambda: SimpleNamespace(jpeg2k_decode=decode))
    read_image(compressed("j2k", X_RAY), threads=3)
    assert given == [{"numthreads": 3}]


def test_want_of_memory_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "_imagecodecs", lambda: SimpleNamespace(jpegls_decode=decode))
    with pytest.raises(MemoryError):
        read_image(compressed("jpegls", X_RAY))


@pytest.mark.parametrize("fast", [True, False])
def test_pixels_are_decoded_at_the_same_time(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads meet inside of the decoder: behind one lock they could not."""
    data = compressed("jpegls", X_RAY)
    expected = read_image(data).pixels
    met = threading.Barrier(4)
    name = "_by_imagecodecs" if fast else "decode_by_pydicom"
    if not fast:
        monkeypatch.setattr(module, "_imagecodecs", lambda: None)
    decode = getattr(module.Frame, name)

    def meet(*args: Any) -> Any:
        met.wait(timeout=60)
        return decode(*args)

    monkeypatch.setattr(module.Frame, name, meet)
    with ThreadPoolExecutor(4) as pool:
        for radiograph in pool.map(read_image, [data] * 4):
            assert np.array_equal(radiograph.pixels, expected)


def test_a_native_frame_is_not_copied() -> None:
    """What is stored lies in the file's bytes, and pixels are made once."""
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
