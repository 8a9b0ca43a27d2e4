"""DICOM: grey values worked out by hand, each known trap, and a stated outcome for every real file."""

from __future__ import annotations

import csv
import io
import logging
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import apply_modality_lut, apply_voi_lut
from pydicom.pixels.decoders.base import Decoder
from pydicom.uid import (
    ComputedRadiographyImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from cbmir.errors import (
    BlankImageError,
    DamagedImageError,
    DicomImageError,
    ImageError,
    ImageSizeError,
    MissingDependencyError,
    NotAnImageError,
)
from cbmir.runtime.dicom_reading import is_dicom, window
from cbmir.runtime.dicom_tags import pydicom_unlogged
from cbmir.runtime.radiograph import collected_warnings
from cbmir.runtime.reading import Limits, Radiograph, read_image

SIDE = 64
STORED = np.arange(SIDE * SIDE, dtype=np.uint16).reshape(SIDE, SIDE)  # 12 bits, each value once
PATIENT = "SECRET^NAME"


def make_dicom(pixels: NDArray[Any] = STORED, *, syntax: str = ExplicitVRLittleEndian, **tags: Any) -> bytes:
    """A chest radiograph's file; a tag given as None is left out."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    bits = 8 * pixels.dtype.itemsize
    little = syntax != ExplicitVRBigEndian
    values = {
        "SOPClassUID": ComputedRadiographyImageStorage,
        "SOPInstanceUID": "1.2.3",
        "StudyInstanceUID": "1.2.4",
        "PatientName": PATIENT,
        "PatientID": "SECRET-ID",
        "Modality": "CR",
        "BodyPartExamined": "CHEST",
        "ViewPosition": "PA",
        "PhotometricInterpretation": "MONOCHROME2",
        "SamplesPerPixel": 1,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "BitsAllocated": bits,
        "BitsStored": 12 if bits == 16 else 8,
        "HighBit": (12 if bits == 16 else 8) - 1,
        "PixelRepresentation": int(pixels.dtype.kind == "i"),
        "WindowCenter": 2048,
        "WindowWidth": 4096,
        "PixelData": pixels.astype(pixels.dtype.newbyteorder("<" if little else ">")).tobytes(),
    } | tags
    for keyword, value in values.items():
        if value is not None:
            setattr(dataset, keyword, value)
    dataset["PixelData"].VR = "OW" if bits == 16 else "OB"
    stream = io.BytesIO()
    dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def lut_sequence(first: int, entries: list[int], bits: int, vr: str = "US", order: str = "<") -> list[Dataset]:
    item = Dataset()
    item.add_new("LUTDescriptor", vr, [len(entries), first, bits])
    item.add_new("LUTData", "OW", np.array(entries, f"{order}u2").tobytes())
    return [item]


def saved(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    dataset.save_as(stream)
    return stream.getvalue()


def read(data: bytes, **limits: Any) -> Radiograph:
    return read_image(data, limits=Limits(**limits)) if limits else read_image(data)


# -- grey values


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
    """Centre 1000.5, width 511: 745 is 0, each grey level is two values, 1255 is 255."""
    radiograph = read(make_dicom(WindowCenter=1000.5, WindowWidth=511))
    flat = radiograph.pixels.ravel()
    assert flat[[0, 745, 747, 765, 1255, 1253, 1254, 4095]].tolist() == [0, 0, 1, 10, 255, 254, 254, 255]
    assert radiograph.warnings == ()
    assert (radiograph.patient_id, radiograph.study_id, radiograph.view) == ("SECRET-ID", "1.2.4", "PA")


def test_monochrome1_is_inverted_last() -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 4000, "WindowWidth": 3000}
    plain = read(make_dicom(**tags)).pixels
    assert np.array_equal(read(make_dicom(PhotometricInterpretation="MONOCHROME1", **tags)).pixels, 255 - plain)


def test_rescale_comes_before_the_window() -> None:
    tags = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 4000, "WindowWidth": 3000}
    expected = np.rint(255 * window(STORED * 2.0 - 100, 4000, 3000)).astype(np.uint8)
    assert np.array_equal(read(make_dicom(**tags)).pixels, expected)


@pytest.mark.parametrize("vr", ["US", "SS"])
def test_modality_lut_replaces_rescale(vr: str) -> None:
    table = lut_sequence(1000, list(range(0, 4000, 10)), 16, vr)
    data = make_dicom(ModalityLUTSequence=table, RescaleSlope=0, WindowCenter=2000.5, WindowWidth=4001)
    flat = read(data).pixels.ravel()
    # 1100 -> 1000 -> 63.75; below the table its first value, above it its last (3990 -> 254.4)
    assert flat[[0, 1000, 1100, 1400, 4095]].tolist() == [0, 0, 64, 254, 254]


def test_voi_lut_comes_before_a_window() -> None:
    table = lut_sequence(100, [0, 1023, 511], 10)
    flat = read(make_dicom(VOILUTSequence=table)).pixels.ravel()
    assert flat[[0, 100, 101, 102, 4000]].tolist() == [0, 0, 255, 127, 127]


def test_signed_lut_start_written_as_unsigned() -> None:
    signed = STORED.astype(np.int16) - 2048
    table = lut_sequence(65536 - 2048, [i * 16 for i in range(4096)], 16)
    flat = read(make_dicom(signed, ModalityLUTSequence=table, WindowCenter=32768, WindowWidth=65536)).pixels.ravel()
    assert flat[[0, 2048, 4095]].tolist() == [0, 128, 255]


def test_lut_of_words_in_a_big_endian_file() -> None:
    entries = list(range(4096))
    little = make_dicom(VOILUTSequence=lut_sequence(0, entries, 12))
    big = make_dicom(syntax=ExplicitVRBigEndian, VOILUTSequence=lut_sequence(0, entries, 12, order=">"))
    assert read(little).pixels.ravel()[[0, 2048, 4095]].tolist() == [0, 128, 255]
    assert np.array_equal(read(big).pixels, read(little).pixels)


@pytest.mark.parametrize("table", [lut_sequence(0, [1, 2], 17), lut_sequence(0, [1, 256], 8), [Dataset()]])
def test_broken_tables_are_refused(table: list[Dataset]) -> None:
    with pytest.raises(DicomImageError, match=r"VOILUTSequence \(0028,3010\)"):
        read(make_dicom(VOILUTSequence=table))


def test_signed_values() -> None:
    signed = STORED.astype(np.int16) - 2048
    assert np.array_equal(read(make_dicom(signed, WindowCenter=0)).pixels, read(make_dicom()).pixels)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_other_native_syntaxes(syntax: str) -> None:
    assert np.array_equal(read(make_dicom(syntax=syntax)).pixels, read(make_dicom()).pixels)


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
def test_without_preamble_and_meta(syntax: str) -> None:
    data = make_dicom(syntax=syntax)
    start = data.index(b"\x08\x00\x16\x00")  # SOPClassUID, the first element after the file meta
    assert np.array_equal(read(data[start:]).pixels, read(make_dicom()).pixels)
    assert np.array_equal(read(data[132:]).pixels, read(make_dicom()).pixels)  # with meta


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ExplicitVRBigEndian])
@pytest.mark.parametrize("vr", ["OB", "OW"])
def test_8_bits(syntax: str, vr: str) -> None:
    """OW holds two pixels a word, the first in its low byte (PS3.5 section 8.1.1)."""
    pixels = (STORED // 16).astype(np.uint8)
    swapped = syntax == ExplicitVRBigEndian and vr == "OW"
    data = pixels.view("<u2").byteswap().tobytes() if swapped else pixels.tobytes()
    tags = {"syntax": syntax, "WindowCenter": 128, "WindowWidth": 256, "PixelData": data}
    file = make_dicom(pixels, **tags)
    start = file.rindex(b"\xe0\x7f\x10\x00" if syntax == ExplicitVRLittleEndian else b"\x7f\xe0\x00\x10") + 4
    assert np.array_equal(read(file[:start] + vr.encode() + file[start + 2 :]).pixels, pixels)


# -- traps


def test_high_bit_above_the_stored_bits() -> None:
    """12 bits at the top of 16: pydicom would take the low 12."""
    shifted = make_dicom(STORED << 4, HighBit=15)
    assert np.array_equal(read(shifted).pixels, read(make_dicom()).pixels)


def test_unused_high_bits_are_ignored() -> None:
    assert np.array_equal(read(make_dicom(STORED | 0xA000)).pixels, read(make_dicom()).pixels)


@pytest.mark.parametrize(("bits", "high"), [(12, 10), (12, 16), (0, 11), (17, 16)])
def test_contradicting_bits(bits: int, high: int) -> None:
    with pytest.raises(DicomImageError, match=r"\(0028,010[12]\)"):
        read(make_dicom(BitsStored=bits, HighBit=high))


@pytest.mark.parametrize(
    ("centre", "width"), [(None, None), (2048, 0), (2048, -5), (2048, 0.5), ("", ""), (None, 4096), ("2048", "")]
)
def test_no_valid_window_takes_the_range_present(centre: Any, width: Any) -> None:
    pixels = STORED // 4 + 500
    radiograph = read(make_dicom(pixels, WindowCenter=centre, WindowWidth=width))
    assert np.array_equal(radiograph.pixels, np.rint((pixels - 500) / 1023 * 255).astype(np.uint8))
    (warning,) = radiograph.warnings
    assert "WindowWidth (0028,1051)" in warning
    assert "lowest to the highest" in warning


def test_first_valid_of_several_windows() -> None:
    expected = read(make_dicom()).pixels
    assert np.array_equal(read(make_dicom(WindowCenter=[2048, 10], WindowWidth=[4096, 5])).pixels, expected)
    radiograph = read(make_dicom(WindowCenter=[10, 2048], WindowWidth=[0, 4096]))
    assert np.array_equal(radiograph.pixels, expected)
    assert "window 2" in radiograph.warnings[0]


def test_unknown_voi_function_warns() -> None:
    radiograph = read(make_dicom(VOILUTFunction="CUBIC"))
    assert np.array_equal(radiograph.pixels, read(make_dicom()).pixels)
    assert "taken as LINEAR" in radiograph.warnings[0]


def test_narrow_window_is_valid_for_sigmoid() -> None:
    assert read(make_dicom(VOILUTFunction="SIGMOID", WindowWidth=0.5)).warnings == ()


@pytest.mark.parametrize(("slope", "intercept"), [("0", "5"), ("inf", "0"), ("1", "nan")])
def test_rescale_that_maps_nothing(slope: str, intercept: str) -> None:
    with pytest.raises(DicomImageError, match=r"Rescale\w+ \(0028,105[23]\)"):
        read(make_dicom(RescaleSlope=float(slope), RescaleIntercept=float(intercept)))


def test_rescale_beyond_all_numbers() -> None:
    with pytest.raises(DicomImageError, match="RescaleSlope"):
        read(make_dicom(RescaleSlope=1e306, RescaleIntercept=0, WindowWidth=None))


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
    result = read(data).pixels.ravel()
    assert not result[:1000].any()
    assert not result[3001:].any()
    ends = (0, 255) if photometric == "MONOCHROME2" else (255, 0)
    assert (result[1000], result[3000]) == ends


def test_padding_of_the_other_sign() -> None:
    """-32000 written as unsigned is 33536, 65535 written as signed is -1."""
    signed = STORED.astype(np.int16)
    signed[0] = -32000
    tags = {"BitsStored": 16, "HighBit": 15, "WindowWidth": None}
    data = make_dicom(signed, PixelPaddingValue=-32000, PhotometricInterpretation="MONOCHROME1", **tags)
    tag = b"\x28\x00\x20\x01"
    assert data.count(tag + b"SS") == 1
    result = read(data.replace(tag + b"SS", tag + b"US")).pixels
    assert not result[0].any()
    assert (result[1, 0], result[-1, -1]) == (255, 0)  # the range is that of the other rows

    unsigned = STORED.copy()
    unsigned[0] = 65535
    data = make_dicom(unsigned, PixelPaddingValue=65535, **tags)
    assert data.count(tag + b"US") == 1
    result = read(data.replace(tag + b"US", tag + b"SS")).pixels
    assert not result[0].any()
    assert (result[1, 0], result[-1, -1]) == (0, 255)


@pytest.mark.parametrize(
    "tags",
    [
        {"WindowCenter": 4095, "WindowWidth": 3},
        {"WindowCenter": 60000, "WindowWidth": 120000},
        {"VOILUTSequence": lut_sequence(0, list(range(4096)), 16)},  # 12-bit values, said to be of 16 bits
    ],
)
def test_window_or_table_that_leaves_little_contrast_warns(tags: dict[str, Any]) -> None:
    (warning,) = read(make_dicom(**tags)).warnings
    assert "little contrast" in warning


def test_nothing_but_padding() -> None:
    with pytest.raises(DicomImageError, match="PixelPaddingValue"):
        read(make_dicom(WindowWidth=None, PixelPaddingValue=0, PixelPaddingRangeLimit=4095))


def test_blank() -> None:
    with pytest.raises(BlankImageError):
        read(make_dicom(np.full((SIDE, SIDE), 9, np.uint16)))
    with pytest.raises(BlankImageError):
        read(make_dicom(np.full((SIDE, SIDE), 9, np.uint16), WindowWidth=None))


# -- what is refused, and what is doubted


@pytest.mark.parametrize(
    ("keyword", "value", "tag"),
    [
        ("Modality", "CT", "0008,0060"),
        ("Modality", "MG", "0008,0060"),
        ("BodyPartExamined", "KNEE", "0018,0015"),
        ("BodyPartExamined", "CHESTABDOMEN", "0018,0015"),
        ("ViewPosition", "LL", "0018,5101"),
        ("ViewPosition", "LATERAL", "0018,5101"),
        ("ViewPosition", "RLD", "0018,5101"),
        ("ViewPosition", "RAO", "0018,5101"),
        ("ViewPosition", "LAO", "0018,5101"),
        ("ViewPosition", "RPO", "0018,5101"),
        ("ViewPosition", "LPO", "0018,5101"),
        ("PhotometricInterpretation", None, "0028,0004"),
        ("PhotometricInterpretation", "RGB", "0028,0004"),
        ("SamplesPerPixel", 3, "0028,0002"),
        ("NumberOfFrames", 2, "0028,0008"),
        ("BitsAllocated", 32, "0028,0100"),
        ("PixelRepresentation", None, "0028,0103"),
        ("Rows", None, "0028,0010"),
    ],
)
def test_refusals_name_tag_and_value_but_no_patient(keyword: str, value: Any, tag: str) -> None:
    with pytest.raises(DicomImageError) as caught:
        read(make_dicom(**{keyword: value}))
    message = str(caught.value)
    assert f"{keyword} ({tag})" in message
    assert ("missing" if value is None else repr(str(value))) in message
    assert "SECRET" not in message


@pytest.mark.parametrize(("view", "expected"), [("PA", "PA"), ("AP", "AP"), ("PA CHEST", "PA"), ("", ""), ("XX", "")])
def test_view(view: str, expected: str) -> None:
    radiograph = read(make_dicom(ViewPosition=view))
    assert radiograph.view == expected
    assert len(radiograph.warnings) == (not expected)


@pytest.mark.parametrize("part", ["CHEST", "THORAX", "CHEST PA", "LUNG"])
def test_chest_by_other_names(part: str) -> None:
    assert not [w for w in read(make_dicom(BodyPartExamined=part)).warnings if "BodyPart" in w]


def test_missing_context_is_a_warning_each() -> None:
    radiograph = read(make_dicom(Modality=None, BodyPartExamined=None, ViewPosition=None))
    assert [warning.split()[0] for warning in radiograph.warnings] == ["Modality", "BodyPartExamined", "ViewPosition"]


def test_description_of_a_lateral_view_is_a_warning() -> None:
    (warning,) = read(make_dicom(AcquisitionDeviceProcessingDescription="Chest Lat")).warnings
    assert "AcquisitionDeviceProcessingDescription (0018,1400) says LAT" in warning


def test_missing_identifiers_are_empty() -> None:
    radiograph = read(make_dicom(PatientID=None, StudyInstanceUID=None))
    assert (radiograph.patient_id, radiograph.study_id) == ("", "")


@pytest.mark.parametrize(
    ("text", "day"),
    [("20240229", "2024-02-29"), ("", ""), (None, ""), ("2020.01.02", "2020-01-02")],
)
def test_uids_and_study_date(text: str | None, day: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom's, of how ACR-NEMA wrote dates
        data = make_dicom(StudyDate=text)
    radiograph = read(data)
    assert (radiograph.sop_instance_uid, radiograph.study_id, radiograph.date) == ("1.2.3", "1.2.4", day)
    assert radiograph.warnings == ()


@pytest.mark.parametrize("text", ["20230229", "20201301", "2020", "SECRET^N"])
def test_a_study_date_that_is_none_is_a_warning(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = make_dicom(StudyDate=text)
    radiograph = read(data)
    assert radiograph.date == ""
    assert "StudyDate (0008,0020) is no date YYYYMMDD: left out" in radiograph.warnings
    assert not any("SECRET" in warning for warning in radiograph.warnings)


def test_size_limits_come_before_decoding() -> None:
    with pytest.raises(ImageSizeError, match="30000x30000"):
        read(make_dicom(Rows=30000, Columns=30000))
    with pytest.raises(ImageSizeError):
        read(make_dicom(), max_pixels=SIDE * SIDE - 1)


def test_pixel_data_missing_cut_off_or_in_excess() -> None:
    with pytest.raises(DicomImageError, match=r"PixelData \(7FE0,0010\)"):
        data = make_dicom()
        read(data[: data.index(b"\xe0\x7f\x10\x00")])
    with pytest.raises(DamagedImageError, match="PixelData"):
        read(make_dicom(PixelData=STORED.tobytes()[:-2]))
    radiograph = read(make_dicom(PixelData=STORED.tobytes() + b"\0\0\0\0"))
    assert np.array_equal(radiograph.pixels, read(make_dicom()).pixels)
    (warning,) = radiograph.warnings
    assert "PixelData (7FE0,0010)" in warning


def test_odd_number_of_bytes_is_padded_to_even() -> None:
    pixels = (np.arange(45 * 45) % 256).astype(np.uint8).reshape(45, 45)
    data = make_dicom(pixels, WindowCenter=128, WindowWidth=256, PixelData=pixels.tobytes() + b"\0")
    assert np.array_equal(read(data).pixels, pixels)
    assert read(data).warnings == ()


def test_nonconformant_values_become_one_warning_without_the_patient(caplog: pytest.LogCaptureFixture) -> None:
    """pydicom warns of the UID, logs it as well, and quotes it."""
    data = make_dicom().replace(b"1.2.4\0", b"SECRET")
    (warning,) = read(data).warnings
    assert "deviation(s) from the standard" in warning
    assert "SECRET" not in warning
    assert not caplog.records
    logging.getLogger("pydicom").warning("heard again")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["pydicom", "pydicom.pixels.decoders.base", "pylibjpeg", "openjpeg"])
def test_what_the_libraries_log_is_kept_out_for_this_thread_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    with pydicom_unlogged():
        logger.error("SECRET")
        other = threading.Thread(target=logger.error, args=("of another thread",))
        other.start()
        other.join()
    logger.error("heard again")
    assert [record.message for record in caplog.records] == ["of another thread", "heard again"]


def test_codec_that_fails_logs_nothing(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DamagedImageError):
        read_image(shared / "dicom" / "chest_canon_j2k_lossless_mono1_12bit_bad.dcm")
    assert not caplog.records


def test_unreadable_number_is_refused() -> None:
    with pytest.raises(DicomImageError, match=r"WindowWidth \(0028,1051\)"):
        read(make_dicom(WindowWidth="4096").replace(b"4096", b"wide"))


def test_transfer_syntax_that_nothing_decodes() -> None:
    data = make_dicom().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0")
    with pytest.raises(DicomImageError, match=r"transfer syntax.*1\.2\.840\.10008\.9\.9\.9"):
        read(data)


def test_missing_codec_names_the_syntax_and_the_cure(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.setattr(Decoder, "is_available", False)
    with pytest.raises(MissingDependencyError, match=r"RLE Lossless.*cbmir\[dicom\]"):
        read_image(shared / "dicom" / "derived_chest_mono1_10bit_rle.dcm")


def test_high_bit_is_not_guessed_in_compressed_pixels(shared: Path) -> None:
    dataset = dcmread(shared / "dicom" / "derived_chest_mono1_10bit_rle.dcm")
    dataset.HighBit = 15
    with pytest.raises(DicomImageError, match="HighBit"):
        read(saved(dataset))


def test_what_is_dicom() -> None:
    assert is_dicom(make_dicom())
    for data in (
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(8),
        b"\x08\x00",
        b"II*\x00\x08\x00\x00\x00",
        b"\x08\x00\x16\x00\xff\xff\xff\xff",
    ):
        assert not is_dicom(data)
    with pytest.raises(NotAnImageError):
        read(bytes(128) + b"DICM")


# -- damage


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_damage_gives_nothing_but_image_errors(syntax: str) -> None:
    """Cut off and flipped bytes: an image or a typed error that names no patient, and no warning."""
    table = lut_sequence(0, list(range(0, 4096, 4)), 12)
    data = make_dicom(syntax=syntax, VOILUTSequence=table, RescaleSlope=1, RescaleIntercept=0, PixelPaddingValue=0)
    header = data.index(b"\xe0\x7f\x10\x00") + 12
    generator = np.random.default_rng(0)
    refused = 0
    for trial in range(400):
        broken = bytearray(data)
        if trial % 4 == 0:
            broken = broken[: int(generator.integers(133, header + 200))]
        else:
            for position in generator.integers(132, header, int(generator.integers(1, 4))):
                broken[position] = int(generator.integers(256))
        try:
            assert read(bytes(broken)).pixels.dtype == np.uint8
        except (ImageError, MissingDependencyError) as error:
            refused += 1
            assert "SECRET" not in str(error)
    assert refused > 50


COMPRESSED = [
    "rsna_nih_jpegbaseline_mono2.dcm",
    "nonchest_hip_rg2_jpegextended_10bit_fixed.dcm",
    "nonchest_hip_rg2_jpeglossless_sv1_10bit.dcm",
    "nonchest_tibia_rg3_jpegls_mono1.dcm",
    "derived_chest_mono1_10bit_jpegls_lossless.dcm",
    "derived_chest_mono1_10bit_j2k_lossless.dcm",
    "chest_rg1_j2k_lossy_mono1_15bit.dcm",
    "derived_chest_mono1_10bit_rle.dcm",
]


@pytest.mark.parametrize("part", [0.5, 0.95])
@pytest.mark.parametrize("file", COMPRESSED)
def test_codestream_that_is_cut_off_is_damaged(shared: Path, file: str, part: float) -> None:
    """Several decoders would fill in what is missing, and say nothing."""
    dataset = dcmread(shared / "dicom" / file)
    dataset.BodyPartExamined = "CHEST"
    (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
    dataset.PixelData = encapsulate([frame[: int(part * len(frame))]])
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\)"):
        read(saved(dataset))


@pytest.mark.parametrize("file", COMPRESSED[:4])
def test_codestream_that_is_whole_is_read(shared: Path, file: str) -> None:
    """Some end in a byte of FF or 00 to make their length even."""
    dataset = dcmread(shared / "dicom" / file)
    dataset.BodyPartExamined = "CHEST"
    assert read(saved(dataset)).pixels.shape == (dataset.Rows, dataset.Columns)


def test_two_frames_in_the_pixel_data_of_one(shared: Path) -> None:
    dataset = dcmread(shared / "dicom" / "derived_chest_mono1_10bit_jpegls_lossless.dcm")
    (frame,) = generate_frames(dataset.PixelData, number_of_frames=1)
    dataset.PixelData = encapsulate([frame, frame])
    with pytest.raises(DamagedImageError, match=r"PixelData \(7FE0,0010\)"):
        read(saved(dataset))


def deflated(dataset: bytes) -> bytes:
    """A file of Deflated Explicit VR Little Endian around a data set."""
    meta = make_dicom(syntax=DeflatedExplicitVRLittleEndian, PixelData=b"\0\0")
    length = 132 + 12 + int.from_bytes(meta[140:144], "little")
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return meta[:length] + squeezer.compress(dataset) + squeezer.flush()


def test_deflated() -> None:
    plain = make_dicom()
    body = plain[plain.index(b"\x08\x00\x16\x00") :]
    data = deflated(body)
    assert len(data) < len(plain)
    assert np.array_equal(read(data).pixels, read(plain).pixels)
    with pytest.raises(DamagedImageError):
        read(data[: len(data) // 2])
    with pytest.raises(DamagedImageError, match="deflated"):
        read(deflated(data[132:]))


def test_deflated_data_set_is_not_inflated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_dicom()
    body = plain[plain.index(b"\x08\x00\x16\x00") :]
    bomb = deflated(body + bytes(20 * 2**20))
    assert len(bomb) < 100_000
    monkeypatch.setattr(zlib, "decompress", None)  # it has no limit
    with pytest.raises(ImageSizeError, match="inflate"):
        read(bomb, max_pixels=1_000_000)


# -- threads


def test_eight_threads_read_files_as_one_does(shared: Path) -> None:
    files = [shared / "dicom" / file for file, outcome in OUTCOMES.items() if isinstance(outcome, tuple)]
    files = [file for file in files if file.stat().st_size < 400_000]
    assert len(files) >= 8
    alone = [read_image(file) for file in files]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(read_image, files * 4))
    for one, other in zip(alone * 4, together, strict=True):
        assert np.array_equal(one.pixels, other.pixels)
        assert (one.name, one.sha256, one.patient_id, one.study_id, one.view, one.warnings) == (
            other.name, other.sha256, other.patient_id, other.study_id, other.view, other.warnings,
        )  # fmt: skip


def test_warnings_of_other_threads_are_theirs() -> None:
    with warnings.catch_warnings(record=True) as theirs, collected_warnings() as ours:
        other = threading.Thread(target=warnings.warn, args=("of another thread",))
        other.start()
        other.join()
        warnings.warn("of this thread", stacklevel=1)
    assert ours == ["of this thread"]
    assert [str(warning.message) for warning in theirs] == ["of another thread"]


def test_threads_leave_the_warning_filters_alone() -> None:
    """`warnings.catch_warnings` is not safe in threads by itself: filters stay changed for good."""
    before = list(warnings.filters)
    stream = io.BytesIO()
    Image.fromarray((STORED // 16).astype(np.uint8)).save(stream, "PNG")
    sources = [make_dicom(StudyInstanceUID=f"1.2.{number}") for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        radiographs = list(pool.map(read_image, [*sources, stream.getvalue()] * 20))
    assert [radiograph.study_id for radiograph in radiographs] == ["1.2.0", "1.2.1", "1.2.2", "1.2.3", ""] * 20
    assert warnings.filters == before


# -- real files

OUTCOMES: dict[str, type[ImageError] | tuple[str, int]] = {  # view and number of warnings, or the error
    "chest_mono1_10bit_no_preamble_no_meta.dcm": ("PA", 0),
    "chest_mono1_10bit_explicit.dcm": ("PA", 0),
    "dx_thorax_mono1_8bit_small.dcm": ("", 2),  # a dog from the side: no ViewPosition, but a description
    "rsna_nih_jpegbaseline_mono2.dcm": ("PA", 1),
    "chest_rg1_j2k_lossy_mono1_15bit.dcm": ("PA", 0),
    "chest_canon_j2k_lossless_mono1_12bit_bad.dcm": DamagedImageError,
    "chest_canon_j2k_lossless_mono1_12bit_fixed.dcm": ("PA", 0),
    "cr_chest_tiny_charset_japanese.dcm": DicomImageError,
    "nonchest_testpattern_ot_16bit_signed.dcm": DicomImageError,
    "nonchest_hip_rg2_jpeglossless_sv1_10bit.dcm": DicomImageError,
    "nonchest_hip_rg2_jpegls_lossless_10bit.dcm": DicomImageError,
    "nonchest_hip_rg2_jpegextended_10bit_fixed.dcm": DicomImageError,
    "nonchest_tibia_rg3_jpegls_mono1.dcm": DicomImageError,
    "lut_voi_lut_sequence.dcm": DicomImageError,
    "lut_modality_lut_sequence.dcm": DicomImageError,
    "derived_chest_mono1_10bit_rle.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_j2k_lossless.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_jpegls_lossless.dcm": ("PA", 0),
    "derived_chest_mono1_10bit_deflated.dcm": ("PA", 0),
    "derived_chest_missing_tags.dcm": DicomImageError,
    "derived_chest_multi_window_sigmoid.dcm": ("PA", 0),
    "derived_chest_truncated_pixels.dcm": DamagedImageError,
}


@pytest.mark.parametrize("file", OUTCOMES)
def test_real_files(shared: Path, file: str) -> None:
    path, outcome = shared / "dicom" / file, OUTCOMES[file]
    if not isinstance(outcome, tuple):
        with pytest.raises(outcome, match=file):
            read_image(path)
        return
    radiograph = read_image(path)
    assert (radiograph.view, len(radiograph.warnings)) == outcome
    with (shared / "dicom" / "manifest.csv").open() as stream:
        sizes = {row["file"]: row["rows_x_cols"] for row in csv.DictReader(stream)}
    assert "x".join(map(str, radiograph.pixels.shape)) == sizes[file]
    if file.startswith(("derived", "chest_mono1")) and "sigmoid" not in file:
        original = read_image(shared / "dicom" / "chest_mono1_10bit_explicit.dcm").pixels
        assert np.array_equal(radiograph.pixels, original)


def test_every_real_file_has_an_outcome(shared: Path) -> None:
    assert {path.name for path in (shared / "dicom").glob("*.dcm")} == set(OUTCOMES)


@pytest.mark.parametrize("file", [file for file, outcome in OUTCOMES.items() if isinstance(outcome, tuple)])
def test_grey_values_of_real_files_by_pydicom(shared: Path, file: str) -> None:
    """pydicom's own modality LUT and VOI LUT, pixel by pixel; its range is that of the stored bits."""
    dataset = dcmread(shared / "dicom" / file, force=True)
    if dataset.get("VOILUTFunction") == "SIGMOID":
        dataset.WindowCenter, dataset.WindowWidth = 512, 1024  # the first of two; pydicom fails on the second
    if "TransferSyntaxUID" not in dataset.file_meta:
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    values = apply_modality_lut(dataset.pixel_array, dataset)
    if "WindowWidth" in dataset:
        grey = apply_voi_lut(values, dataset) / (2**dataset.BitsStored - 1)
    else:
        grey = (values - values.min()) / np.ptp(values)
    expected = 255 * (1 - grey if dataset.PhotometricInterpretation == "MONOCHROME1" else grey)
    pixels = read_image(shared / "dicom" / file).pixels
    assert np.abs(pixels - expected).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("file", ["rsna_nih_jpegbaseline_mono2.dcm"])
def test_lungs_are_darker_than_the_middle_of_a_real_chest(shared: Path, file: str) -> None:
    """Seen by eye once: the right way up, and bone bright."""
    pixels = read_image(shared / "dicom" / file).pixels
    height, width = pixels.shape
    band = pixels[int(0.35 * height) : int(0.55 * height)].mean(axis=0)
    right, middle, left = (band[int(a * width) : int((a + 0.1) * width)].mean() for a in (0.22, 0.45, 0.68))
    assert max(right, left) < middle - 20


def test_air_is_dark_in_a_real_monochrome1_file(shared: Path) -> None:
    """Stored 0 is white there: window 550 / 1024 by hand for the stored values, then inverted."""
    path = shared / "dicom" / "chest_mono1_10bit_explicit.dcm"
    expected = 255 - 255 * np.clip((dcmread(path).pixel_array - 549.5) / 1023 + 0.5, 0, 1)
    assert np.abs(read_image(path).pixels - expected).max() <= 0.5
