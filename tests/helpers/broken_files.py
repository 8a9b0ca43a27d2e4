"""A seeded corpus of mutated and truncated DICOM files and images."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    HTJ2KLossless,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

from dicom_files import STORED, lut_sequence, make_dicom

SMALL = (STORED // 16).astype(np.uint8)
#: Values written over four bytes, to make a length, count or size absurd.
_NUMBERS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xfe\xff\x00\xe0")


@cache
def whole_files() -> dict[str, bytes]:
    """A valid file of each supported kind."""
    import imagecodecs

    table = lut_sequence(0, list(range(0, 4096, 4)), 12)
    rle = b"".join(
        bytes([len(row) - 1]) + row.tobytes() for row in (SMALL[at : at + 1].ravel() for at in range(len(SMALL)))
    )
    rle = np.array([1, 64] + [0] * 14, "<u4").tobytes() + rle
    plain = make_dicom()
    body = plain[plain.index(b"\x08\x00\x16\x00") :]
    meta = make_dicom(syntax=DeflatedExplicitVRLittleEndian, PixelData=b"\0\0")
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    deflated = squeezer.compress(body) + squeezer.flush()
    meta = meta[: 132 + 12 + int.from_bytes(meta[140:144], "little")]
    colour, three = np.stack([SMALL] * 3, axis=2), {"SamplesPerPixel": 3, "PlanarConfiguration": 0}
    palette = {
        f"{name}PaletteColorLookupTable{part}": value
        for name in ("Red", "Green", "Blue")
        for part, value in (("Descriptor", [256, 0, 8]), ("Data", bytes(range(256))))
    }
    rgb = make_dicom(colour, PhotometricInterpretation="RGB", **three)
    packed = dcmread(io.BytesIO(rgb))
    packed.compress(RLELossless, generate_instance_uid=False)
    rgb_rle = io.BytesIO()
    packed.save_as(rgb_rle)
    return {
        "explicit.dcm": make_dicom(VOILUTSequence=table, RescaleSlope=1, RescaleIntercept=0, PixelPaddingValue=0),
        "implicit.dcm": make_dicom(syntax=ImplicitVRLittleEndian, ModalityLUTSequence=table),
        "big.dcm": make_dicom(syntax=ExplicitVRBigEndian),
        "deflated.dcm": meta + deflated,
        "rle.dcm": make_dicom(SMALL, syntax=RLELossless, frame=rle),
        "baseline.dcm": make_dicom(SMALL, syntax=JPEGBaseline8Bit, frame=_picture("JPEG")),
        "lossless.dcm": make_dicom(syntax=JPEGLosslessSV1, frame=imagecodecs.ljpeg_encode(STORED, bitspersample=12)),
        "jpegls.dcm": make_dicom(syntax=JPEGLSLossless, frame=imagecodecs.jpegls_encode(STORED)),
        "j2k.dcm": make_dicom(
            syntax=JPEG2000Lossless, frame=imagecodecs.jpeg2k_encode(STORED, codecformat="J2K", level=0)
        ),
        "htj2k.dcm": make_dicom(syntax=HTJ2KLossless, frame=imagecodecs.htj2k_encode(STORED)),
        "rgb.dcm": rgb,
        "rgb-rle.dcm": rgb_rle.getvalue(),
        "ybr.dcm": make_dicom(
            colour,
            syntax=JPEGBaseline8Bit,
            frame=_picture("JPEG", colour),
            PhotometricInterpretation="YBR_FULL_422",
            **three,
        ),
        "palette.dcm": make_dicom(SMALL, PhotometricInterpretation="PALETTE COLOR", **palette),
        "x.png": _picture("PNG"),
        "x.jpg": _picture("JPEG"),
        "x.tif": _picture("TIFF"),
    }


def broken_files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`count` broken files (name, bytes), cycling through the kinds; reproducible by seed."""
    whole = list(whole_files().items())
    generator = np.random.default_rng(seed)
    for number in range(count):
        name, data = whole[number % len(whole)]
        for _ in range(int(generator.integers(1, 4))):
            data = _WAYS[int(generator.integers(len(_WAYS)))](data, generator)
        yield f"{number:05}-{name}", data


def broken_data_sets(count: int, seed: int = 0) -> Iterator[tuple[str, str, bytes]]:
    """Broken data sets without a file meta header, as sent over the network: (name, transfer syntax, bytes)."""
    whole = [(name, *_data_set(data)) for name, data in whole_files().items() if name.endswith(".dcm")]
    generator = np.random.default_rng(seed)
    for number in range(count):
        name, syntax, data = whole[number % len(whole)]
        for _ in range(int(generator.integers(1, 4))):
            data = _WAYS[int(generator.integers(len(_WAYS)))](data, generator)
        yield f"{number:05}-{name}", syntax, data


def _data_set(file: bytes) -> tuple[str, bytes]:
    syntax = str(dcmread(io.BytesIO(file), stop_before_pixels=True).file_meta.TransferSyntaxUID)
    return syntax, file[132 + 12 + int.from_bytes(file[140:144], "little") :]


def _picture(kind: str, pixels: NDArray[np.uint8] = SMALL) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


Generator = np.random.Generator


def _place(data: bytes, generator: Generator) -> int:
    """A random position; half of them are in the first kilobyte, since headers matter more than pixels."""
    end = max(1, min(len(data), 1024 if generator.integers(2) else len(data)))
    return int(generator.integers(min(132, end - 1) if len(data) > 200 else 0, end))


def _cut(data: bytes, generator: Generator) -> bytes:
    return data[: _place(data, generator)]


def _flip(data: bytes, generator: Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(int(generator.integers(1, 9))):
        if changed:
            changed[_place(data, generator)] = int(generator.integers(256))
    return bytes(changed)


def _absurd(data: bytes, generator: Generator) -> bytes:
    at = _place(data, generator)
    return data[:at] + _NUMBERS[int(generator.integers(len(_NUMBERS)))] + data[at + 4 :]


def _drop(data: bytes, generator: Generator) -> bytes:
    at = _place(data, generator)
    return data[:at] + data[at + int(generator.integers(1, 64)) :]


def _repeat(data: bytes, generator: Generator) -> bytes:
    at, length = _place(data, generator), int(generator.integers(1, 512))
    return data[:at] + data[at : at + length] * int(generator.integers(2, 9)) + data[at:]


def _splice(data: bytes, generator: Generator) -> bytes:
    others = list(whole_files().values())
    other = others[int(generator.integers(len(others)))]
    return data[: _place(data, generator)] + other[_place(other, generator) :]


_WAYS: tuple[Callable[[bytes, Generator], bytes], ...] = (_cut, _flip, _absurd, _drop, _repeat, _splice)
