"""FHIR R4 (4.0.1): a transaction Bundle of DiagnosticReport, Observation, ImagingStudy and Device.

Each resource has an identifier that a second run reproduces, and is stored by a conditional request with it. So a
server that receives the Bundle twice stores it once. The patient is referenced by the image's Patient ID.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from cbmir.labels import Code, spelled
from cbmir.runtime.dicom_output import identifiers as own
from cbmir.runtime.dicom_output.content import ALGORITHM, MANUFACTURER, Content, SimilarImage
from cbmir.runtime.dicom_output.source import SourceImage
from cbmir.runtime.results import Finding

_URI = "urn:ietf:rfc:3986"  # the system of identifiers that are URIs
_TERMS = "http://terminology.hl7.org/CodeSystem"
_NAMESPACE = uuid.UUID("1f2d230f-6a9e-4849-b2a1-1beb3d1c78c9")

Resource = dict[str, Any]


def bundle(content: Content) -> Resource:
    """Make the Bundle of an analysis, as plain values for JSON."""
    uid = content.uid("fhir")
    device, study = _device(content), _imaging_study(content)
    # Shared by all observations, which differ in identifier, code and value.
    shared = {
        "category": [_category("observation-category", "imaging", "Imaging")],
        "device": _reference(device),
        "derivedFrom": [_reference(study)],
        "note": [{"text": own.DISCLAIMER}],
    }
    answers = {own.part_uid(uid, "finding", one.label): _finding(one) for one in content.findings}
    if content.similar_images:
        answers[own.part_uid(uid, "similar-images")] = _similar_images(content.similar_images)
    observations = [_made(content, "Observation", part) | shared | answer for part, answer in answers.items()]
    over = [spelled(one.label) for one in content.findings if one.predicted]
    summary = [f"Scores over the model's {content.operating_point} thresholds: {', '.join(over) or 'none'}."]
    code = {"system": "http://loinc.org", "code": "18748-4", "display": "Diagnostic imaging study"}
    report = _made(content, "DiagnosticReport", uid) | {
        "category": [_category("v2-0074", "RAD", "Radiology")],
        "code": {"coding": [code], "text": ALGORITHM},
        "result": [_reference(one) for one in observations],
        "imagingStudy": [_reference(study)],
        "conclusion": "\n".join((own.DISCLAIMER, *(summary if content.findings else ()), *content.warnings)),
    }
    return {
        "resourceType": "Bundle",
        "type": "transaction",
        "timestamp": report["issued"],
        "entry": [_entry(resource) for resource in (report, *observations, study, device)],
    }


def _made(content: Content, kind: str, uid: str) -> Resource:
    """Make the elements that a report and an observation share."""
    return {
        "resourceType": kind,
        "identifier": [_identifier(uid)],
        "status": "preliminary",
        **_subject(content),
        "issued": content.source.local(content.moment).isoformat(timespec="seconds"),
    }


def _finding(finding: Finding) -> Resource:
    """Make the value, whether the score exceeds the threshold, with probability, score and threshold as components."""
    verdict, components = own.predicted_code(finding.predicted), []
    for name, value, unit in own.measured(finding):
        quantity = {"value": round(value, 6), "unit": unit.meaning, "system": own.SYSTEMS["UCUM"], "code": unit.value}
        components.append({"code": _concept(name), "valueQuantity": quantity})
    return {
        "code": _concept(own.label_code(finding.label), finding.label),
        "valueCodeableConcept": _concept(verdict, f"{own.PREDICTED.meaning}: {verdict.meaning}"),
        "component": components,
    }


def _similar_images(similar_images: Sequence[SimilarImage]) -> Resource:
    """Make a component for each case: its opaque id, its distance, and its labels in words."""
    components = []
    for one in similar_images:
        text = f"{one.case}: distance {one.distance:.3f}; {one.words}"
        components.append({"code": _concept(own.SIMILAR_IMAGE, one.case), "valueString": text})
    return {"code": _concept(own.SIMILAR_IMAGE), "component": components}


def _imaging_study(content: Content) -> Resource:
    """Make the study with only the analysed series and instance; a server may know others."""
    source, started = content.source, _started(content.source)
    sop_class = {"system": _URI, "code": f"urn:oid:{source.sop_class}"}
    series = {
        "uid": str(source.header.SeriesInstanceUID),
        "modality": {"system": own.SYSTEMS["DCM"], "code": source.modality},
        "instance": [{"uid": source.uid, "sopClass": sop_class, "number": source.number}],
    }
    return {
        "resourceType": "ImagingStudy",
        "identifier": [{"system": "urn:dicom:uid", "value": f"urn:oid:{source.study_uid}"}],
        "status": "available",
        **(_subject(content) or {"subject": {"type": "Patient", "display": "not known"}}),
        **({"started": started} if started else {}),
        "series": [series],
    }


def _device(content: Content) -> Resource:
    return {
        "resourceType": "Device",
        "identifier": [_identifier(own.part_uid(content.fingerprint, "device"))],
        "status": "active",
        "manufacturer": MANUFACTURER,
        "deviceName": [{"name": ALGORITHM, "type": "model-name"}],
        "version": [{"value": content.version}],
        "property": [
            {"type": {"text": name}, "valueCode": [{"text": value}]}
            for name, value in (text.split(": ", 1) for text in content.parameters)
        ],
        "note": [{"text": own.DISCLAIMER}],
    }


def _entry(resource: Resource) -> Resource:
    """Make a conditional update by the identifier; a study is only created if the server does not have it."""
    system, value = (resource["identifier"][0][name] for name in ("system", "value"))
    asked = f"identifier={quote(f'{system}|{value}', safe='')}"
    kind = resource["resourceType"]
    request = {"method": "PUT", "url": f"{kind}?{asked}"}
    if kind == "ImagingStudy":
        request = {"method": "POST", "url": kind, "ifNoneExist": asked}
    return {"fullUrl": _url(resource), "resource": resource, "request": request}


def _reference(resource: Resource) -> Resource:
    return {"reference": _url(resource), "type": resource["resourceType"]}


def _url(resource: Resource) -> str:
    """Return the URL of a resource within the Bundle."""
    return f"urn:uuid:{uuid.uuid5(_NAMESPACE, resource['identifier'][0]['value'])}"


def _identifier(uid: str) -> Resource:
    return {"system": _URI, "value": f"urn:oid:{uid}"}


def _subject(content: Content) -> Resource:
    """Refer to the patient by identifier; empty if the image has no Patient ID."""
    header = content.source.header
    if not header.PatientID:
        return {}
    number = _category("v2-0203", "MR", "Medical record number")
    identifier: Resource = {"type": number, "value": str(header.PatientID)}
    if header.get("IssuerOfPatientID"):
        identifier["assigner"] = {"display": str(header.IssuerOfPatientID)}
    return {"subject": {"type": "Patient", "identifier": identifier}}


def _category(system: str, code: str, display: str) -> Resource:
    return {"coding": [{"system": f"{_TERMS}/{system}", "code": code, "display": display}]}


def _concept(code: Code, text: str = "") -> Resource:
    coding = {"system": own.SYSTEMS[code.scheme], "code": code.value, "display": code.meaning}
    return {"coding": [coding], "text": text or code.meaning}


def _started(source: SourceImage) -> str:
    """Return the study's date, with its time if the image states a time zone: FHIR has no time without a zone."""
    clock, zone = str(source.header.StudyTime), str(source.header.get("TimezoneOffsetFromUTC", ""))
    if not source.day or not zone or len(clock) < 6:
        return source.day
    return f"{source.day}T{clock[:2]}:{clock[2:4]}:{clock[4:6]}{zone[:3]}:{zone[3:]}"
