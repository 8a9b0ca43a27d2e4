"""Values that results copy from an image: invalid ones are left out with a warning, names stay unchanged."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVRLittleEndian

from cbmir.errors import DicomImageError, ImageError, NotAnImageError
from cbmir.runtime.dicom_output.source import SourceImage
from cbmir.runtime.imaging.dicom_header import UIDS
from dicom_files import make_dicom

Make = Callable[..., bytes]


def read(data: bytes) -> SourceImage:
    return SourceImage.read(io.BytesIO(data))


def test_copied_attributes(make_radiograph: Make) -> None:
    source = read(make_radiograph(IssuerOfPatientID="HOSPITAL", TimezoneOffsetFromUTC="-0330", BurnedInAnnotation="NO"))
    assert source.warnings == ()
    assert (source.uid, source.study_uid, source.patient_id) == (
        "1.2.826.0.1.1.11.3",
        "1.2.826.0.1.1.11.1",
        "CLINIC-0001",
    )
    assert (source.number, source.modality, source.burned_in) == (7, "CR", "NO")
    assert source.header.PatientName == "Muster^Erika"
    assert source.header.IssuerOfPatientID == "HOSPITAL"
    assert source.header.StudyDate == "20210304"
    assert source.local(datetime(2026, 1, 1, tzinfo=UTC)).isoformat() == "2025-12-31T20:30:00-03:30"


def test_missing_attributes_are_empty(make_radiograph: Make) -> None:
    keywords = (
        "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID",
        "AccessionNumber", "ReferringPhysicianName", "InstanceNumber", "Modality",
    )  # fmt: skip
    source = read(make_radiograph(**dict.fromkeys(keywords)))
    assert source.warnings == ()
    assert all(source.header[keyword].value in ("", None) for keyword in keywords[:-2])
    assert (source.number, source.modality, source.burned_in) == (1, "OT", "")


#: Bytes of tag and VR in Explicit VR Little Endian.
TAGS = {
    "SOPClassUID": b"\x08\0\x16\0UI", "SOPInstanceUID": b"\x08\0\x18\0UI", "StudyInstanceUID": b"\x20\0\x0d\0UI",
    "SeriesInstanceUID": b"\x20\0\x0e\0UI",
}  # fmt: skip


@pytest.mark.parametrize("keyword", ["SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID"])
def test_a_missing_uid_is_refused(make_radiograph: Make, keyword: str) -> None:
    data = make_radiograph()
    at = data.rindex(TAGS[keyword])  # after the file meta
    length = int.from_bytes(data[at + 6 : at + 8], "little")
    emptied = data[: at + 6] + b"\0\0" + data[at + 8 + length :]
    for damaged in (emptied, data[: at + 8] + b"x" * length + data[at + 8 + length :]):
        with pytest.raises(DicomImageError, match=rf"expected {keyword} \(.*found no valid one"):
            read(damaged)


@pytest.mark.filterwarnings("ignore:Invalid value for VR UI")
@pytest.mark.parametrize("keyword", UIDS)
def test_a_uid_with_leading_zeros_is_kept(make_radiograph: Make, keyword: str) -> None:
    """Some devices write them. PS3.5 9.1 forbids it, but a reference must name the image by the UID that it has."""
    source = read(make_radiograph(**{keyword: "1.2.392.200036.093012.007"}))
    assert (source.header[keyword].value, source.warnings) == ("1.2.392.200036.093012.007", ())


def test_another_format_is_refused() -> None:
    with pytest.raises(NotAnImageError, match="expected a DICOM file"):
        read(b"\x89PNG\r\n\x1a\n" + bytes(200))


@pytest.mark.filterwarnings("ignore")  # from pydicom, about values written on purpose
@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("PatientBirthDate", "d14a028c2a3a2bc9"),
        ("AccessionNumber", "more-than-16-characters"),
        ("StudyID", "more-than-16-characters"),
        ("PatientID", "x" * 65),
        ("PatientSex", "X"),
        ("StudyDate", "20211340"),
        ("StudyDate", "20210101-20210202"),
        ("StudyTime", "half past"),
        ("PatientID", ["two", "ids"]),
        ("StudyID", "a\tb"),
        ("PatientName", "\u30e4\u30de\u30c0"),  # without a character set that has these letters
        ("TimezoneOffsetFromUTC", "CET"),
    ],
)
def test_invalid_values_are_left_out(make_radiograph: Make, keyword: str, value: Any) -> None:
    if keyword == "PatientName":
        data = make_radiograph(PatientName="????").replace(b"????", b"\x83\x84\x83\x7d")  # Shift JIS
    else:
        data = make_radiograph(**{keyword: value})
    source = read(data)
    assert source.header.get(keyword, "") in ("", None)
    (warning,) = source.warnings
    assert warning.startswith(f"{keyword} (")
    assert str(value) not in warning


@pytest.mark.filterwarnings("ignore")
def test_dates_in_the_format_of_acr_nema(make_radiograph: Make) -> None:
    source = read(make_radiograph(StudyDate="1993.02.24", StudyTime="10:11:12"))
    assert (source.header.StudyDate, source.header.StudyTime, source.warnings) == ("19930224", "101112", ())


@pytest.mark.parametrize(
    ("character_set", "name"),
    [
        ("ISO_IR 100", "Müller^Jürgen"),
        ("ISO_IR 192", "山田^太郎\u3000二=やまだ^たろう"),
        (["", "ISO 2022 IR 87"], "Yamada^Tarou=山田^太郎=やまだ^たろう"),
        ("ISO_IR 144", "Жуков^Иван"),
        ("GB18030", "Wang^XiaoDong=王^小东"),
        (["", "ISO 2022 IR 149"], "Hong^Gildong=洪^吉洞=홍^길동"),
    ],
)
def test_names_are_preserved_in_every_character_set(make_radiograph: Make, character_set: Any, name: str) -> None:
    source = read(make_radiograph(SpecificCharacterSet=character_set, PatientName=name))
    assert source.warnings == ()
    assert str(source.header.PatientName) == name
    assert source.header.SpecificCharacterSet == "ISO_IR 192"


def test_the_real_japanese_header(shared: Path) -> None:
    source = read((shared / "dicom" / "cr_chest_tiny_charset_japanese.dcm").read_bytes())
    assert "やまだ^たろう" in str(source.header.PatientName)


def test_damaged_headers_give_typed_errors(make_radiograph: Make) -> None:
    whole = make_radiograph(SpecificCharacterSet="ISO_IR 100")
    end = whole.index(b"\x28\0\x02\0")  # start of the pixels' description
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for at in rng.integers(132, end, 4):
            data[at] = rng.integers(0, 256)
        try:
            read(bytes(data))
        except ImageError:
            refused += 1
    assert 50 < refused < 450


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian])
def test_every_transfer_syntax(syntax: str) -> None:
    source = read(make_dicom(syntax=syntax, SeriesInstanceUID="1.2.5", PatientID="P"))
    assert (source.patient_id, source.uid) == ("P", "1.2.3")
