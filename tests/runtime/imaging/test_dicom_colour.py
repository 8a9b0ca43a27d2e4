"""DICOM files in colour: read if they are actually grey, otherwise refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from pydicom.pixels import convert_color_space
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless

from cbmir.errors import DamagedImageError, DicomImageError, ImageError, ImageSizeError
from cbmir.runtime.imaging.reader import ImageLimits, read_image
from dicom_files import SIDE, make_dicom

GREY = ((np.add.outer(np.arange(SIDE), np.arange(SIDE)) * 2) % 256).astype(np.uint8)
RGB = np.repeat(GREY[..., None], 3, axis=2)
COLOURFUL = np.stack([GREY, 255 - GREY, GREY // 2], axis=2)


def colour_dicom(pixels: NDArray[np.uint8] = RGB, photometric: str = "RGB", **tags: Any) -> bytes:
    """A colour file with a window that would show nothing, since windows do not apply to colour."""
    tags = {"SamplesPerPixel": 3, "PlanarConfiguration": 0, "WindowCenter": 9000, "WindowWidth": 2} | tags
    return make_dicom(pixels, PhotometricInterpretation=photometric, **tags)


def jpeg(pixels: NDArray[np.uint8], kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def rle(pixels: NDArray[np.uint8], **tags: Any) -> bytes:
    dataset = dcmread(io.BytesIO(colour_dicom(pixels, **tags)))
    dataset.compress(RLELossless, generate_instance_uid=False)
    stream = io.BytesIO()
    dataset.save_as(stream)
    return stream.getvalue()


def check(data: bytes, photometric: str, tolerance: int = 0) -> None:
    radiograph = read_image(data)
    assert radiograph.pixels.shape == GREY.shape
    assert np.abs(radiograph.pixels.astype(int) - GREY).max() <= tolerance
    (warning,) = radiograph.warnings
    assert warning.kind == "stored in colour"
    assert f"PhotometricInterpretation (0028,0004) is {photometric}, but the image is grey" in warning


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian])
@pytest.mark.parametrize("planar", [0, 1])
def test_grey_rgb(syntax: str, planar: int) -> None:
    pixels = RGB.transpose(2, 0, 1) if planar else RGB
    check(
        colour_dicom(np.ascontiguousarray(pixels), syntax=syntax, PlanarConfiguration=planar, Rows=SIDE, Columns=SIDE),
        "RGB",
    )


def test_grey_ybr() -> None:
    ybr = convert_color_space(RGB, "RGB", "YBR_FULL")
    check(colour_dicom(ybr, "YBR_FULL"), "YBR_FULL", 1)
    halved = np.empty((SIDE, SIDE * 2), np.uint8)  # Y Y Cb Cr for every two pixels (PS3.3 C.7.6.3.1.2)
    halved[:, 0::4], halved[:, 1::4], halved[:, 2::4], halved[:, 3::4] = GREY[:, ::2], GREY[:, 1::2], 128, 128
    check(colour_dicom(halved, "YBR_FULL_422", Columns=SIDE), "YBR_FULL_422", 1)


def test_grey_compressed() -> None:
    frame = jpeg(RGB, "JPEG", quality=100, subsampling=0)
    check(colour_dicom(frame=frame, syntax=JPEGBaseline8Bit, photometric="YBR_FULL"), "YBR_FULL", 3)
    frame = jpeg(RGB, "JPEG2000", irreversible=False, no_jp2=True)
    check(colour_dicom(frame=frame, syntax=JPEG2000Lossless), "RGB")
    check(rle(RGB), "RGB")


def test_a_few_coloured_marks_count_as_grey() -> None:
    marked = RGB.copy()
    marked[:8, :8] = (255, 0, 0)  # 1.6%
    assert read_image(colour_dicom(marked)).warnings[0].kind == "stored in colour"


@pytest.mark.parametrize("data", [colour_dicom(COLOURFUL), rle(COLOURFUL)])
def test_colour_images_are_refused(data: bytes) -> None:
    with pytest.raises(
        DicomImageError, match=r"PhotometricInterpretation \(0028,0004\): expected a grey image, found 'RGB'"
    ):
        read_image(data)


@pytest.mark.parametrize("intensity", ["minmax", "percentile"])
def test_intensity_policies(intensity: str) -> None:
    dim = (RGB // 4 + 50).astype(np.uint8)
    pixels = read_image(colour_dicom(dim), intensity=intensity).pixels
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert np.array_equal(read_image(colour_dicom(dim)).pixels, dim[..., 0])


def test_damaged_images() -> None:
    cut = colour_dicom(PixelData=RGB.tobytes()[:-2])
    frame = jpeg(GREY, "JPEG")
    for data, error in (
        (cut, DamagedImageError),
        (
            colour_dicom(frame=frame, syntax=JPEGBaseline8Bit, photometric="YBR_FULL"),
            DamagedImageError,
        ),  # one component
        (colour_dicom(np.zeros((SIDE, 2 * SIDE - 2), np.uint8), "YBR_FULL_422", Columns=SIDE - 1), DamagedImageError),
        (colour_dicom(SamplesPerPixel=1), DicomImageError),
        (colour_dicom(SamplesPerPixel=4), DicomImageError),
        (colour_dicom(BitsAllocated=16), DicomImageError),
        (colour_dicom(Rows=30000, Columns=30000), ImageSizeError),
    ):
        with pytest.raises(error):
            read_image(data)
    with pytest.raises(ImageSizeError):
        read_image(colour_dicom(), limits=ImageLimits(max_pixels=100))


def palette_dicom(
    red: list[int], green: list[int], blue: list[int], bits: int = 16, first: int = 0, **tags: Any
) -> bytes:
    palette: dict[str, Any] = {}
    for name, entries in {"Red": red, "Green": green, "Blue": blue}.items():
        palette[f"{name}PaletteColorLookupTableDescriptor"] = [len(entries), first, bits]
        palette[f"{name}PaletteColorLookupTableData"] = np.array(entries, "<u2" if bits == 16 else "u1").tobytes()
    return make_dicom(GREY, PhotometricInterpretation="PALETTE COLOR", **palette | tags)


RAMP = [257 * i for i in range(256)]


def test_a_grey_palette() -> None:
    check(palette_dicom(RAMP, RAMP, RAMP), "PALETTE COLOR")
    check(palette_dicom(*[list(range(256))] * 3, bits=8), "PALETTE COLOR")
    upside_down = read_image(palette_dicom(RAMP[::-1], RAMP[::-1], RAMP[::-1])).pixels
    assert np.array_equal(upside_down, 255 - GREY)
    minmax = read_image(palette_dicom(RAMP, RAMP, RAMP), intensity="minmax").pixels
    assert (minmax.min(), minmax.max()) == (0, 255)


def test_a_palette_of_bytes_declared_as_16_bits() -> None:
    radiograph = read_image(palette_dicom(*[list(range(256))] * 3))
    assert np.array_equal(radiograph.pixels, GREY)
    assert [warning.kind for warning in radiograph.warnings] == ["stored in colour", "LUT rescaled"]


def test_luma_of_a_tinted_palette() -> None:
    """A bluish X-ray from an old film scanner, with channels 20 levels apart."""
    blue = [min(65535, value + 20 * 257) for value in RAMP]
    pixels = read_image(palette_dicom(RAMP, RAMP, blue)).pixels
    expected = 0.886 * GREY + 0.114 * np.minimum(GREY.astype(float) + 20, 255)
    assert np.abs(pixels - expected).max() <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (palette_dicom(RAMP, RAMP[::-1], RAMP), "expected a grey image, found 'PALETTE COLOR'"),
        (palette_dicom(RAMP, RAMP, RAMP, GreenPaletteColorLookupTableData=None), "Green"),
        (palette_dicom(RAMP, RAMP, RAMP, RedPaletteColorLookupTableDescriptor=None), "Red"),
        (palette_dicom(RAMP, RAMP, RAMP[:100], BluePaletteColorLookupTableDescriptor=[256, 0, 16]), "Blue"),
    ],
)
def test_palettes_that_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(ImageError, match=match):
        read_image(data)
