"""Logs and audit trail: no patient name from any part of a request, and the expected fields."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cbmir.runtime.logs import JsonFormatter
from dicom_files import make_dicom
from http_service import MakeClient

NAME = "PLANTED_NAME"  # also valid in a code tag


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that any logger logs at any level, in the service's format."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    handler.setFormatter(JsonFormatter())
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.fixture
def audited(make_client: MakeClient, tmp_path: Path) -> TestClient:
    return make_client(audit=tmp_path / "audit.jsonl", share=frozenset({"reports"}))


def test_a_planted_name_appears_nowhere(audited: TestClient, tmp_path: Path, log: io.StringIO) -> None:
    named = make_dicom(
        PatientName=NAME, PatientID=NAME, InstitutionName=NAME, StudyDescription=NAME, SOPInstanceUID="1.2.3.4.5"
    )
    odd = [make_dicom(PatientName=NAME, **{tag: NAME}) for tag in ("Modality", "BodyPartExamined", "ViewPosition")]
    headers = {"Patient-ID": NAME, "Content-Disposition": f'attachment; filename="{NAME}.dcm"', "User-Agent": NAME}
    answers = [
        audited.post("/v1/analyze", content=named, headers=headers),
        *(audited.post("/v1/analyze", content=one, headers=headers) for one in odd),
        audited.post("/v1/analyze", content=named[:-100], headers=headers),
        audited.post("/v1/analyze", params={"where": NAME}, content=named),
        audited.post("/v1/analyze", params={NAME: NAME, "k": NAME}, content=named),
        audited.post(f"/v1/{NAME}", content=named),
        audited.get(f"/v1/cases/{NAME}/thumbnail"),
        audited.post("/v1/search", json={"case": NAME, "patient_id": NAME}),
        audited.post("/v1/search", content=NAME.encode()),
        audited.post("/v1/embed", content=NAME.encode(), headers=headers),
        audited.request(NAME, "/v1/embed"),
    ]
    statuses = [one.status_code for one in answers]
    assert statuses == [200, 422, 200, 200, 422, 422, 422, 404, 422, 422, 422, 415, 405]
    logged, trail = log.getvalue(), (tmp_path / "audit.jsonl").read_text()
    assert len(trail.splitlines()) == len(answers)
    for text in (logged, trail, audited.get("/metrics").text):
        for part in ("PLANTED", "1.2.3.4.5"):
            assert part not in text
    for answer in (answers[0], *answers[2:4]):  # unknown words give a warning that does not quote them
        assert "PLANTED" not in answer.text
        assert "patient_" not in answer.text
        assert "1.2.3" not in answer.text


def test_content_of_the_audit_trail(audited: TestClient, tmp_path: Path, png: bytes) -> None:
    answer = audited.post("/v1/analyze", params={"k": 2}, content=png)
    audited.post("/v1/embed", content=b"nothing")
    audited.get("/health")
    first, second = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert first["request"] == answer.headers["x-request-id"]
    assert (first["route"], first["status"], first["problem"]) == ("/v1/analyze", 200, "")
    assert first["sha256"] == hashlib.sha256(png).hexdigest()
    assert first["cases"] == [one["id"] for one in answer.json()["neighbours"]]
    assert first["model"] == answer.json()["model"]["fingerprint"]
    assert first["gallery_generation"] >= 1
    assert first["time"].endswith("+00:00")
    assert (second["route"], second["status"], second["problem"]) == ("/v1/embed", 415, "not-an-image")
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_refused_clients_are_not_in_the_audit_trail(make_client: MakeClient, tmp_path: Path, log: io.StringIO) -> None:
    client = make_client(audit=tmp_path / "audit.jsonl", token="a-token-of-thirty-two-characters")
    assert client.get("/v1/about").status_code == 401
    assert (tmp_path / "audit.jsonl").read_text() == ""
    assert '"problem": "token"' in log.getvalue()


def test_the_audit_trail_may_be_rotated(audited: TestClient, tmp_path: Path) -> None:
    audited.get("/v1/about")
    (tmp_path / "audit.jsonl").rename(tmp_path / "old")
    audited.get("/v1/about")
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1


def test_requests_that_cannot_be_audited_are_refused(audited: TestClient, tmp_path: Path, png: bytes) -> None:
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    answer = audited.post("/v1/analyze", content=png)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cbmir:problem:audit")
    assert "findings" not in answer.text
    assert answer.headers["retry-after"]
    assert audited.get("/health").status_code == 200


def test_content_of_a_log_line(client: TestClient, png: bytes, log: io.StringIO) -> None:
    answer = client.post("/v1/analyze", content=png)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    (line,) = [one for one in lines if one["message"] == "answered"]
    assert (line["route"], line["status"], line["method"]) == ("/v1/analyze", 200, "POST")
    assert line["request"] == answer.headers["x-request-id"]
    assert line["ms"] > 0


def test_telemetry_does_not_include_the_query(client: TestClient, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI uses OpenTelemetry if it is configured."""
    trace = pytest.importorskip("opentelemetry.trace")
    told: list[Any] = []

    class Tracer(trace.NoOpTracer):  # type: ignore[misc, name-defined]
        def start_span(self, *arguments: Any, **more: Any) -> Any:
            told.append((arguments, more))
            return super().start_span(*arguments, **more)

    class Provider(trace.TracerProvider):  # type: ignore[misc, name-defined]
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            return Tracer()

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Provider())
    client.post("/v1/analyze", params={"where": NAME}, content=png)
    assert not told


def test_messages_of_libraries_and_exceptions_are_not_shown(log: io.StringIO) -> None:
    logging.getLogger("pydicom").error("cannot read %s", NAME)
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(NAME, stacklevel=1)
    finally:
        logging.captureWarnings(False)
    try:
        raise ValueError(NAME)
    except ValueError:
        logging.getLogger("cbmir").exception("failed")
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert "PLANTED" not in log.getvalue()
    assert [one["logger"] for one in lines] == ["pydicom", "py.warnings", "cbmir"]
    assert lines[2]["error"] == "ValueError"
    assert "test_privacy.py" in lines[2]["at"][-1]
