"""Data for windowing and measuring in the page's viewer: values before the window, and the size of a pixel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.runtime import Radiograph, read_image
from dicom_files import SIDE, STORED, lut_sequence, make_dicom

SIGNED = (STORED.astype(np.int16) - 2048).view(np.int16)


def shown(radiograph: Radiograph) -> NDArray[np.float64]:
    """Greys 0..255 from the values and their window, computed slowly."""
    values = radiograph.values
    assert values is not None
    grey = (values.of_stored[radiograph.stored].astype(np.float64) - values.low) / (values.high - values.low)
    grey = np.clip(1 - grey if values.inverted else grey, 0, 1)
    return 255 * np.nan_to_num(grey, nan=0)


@pytest.mark.parametrize(
    ("pixels", "tags"),
    [
        (STORED, {}),
        (STORED, {"PhotometricInterpretation": "MONOCHROME1"}),
        (STORED, {"WindowCenter": 1000, "WindowWidth": 500, "RescaleSlope": 0.5, "RescaleIntercept": -24}),
        (STORED, {"RescaleSlope": -2, "RescaleIntercept": 4095, "WindowCenter": 0}),
        (STORED, {"VOILUTFunction": "LINEAR_EXACT", "WindowCenter": [300, 5], "WindowWidth": [200, 5]}),
        (STORED, {"WindowCenter": None, "WindowWidth": None}),
        (STORED, {"PixelPaddingValue": 4000, "PixelPaddingRangeLimit": 4095}),
        (STORED, {"ModalityLUTSequence": lut_sequence(0, [9 * n for n in range(4096)], 16), "WindowCenter": 9000}),
        (SIGNED, {"WindowCenter": -100, "WindowWidth": 900}),
    ],
)
def test_windowed_values_agree_with_the_pixels(pixels: NDArray[Any], tags: dict[str, Any]) -> None:
    radiograph = read_image(make_dicom(pixels, **tags))
    assert np.abs(shown(radiograph) - radiograph.pixels).max() <= 0.5 + 1e-3
    for intensity in ("minmax", "percentile"):
        radiograph = read_image(make_dicom(pixels, **tags), intensity=intensity)
        assert np.abs(shown(radiograph) - radiograph.pixels).max() <= 0.5 + 1e-3


def test_values_by_hand() -> None:
    """DICOM's window with centre 100 and width 4 is black up to 98 and white from 101 (PS3.3 C.11.2.1.2.1)."""
    tags = {"RescaleIntercept": -1000, "WindowCenter": 100, "WindowWidth": 4, "PixelPaddingValue": 7}
    radiograph = read_image(make_dicom(**tags))
    values = radiograph.values
    assert values is not None and (values.low, values.high, values.edge) == (98, 101, 1)
    assert values.of_stored[[0, 1098, 4095]].tolist() == [-1000, 98, 3095] and np.isnan(values.of_stored[7])
    assert radiograph.pixels.ravel()[[1098, 1099, 1100, 1101]].tolist() == [0, 85, 170, 255]


@pytest.mark.parametrize(
    "tags",
    [
        {"VOILUTFunction": "SIGMOID"},
        {"VOILUTSequence": lut_sequence(0, list(range(4096)), 12)},
    ],
)
def test_images_without_a_linear_window_have_no_values(tags: dict[str, Any]) -> None:
    assert read_image(make_dicom(**tags)).values is None


def test_pictures_of_16_bits_have_values_and_those_of_8_have_none() -> None:
    deep = read_image(np.resize(np.arange(65536, dtype=np.uint16), (256, 256)))
    assert deep.values is not None and (deep.values.low, deep.values.high) == (0, 65535)
    assert np.abs(shown(deep) - deep.pixels).max() <= 0.5 + 1e-3
    assert read_image(np.resize(np.arange(256, dtype=np.uint8), (64, 64))).values is None


def test_resized_pixels_have_neither_values_nor_spacing() -> None:
    radiograph = read_image(make_dicom(PixelSpacing=[0.2, 0.2]))
    small = radiograph.with_pixels(radiograph.pixels[: SIDE // 2])
    assert small.values is None and small.spacing is None


IMAGER = {"ImagerPixelSpacing": [0.2, 0.1]}
UNKNOWN = "(the file does not say in which plane)"


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({}, None),
        ({"PixelSpacing": [0, 0]}, None),  # written by devices that do not know it
        (IMAGER, (0.2, 0.1, "at the detector")),
        ({**IMAGER, "PixelSpacing": [0.20, 0.10]}, (0.2, 0.1, "at the detector")),
        ({**IMAGER, "PixelSpacing": [0.18, 0.09]}, (0.18, 0.09, "")),
        ({**IMAGER, "PixelSpacing": [0.2, 0.1], "PixelSpacingCalibrationType": "FIDUCIAL"}, (0.2, 0.1, "")),
        (
            {**IMAGER, "EstimatedRadiographicMagnificationFactor": 1.25},
            (0.16, 0.08, "by the estimated magnification"),
        ),
        ({"NominalScannedPixelSpacing": [0.3, 0.3]}, (0.3, 0.3, "at the detector")),
        ({"PixelSpacing": [0.2, 0.1]}, (0.2, 0.1, UNKNOWN)),
    ],
)
def test_spacing_by_hand(tags: dict[str, Any], expected: tuple[float, float, str] | None) -> None:
    """PS3.3 10.7.1: rows come first; calibrated spacing is in the patient, other spacing on the detector."""
    radiograph = read_image(make_dicom(**tags))
    spacing = radiograph.spacing
    found = None if spacing is None else (spacing.row, spacing.column, spacing.where)
    assert found == (None if expected is None else (*map(pytest.approx, expected[:2]), expected[2]))
    assert radiograph.warnings == ()


@pytest.mark.parametrize("pair", [[0.2], [0.2, 0], [-0.1, -0.1], [0.1, 0.1, 0.1]])
def test_an_invalid_spacing_is_left_out_with_a_warning(pair: list[float]) -> None:
    radiograph = read_image(make_dicom(ImagerPixelSpacing=pair))
    assert radiograph.spacing is None
    (warning,) = radiograph.warnings
    assert warning == "ImagerPixelSpacing (0018,1164) is not 2 positive number(s): left out"
