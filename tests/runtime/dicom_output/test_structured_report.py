"""The SR, written, read back with pydicom's and highdicom's tools, and compared with the analysis."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import Dataset, dcmread
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

from cbmir.runtime import Analysis, Finder
from cbmir.runtime.dicom_output import answers_fingerprint, make_results, result_uid
from cbmir.runtime.dicom_output.identifiers import SCHEME_UID, pixels_digest, series_uid
from cbmir.runtime.dicom_output.source import SourceImage
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.results import most_probable_first
from dicom_files import file_bytes, make_dicom, reread

highdicom_sr = pytest.importorskip("highdicom.sr")
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def analysis(clinic: Any) -> Analysis:
    found: Analysis = clinic.finder.analyze(clinic.image, 5)
    return found


@pytest.fixture(scope="module")
def report(clinic: Any, analysis: Analysis) -> Dataset:
    sr = make_results(clinic.image, analysis, clinic.finder).sr
    assert sr is not None
    return reread(sr)


def groups(report: Dataset) -> list[Any]:
    tree = highdicom_sr.Comprehensive3DSR.from_dataset(report).content
    found: list[Any] = tree.get_image_measurement_groups()
    return found


def test_it_belongs_to_the_images_study(clinic: Any, report: Dataset) -> None:
    image = dcmread(io.BytesIO(clinic.image))
    for keyword in (
        "StudyInstanceUID", "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime",
        "StudyID", "AccessionNumber", "ReferringPhysicianName",
    ):  # fmt: skip
        assert report[keyword].value == image[keyword].value, keyword
    assert report.SeriesInstanceUID == series_uid(image.StudyInstanceUID, "sr") != image.SeriesInstanceUID
    assert (report.Modality, report.Manufacturer, report.ManufacturerModelName) == ("SR", "cbmir", "cbmir")
    assert (report.CompletionFlag, report.VerificationFlag, report.PreliminaryFlag) == (
        "COMPLETE", "UNVERIFIED", "PRELIMINARY",
    )  # fmt: skip
    assert "VerifyingObserverSequence" not in report and "PredecessorDocumentsSequence" not in report
    (study,) = report.CurrentRequestedProcedureEvidenceSequence
    (series,) = study.ReferencedSeriesSequence
    (instance,) = series.ReferencedSOPSequence
    assert study.StudyInstanceUID == image.StudyInstanceUID
    assert series.SeriesInstanceUID == image.SeriesInstanceUID
    assert (instance.ReferencedSOPClassUID, instance.ReferencedSOPInstanceUID) == (
        image.SOPClassUID,
        image.SOPInstanceUID,
    )


def test_a_second_run_has_the_same_uids(clinic: Any, report: Dataset) -> None:
    again = clinic.results().sr
    assert again.SOPInstanceUID == report.SOPInstanceUID
    assert again.SeriesInstanceUID == report.SeriesInstanceUID
    fingerprint = answers_fingerprint(clinic.finder.card)
    source = SourceImage.read(io.BytesIO(clinic.image))
    assert report.SOPInstanceUID == result_uid(
        source, pixels_digest(clinic.finder.read(clinic.image)), fingerprint, "sr"
    )
    tracked = [[group.tracking_uid for group in groups(one)] for one in (report, reread(again))]
    assert tracked[0] == tracked[1][: len(tracked[0])]


def test_findings(clinic: Any, analysis: Analysis, report: Dataset) -> None:
    found = groups(report)[: len(analysis.findings)]
    codes_of = {
        "Effusion": Code("60046008", "SCT", "Pleural effusion"),
        "Mass": Code("309529002", "SCT", "Lung mass"),
    }
    for group, finding in zip(found, most_probable_first(analysis.findings), strict=True):
        assert group.tracking_identifier == finding.label
        expected = codes_of.get(finding.label)
        assert group.finding_type == expected if expected else group.finding_type.value
        measured = {one.name.value: (one.value, one.unit.value) for one in group.get_measurements()}
        assert measured.pop("score") == (pytest.approx(finding.score, abs=1e-6), "1")
        if finding.probability is not None:
            assert measured.pop("111012") == (pytest.approx(100 * finding.probability, abs=1e-6), "%")
        if finding.threshold is not None:
            assert measured.pop("122411") == (pytest.approx(finding.threshold), "1")
        assert not measured
        (evaluation,) = group.get_qualitative_evaluations()
        verdict = {True: "373066001", False: "373067005", None: "373068000"}[finding.predicted]
        assert (evaluation.name.value, evaluation.value.value) == ("predicted", verdict)
        (image,) = group.source_images
        assert image.referenced_sop_instance_uid == "1.2.826.0.1.1.11.3"


def test_similar_images_are_case_ids(clinic: Any, analysis: Analysis, report: Dataset) -> None:
    found = groups(report)[len(analysis.findings) :]
    assert [group.tracking_identifier for group in found] == [
        clinic.finder.gallery.case_id(one.id) for one in analysis.neighbours
    ]
    for group, neighbour in zip(found, analysis.neighbours, strict=True):
        assert group.finding_type.value == "similar-image"
        (distance,) = group.get_measurements()
        assert distance.value == pytest.approx(neighbour.distance, abs=1e-6)
        labels = [(one.name.value, one.value.meaning) for one in group.get_qualitative_evaluations()]
        assert labels == [("label", "Pleural effusion"), ("uncertain-label", "Nodule of lung")]
        assert (neighbour.labels, neighbour.uncertain) == (("Effusion", "Nodule"), ("Nodule",))


def test_the_algorithm(clinic: Any, report: Dataset) -> None:
    group = highdicom_sr.Comprehensive3DSR.from_dataset(report).content.get_image_measurement_groups()[0]
    of = {}
    for item in group[0].ContentSequence:
        if item.ValueType == "TEXT":
            of.setdefault(item.ConceptNameCodeSequence[0].CodeValue, []).append(item.TextValue)
    fingerprint = answers_fingerprint(clinic.finder.card)
    assert of["111001"] == ["cbmir chest X-ray findings and retrieval"]
    assert of["111003"][0].endswith(f"+{fingerprint[:12]}")
    (parameters,) = of["111002"]
    assert "; operating point: balanced; " in parameters
    assert "; embedding space: tiny-0; " in parameters and "; engine: onnxruntime " in parameters
    (device,) = highdicom_sr.Comprehensive3DSR.from_dataset(report).content.get_observer_contexts()
    assert device.observer_type == codes.DCM.Device
    assert device.observer_identifying_attributes.serial_number == fingerprint


def comments(report: Dataset) -> list[str]:
    named = [one for one in report.ContentSequence if one.ValueType == "TEXT"]
    return [one.TextValue for one in named if one.ConceptNameCodeSequence[0].CodeValue == "121106"]


def test_it_states_its_intended_use(report: Dataset) -> None:
    assert comments(report)[0] == "For research, not for diagnosis. cbmir is not a medical device."
    assert "for research, not for diagnosis" in report.SeriesDescription


def test_it_contains_warnings(clinic: Any, make_radiograph: Make) -> None:
    results = clinic.results(make_radiograph(ViewPosition="", PatientSex="X"))
    assert any("ViewPosition" in text for text in results.warnings)
    assert any("PatientSex" in text and "left out" in text for text in results.warnings)
    assert comments(reread(results.sr))[1:] == list(results.warnings)


def test_warnings_of_the_picture_check_come_first(clinic: Any, inverted_chest: NDArray[np.uint8]) -> None:
    results = clinic.results(make_dicom(inverted_chest.astype(np.uint16) * 16))
    assert comments(reread(results.sr))[1] == SENTENCES["inverted"]
    assert results.warnings[0] == SENTENCES["inverted"]


def test_private_codes_are_declared(report: Dataset) -> None:
    (scheme,) = [one for one in report.CodingSchemeIdentificationSequence if one.CodingSchemeDesignator == "99CBMIR"]
    assert scheme.CodingSchemeUID == SCHEME_UID


def test_a_new_model_names_its_predecessor(
    clinic: Any, report: Dataset, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    newer = make_tiny_model(tmp_path / "newer.onnx", thresholds=(0.4, 0.8, 0.1))
    with Finder.open(newer, clinic.folder / "gallery", threads=1) as finder:
        results = make_results(
            clinic.image, finder.analyze(clinic.image), finder, predecessor=str(report.SOPInstanceUID)
        )
    assert results.sr is not None and results.sr.SOPInstanceUID != report.SOPInstanceUID
    (study,) = results.sr.PredecessorDocumentsSequence
    (series,) = study.ReferencedSeriesSequence
    (instance,) = series.ReferencedSOPSequence
    assert (study.StudyInstanceUID, series.SeriesInstanceUID) == (report.StudyInstanceUID, report.SeriesInstanceUID)
    assert (instance.ReferencedSOPClassUID, instance.ReferencedSOPInstanceUID) == (
        report.SOPClassUID, report.SOPInstanceUID,
    )  # fmt: skip


def test_a_report_is_not_its_own_predecessor(clinic: Any, report: Dataset) -> None:
    again = clinic.results(predecessor=str(report.SOPInstanceUID)).sr
    assert "PredecessorDocumentsSequence" not in again


def test_times_are_in_the_images_time_zone(clinic: Any, make_radiograph: Make) -> None:
    report = clinic.results(make_radiograph(TimezoneOffsetFromUTC="+1345")).sr
    assert report.TimezoneOffsetFromUTC == "+1345"
    assert (report.InstanceCreationDate, report.InstanceCreationTime) == (report.ContentDate, report.ContentTime)
    assert "TimezoneOffsetFromUTC" not in clinic.results().sr


@pytest.mark.parametrize(
    "sop_class",
    ["1.2.840.10008.5.1.4.1.1.1.1", "1.2.840.10008.5.1.4.1.1.7", "1.2.840.113619.4.26"],
)
def test_sources_of_other_classes(clinic: Any, make_radiograph: Make, sop_class: str) -> None:
    """They are Digital X-ray for presentation, Secondary Capture, and a private class."""
    report = reread(clinic.results(make_radiograph(SOPClassUID=sop_class)).sr)
    (study,) = report.CurrentRequestedProcedureEvidenceSequence
    assert study.ReferencedSeriesSequence[0].ReferencedSOPSequence[0].ReferencedSOPClassUID == sop_class
    assert groups(report)[0].source_images[0].referenced_sop_class_uid == sop_class


def test_another_image_with_the_same_uid_has_its_own_report(clinic: Any, make_radiograph: Any) -> None:
    """A faulty sender reuses a UID: neither report replaces the other. The same pixels with a new header do."""
    image, other = dcmread(io.BytesIO(clinic.image)), dcmread(io.BytesIO(clinic.image))
    other.PixelData = bytes(reversed(other.PixelData))
    image.StudyDescription = "corrected"
    uids = [clinic.results(file_bytes(each)).sr.SOPInstanceUID for each in (image, other)]
    assert uids[0] == clinic.results().sr.SOPInstanceUID != uids[1]
