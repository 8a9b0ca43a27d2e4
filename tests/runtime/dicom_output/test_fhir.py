"""The FHIR Bundle: valid resources, resolvable references, values of the analysis, and stable ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cbmir.runtime.results import most_probable_first

pytest.importorskip("highdicom")
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def bundle(clinic: Any) -> dict[str, Any]:
    found: dict[str, Any] = clinic.results(kinds=["fhir"]).fhir
    return found


def of_kind(bundle: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [entry["resource"] for entry in bundle["entry"] if entry["resource"]["resourceType"] == kind]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("reference"), str):
            yield value["reference"]
        for part in value.values():
            yield from references(part)
    elif isinstance(value, list):
        for part in value:
            yield from references(part)


@pytest.mark.parametrize(
    "tags", [{}, {"PatientID": ""}, {"StudyDate": "", "Modality": None}, {"TimezoneOffsetFromUTC": "-0400"}]
)
def test_resources_are_valid(clinic: Any, make_radiograph: Make, tags: dict[str, Any]) -> None:
    """Validate with the definitions of R4B, which equal those of R4 for these resources."""
    models = pytest.importorskip("fhir.resources.R4B.bundle")
    bundle = clinic.results(make_radiograph(**tags), kinds=["fhir"]).fhir
    text = json.dumps(bundle, ensure_ascii=False, allow_nan=False)
    parsed = models.Bundle.model_validate_json(text)
    assert json.loads(parsed.model_dump_json(exclude_none=True)) == json.loads(text.replace("+00:00", "Z"))


def test_references_resolve_to_entries(bundle: dict[str, Any]) -> None:
    urls = [entry["fullUrl"] for entry in bundle["entry"]]
    assert len(set(urls)) == len(urls) == 1 + 3 + 1 + 1 + 1
    found = set(references(bundle))
    assert found <= set(urls)
    assert found == set(urls[1:])  # nothing refers to the report, everything else is referred to


def test_the_report(clinic: Any, bundle: dict[str, Any]) -> None:
    (report,) = of_kind(bundle, "DiagnosticReport")
    assert report["status"] == "preliminary"
    assert report["conclusion"].startswith(
        "For research, not for diagnosis. cbmir is not a medical device.\nScores over"
    )
    assert report["subject"]["identifier"]["value"] == "CLINIC-0001"
    assert "assigner" not in report["subject"]["identifier"]
    assert "Muster" not in json.dumps(bundle)  # the patient is only referred to by identifier


def test_findings(clinic: Any, bundle: dict[str, Any]) -> None:
    analysis = clinic.finder.analyze(clinic.image)
    observations = of_kind(bundle, "Observation")[:3]
    for one, finding in zip(observations, most_probable_first(analysis.findings), strict=True):
        assert one["status"] == "preliminary" and "For research" in one["note"][0]["text"]
        assert one["code"]["text"] == finding.label
        verdict = {True: "Yes", False: "No", None: "Undetermined"}[finding.predicted]
        assert one["valueCodeableConcept"]["coding"][0]["display"] == verdict
        assert one["valueCodeableConcept"]["text"] == f"Score exceeds the threshold: {verdict}"
        values = {part["code"]["coding"][0]["code"]: part["valueQuantity"] for part in one["component"]}
        assert values["score"]["value"] == pytest.approx(finding.score, abs=1e-6)
        assert ("111012" in values) == (finding.probability is not None)
        if finding.probability is not None:
            assert values["111012"] == {
                "value": round(100 * finding.probability, 6), "unit": "Percent",
                "system": "http://unitsofmeasure.org", "code": "%",
            }  # fmt: skip
        assert ("122411" in values) == (finding.threshold is not None)
    assert observations[0]["code"]["coding"] == [
        {"system": "http://snomed.info/sct", "code": "60046008", "display": "Pleural effusion"}
    ]


def test_similar_images_are_case_ids(clinic: Any, bundle: dict[str, Any]) -> None:
    alike = of_kind(bundle, "Observation")[3]
    neighbours = clinic.finder.analyze(clinic.image).neighbours
    for part, one in zip(alike["component"], neighbours, strict=True):
        case = clinic.finder.gallery.case_id(one.id)
        assert part["valueString"] == f"{case}: distance {one.distance:.3f}; Effusion, Nodule (uncertain)"


def test_the_study(clinic: Any, make_radiograph: Make, bundle: dict[str, Any]) -> None:
    (study,) = of_kind(bundle, "ImagingStudy")
    assert study["identifier"] == [{"system": "urn:dicom:uid", "value": "urn:oid:1.2.826.0.1.1.11.1"}]
    assert study["started"] == "2021-03-04"
    (series,) = study["series"]
    assert (series["uid"], series["modality"]["code"]) == ("1.2.826.0.1.1.11.2", "CR")
    assert series["instance"][0]["uid"] == "1.2.826.0.1.1.11.3"
    timed = clinic.results(make_radiograph(TimezoneOffsetFromUTC="-0400"), kinds=["fhir"]).fhir
    assert of_kind(timed, "ImagingStudy")[0]["started"] == "2021-03-04T10:11:12-04:00"
    assert timed["timestamp"].endswith("-04:00")


def test_a_second_run_replaces_the_first(clinic: Any, bundle: dict[str, Any]) -> None:
    again = clinic.results(kinds=["fhir"]).fhir
    for first, second in zip(bundle["entry"], again["entry"], strict=True):
        assert first["fullUrl"] == second["fullUrl"]
        assert first["request"] == second["request"]
    by_kind = {entry["resource"]["resourceType"]: entry["request"] for entry in bundle["entry"]}
    assert by_kind["DiagnosticReport"]["method"] == "PUT"
    assert by_kind["DiagnosticReport"]["url"].startswith(
        "DiagnosticReport?identifier=urn%3Aietf%3Arfc%3A3986%7Curn%3Aoid%3A2.25."
    )
    assert by_kind["ImagingStudy"] == {
        "method": "POST", "url": "ImagingStudy",
        "ifNoneExist": "identifier=urn%3Adicom%3Auid%7Curn%3Aoid%3A1.2.826.0.1.1.11.1",
    }  # fmt: skip
