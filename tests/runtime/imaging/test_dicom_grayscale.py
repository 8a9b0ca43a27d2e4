"""DICOM: grey values computed by hand, and all known pitfalls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from cbmir.errors import (
    BlankImageError,
    DamagedImageError,
    DicomImageError,
)
from cbmir.runtime.imaging.dicom_grayscale import window
from cbmir.runtime.imaging.reader import read_image
from dicom_files import SIDE, STORED, lut_sequence, make_dicom


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        # centre 5, width 5: ramp from 4.5 - 2 to 4.5 + 2 (PS3.3 C.11.2.1.2.1)
        ("LINEAR", [2, 2.5, 3, 4.5, 6, 6.5, 7], [0, 0, 0.125, 0.5, 0.875, 1, 1]),
        ("LINEAR_EXACT", [2, 2.5, 3, 5, 6, 7.5, 8], [0, 0, 0.1, 0.5, 0.7, 1, 1]),
        ("SIGMOID", [5, 5 + 5 / 4 * np.log(3), 5 - 5 / 4 * np.log(3), 1e6, -1e6], [0.5, 0.75, 0.25, 1, 0]),
    ],
)
def test_window_functions(function: str, values: list[float], expected: list[float]) -> None:
    assert window(np.array(values), 5, 5, function) == pytest.approx(expected, abs=1e-12)


def test_window_of_width_one_is_a_threshold() -> None:
    assert window(np.array([4, 4.5, 5]), 5, 1).tolist() == [0, 0, 1]


def test_window_of_stored_values() -> None:
    """With centre 1000.5 and width 511, 745 is 0, each grey level covers two values, and 1255 is 255."""
    radiograph = read_image(make_dicom(WindowCenter=1000.5, WindowWidth=511))
    flat = radiograph.pixels.ravel()
    assert flat[[0, 745, 747, 765, 1255, 1253, 1254, 4095]].tolist() == [0, 0, 1, 10, 255, 254, 254, 255]
    assert radiograph.warnings == ()
    assert (radiograph.patient_id, radiograph.study_id, radiograph.view) == ("SECRET-ID", "1.2.4", "PA")


def test_monochrome1_is_inverted_last() -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 4000, "WindowWidth": 3000}
    plain = read_image(make_dicom(**tags)).pixels
    assert np.array_equal(read_image(make_dicom(PhotometricInterpretation="MONOCHROME1", **tags)).pixels, 255 - plain)


def test_rescale_comes_before_the_window() -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 4000, "WindowWidth": 3000}
    expected = np.rint(255 * window(STORED * 2.0 - 100, 4000, 3000)).astype(np.uint8)
    assert np.array_equal(read_image(make_dicom(**tags)).pixels, expected)


@pytest.mark.parametrize("vr", ["US", "SS"])
def test_modality_lut_replaces_rescale(vr: str) -> None:
    table = lut_sequence(1000, list(range(0, 4000, 10)), 16, vr)
    data = make_dicom(ModalityLUTSequence=table, RescaleSlope=0, WindowCenter=2000.5, WindowWidth=4001)
    flat = read_image(data).pixels.ravel()
    # 1100 -> 1000 -> 63.75; the first value below the table, the last one above it (3990 -> 254.4)
    assert flat[[0, 1000, 1100, 1400, 4095]].tolist() == [0, 0, 64, 254, 254]


def test_voi_lut_comes_before_a_window() -> None:
    table = lut_sequence(100, [0, 1023, 511], 10)
    flat = read_image(make_dicom(VOILUTSequence=table)).pixels.ravel()
    assert flat[[0, 100, 101, 102, 4000]].tolist() == [0, 0, 255, 127, 127]


def test_signed_lut_start_written_as_unsigned() -> None:
    signed = STORED.astype(np.int16) - 2048
    table = lut_sequence(65536 - 2048, [i * 16 for i in range(4096)], 16)
    flat = read_image(
        make_dicom(signed, ModalityLUTSequence=table, WindowCenter=32768, WindowWidth=65536)
    ).pixels.ravel()
    assert flat[[0, 2048, 4095]].tolist() == [0, 128, 255]


def test_lut_of_words_in_a_big_endian_file() -> None:
    entries = list(range(4096))
    little = make_dicom(VOILUTSequence=lut_sequence(0, entries, 12))
    big = make_dicom(syntax=ExplicitVRBigEndian, VOILUTSequence=lut_sequence(0, entries, 12, order=">"))
    assert read_image(little).pixels.ravel()[[0, 2048, 4095]].tolist() == [0, 128, 255]
    assert np.array_equal(read_image(big).pixels, read_image(little).pixels)


@pytest.mark.parametrize("table", [lut_sequence(0, [1, 2], 17), lut_sequence(0, [1, 2], 0), [Dataset()]])
def test_broken_tables_are_refused(table: list[Dataset]) -> None:
    with pytest.raises(DicomImageError, match=r"VOILUTSequence \(0028,3010\)"):
        read_image(make_dicom(VOILUTSequence=table))


def test_signed_values() -> None:
    signed = STORED.astype(np.int16) - 2048
    assert np.array_equal(read_image(make_dicom(signed, WindowCenter=0)).pixels, read_image(make_dicom()).pixels)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_other_native_syntaxes(syntax: str) -> None:
    assert np.array_equal(read_image(make_dicom(syntax=syntax)).pixels, read_image(make_dicom()).pixels)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
def test_without_preamble_and_meta(syntax: str) -> None:
    data = make_dicom(syntax=syntax)
    start = data.index(b"\x08\x00\x16\x00")  # SOPClassUID, the first element after the file meta
    assert np.array_equal(read_image(data[start:]).pixels, read_image(make_dicom()).pixels)
    assert np.array_equal(read_image(data[132:]).pixels, read_image(make_dicom()).pixels)  # with meta


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian])
@pytest.mark.parametrize("vr", ["OB", "OW"])
def test_8_bits(syntax: str, vr: str) -> None:
    """OW has two pixels per word, the first in the low byte (PS3.5 section 8.1.1)."""
    pixels = (STORED // 16).astype(np.uint8)
    swapped = syntax == ExplicitVRBigEndian and vr == "OW"
    data = pixels.view("<u2").byteswap().tobytes() if swapped else pixels.tobytes()
    tags = {"syntax": syntax, "WindowCenter": 128, "WindowWidth": 256, "PixelData": data}
    file = make_dicom(pixels, **tags)
    start = file.rindex(b"\xe0\x7f\x10\x00" if syntax == ExplicitVRLittleEndian else b"\x7f\xe0\x00\x10") + 4
    assert np.array_equal(read_image(file[:start] + vr.encode() + file[start + 2 :]).pixels, pixels)


def test_words_with_a_byte_missing_are_damaged() -> None:
    file = make_dicom(np.resize(STORED // 16, (65, 65)).astype(np.uint8), syntax=ExplicitVRBigEndian)
    start = file.rindex(b"\x7f\xe0\x00\x10") + 4
    odd = file[:start] + b"OW\0\0" + (65 * 65).to_bytes(4, "big") + file[start + 8 : -1]
    with pytest.raises(DamagedImageError):
        read_image(odd)


# -- pitfalls


def test_high_bit_above_the_stored_bits() -> None:
    """The 12 stored bits are the high ones of 16: pydicom would take the low 12."""
    shifted = make_dicom(STORED << 4, HighBit=15)
    assert np.array_equal(read_image(shifted).pixels, read_image(make_dicom()).pixels)


def test_unused_high_bits_are_ignored() -> None:
    assert np.array_equal(read_image(make_dicom(STORED | 0xA000)).pixels, read_image(make_dicom()).pixels)


@pytest.mark.parametrize(("bits", "high"), [(12, 10), (12, 16), (0, 11), (17, 16)])
def test_contradicting_bits(bits: int, high: int) -> None:
    with pytest.raises(DicomImageError, match=r"\(0028,010[12]\)"):
        read_image(make_dicom(BitsStored=bits, HighBit=high))


@pytest.mark.parametrize(
    ("centre", "width"), [(None, None), (2048, 0), (2048, -5), (2048, 0.5), ("", ""), (None, 4096), ("2048", "")]
)
def test_without_a_valid_window_the_range_of_values_is_used(centre: Any, width: Any) -> None:
    pixels = STORED // 4 + 500
    radiograph = read_image(make_dicom(pixels, WindowCenter=centre, WindowWidth=width))
    assert np.array_equal(radiograph.pixels, np.rint((pixels - 500) / 1023 * 255).astype(np.uint8))
    (warning,) = radiograph.warnings
    assert "WindowWidth (0028,1051)" in warning
    assert "lowest to the highest" in warning


def test_first_valid_of_several_windows() -> None:
    expected = read_image(make_dicom()).pixels
    assert np.array_equal(read_image(make_dicom(WindowCenter=[2048, 10], WindowWidth=[4096, 5])).pixels, expected)
    radiograph = read_image(make_dicom(WindowCenter=[10, 2048], WindowWidth=[0, 4096]))
    assert np.array_equal(radiograph.pixels, expected)
    assert "window 2" in radiograph.warnings[0]


def test_unknown_voi_function_warns() -> None:
    radiograph = read_image(make_dicom(VOILUTFunction="CUBIC"))
    assert np.array_equal(radiograph.pixels, read_image(make_dicom()).pixels)
    assert "taken as LINEAR" in radiograph.warnings[0]


def test_narrow_window_is_valid_for_sigmoid() -> None:
    assert read_image(make_dicom(VOILUTFunction="SIGMOID", WindowWidth=0.5)).warnings == ()


@pytest.mark.parametrize(("slope", "intercept"), [("0", "5"), ("inf", "0"), ("1", "nan")])
def test_invalid_rescale(slope: str, intercept: str) -> None:
    with pytest.raises(DicomImageError, match=r"Rescale\w+ \(0028,105[23]\)"):
        read_image(make_dicom(RescaleSlope=float(slope), RescaleIntercept=float(intercept)))


def test_rescale_beyond_finite_numbers() -> None:
    with pytest.raises(DicomImageError, match="RescaleSlope"):
        read_image(make_dicom(RescaleSlope=1e306, RescaleIntercept=0, WindowWidth=None))


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize(("padding", "limit"), [(0, None), (4095, None), (0, 9), (4090, 4095), (4095, 4090)])
def test_padding_is_dark_and_out_of_the_range(photometric: str, padding: int, limit: int | None) -> None:
    low, high = sorted((padding, padding if limit is None else limit))
    pixels = np.where((STORED >= 1000) & (STORED <= 3000), STORED, np.where(STORED % 2, low, high)).astype(np.uint16)
    data = make_dicom(
        pixels,
        PhotometricInterpretation=photometric,
        WindowWidth=None,
        PixelPaddingValue=padding,
        PixelPaddingRangeLimit=limit,
    )
    result = read_image(data).pixels.ravel()
    assert not result[:1000].any()
    assert not result[3001:].any()
    ends = (0, 255) if photometric == "MONOCHROME2" else (255, 0)
    assert (result[1000], result[3000]) == ends


def test_padding_of_the_other_sign() -> None:
    """-32000 written as unsigned is 33536; 65535 written as signed is -1."""
    signed = STORED.astype(np.int16)
    signed[0] = -32000
    tags = {"BitsStored": 16, "HighBit": 15, "WindowWidth": None}
    data = make_dicom(signed, PixelPaddingValue=-32000, PhotometricInterpretation="MONOCHROME1", **tags)
    tag = b"\x28\x00\x20\x01"
    assert data.count(tag + b"SS") == 1
    result = read_image(data.replace(tag + b"SS", tag + b"US")).pixels
    assert not result[0].any()
    assert (result[1, 0], result[-1, -1]) == (255, 0)  # the range is that of the other rows

    unsigned = STORED.copy()
    unsigned[0] = 65535
    data = make_dicom(unsigned, PixelPaddingValue=65535, **tags)
    assert data.count(tag + b"US") == 1
    result = read_image(data.replace(tag + b"US", tag + b"SS")).pixels
    assert not result[0].any()
    assert (result[1, 0], result[-1, -1]) == (0, 255)


@pytest.mark.parametrize(
    "tags",
    [
        {"WindowCenter": 4095, "WindowWidth": 3},
        {"WindowCenter": 60000, "WindowWidth": 120000},
    ],
)
def test_window_that_leaves_little_contrast_warns(tags: dict[str, Any]) -> None:
    (warning,) = read_image(make_dicom(**tags)).warnings
    assert "little contrast" in warning


def test_nothing_but_padding() -> None:
    with pytest.raises(DicomImageError, match="PixelPaddingValue"):
        read_image(make_dicom(WindowWidth=None, PixelPaddingValue=0, PixelPaddingRangeLimit=4095))


def test_blank() -> None:
    with pytest.raises(BlankImageError):
        read_image(make_dicom(np.full((SIDE, SIDE), 9, np.uint16)))
    with pytest.raises(BlankImageError):
        read_image(make_dicom(np.full((SIDE, SIDE), 9, np.uint16), WindowWidth=None))


# -- scales in the header, and data that contradict them

TEN_BITS = (STORED % 1024).astype(np.uint16)
NARROW = [round(4095 * i / 1023) for i in range(1024)]


def ten_bit_dicom(**tags: Any) -> bytes:
    return make_dicom(TEN_BITS, BitsStored=10, HighBit=9, WindowCenter=None, WindowWidth=None, **tags)


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("bits", [8, 10, 11, 13, 14, 15, 16])
def test_a_voi_lut_with_other_bits_than_stated(photometric: str, bits: int) -> None:
    def read(bits: int) -> Any:
        table = lut_sequence(0, NARROW, bits)
        return read_image(ten_bit_dicom(PhotometricInterpretation=photometric, VOILUTSequence=table))

    wrong, right = read(bits), read(12)
    assert wrong.pixels.ravel()[512] == pytest.approx(128, abs=1)
    assert np.array_equal(wrong.pixels, right.pixels)
    (warning,) = wrong.warnings
    assert warning.kind == "LUT rescaled"
    assert f"entries of {bits} bits, but they reach 4095: 4095 is taken as white" in warning
    assert right.warnings == ()


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_a_modality_lut_with_other_bits_than_stated(photometric: str) -> None:
    """It maps to values, not to greys, so its number of bits does not matter."""

    def read(bits: int, **tags: Any) -> Any:
        table = lut_sequence(0, NARROW, bits)
        return read_image(ten_bit_dicom(PhotometricInterpretation=photometric, ModalityLUTSequence=table) if not tags
                          else make_dicom(TEN_BITS, PhotometricInterpretation=photometric, ModalityLUTSequence=table,
                                          **tags))  # fmt: skip

    assert read(16).pixels.ravel()[512] == pytest.approx(128, abs=1)
    for bits in (0, 8, 12, 17):
        assert np.array_equal(read(16).pixels, read(bits).pixels)
    both = {"VOILUTSequence": lut_sequence(0, list(range(4096)), 16), "WindowWidth": None}
    assert read(16, **both).pixels.ravel()[512] == pytest.approx(128, abs=1)
    assert [warning.kind for warning in read(16, **both).warnings] == ["LUT rescaled"]


@pytest.mark.parametrize("highest", [65535, 60000, 32768])
def test_a_lut_that_reaches_its_range_is_unchanged(highest: int) -> None:
    entries = [highest * i // 1023 for i in range(1024)]
    radiograph = read_image(ten_bit_dicom(VOILUTSequence=lut_sequence(0, entries, 16)))
    expected = np.rint(255 * np.array(entries) / 65535).astype(np.uint8)[TEN_BITS]
    assert np.array_equal(radiograph.pixels, expected)
    assert radiograph.warnings == ()


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_a_lut_that_ends_one_above_its_bits(bits: int) -> None:
    """Its highest entry is white, not half of the range of one more bit."""
    entries = [4 * i for i in range(1023)] + [4096]
    radiograph = read_image(ten_bit_dicom(VOILUTSequence=lut_sequence(0, entries, bits)))
    assert radiograph.pixels.ravel()[[0, 512, 1023]].tolist() == [0, 128, 255]
    assert [warning.kind for warning in radiograph.warnings] == ["LUT rescaled"]


@pytest.mark.parametrize(("bits", "warnings"), [(16, []), (12, ["LUT rescaled"])])
def test_one_entry_decides_the_range_of_a_lut(bits: int, warnings: list[str]) -> None:
    table = lut_sequence(0, [*NARROW[:-1], 65535], bits)
    radiograph = read_image(ten_bit_dicom(VOILUTSequence=table))
    assert radiograph.pixels.ravel()[[512, 1023]].tolist() == [8, 255]
    assert [warning.kind for warning in radiograph.warnings] == [*warnings, "little contrast"]


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian])
@pytest.mark.parametrize("count", [256, 255])
def test_a_lut_with_one_byte_per_entry(syntax: str, count: int) -> None:
    """PS3.3 C.11.1.1.1: 256 entries of 8 bits in 256 bytes, padded to words."""
    pixels = (STORED % count).astype(np.uint8)
    values = [255 - 255 * i // (count - 1) for i in range(count)]
    data = bytes(values) + b"\0" * (count % 2)
    if syntax == ExplicitVRBigEndian:  # the first of two bytes is the low byte of a word
        data = np.frombuffer(data, "<u2").astype(">u2").tobytes()
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [count, 0, 8])
    item.add_new("LUTData", "OW", data)
    radiograph = read_image(make_dicom(pixels, syntax=syntax, VOILUTSequence=[item]))
    assert np.array_equal(radiograph.pixels, np.array(values, np.uint8)[pixels])
    assert radiograph.warnings == ()


def test_a_lut_of_bytes_written_as_numbers() -> None:
    """With VR US, each number holds two entries."""
    item = Dataset()
    item.add_new("LUTDescriptor", "US", [256, 0, 8])
    item.add_new("LUTData", "US", np.arange(256, dtype=np.uint8).view("<u2").tolist())
    pixels = (STORED % 256).astype(np.uint8)
    assert np.array_equal(read_image(make_dicom(pixels, VOILUTSequence=[item])).pixels, pixels)


def test_words_with_small_values_are_words() -> None:
    pixels = (STORED % 256).astype(np.uint8)
    table = lut_sequence(0, list(range(255, -1, -1)), 8)
    assert np.array_equal(read_image(make_dicom(pixels, VOILUTSequence=table)).pixels, 255 - pixels)


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize(("centre", "width"), [(30000, 2), (-30000, 100), (8200, 4)])
def test_a_window_that_misses_all_values(photometric: str, padding: int | None, centre: int, width: int) -> None:
    pixels = np.where(STORED < 300, 5, STORED) if padding else STORED
    data = make_dicom(
        pixels.astype(np.uint16), PhotometricInterpretation=photometric, WindowCenter=centre, WindowWidth=width,
        PixelPaddingValue=padding, RescaleSlope=2, RescaleIntercept=-1,
    )  # fmt: skip
    with pytest.raises(DicomImageError) as caught:
        read_image(data)
    message, first = str(caught.value), 300 if padding else 0
    assert f"WindowCenter (0028,1050) {centre} with WindowWidth (0028,1051) {width}" in message
    assert f"its stored values are {first} to 4095, which stand for {2 * first - 1} to 8189" in message
    assert "damaged" not in message
    assert caught.value.reason == "WindowCenter"
    assert read_image(data, intensity="minmax").pixels.max() == 255


def test_a_voi_lut_that_misses_all_values() -> None:
    with pytest.raises(
        DicomImageError, match=r"VOILUTSequence \(0028,3010\) would show .* stored values are 0 to 4095;"
    ):
        read_image(make_dicom(VOILUTSequence=lut_sequence(5000, [0, 1023], 10)))
