"""JPEG 2000 at a lower resolution: bit-exact low-pass band of the standard, and nearly the same model input."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGLSLossless

from cbmir.card import ModelCard
from cbmir.errors import BlankImageError, ImageError
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.finder import Finder
from cbmir.runtime.gallery import Gallery
from cbmir.runtime.gallery.build import build_gallery
from cbmir.runtime.imaging.dicom_pixels import decode_halved, halvings
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.radiograph import Reduction
from cbmir.runtime.imaging.reader import read_image
from dicom_files import make_dicom

imagecodecs = pytest.importorskip("imagecodecs")

SPEC = PreprocessSpec(39, 32)
GOLDEN_VALUES = [119, 144, 147, 142, 155]
GOLDEN_HASH = "86117833d9d28ceb55cc0c918878eebdbab4f1e39dcc3518a1fc51661ab30c26"
Pixels = NDArray[np.uint16]


def x_ray(height: int, width: int) -> Pixels:
    """A 12-bit image: a smooth gradient, an edge, and detector noise."""
    y, x = np.mgrid[:height, :width]
    smooth = 1800 + 900 * np.sin(x / 23) * np.cos(y / 31) + 600 * (x + y > 300)
    noise = np.random.default_rng(0).integers(-60, 61, (height, width))
    return np.clip(smooth.astype(np.int64) + noise, 0, 4095).astype(np.uint16)


def encoded(pixels: NDArray[Any], **options: Any) -> bytes:
    frame: bytes = imagecodecs.jpeg2k_encode(pixels, codecformat="J2K", level=0, **options)
    return frame


def dicom(pixels: NDArray[Any], frame: bytes | None = None, syntax: str = JPEG2000Lossless, **tags: Any) -> bytes:
    bits = min(12, 8 * pixels.dtype.itemsize)
    window = {"WindowCenter": 2**bits // 2, "WindowWidth": 2**bits}
    return make_dicom(pixels, syntax=syntax, frame=encoded(pixels) if frame is None else frame, **window | tags)


def low_pass(signal: NDArray[np.int64]) -> NDArray[np.int64]:
    """The low-pass band along the first axis, by the lifting steps of ISO/IEC 15444-1, F.4.8.1; mirrored borders."""
    even, odd = signal[::2], signal[1::2]
    following = np.concatenate([even[1:], even[-1:]])[: len(odd)]
    high = odd - (even[: len(odd)] + following) // 2
    before = np.concatenate([high[:1], high])[: len(even)]
    after = np.concatenate([high, high[-1:]])[: len(even)]
    return even + (before + after + 2) // 4


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("shape", [(80, 72), (65, 70), (66, 71), (67, 97)])
def test_values_agree_with_the_low_pass_band(shape: tuple[int, int], times: int) -> None:
    """Computed by the standard's steps, for sides that no power of two divides."""
    pixels = x_ray(*shape)
    expected = pixels.astype(np.int64)
    for _ in range(times):
        expected = low_pass(low_pass(expected).T).T
    halved = decode_halved(encoded(pixels, resolutions=4), shape, times)
    assert halved is not None
    assert np.array_equal(halved, expected)


@pytest.mark.parametrize("bits", [7, 8, 10, 16])
def test_values_of_any_depth(bits: int) -> None:
    pixels = (x_ray(64, 64) >> 4) << bits - 8 if bits > 8 else x_ray(64, 64) >> 12 - bits
    pixels = pixels.astype(np.uint8 if bits <= 8 else np.uint16)
    halved = decode_halved(encoded(pixels, bitspersample=bits), (64, 64), 1)
    assert halved is not None
    assert np.array_equal(halved, low_pass(low_pass(pixels.astype(np.int64)).T).T)


@pytest.mark.parametrize(
    ("shape", "spec", "times"),
    [
        ((3056, 2500), PreprocessSpec(270, 224), 1),  # 2500 / 270 = 9.3, halved once 4.6, twice below 3
        ((3056, 2500), PreprocessSpec(154, 128), 2),
        ((3240, 4000), PreprocessSpec(270, 224), 2),
        ((3239, 4000), PreprocessSpec(270, 224), 1),
        ((6480, 7000), PreprocessSpec(270, 224), 2),  # at an eighth of the resolution, aliasing is visible
        ((1619, 4000), PreprocessSpec(270, 224), 0),
        ((200, 200), PreprocessSpec(270, 224), 0),
        ((3056, 2500), PreprocessSpec(224, 224), 0),  # the crop reaches the border
        ((3056, 2500), PreprocessSpec(226, 224), 1),
    ],
)
def test_number_of_halvings(shape: tuple[int, int], spec: PreprocessSpec, times: int) -> None:
    assert halvings(shape, spec) == times


@pytest.mark.parametrize("photometric", ["MONOCHROME2", "MONOCHROME1"])
@pytest.mark.parametrize(("shape", "step"), [((236, 299), 2), ((237, 301), 2), ((469, 511), 4), ((950, 941), 4)])
def test_the_model_input_agrees_with_the_full_image(shape: tuple[int, int], step: int, photometric: str) -> None:
    data = dicom(x_ray(*shape), PhotometricInterpretation=photometric)
    full, reduced = read_image(data), read_image(data, reduced_for=SPEC)
    assert full.reduction is None
    assert reduced.reduction == Reduction(step, shape)
    assert reduced.pixels.shape == tuple(-(-side // step) for side in shape)
    assert (reduced.sha256, reduced.view, reduced.warnings) == (full.sha256, full.view, full.warnings)
    expected = preprocess(full, SPEC).astype(int)
    difference = np.abs(preprocess(reduced, SPEC) - expected)
    assert difference.max() <= 1
    unshifted = np.abs(preprocess(replace(reduced, reduction=None), SPEC) - expected)
    assert unshifted.mean() > 2 * difference.mean()


def test_golden_values() -> None:
    reduced = read_image(dicom(x_ray(501, 470)), reduced_for=SPEC)
    result = preprocess(reduced, SPEC)
    assert result[[0, 0, 15, 31, 31], [0, 31, 15, 0, 31]].tolist() == GOLDEN_VALUES
    assert hashlib.sha256(result.tobytes()).hexdigest() == GOLDEN_HASH


def test_images_with_overshoot_are_decoded_in_full() -> None:
    """The codestream has 16 bits, the image 12: values above 4095 would wrap to dark ones."""
    y, x = np.mgrid[:256, :256]
    pixels = (4095 * ((x // 5 + y // 7) % 2)).astype(np.uint16)
    halved = decode_halved(encoded(pixels), pixels.shape, 1)
    assert halved is not None
    assert halved.max() > 4095
    full = read_image(dicom(pixels), reduced_for=SPEC)
    assert full.reduction is None
    assert np.array_equal(full.stored, pixels)


def test_damage_is_still_refused() -> None:
    pixels = x_ray(240, 250)
    frame = encoded(pixels, bitspersample=12)  # so that damage cannot give values with more bits
    generator = np.random.default_rng(0)
    outcomes = []
    for trial in range(60):
        broken = bytearray(frame)
        if trial % 3 == 0:
            broken = broken[: int(generator.integers(2, len(frame)))] + b"\xff\xd9" * (trial % 2)
        else:
            for position in generator.integers(0, (len(frame), 140)[trial % 2], 2):
                broken[position] = int(generator.integers(256))
        data = dicom(pixels, bytes(broken))
        errors: list[type[ImageError] | None] = []
        for spec in (None, SPEC):
            try:
                read_image(data, reduced_for=spec)
                errors.append(None)
            except ImageError as error:
                errors.append(type(error))
        assert errors[0] == errors[1]
        outcomes.append(errors[0])
    assert 10 < outcomes.count(None) < 50


def test_a_blank_image_is_still_refused() -> None:
    with pytest.raises(BlankImageError):
        read_image(dicom(np.full((256, 256), 7, np.uint16)), reduced_for=SPEC)


@pytest.mark.parametrize(
    "make",
    [
        lambda pixels: dicom(pixels[:200]),  # too small
        lambda pixels: dicom(pixels, encoded(pixels, resolutions=1)),  # no lower resolution in the codestream
        lambda pixels: dicom(pixels, WindowCenter=None, WindowWidth=None),  # scaled by its lowest and highest value
        lambda pixels: dicom(pixels, PixelPaddingValue=0),
        lambda pixels: dicom(pixels.astype(np.int16) - 2048),
        lambda pixels: dicom(pixels, imagecodecs.jpegls_encode(pixels), JPEGLSLossless),
    ],
)
def test_images_that_are_not_reduced(make: Callable[[Pixels], bytes]) -> None:
    data = make(x_ray(240, 250))
    full, other = read_image(data), read_image(data, reduced_for=SPEC)
    assert other.reduction is None
    assert np.array_equal(other.stored, full.stored)
    assert np.array_equal(other.pixels, full.pixels)


def test_other_formats_are_not_reduced() -> None:
    stream = io.BytesIO()
    Image.fromarray((x_ray(240, 250) >> 4).astype(np.uint8)).save(stream, "PNG")
    assert read_image(stream.getvalue(), reduced_for=SPEC).pixels.shape == (240, 250)
    pixels = x_ray(240, 250)
    dataset = dcmread(io.BytesIO(dicom(pixels)))
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.PixelData = pixels.tobytes()
    dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OW", False
    stream = io.BytesIO()
    dataset.save_as(stream)
    assert np.array_equal(read_image(stream.getvalue(), reduced_for=SPEC).stored, pixels)


def test_an_image_that_contradicts_the_header() -> None:
    frame = encoded(x_ray(240, 250))
    assert decode_halved(frame, (240, 250), 1) is not None
    assert decode_halved(frame, (250, 240), 1) is None
    assert decode_halved(frame[:20], (240, 250), 1) is None
    assert decode_halved(encoded(np.zeros((240, 250, 3), np.uint8)), (240, 250), 1) is None
    shifted = bytearray(frame)
    shifted[8:24] = np.array([251, 241, 1, 1], ">u4").tobytes()  # same size, one pixel off the canvas origin
    assert decode_halved(bytes(shifted), (240, 250), 1) is None


def test_other_pixels_are_not_reduced() -> None:
    reduced = read_image(dicom(x_ray(240, 250)), reduced_for=SPEC)
    assert reduced.reduction is not None
    assert reduced.with_pixels(np.zeros((39, 39), np.uint8)).reduction is None


def test_a_finder_reduces_on_request(tiny_model: Path, tmp_path: Path) -> None:
    data = dicom(x_ray(240, 250))
    file = tmp_path / "image.dcm"
    file.write_bytes(data)
    with Finder.open(tiny_model, threads=1) as plain, Finder.open(tiny_model, threads=1, reduced_jpeg2000=True) as fast:
        spec = plain.card.preprocess
        crops = [preprocess(read_image(data, reduced_for=given), spec) for given in (None, spec)]
        assert not np.array_equal(*crops)
        for finder, crop in zip((plain, fast), crops, strict=True):
            (expected,) = finder.embed(crop[None, None])
            assert np.array_equal(finder.analyze(data).embedding, expected)
            assert np.array_equal(finder.embed([data])[0], expected)
            (result,) = finder.embed_many([file], workers=1)
            assert isinstance(result, np.ndarray)
            assert np.array_equal(result, expected)


def test_results_have_the_same_uids_for_a_reduced_image(tiny_model: Path) -> None:
    data, uids = dicom(x_ray(240, 250), StudyInstanceUID="1.2.3", SeriesInstanceUID="1.2.4"), set()
    for reduced in (False, True):
        with Finder.open(tiny_model, threads=1, reduced_jpeg2000=reduced) as finder:
            report = make_results(data, finder.analyze(data), finder).sr
            assert report is not None
            uids.add(report.SOPInstanceUID)
    assert len(uids) == 1


def test_a_gallery_is_built_from_reduced_images_on_request(
    tiny_model: Path, tiny_card: ModelCard, tmp_path: Path
) -> None:
    file = tmp_path / "image.dcm"
    file.write_bytes(dicom(x_ray(240, 250)))
    manifest = Manifest(tiny_card.labels, (Row(image=file, patient_id="a", labels=(1, 0, 0), split="train"),))
    with Finder.open(tiny_model, threads=1) as plain, Finder.open(tiny_model, threads=1, reduced_jpeg2000=True) as fast:
        vectors = []
        for finder, reduced in ((plain, False), (fast, True)):
            path = tmp_path / f"gallery{reduced}"
            build_gallery(finder.engine, manifest, path, reduced_jpeg2000=reduced)
            with Gallery.open(path) as gallery:
                vectors.append(gallery.vector("image"))
            np.testing.assert_allclose(vectors[-1], finder.embed([file])[0], atol=1e-6)
    assert not np.array_equal(*vectors)


REAL = ["chest_canon_j2k_lossless_mono1_12bit_fixed.dcm", "chest_rg1_j2k_lossy_mono1_15bit.dcm"]


@pytest.mark.parametrize(("size", "step"), [(224, 2), (128, 4)])
@pytest.mark.parametrize("file", REAL)
def test_real_files(shared: Path, file: str, size: int, step: int) -> None:
    spec = PreprocessSpec.for_image_size(size)
    full = read_image(shared / "dicom" / file)
    reduced = read_image(shared / "dicom" / file, reduced_for=spec)
    if file == REAL[1] and size == 128:
        step = 2  # 1841 pixels are too few for 4
    assert reduced.reduction == Reduction(step, full.pixels.shape)
    difference = np.abs(preprocess(reduced, spec).astype(int) - preprocess(full, spec))
    assert difference.max() <= 1


def test_real_x_rays_with_sharp_edges(shared: Path) -> None:
    """A worst case: the files are small, so letters and borders are as sharp as possible."""
    shares, worst = [], 0
    for path in sorted((shared / "nih" / "images").iterdir())[:200:10]:
        pixels = read_image(path).pixels
        reduced = read_image(dicom(pixels), reduced_for=SPEC)
        assert reduced.reduction == Reduction(2, pixels.shape)
        difference = np.abs(preprocess(reduced, SPEC).astype(int) - preprocess(pixels, SPEC))
        shares.append((difference > 1).mean())
        worst = max(worst, difference.max())
    assert np.mean(shares) < 0.01
    assert max(shares) < 0.04
    assert worst <= 4
