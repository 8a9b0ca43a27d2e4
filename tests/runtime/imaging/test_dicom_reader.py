"""DICOM: refusals, warnings, damage, and threads."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from cbmir.errors import (
    DamagedImageError,
    DicomImageError,
    ImageError,
    ImageSizeError,
    MissingDependencyError,
    NotAnImageError,
)
from cbmir.runtime.imaging import dicom_reader
from cbmir.runtime.imaging.dicom_header import pydicom_unlogged
from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_header
from cbmir.runtime.imaging.radiograph import collected_warnings
from cbmir.runtime.imaging.reader import ImageLimits, Radiograph, read_image
from dicom_files import SIDE, STORED, file_bytes, lut_sequence, make_dicom


def read(data: bytes, **limits: Any) -> Radiograph:
    return read_image(data, limits=ImageLimits(**limits)) if limits else read_image(data)


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
    assert ("found no value" if value is None else repr(str(value))) in message
    assert "SECRET" not in message


@pytest.mark.parametrize(("view", "expected"), [("PA", "PA"), ("AP", "AP"), ("PA CHEST", "PA"), ("", ""), ("XX", "")])
def test_view(view: str, expected: str) -> None:
    radiograph = read(make_dicom(ViewPosition=view))
    assert radiograph.view == expected
    assert len(radiograph.warnings) == (not expected)


@pytest.mark.parametrize("part", ["CHEST", "THORAX", "CHEST PA", "LUNG"])
def test_other_names_of_the_chest(part: str) -> None:
    assert not [w for w in read(make_dicom(BodyPartExamined=part)).warnings if "BodyPart" in w]


def test_each_missing_attribute_is_a_warning() -> None:
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
        warnings.simplefilter("ignore")  # from pydicom, about ACR-NEMA dates
        data = make_dicom(StudyDate=text)
    radiograph = read(data)
    assert (radiograph.sop_instance_uid, radiograph.study_id, radiograph.date) == ("1.2.3", "1.2.4", day)
    assert radiograph.warnings == ()


@pytest.mark.parametrize("text", ["20230229", "20201301", "2020", "SECRET^N"])
def test_an_invalid_study_date_is_a_warning(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = make_dicom(StudyDate=text)
    radiograph = read(data)
    assert radiograph.date == ""
    assert "StudyDate (0008,0020) is not a date YYYYMMDD: left out" in radiograph.warnings
    assert not any("SECRET" in warning for warning in radiograph.warnings)


def test_size_limits_come_before_decoding() -> None:
    with pytest.raises(ImageSizeError, match="30000x30000"):
        read(make_dicom(Rows=30000, Columns=30000))
    with pytest.raises(ImageSizeError):
        read(make_dicom(), max_pixels=SIDE * SIDE - 1)


def test_missing_truncated_or_excess_pixel_data() -> None:
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
    """pydicom warns about the UID and also logs it, quoting it."""
    data = make_dicom().replace(b"1.2.4\0", b"SECRET")
    (warning,) = read(data).warnings
    assert "deviation(s) from the standard" in warning
    assert "SECRET" not in warning
    assert not caplog.records
    logging.getLogger("pydicom").warning("heard again")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["pydicom", "pydicom.pixels.decoders.base", "highdicom"])
def test_logging_of_libraries_is_silenced_for_this_thread_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    with pydicom_unlogged():
        logger.error("SECRET")
        other = threading.Thread(target=logger.error, args=("of another thread",))
        other.start()
        other.join()
    logger.error("heard again")
    assert [record.message for record in caplog.records] == ["of another thread", "heard again"]


def test_a_failing_codec_logs_nothing(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DamagedImageError):
        read_image(shared / "dicom" / "chest_canon_j2k_lossless_mono1_12bit_bad.dcm")
    assert not caplog.records


def test_unreadable_number_is_refused() -> None:
    with pytest.raises(DicomImageError, match=r"WindowWidth \(0028,1051\)"):
        read(make_dicom(WindowWidth="4096").replace(b"4096", b"wide"))


def test_unsupported_transfer_syntax() -> None:
    data = make_dicom().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0")
    with pytest.raises(DicomImageError, match=r"transfer syntax.*1\.2\.840\.10008\.9\.9\.9"):
        read(data)


def test_missing_codecs_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(MissingDependencyError, match=r"imagecodecs.*\.\[dicom\]"):
        read_image(shared / "dicom" / "derived_chest_mono1_10bit_rle.dcm")


def test_high_bit_is_not_guessed_in_compressed_pixels(shared: Path) -> None:
    dataset = dcmread(shared / "dicom" / "derived_chest_mono1_10bit_rle.dcm")
    dataset.HighBit = 15
    with pytest.raises(DicomImageError, match="HighBit"):
        read(file_bytes(dataset, enforce=False))


def test_is_dicom() -> None:
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


def test_lack_of_memory_is_not_reported_as_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the file may succeed later."""

    def dcmread(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("pydicom.dcmread", dcmread)
    with pytest.raises(MemoryError):
        read(make_dicom())


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_damage_only_raises_image_errors(syntax: str) -> None:
    """Truncated files and flipped bytes give an image, or a typed error without patient data, and no warning."""
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


def deflated(dataset: bytes) -> bytes:
    """A file with the data set in Deflated Explicit VR Little Endian."""
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


def test_the_inflated_size_of_a_deflated_data_set_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_dicom()
    body = plain[plain.index(b"\x08\x00\x16\x00") :]
    bomb = deflated(body + bytes(20 * 2**20))
    assert len(bomb) < 100_000
    monkeypatch.setattr(zlib, "decompress", None)  # it has no size limit
    with pytest.raises(ImageSizeError, match="inflate"):
        read(bomb, max_pixels=1_000_000)
    monkeypatch.setattr(dicom_reader, "ImageLimits", partial(ImageLimits, max_pixels=1_000_000))
    with pytest.raises(ImageSizeError, match="inflate"), collected_warnings(), pydicom_unlogged():
        parse_header(io.BytesIO(bomb), "image")


def test_a_header_is_read_without_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_dicom()
    body = plain[plain.index(b"\x08\x00\x16\x00") :]
    for data in (plain, deflated(body)):
        with collected_warnings(), pydicom_unlogged():
            assert parse_header(io.BytesIO(data), "image").Rows == SIDE
    monkeypatch.setattr(dicom_reader, "ImageLimits", partial(ImageLimits, max_bytes=len(plain) - 1))
    with pytest.raises(NotAnImageError, match="expected at most"), collected_warnings(), pydicom_unlogged():
        parse_header(io.BytesIO(plain), "image")


# -- threads


def test_warnings_of_other_threads_are_not_collected() -> None:
    with warnings.catch_warnings(record=True) as theirs, collected_warnings() as ours:
        other = threading.Thread(target=warnings.warn, args=("of another thread",))
        other.start()
        other.join()
        warnings.warn("of this thread", stacklevel=1)
    assert ours == ["of this thread"]
    assert [str(warning.message) for warning in theirs] == ["of another thread"]


def test_threads_do_not_change_the_warning_filters() -> None:
    """`warnings.catch_warnings` alone is not thread-safe: filters could stay changed permanently."""
    before = list(warnings.filters)
    stream = io.BytesIO()
    Image.fromarray((STORED // 16).astype(np.uint8)).save(stream, "PNG")
    sources = [make_dicom(StudyInstanceUID=f"1.2.{number}") for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        radiographs = list(pool.map(read_image, [*sources, stream.getvalue()] * 20))
    assert [radiograph.study_id for radiograph in radiographs] == ["1.2.0", "1.2.1", "1.2.2", "1.2.3", ""] * 20
    assert warnings.filters == before
