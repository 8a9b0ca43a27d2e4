"""Values beyond BitsStored: never wrapped in a compressed frame, unlike in a native one, where that is correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom.uid import (
    HTJ2KLossless,
    JPEG2000Lossless,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
)

from cbmir.errors import DicomImageError
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.reader import read_image
from dicom_files import SIDE, make_dicom

imagecodecs = pytest.importorskip("imagecodecs")

#: 13-bit values from 0 to 6048.
LARGE: NDArray[np.uint16] = np.add.outer(np.arange(SIDE) * 48, np.arange(SIDE) * 48).astype(np.uint16)
FULL = {"WindowCenter": 2048, "WindowWidth": 4096}
LOSSLESS: dict[str, tuple[str, Callable[[NDArray[Any]], bytes]]] = {
    "jpeg": (JPEGLosslessSV1, lambda p: imagecodecs.ljpeg_encode(p, bitspersample=13)),
    "jpegls": (JPEGLSLossless, imagecodecs.jpegls_encode),
    "j2k": (JPEG2000Lossless, lambda p: imagecodecs.jpeg2k_encode(p, codecformat="J2K", level=0)),
    "htj2k": (HTJ2KLossless, lambda p: imagecodecs.htj2k_encode(p, reversible=True)),
}


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("kind", LOSSLESS)
def test_values_of_more_bits_contradict_bits_stored(kind: str, sign: int) -> None:
    if kind == "htj2k" and not imagecodecs.HTJ2K.available:
        pytest.skip("imagecodecs was built without HTJ2K")
    syntax, encode = LOSSLESS[kind]
    data = make_dicom(LARGE, syntax=syntax, frame=encode(LARGE), PixelRepresentation=sign, **FULL)
    with pytest.raises(DicomImageError, match=r"BitsStored \(0028,0101\): expected as many bits as .*, found '12'"):
        read_image(data)


@pytest.mark.parametrize("kind", ["jpeg", "jpegls", "j2k"])
def test_values_within_bits_stored_are_read_at_any_codestream_precision(kind: str) -> None:
    syntax, encode = LOSSLESS[kind]
    pixels = LARGE * 4095 // LARGE.max()
    assert np.array_equal(read_image(make_dicom(pixels, syntax=syntax, frame=encode(pixels), **FULL)).stored, pixels)


@pytest.mark.parametrize(("bits", "fits"), [(13, True), (12, False)])
def test_signed_values(bits: int, fits: bool) -> None:
    """The values range from -3024 to 3024."""
    pixels = LARGE.astype(np.int16) - 3024
    syntax, encode = LOSSLESS["j2k"]
    tags = {"BitsStored": bits, "HighBit": bits - 1, "WindowCenter": 0, "WindowWidth": 8192}
    data = make_dicom(pixels, syntax=syntax, frame=encode(pixels), **tags)
    if fits:
        assert np.array_equal(read_image(data).stored.view(np.int16), pixels)
    else:
        with pytest.raises(DicomImageError, match="BitsStored"):
            read_image(data)


def test_overshoot_of_a_lossy_codec_is_white_not_black() -> None:
    """Some devices store 10 bits in a 12-bit codestream: values above 1023 are clipped."""
    y, x = np.mgrid[:SIDE, :SIDE]
    pixels = (1023 * ((x // 6 + y // 6) % 2)).astype(np.uint16)
    coarse = imagecodecs.jpeg8_encode(pixels, level=70, bitspersample=12)
    decoded = imagecodecs.jpeg8_decode(coarse)
    assert 1023 < decoded.max() < 1023 + 128
    tags = {"BitsStored": 10, "HighBit": 9, "WindowCenter": 512, "WindowWidth": 1024}
    radiograph = read_image(make_dicom(pixels, syntax=JPEGExtended12Bit, frame=coarse, **tags))
    assert radiograph.stored.max() == 1023
    assert np.abs(radiograph.stored.astype(int) - np.minimum(decoded, 1023)).max() <= 2  # decoders round differently
    assert radiograph.pixels[pixels == 1023].min() > 200


def test_a_lossy_codec_overshoots_by_little() -> None:
    frame = imagecodecs.jpegls_encode(LARGE, level=3)
    with pytest.raises(DicomImageError, match="BitsStored"):
        read_image(make_dicom(LARGE, syntax=JPEGLSNearLossless, frame=frame, **FULL))


def test_a_reduced_image_is_refused_as_the_full_one_is() -> None:
    pixels = np.tile(LARGE, (4, 4))
    syntax, encode = LOSSLESS["j2k"]
    with pytest.raises(DicomImageError, match="BitsStored"):
        read_image(make_dicom(pixels, syntax=syntax, frame=encode(pixels), **FULL), reduced_for=PreprocessSpec(39, 32))
