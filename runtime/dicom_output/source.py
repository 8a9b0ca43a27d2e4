"""The analysed image as results refer to it: its patient, its study, and its own UIDs.

A value that violates the standard is left empty in the results, with a warning that names the tag. Only the UIDs are
required.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import BinaryIO, Self

from pydicom import Dataset, config
from pydicom.multival import MultiValue
from pydicom.valuerep import validate_value

from cbmir.errors import DamagedImageError, DicomImageError, NotAnImageError
from cbmir.runtime.imaging.dicom_header import UIDS, is_uid, pydicom_unlogged, read_errors, tag_name
from cbmir.runtime.imaging.dicom_reader import is_dicom, parse_header
from cbmir.runtime.imaging.radiograph import collected_warnings

#: Type 2 in every result (PS3.3 C.7.1.1, C.7.2.1): present, but may be empty.
NAMES = ("PatientName", "ReferringPhysicianName")
_PRESENT = (
    *NAMES, "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber",
)  # fmt: skip
#: Type 3: copied if the image has it.
OPTIONAL = ("IssuerOfPatientID", "StudyDescription", "TimezoneOffsetFromUTC")
_WORDS = {"PatientSex": ("M", "F", "O"), "BurnedInAnnotation": ("YES", "NO")}
UTF_8 = "ISO_IR 192"


@dataclass(frozen=True, eq=False)
class SourceImage:
    """The parts of a DICOM image's header that results need."""

    header: Dataset  # the four UIDs, the patient and the study, in UTF-8 and valid
    warnings: tuple[str, ...]  # they do not quote values
    number: int  # Instance Number, or 1
    modality: str  # OT (other) if the image has none
    burned_in: str  # YES or NO: whether the pixels name the patient; empty if the image does not say

    @classmethod
    def read(cls, stream: BinaryIO) -> Self:
        """Read a DICOM file. Raises NotAnImageError, DamagedImageError, and DicomImageError if a UID is missing."""
        if not is_dicom(stream.read(132)):
            raise NotAnImageError("expected a DICOM file, since results refer to one; found another format")
        stream.seek(0)
        with collected_warnings() as collected, pydicom_unlogged():
            try:
                found = parse_header(stream, "image")
            except read_errors() as error:
                name = type(error).__name__  # its message may quote a tag
                raise DamagedImageError(f"the DICOM file is damaged or cut off ({name})") from None
            header, warnings = Dataset(), []
            header.SpecificCharacterSet = UTF_8
            for keyword in UIDS:
                uid = _text(found, keyword, collected)
                if not uid or not is_uid(uid):
                    raise DicomImageError(f"expected {tag_name(keyword)} in the image, found no valid one: no result "
                                          "can refer to it", keyword)  # fmt: skip
                setattr(header, keyword, uid)
            for keyword in (*_PRESENT, *OPTIONAL):
                text = _text(found, keyword, collected)
                if text is None:
                    warnings.append(f"{tag_name(keyword)} of the image is not valid in DICOM: left out of the results")
                if text or keyword in _PRESENT:
                    setattr(header, keyword, text or "")
            words = ("InstanceNumber", "Modality", "BurnedInAnnotation")
            number, modality, burned_in = (_text(found, keyword, collected) for keyword in words)
        if burned_in == "YES":
            warnings.append(f"{tag_name('BurnedInAnnotation')} of the image is YES: its pixels may name the patient")
        return cls(header, tuple(warnings), max(1, int(number or 1)), modality or "OT", burned_in or "")

    @property
    def uid(self) -> str:
        """The SOP Instance UID."""
        return str(self.header.SOPInstanceUID)

    @property
    def study_uid(self) -> str:
        return str(self.header.StudyInstanceUID)

    @property
    def sop_class(self) -> str:
        return str(self.header.SOPClassUID)

    @property
    def patient_id(self) -> str:
        return str(self.header.PatientID)

    @property
    def day(self) -> str:
        """The study's date, YYYY-MM-DD or empty."""
        day = str(self.header.StudyDate)
        return f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else ""

    @property
    def reference(self) -> tuple[str, str, str, str]:
        """Study, series, SOP class and SOP instance, for `objects.references`."""
        return self.study_uid, str(self.header.SeriesInstanceUID), self.sop_class, self.uid

    def local(self, moment: datetime) -> datetime:
        """Convert a time to the image's time zone, which its results state too; without one, to this machine's."""
        offset = str(self.header.get("TimezoneOffsetFromUTC", ""))
        if not offset:
            return moment.astimezone()
        ahead = timedelta(hours=int(offset[1:3]), minutes=int(offset[3:]))
        return moment.astimezone(timezone(-ahead if offset[0] == "-" else ahead))


def _text(found: Dataset, keyword: str, collected: list[str]) -> str | None:
    """Return a tag's single value as text; empty if it has no value, None if it violates the standard."""
    before = len(collected)
    try:
        value = found.get(keyword)
        if isinstance(value, MultiValue):  # these tags may only have one
            return None
        text = "" if value is None else str(value).strip(" \0")
        if keyword.endswith("Date") and re.fullmatch(r"\d{4}\.\d\d\.\d\d", text):
            text = text.replace(".", "")  # ACR-NEMA's format, which PS3.5 6.2 lets readers accept
        if keyword.endswith("Time") and re.fullmatch(r"\d\d(:\d\d){1,2}(\.\d+)?", text):
            text = text.replace(":", "")
        if not text or keyword in UIDS:  # devices write UIDs with leading zeros, which PS3.5 9.1 forbids
            return text
        validate_value(found[keyword].VR, text, config.RAISE)
        has_character_set = bool(found.get("SpecificCharacterSet"))
    except read_errors():
        return None
    # A new warning means that pydicom does not know the character set, or that it does not fit the bytes.
    return text if len(collected) == before and _is_fit(keyword, text, has_character_set) else None


def _is_fit(keyword: str, text: str, has_character_set: bool) -> bool:
    """Make the checks that `validate_value` leaves out."""
    if keyword in _WORDS:
        return text in _WORDS[keyword]
    if keyword == "TimezoneOffsetFromUTC":
        return re.fullmatch(r"[+-](0\d|1[0-4])[0-5]\d", text) is not None
    if keyword.endswith(("Date", "Time")):
        return "-" not in text  # ranges are for queries
    has_control = any(unicodedata.category(character) == "Cc" for character in text)
    return not has_control and (has_character_set or text.isascii())  # else the meaning of other bytes is unknown
