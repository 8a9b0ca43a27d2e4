"""Patient matching: an id alone does not identify a patient, and two patients must never be treated as one."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from cbmir.runtime.dicom_output.content import _is_same_patient
from cbmir.runtime.dicom_output.source import SourceImage

JANE = {"PatientID": "0", "PatientName": "DOE^JANE", "PatientBirthDate": "19610417", "IssuerOfPatientID": "HOSPITAL"}
NO_ISSUER = {**JANE, "IssuerOfPatientID": None}
UNKNOWN_DAY = {**JANE, "PatientBirthDate": "19000101"}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (JANE, {}, True),
        (NO_ISSUER, {}, True),
        (UNKNOWN_DAY, {}, True),
        (JANE, {"PatientName": "SMITH^JANE"}, True),
        (NO_ISSUER, {"PatientName": "SMITH^ANN"}, False),
        (JANE, {"PatientName": "SMITH^ANN", "IssuerOfPatientID": None}, False),
        (UNKNOWN_DAY, {"PatientName": "SMITH^ANN"}, False),
        (UNKNOWN_DAY, {"PatientName": None}, False),
        (NO_ISSUER, {"PatientName": None}, True),
        (JANE, {"PatientBirthDate": "19610418"}, False),
        (JANE, {"IssuerOfPatientID": "ELSEWHERE"}, False),
        (JANE, {"PatientSex": "M"}, False),
        (JANE, {"PatientID": "1"}, False),
    ],
)
def test_is_same_patient(
    first: dict[str, str | None], second: dict[str, str | None], same: bool, make_radiograph: Callable[..., bytes]
) -> None:
    one, other = (SourceImage.read(io.BytesIO(make_radiograph(**tags))) for tags in (first, first | second))
    assert _is_same_patient(one, other) is same
    assert _is_same_patient(other, one) is same
