"""The intensity policies: computed by hand, without padding, for every format, and equal in training and runtime."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.errors import BlankImageError, DicomImageError, UserError
from cbmir.preprocessing import INTENSITIES, PreprocessSpec
from cbmir.runtime import Finder, read_image
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.runtime.imaging.radiograph import counted, spread
from dicom_files import SIDE, STORED, make_dicom


def greys(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    return np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 255).astype(np.uint8)


def test_counts() -> None:
    pixels = np.random.default_rng(0).integers(0, 2**16, (700, 800), dtype=np.uint16)
    assert np.array_equal(counted(pixels, 2**16), np.bincount(pixels.ravel(), minlength=2**16))
    assert counted(np.array([[3, 3], [0, 3]], np.uint8), 5).tolist() == [1, 0, 0, 3, 0]


def test_spread_by_hand() -> None:
    """200 pixels: one is -50, two are 0, 194 are 10 to 20, two are 30, one is 1000."""
    values = np.array([-50, 0, 10, 20, 30, 1000, 5000.0])
    counts = np.array([1, 2, 100, 94, 2, 1, 0])
    assert spread(values, counts, "minmax")[0] == pytest.approx([0, 50 / 1050, 60 / 1050, 70 / 1050, 80 / 1050, 1, 1])
    # 1% are 2 pixels: 3 do not exceed 0, one does not exceed -50. 99% are 198: 199 do not exceed 30, 197 not 20.
    assert spread(values, counts, "percentile")[0] == pytest.approx([0, 0, 1 / 3, 2 / 3, 1, 1, 1])


def test_order_of_the_values_does_not_matter() -> None:
    values = np.array([30.0, -50, 20, 0, 10])
    assert spread(values, np.array([2, 1, 94, 2, 100]), "percentile")[0] == pytest.approx([1, 0, 2 / 3, 0, 1 / 3])


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("intensity", "low", "high"), [("minmax", 0, 4095), ("percentile", 40, 4055)])
def test_dicom_by_hand(intensity: str, low: int, high: int, photometric: str) -> None:
    """4096 pixels have each value once: 1% is 40.96, so the 41st value; 99% is 4055.04, so the 4056th."""
    radiograph = read_image(
        make_dicom(PhotometricInterpretation=photometric, WindowCenter=10, WindowWidth=5), intensity=intensity
    )
    expected = greys(STORED, low, high)
    if photometric == "MONOCHROME1":
        expected = np.rint((1 - np.clip((STORED.astype(float) - low) / (high - low), 0, 1)) * 255).astype(np.uint8)
    assert np.array_equal(radiograph.pixels, expected)
    assert (radiograph.warnings, radiograph.intensity) == ((), intensity)


@pytest.mark.parametrize(("intensity", "low", "high"), [("minmax", 500, 1500), ("percentile", 510, 1490)])
def test_padding_is_left_out_before_any_percentile(intensity: str, low: int, high: int) -> None:
    """There are 1001 values from 500 to 1500, once each, and three padding pixels for each of them."""
    flat = np.full(SIDE * SIDE, 4000, np.uint16)
    flat[100:1101] = np.arange(500, 1501)
    pixels = flat.reshape(SIDE, SIDE)
    data = make_dicom(pixels, PixelPaddingValue=3990, PixelPaddingRangeLimit=4095)
    expected = np.where(pixels == 4000, 0, greys(pixels, low, high))
    assert np.array_equal(read_image(data, intensity=intensity).pixels, expected)
    with pytest.raises(DicomImageError, match="PixelPaddingValue"):
        read_image(make_dicom(PixelPaddingValue=0, PixelPaddingRangeLimit=4095), intensity=intensity)


def test_the_range_is_that_of_values_after_rescale() -> None:
    """A negative slope reverses the order."""
    data = make_dicom(RescaleSlope=-2, RescaleIntercept=5000)
    assert np.array_equal(read_image(data, intensity="minmax").pixels, greys(-STORED.astype(float), -4095, 0))


def test_a_useless_window_does_not_matter() -> None:
    data = make_dicom(WindowCenter=30000, WindowWidth=10)
    with pytest.raises(DicomImageError, match="WindowCenter"):
        read_image(data)
    assert read_image(data, intensity="minmax").warnings == ()
    with pytest.raises(BlankImageError):
        read_image(make_dicom(np.full((SIDE, SIDE), 9, np.uint16)), intensity="percentile")


@pytest.mark.parametrize("orientation", [1, 6])
def test_pictures_of_16_bits(orientation: int) -> None:
    """12 bits in 16 are nearly black by the type's range, but fill the range by their own."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(STORED).save(stream, "PNG", exif=exif)
    turned = np.rot90(STORED, -1) if orientation == 6 else STORED
    assert np.array_equal(read_image(stream.getvalue(), intensity="minmax").pixels, greys(turned, 0, 4095))
    assert np.array_equal(read_image(stream.getvalue()).pixels, np.rint(turned / 257).astype(np.uint8))


def test_pictures_of_8_bits_and_arrays() -> None:
    pixels = (50 + STORED // 32).astype(np.uint8)  # 50 to 177
    for source in (pixels, pixels.astype(np.uint16) * 3):
        assert np.array_equal(read_image(source, intensity="minmax").pixels, greys(pixels, 50, 177))


def test_unknown_policy() -> None:
    with pytest.raises(UserError, match="header, minmax, percentile, found 'guess'"):
        read_image(STORED, intensity="guess")


@pytest.mark.parametrize("intensity", INTENSITIES)
def test_training_and_runtime_use_the_same_pixels(intensity: str, make_tiny_model: Any, tmp_path: Path) -> None:
    """The training cache's centre crop equals the finder's input and an explicit reading, for a narrow window."""
    from cbmir.labels import LabelSet
    from cbmir.manifest import Manifest, Row
    from cbmir.training.dataset import cached_images, evaluation_batches

    file = tmp_path / "x.dcm"
    file.write_bytes(make_dicom(np.repeat(np.repeat(STORED, 3, 0), 3, 1), WindowCenter=1000, WindowWidth=1500))
    spec = PreprocessSpec.for_image_size(32, intensity)
    manifest = Manifest(LabelSet(("Mass",)), (Row(file, "p", (None,)),))
    other = PreprocessSpec.for_image_size(32, "minmax" if intensity == "header" else "header")
    caches = {}
    for wanted in (spec, other):
        squares = cached_images(manifest, wanted, tmp_path / "cache")
        (caches[wanted],) = evaluation_batches(squares, [0], wanted)
    assert np.abs(caches[spec].astype(int) - caches[other]).max() > 20  # the cache depends on the policy
    crop = preprocess(read_image(file, intensity=intensity), spec)
    assert np.abs(caches[spec][0, 0].astype(int) - crop).max() <= 1
    model = make_tiny_model(tmp_path / f"{intensity}.onnx", preprocess=spec)
    with Finder.open(model, threads=1) as finder:
        assert finder.card.preprocess == spec
        expected = finder.engine.run(crop[None, None]).embedding
        assert np.array_equal(finder.embed([file]), expected)
        assert np.array_equal(finder.analyze(file).embedding, expected[0])
        assert np.array_equal(finder.analyze(finder.read(file)).embedding, expected[0])
        with pytest.raises(UserError, match=r"expected an image that was read by intensity.*Finder\.read"):
            finder.analyze(read_image(file, intensity=other.intensity))


def test_a_gallery_is_built_with_the_policy_of_the_card(make_tiny_model: Any, tmp_path: Path) -> None:
    from cbmir.labels import LabelSet
    from cbmir.manifest import Manifest, Row
    from cbmir.runtime import build_gallery, open_engine, open_gallery

    file = tmp_path / "x.dcm"
    file.write_bytes(make_dicom(np.repeat(np.repeat(STORED, 3, 0), 3, 1), WindowCenter=30000, WindowWidth=10))
    spec = PreprocessSpec.for_image_size(32, "percentile")
    model = make_tiny_model(tmp_path / "m.onnx", preprocess=spec)
    manifest = Manifest(LabelSet(("Mass",)), (Row(file, "p", (None,), split="train"),))
    with open_engine(model, threads=1) as engine:
        assert build_gallery(engine, manifest, tmp_path / "gallery").images == 1
        expected = engine.run(preprocess(read_image(file, intensity="percentile"), spec)[None, None]).embedding[0]
    with open_gallery(tmp_path / "gallery") as gallery:
        (name,) = gallery.ids()
        assert gallery.vector(name) == pytest.approx(expected, abs=1e-6)
