"""UIDs and case ids: reproducible, distinct for different inputs, and without readable content."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydicom import Dataset

from cbmir.card import Calibration, ModelCard
from cbmir.runtime.dicom_output import answers_fingerprint, result_uid
from cbmir.runtime.dicom_output.identifiers import part_uid, series_uid
from cbmir.runtime.dicom_output.source import SourceImage


def source(patient: str = "P", study: str = "1.2.3", instance: str = "1.2.4") -> SourceImage:
    header = Dataset()
    header.PatientID, header.StudyInstanceUID, header.SOPInstanceUID = patient, study, instance
    return SourceImage(header, (), 1, "CR", "")


def test_uids_are_derived_from_what_they_identify() -> None:
    """They also depend on patient and study: if an archive corrects these, it gets a separate result."""
    uid = result_uid(source(), "aa", "abc", "sr")
    assert uid == result_uid(source(), "aa", "abc", "sr") == "2.25.7913788055758722148799706716505582928"
    others = [
        (source(patient="Q"), "aa", "abc", "sr"),
        (source(study="1.2.2"), "aa", "abc", "sr"),
        (source(instance="1.2.5"), "aa", "abc", "sr"),
        (source(), "ab", "abc", "sr"),
        (source(), "aa", "abd", "sr"),
        (source(), "aa", "abc", "sc"),
        (source(patient="P1.2.3", study=""), "aa", "abc", "sr"),
    ]
    made = {uid, *(result_uid(*one) for one in others), series_uid("1.2.3", "sr"), part_uid("1.2.3", "abc", "sr")}
    assert len(made) == len(others) + 3
    assert all(re.fullmatch(r"2\.25\.[1-9]\d{30,38}", one) and len(one) <= 64 for one in made)


@pytest.mark.parametrize(
    "changes",
    [
        {"thresholds": (0.5, 0.8, None)},
        {"calibration": (Calibration(4.0, -2.0), None, None)},
        {"fingerprint": "tiny-1"},
        {"fingerprint": "tiny-0-int8-1"},
        {"training": {"weights_fingerprint": "distilled"}},
        {"encoder": "other"},
    ],
)
def test_the_fingerprint_of_answers_changes_with_their_inputs(tiny_card: ModelCard, changes: Any) -> None:
    assert answers_fingerprint(tiny_card.with_(**changes)) != answers_fingerprint(tiny_card)


@pytest.mark.parametrize(
    "changes", [{"precision": "float16"}, {"metrics": {"AUC": 1}}, {"versions": {"cbmir": "9"}}, {"licence": "MIT"}]
)
def test_the_fingerprint_of_answers_ignores_other_fields(tiny_card: ModelCard, changes: Any) -> None:
    found = answers_fingerprint(tiny_card.with_(**changes))
    assert found == answers_fingerprint(tiny_card)
    assert re.fullmatch("[0-9a-f]{32}", found)
