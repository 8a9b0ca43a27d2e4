"""Bits and transfer syntaxes: values of known arrays, exact or within the error of a lossy codec."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom.uid import (
    HTJ2K,
    JPEG2000,
    HTJ2KLossless,
    HTJ2KLosslessRPCL,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
)

import cbmir.runtime.imaging.dicom_pixels as module
from cbmir.errors import DamagedImageError
from cbmir.runtime.imaging.codestream import FrameHeader, FrameShape, frame_header
from cbmir.runtime.imaging.reader import read_image
from dicom_files import SIDE, make_dicom

imagecodecs = pytest.importorskip("imagecodecs")

#: A smooth 12-bit image, 0 to 4032 from corner to corner.
SMOOTH: NDArray[np.uint16] = np.add.outer(np.arange(SIDE) * 32, np.arange(SIDE) * 32).astype(np.uint16)
SMOOTH_8 = (SMOOTH // 16).astype(np.uint8)  # 0 to 252
FULL = {"WindowCenter": 2048, "WindowWidth": 4096}
FULL_8 = {"WindowCenter": 128, "WindowWidth": 256}


@pytest.mark.parametrize("bits", range(8, 17))
@pytest.mark.parametrize("signed", [False, True])
def test_every_number_of_bits(bits: int, signed: bool) -> None:
    """A ramp and a window over the full range: black, then one level per 1/255 of it."""
    top = 2**bits - 1
    ramp = np.linspace(0, top, SIDE * SIDE).round().reshape(SIDE, SIDE)
    low = -(2 ** (bits - 1)) if signed else 0
    stored = (ramp + low).astype(np.int16 if signed else np.uint16)
    if bits == 8 and not signed:
        stored = stored.astype(np.uint8)
    window = {"WindowCenter": low + 2 ** (bits - 1), "WindowWidth": 2**bits}
    pixels = read_image(make_dicom(stored, BitsStored=bits, HighBit=bits - 1, **window)).pixels
    assert np.array_equal(pixels, np.rint(ramp / top * 255))


@pytest.mark.parametrize("bits", [10, 12, 15])
def test_unused_bits_are_ignored(bits: int) -> None:
    """Old devices put overlays there; the value is in the low bits or, with HighBit, in the high ones."""
    values = (SMOOTH % 2**bits).astype(np.uint16)
    window = {"WindowCenter": 2 ** (bits - 1), "WindowWidth": 2**bits, "BitsStored": bits}
    expected = np.rint(values / (2**bits - 1) * 255)
    rubbish = np.uint16(1 << 15)
    assert np.array_equal(read_image(make_dicom(values | rubbish, HighBit=bits - 1, **window)).pixels, expected)
    raised = (values << (16 - bits)) | np.uint16(1)
    assert np.array_equal(read_image(make_dicom(raised, HighBit=15, **window)).pixels, expected)


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=100)
    return stream.getvalue()


Encode = Callable[[NDArray[Any]], bytes]
#: Transfer syntax -> a 12-bit encoder, and the maximum error of a stored value.
TWELVE_BITS: dict[str, tuple[str, Encode, int]] = {
    "extended": (JPEGExtended12Bit, lambda p: imagecodecs.jpeg8_encode(p, level=100, bitspersample=12), 4),
    "lossless": (JPEGLossless, lambda p: imagecodecs.ljpeg_encode(p, bitspersample=12), 0),
    "lossless-sv1": (JPEGLosslessSV1, lambda p: imagecodecs.ljpeg_encode(p, bitspersample=12), 0),
    "jpegls": (JPEGLSLossless, imagecodecs.jpegls_encode, 0),
    "jpegls-near": (JPEGLSNearLossless, lambda p: imagecodecs.jpegls_encode(p, level=3), 3),
    "j2k": (JPEG2000Lossless, lambda p: imagecodecs.jpeg2k_encode(p, codecformat="J2K", level=0), 0),
    "j2k-lossy": (JPEG2000, lambda p: imagecodecs.jpeg2k_encode(p, codecformat="J2K", level=90), 16),
    "htj2k": (HTJ2KLossless, lambda p: imagecodecs.htj2k_encode(p, reversible=True), 0),
    "htj2k-rpcl": (HTJ2KLosslessRPCL, lambda p: imagecodecs.htj2k_encode(p, reversible=True), 0),
    "htj2k-lossy": (HTJ2K, lambda p: imagecodecs.htj2k_encode(p, reversible=False), 48),
}


@pytest.mark.parametrize("kind", TWELVE_BITS)
def test_compressed_12_bits(kind: str) -> None:
    if kind.startswith("htj2k") and not imagecodecs.HTJ2K.available:
        pytest.skip("imagecodecs was built without HTJ2K")
    syntax, encode, error = TWELVE_BITS[kind]
    radiograph = read_image(make_dicom(SMOOTH, syntax=syntax, frame=encode(SMOOTH), **FULL), threads=2)
    assert np.abs(radiograph.stored.astype(int) - SMOOTH).max() <= error
    expected = np.rint(SMOOTH / 4095 * 255)
    assert np.abs(radiograph.pixels - expected).max() <= -(-error // 16)
    assert radiograph.warnings == ()


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_jpeg_baseline(photometric: str) -> None:
    data = make_dicom(
        SMOOTH_8, syntax=JPEGBaseline8Bit, frame=jpeg(SMOOTH_8), PhotometricInterpretation=photometric, **FULL_8
    )
    expected = 255 - SMOOTH_8 if photometric == "MONOCHROME1" else SMOOTH_8
    assert np.abs(read_image(data).pixels.astype(int) - expected).max() <= 1


FRAMES: dict[str, tuple[str, bytes]] = {
    kind: (syntax, encode(SMOOTH))
    for kind, (syntax, encode, _) in TWELVE_BITS.items()
    if not kind.startswith("htj2k") or imagecodecs.HTJ2K.available
} | {"baseline": (JPEGBaseline8Bit, jpeg(SMOOTH_8))}


@pytest.mark.parametrize("kind", FRAMES)
def test_size_in_a_codestream(kind: str) -> None:
    _, frame = FRAMES[kind]
    for data in (frame, memoryview(frame)):
        header = frame_header(data)
        assert header is not None
        assert header.shape == (SIDE, SIDE, 1)
        assert header.precision == (8 if kind == "baseline" else 12 if kind[0] in "el" else 16)
    for end in range(0, 60):
        frame_header(frame[:end])  # does not raise


def test_data_without_a_size() -> None:
    for data in (
        b"",
        b"\xff",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xff\xff\xff",
        b"\x00" * 50,
        b"\xff\x4f\xff\x51",
    ):
        assert frame_header(data) is None
    padded = b"\xff\xd8\xff\xe0\x00\x02\xff\x01\xff\xff\xff\xc3\x00\x0b\x0c\x00\x05\x00\x06\x01"
    assert frame_header(padded) == FrameHeader(FrameShape(5, 6, 1), 12, 0xC3)


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_that_claims_another_size_is_not_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes claim 60,000 x 60,000 pixels, for which decoders would allocate memory."""
    syntax, frame = FRAMES[kind]
    big = bytearray(frame)
    if b"\xff\x4f\xff\x51" in frame[:100]:
        at = frame.index(b"\xff\x4f\xff\x51") + 8
        big[at : at + 8] = (60_000).to_bytes(4, "big") * 2
    else:
        at = next(i for m in (0xC0, 0xC1, 0xC3, 0xF7) if (i := frame.find(bytes([0xFF, m]))) > 0) + 5
        big[at : at + 4] = (60_000).to_bytes(2, "big") * 2
    monkeypatch.setattr(module.Frame, "decode", None)
    pixels = SMOOTH_8 if kind == "baseline" else SMOOTH
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\).*64x64.*found 60000x60000 pixels"):
        read_image(make_dicom(pixels, syntax=syntax, frame=bytes(big)))


def test_a_colour_frame_is_not_decoded() -> None:
    stream = io.BytesIO()
    Image.fromarray(SMOOTH_8).convert("RGB").save(stream, "JPEG")
    with pytest.raises(DamagedImageError, match=r"3 component\(s\)"):
        read_image(make_dicom(SMOOTH_8, syntax=JPEGBaseline8Bit, frame=stream.getvalue()))


# -- character sets


@pytest.mark.parametrize(
    ("charset", "name"),
    [
        ("ISO_IR 100", "Müller^Zoë"),
        ("ISO_IR 192", "山田^太郎"),
        ("ISO_IR 144", "Пациент^Ж"),
        ("ISO_IR 13", "ﾔﾏﾀﾞ^ﾀﾛｳ"),
        ("GB18030", "王^小东"),
        (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎"),
        (["", "ISO 2022 IR 149"], "Hong^Gildong=洪^吉洞"),
    ],
)
def test_character_sets(charset: str | list[str], name: str) -> None:
    data = make_dicom(SpecificCharacterSet=charset, PatientName=name, SeriesDescription="", **FULL)
    radiograph = read_image(data)
    assert radiograph.warnings == ()
    assert np.array_equal(radiograph.pixels, read_image(make_dicom(**FULL)).pixels)


def test_a_patient_id_in_another_script() -> None:
    for charset, patient in (("ISO_IR 100", "Zoë-7"), ("ISO_IR 192", "患者-7"), ("ISO_IR 144", "Пациент-7")):
        assert read_image(make_dicom(SpecificCharacterSet=charset, PatientID=patient)).patient_id == patient


@pytest.mark.parametrize("charset", ["ISO_IR 999", "KLINGON", "ISO 2022 IR 87"])
def test_an_unknown_or_wrong_character_set_is_harmless(charset: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = make_dicom(SpecificCharacterSet="ISO_IR 100", PatientName="SECRÉT^NAME")
    data = plain.replace(b"ISO_IR 100", charset[:10].ljust(10).encode())
    radiograph = read_image(data)
    assert np.array_equal(radiograph.pixels, read_image(plain).pixels)
    assert not any("SECR" in text for text in (*radiograph.warnings, *caplog.messages))


# -- elements of any kind before the pixels


def test_private_and_unknown_elements() -> None:
    from pydicom import dcmread

    dataset = dcmread(io.BytesIO(make_dicom(syntax=ImplicitVRLittleEndian)))
    block = dataset.private_block(0x0029, "SECRET VENDOR", create=True)
    block.add_new(0x01, "UN", b"\x00" * 5001)
    block.add_new(0x02, "SQ", [])
    dataset.add_new(0x00191001, "UN", b"odd")
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    radiograph = read_image(stream.getvalue())
    assert np.array_equal(radiograph.pixels, read_image(make_dicom()).pixels)
