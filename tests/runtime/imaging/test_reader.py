"""Reading PNG, JPEG, TIFF and arrays: right grey values, and a typed error for everything else."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import BlankImageError, DamagedImageError, ImageError, ImageSizeError, NotAnImageError
from cbmir.runtime.imaging.reader import ImageLimits, read_image

SIDE = 48
RAMP = np.tile(np.arange(SIDE, dtype=np.uint8) * 5, (SIDE, 1))  # columns 0, 5, ..., 235


def encoded(image: Image.Image | NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_8_bit_grey_is_unchanged(kind: str, tmp_path: Path) -> None:
    data = encoded(RAMP, kind)
    path = tmp_path / "ramp.bin"
    path.write_bytes(data)
    for source in (data, path, str(path)):
        radiograph = read_image(source)
        assert np.array_equal(radiograph.pixels, RAMP)
        assert radiograph.pixels.dtype == np.uint8
        assert radiograph.sha256 == hashlib.sha256(data).hexdigest()
        assert radiograph.warnings == ()
    assert radiograph.name == str(path)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_is_scaled_and_never_clipped(kind: str) -> None:
    values = np.linspace(0, 65535, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)
    values[0, :5] = [0, 128, 129, 32768, 65535]  # / 257 = 0, 0.498, 0.502, 127.502, 255
    radiograph = read_image(encoded(values, kind))
    assert radiograph.pixels[0, :5].tolist() == [0, 0, 1, 128, 255]
    assert np.array_equal(radiograph.pixels, np.rint(values / 257).astype(np.uint8))
    assert radiograph.warnings == ()


def test_big_endian_and_white_is_zero_tiff() -> None:
    values = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE) * 28
    expected = np.rint(values / 257).astype(np.uint8)
    little = encoded(values, "TIFF")
    tag = b"\x06\x01\x03\x00\x01\x00\x00\x00"  # PhotometricInterpretation, SHORT, one value
    assert little.count(tag + b"\x01") == 1
    assert np.array_equal(read_image(little.replace(tag + b"\x01", tag + b"\x00")).pixels, 255 - expected)
    big = Image.frombytes("I;16B", (SIDE, SIDE), values.astype(">u2").tobytes())
    assert np.array_equal(read_image(encoded(big, "TIFF")).pixels, expected)


def test_little_contrast_warns_with_the_range_of_greys() -> None:
    twelve_bits = np.linspace(0, 4095, SIDE * SIDE).astype(np.uint16).reshape(SIDE, SIDE)  # / 257 = 0..16
    nearly_blank = np.full((SIDE, SIDE), 100, np.uint8)
    nearly_blank[0, :20] = 255  # under 1%
    for values, greys in ((twelve_bits, "0..16"), (nearly_blank, "100..100")):
        for source in (values, encoded(values)):
            (warning,) = read_image(source).warnings
            assert "little contrast" in warning
            assert f"{greys} of 0..255" in warning


@pytest.mark.parametrize(("spread", "warnings"), [(31, 1), (32, 0)])
def test_little_contrast_is_less_than_32_greys(spread: int, warnings: int) -> None:
    halves = np.where(RAMP < 120, 50, 50 + spread).astype(np.uint8)
    assert len(read_image(halves).warnings) == warnings


@pytest.mark.parametrize("mode", ["RGB", "P", "CMYK"])
def test_grey_stored_as_colour_reads_as_grey(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    image = Image.fromarray(RAMP).convert("RGB")
    radiograph = read_image(encoded(image.quantize(64) if mode == "P" else image.convert(mode), kind))
    assert np.abs(radiograph.pixels.astype(int) - RAMP).max() <= (0 if mode != "P" else 5)
    assert radiograph.warnings == ()


def test_luma_and_warning_of_a_colour_image() -> None:
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    image[:, :16, 0], image[:, 16:32, 1], image[:, 32:, 2] = 255, 255, 255
    for source in (image, encoded(image)):
        radiograph = read_image(source)
        assert radiograph.pixels[0, [0, 20, 40]].tolist() == [76, 150, 29]  # .299, .587, .114 of 255
        assert radiograph.warnings == ("colour image: looks like a photo or screenshot, not an X-ray",)


def test_alpha_lies_on_black() -> None:
    image = Image.fromarray(RAMP).convert("LA")
    alpha = np.full((SIDE, SIDE), 255, np.uint8)
    alpha[:10] = 0
    image.putalpha(Image.fromarray(alpha))
    for mode in ("LA", "RGBA"):
        pixels = read_image(encoded(image.convert(mode))).pixels
        assert not pixels[:10].any()
        assert np.array_equal(pixels[10:], RAMP[10:])
    image.putalpha(0)
    with pytest.raises(BlankImageError, match="transparent"):
        read_image(encoded(image))


def test_transparent_key_colour_is_black() -> None:
    pixels = read_image(encoded(Image.fromarray(RAMP), transparency=235)).pixels
    assert not pixels[:, -1].any()
    assert np.array_equal(pixels[:, :-1], RAMP[:, :-1])


def test_half_transparent_grey_is_half_as_bright() -> None:
    image = Image.fromarray(RAMP).convert("RGBA")
    image.putalpha(128)
    pixels = read_image(encoded(image)).pixels
    assert np.abs(pixels - RAMP * (128 / 255)).max() <= 1


def test_colour_of_transparent_pixels_is_ignored() -> None:
    image = np.dstack([RAMP, RAMP, RAMP, np.full_like(RAMP, 255)])
    image[:10] = (255, 0, 0, 0)
    assert read_image(encoded(image)).warnings == ()


def test_one_bit_image() -> None:
    pixels = read_image(encoded(Image.fromarray(RAMP > 100))).pixels
    assert np.array_equal(pixels, np.where(RAMP > 100, 255, 0))


def test_jpeg_in_grey_and_cmyk() -> None:
    grey = Image.fromarray(RAMP)
    assert np.abs(read_image(encoded(grey, "JPEG", quality=95)).pixels.astype(int) - RAMP).max() <= 6
    cmyk = read_image(encoded(grey.convert("RGB").convert("CMYK"), "JPEG", quality=95))
    assert np.abs(cmyk.pixels.astype(int) - RAMP).max() <= 8


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda a: a),
        (2, np.fliplr),
        (3, lambda a: np.rot90(a, 2)),
        (4, np.flipud),
        (5, np.transpose),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: np.rot90(a, 2).T),
        (8, np.rot90),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(kind: str, orientation: int, turned: Callable[[Any], Any]) -> None:
    image = np.zeros((40, 64), np.uint8)
    image[:8, :24] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = read_image(encoded(image, kind, exif=exif)).pixels
    expected = turned(image)
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() < 60


@pytest.mark.parametrize("place", ["eXIf after the pixels", "text of ImageMagick", "text after the pixels"])
def test_exif_orientation_anywhere_in_a_png(place: str) -> None:
    image = np.zeros((40, 64), np.uint8)
    image[:8, :24] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(image, "PNG")
    text = f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n".encode()
    kind, body = (b"eXIf", exif.tobytes()[6:]) if "eXIf" in place else (b"tEXt", b"Raw profile type exif\0" + text)
    chunk = len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
    at = data.index(b"IEND" if "after" in place else b"IDAT") - 4
    assert np.array_equal(read_image(data[:at] + chunk + data[at:]).pixels, np.rot90(image, -1))


def test_a_colour_space_that_cannot_become_grey_is_refused() -> None:
    with pytest.raises(DamagedImageError, match="of an unknown kind"):
        read_image(encoded(Image.new("LAB", (64, 64)), "TIFF"))


def test_arrays() -> None:
    radiograph = read_image(RAMP)
    assert np.array_equal(radiograph.pixels, RAMP)
    assert not np.shares_memory(radiograph.pixels, RAMP)
    assert radiograph.sha256 == hashlib.sha256(RAMP.tobytes()).hexdigest()
    strided = np.repeat(RAMP, 2, axis=1)[:, ::2]
    assert read_image(strided).sha256 == radiograph.sha256
    values = RAMP.astype(np.uint16) * 257
    assert np.array_equal(read_image(values).pixels, RAMP)


@pytest.mark.parametrize(
    "array",
    [
        RAMP.astype(np.float32),
        RAMP.astype(np.int16),
        RAMP[None],
        RAMP[..., None],
        np.zeros((SIDE, SIDE, 4), np.uint8),
        RAMP > 3,
        RAMP[0],
        np.zeros((SIDE, SIDE, 3), np.uint16),
        np.array("text"),
    ],
)
def test_invalid_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(NotAnImageError, match=r"expected uint8 \[H,W\]"):
        read_image(array)


def test_bytes_of_any_kind() -> None:
    data = encoded(RAMP)
    for source in (bytearray(data), memoryview(data)):
        radiograph = read_image(source)
        assert np.array_equal(radiograph.pixels, RAMP)
        assert radiograph.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("source", [None, 3, [RAMP], io.BytesIO()])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(NotAnImageError, match=f"expected a path.*found {type(source).__name__}"):
        read_image(source)


@pytest.mark.parametrize("shape", [(31, 40), (1, 1), (0, 0), (40, 161)])
def test_sizes_beyond_the_limits(shape: tuple[int, int]) -> None:
    with pytest.raises(ImageSizeError, match=f"{shape[1]}x{shape[0]}"):
        read_image(np.zeros(shape, np.uint8))


def test_aspect_limit_is_inclusive() -> None:
    image = np.zeros((40, 160), np.uint8)
    image[0, 0] = 1
    assert read_image(image).pixels.shape == (40, 160)


@pytest.mark.parametrize("side", [300, 20_000])
def test_the_pixel_limit_is_checked_before_decoding(side: int) -> None:
    """Only the header claims this size: decoding would find no pixels, and report damage."""
    data = bytearray(encoded(RAMP))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(ImageSizeError, match=f"{side}x{side}"):
        read_image(bytes(data), limits=ImageLimits(max_pixels=299 * 300))


def test_limits_do_not_depend_on_the_global_limit_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for kind in ("PNG", "JPEG"):
        assert read_image(encoded(RAMP, kind)).pixels.shape == (SIDE, SIDE)
    with pytest.raises(ImageSizeError, match="tiles"):  # Pillow checks a TIFF's tiles again
        read_image(encoded(RAMP, "TIFF"))


def test_blank_images() -> None:
    for image in (np.full((SIDE, SIDE), 77, np.uint8), np.full((SIDE, SIDE), 40, np.uint16)):
        for source in (image, encoded(image)):
            with pytest.raises(BlankImageError, match="everywhere"):
                read_image(source)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_ranges_are_not_guessed(mode: str) -> None:
    with pytest.raises(NotAnImageError, match="not guessed"):
        read_image(encoded(Image.fromarray(RAMP).convert(mode), "TIFF"))


def test_pages_and_animations_are_refused() -> None:
    page = Image.fromarray(RAMP)
    for kind in ("TIFF", "PNG"):
        data = encoded(page, kind, save_all=True, append_images=[Image.fromarray(255 - RAMP)])
        with pytest.raises(NotAnImageError, match="found several pages or frames"):
            read_image(data)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WebP", "PDF"])
def test_other_formats_are_refused_by_name(kind: str) -> None:
    with pytest.raises(NotAnImageError, match=f"found {kind}.*convert it to PNG"):
        read_image(encoded(Image.fromarray(RAMP), kind))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "empty file"),
        ("Name: Müller\n".encode() * 3, "found text"),
        ("é".encode() * 511, "found text"),
        (bytes(range(200, 256)), "no known image format"),
        (b"\x00", "no known image format"),
    ],
)
def test_other_content(data: bytes, found: str) -> None:
    with pytest.raises(NotAnImageError, match=found) as caught:
        read_image(data)
    assert "Müller" not in str(caught.value)


def test_paths_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(NotAnImageError, match="found a folder"):
        read_image(tmp_path)
    with pytest.raises(NotAnImageError, match="no such file"):
        read_image(tmp_path / "missing.png")
    with pytest.raises(NotAnImageError, match="cannot be read"):
        read_image("nul\0byte.png")
    with pytest.raises(NotAnImageError, match="cannot be read"):
        read_image(tmp_path / ("long" * 200))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAnImageError, match="pipe"):
        read_image(tmp_path / "pipe")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(RAMP))

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(NotAnImageError, match="Permission denied"):
        read_image(path)


def test_the_file_size_limit_is_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(encoded(RAMP))
    limits = ImageLimits(max_bytes=path.stat().st_size - 1)
    with pytest.raises(NotAnImageError, match="bytes"):
        read_image(path.read_bytes(), limits=limits)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(NotAnImageError, match="bytes"):
        read_image(path, limits=limits)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_truncated_files_are_damaged(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200), dtype=np.uint8)
    data = encoded(noise, kind)
    with pytest.raises(DamagedImageError, match=kind):
        read_image(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "TIFF-LZW", "PNG-exif", "JPEG-exif", "PNG-16", "PNG-palette"])
def test_damage_only_raises_image_errors(kind: str) -> None:
    """Truncated files and flipped bytes give an image or an ImageError, and no warning (an error in these tests)."""
    image = Image.fromarray(RAMP)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "description"
    data = {
        "PNG": lambda: encoded(image),
        "JPEG": lambda: encoded(image, "JPEG"),
        "TIFF": lambda: encoded(image, "TIFF"),
        "TIFF-LZW": lambda: encoded(image, "TIFF", compression="tiff_lzw"),
        "PNG-exif": lambda: encoded(image, exif=exif, dpi=(72, 72)),
        "JPEG-exif": lambda: encoded(image.convert("RGB"), "JPEG", exif=exif),
        "PNG-16": lambda: encoded(RAMP.astype(np.uint16) * 257),
        "PNG-palette": lambda: encoded(image.convert("RGB").quantize(16), transparency=3),
    }[kind]()
    generator = np.random.default_rng(0)
    refused = 0
    for trial in range(400):
        broken = bytearray(data)
        if trial % 4 == 0:
            broken = broken[: int(generator.integers(len(data)))]
        else:
            limit = len(data) if trial % 2 else min(len(data), 200)  # headers matter more than pixels
            for position in generator.integers(4, limit, int(generator.integers(1, 6))):
                broken[position] = int(generator.integers(256))
        try:
            assert read_image(bytes(broken)).pixels.dtype == np.uint8
        except ImageError:
            refused += 1
    assert refused > 50
