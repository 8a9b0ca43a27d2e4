"""The data that the viewer gets: an image's picture and, on request, all its pixels and values."""

from __future__ import annotations

import base64
import io
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.demo import uploads
from cbmir.demo.page.viewer import about_image, whole_image
from cbmir.demo.uploads import WholeImages
from cbmir.runtime import read_image
from cbmir.runtime.imaging.radiograph import Reduction
from dicom_files import STORED, make_dicom


def opened(answer: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(answer["src"].partition(",")[2])))


def values_of(answer: dict[str, Any]) -> NDArray[np.float32]:
    """The values float32 [H, W] that a browser reads from an answer, with NaN for padding."""
    rgb = np.asarray(opened(answer)).astype(np.int64)
    known = np.frombuffer(base64.b64decode(answer["values"]), "<f4")
    return np.append(known, np.float32(np.nan))[256 * rgb[..., 0] + rgb[..., 1]]


@pytest.mark.parametrize(
    "tags",
    [{}, {"PhotometricInterpretation": "MONOCHROME1"}, {"RescaleSlope": -0.25, "RescaleIntercept": 1000}],
)
def test_every_value_arrives(tags: dict[str, Any]) -> None:
    """Including values outside the header's window, which the picture shows as black or white."""
    radiograph = read_image(make_dicom(WindowCenter=100, WindowWidth=50, **tags))
    answer = whole_image(radiograph)
    slope, intercept = tags.get("RescaleSlope", 1), tags.get("RescaleIntercept", 0)
    assert np.array_equal(values_of(answer), (slope * STORED + intercept).astype(np.float32))
    assert (answer["low"], answer["high"], answer["edge"]) == (75, 124, 1)
    assert answer["inverted"] == ("PhotometricInterpretation" in tags)
    assert opened(answer).info == {}  # no profile or gamma that would make a browser change the bytes


def test_padding_has_no_value() -> None:
    values = values_of(whole_image(read_image(make_dicom(PixelPaddingValue=5))))
    assert np.isnan(values.ravel()[5]) and np.isfinite(np.delete(values, 5)).all()


def test_all_16_bit_values_arrive() -> None:
    pixels = np.random.default_rng(0).permutation(2**16).astype(np.uint16).reshape(256, 256)
    assert np.array_equal(values_of(whole_image(read_image(pixels))), pixels)


def test_8_bits_are_a_grey_picture() -> None:
    pixels = np.resize(np.arange(256, dtype=np.uint8), (64, 64))
    answer = whole_image(read_image(pixels))
    assert list(answer) == ["src"] and np.array_equal(np.asarray(opened(answer)), pixels)


def test_the_size_in_mm_is_that_of_the_whole_file() -> None:
    """64 columns of 0.1 mm, 32 rows of 0.2 mm."""
    radiograph = read_image(make_dicom(STORED[:32], ImagerPixelSpacing=[0.2, 0.1]))
    about = about_image(radiograph)
    assert about["size"] == [64, 32] and about["mm"] == pytest.approx([6.4, 6.4])
    assert about["where"] == "at the detector" and about["deep"]
    halved = replace(radiograph, stored=radiograph.stored[::2, ::2], reduction=Reduction(2, (32, 64)))
    assert about_image(halved) == about
    about = about_image(read_image(STORED.astype(np.uint8)))
    assert about == {"size": [64, 64], "mm": None, "where": "", "deep": False, "sides": ""}


def test_kept_images_are_bounded_including_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a small 16-bit image are larger than its pixels."""
    whole = WholeImages()
    radiograph = read_image(make_dicom())
    tables = 2**16 * (1 + 4)
    monkeypatch.setattr(uploads, "_MOST_KEPT", 3 * (tables + radiograph.stored.nbytes))
    keys = [whole.keep(radiograph) for _ in range(5)]
    assert [whole.show(key) is not None for key in keys] == [False, False, True, True, True]


def test_an_image_kept_again_is_not_copied_but_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WholeImages()
    radiograph = read_image(make_dicom())
    monkeypatch.setattr(uploads, "_MOST_KEPT", 2 * (2**16 * (1 + 4) + radiograph.stored.nbytes))
    shared, first = whole.keep(radiograph, key="shared"), whole.keep(radiograph)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "deepcopy", None)
        assert whole.keep(radiograph, key="shared") == shared
    last = whole.keep(radiograph)
    assert [whole.show(key) is not None for key in (shared, first, last)] == [True, False, True]


def test_kept_images_do_not_hold_the_memory_of_a_decoder() -> None:
    """Arrays are copied, since those of the image may be views of a larger block."""
    radiograph = read_image(make_dicom())
    block = np.zeros(2**22, np.uint8)
    alive = weakref.ref(block)
    stored = block[: radiograph.stored.nbytes].view(np.uint16).reshape(radiograph.stored.shape)
    whole = WholeImages()
    key = whole.keep(replace(radiograph, stored=stored))
    del block, stored
    assert alive() is None and whole.show(key) is not None
