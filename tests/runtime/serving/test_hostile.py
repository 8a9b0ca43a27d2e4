"""No client error gives a 500, and every error is a problem+json with a type, for any input."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from pydicom.uid import DeflatedExplicitVRLittleEndian

from cbmir.errors import GalleryError, MissingDependencyError
from cbmir.runtime.serving.app import _utf8
from cbmir.runtime.serving.problems import _OF_ERROR, Problem
from dicom_files import make_dicom
from http_service import MakeClient


def kind_of(answer: Any) -> str:
    """Check that an answer is a complete problem, and return its kind."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    assert {"type", "title", "status", "detail", "instance"} <= set(body)
    assert body["status"] == answer.status_code
    assert body["instance"] == f"urn:uuid:{answer.headers['x-request-id']}"
    assert 400 <= answer.status_code < 500
    start, kind = body["type"].rsplit(":", 1)
    assert start == "urn:cbmir:problem"
    return str(kind)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A deflated DICOM file of 300 kB that inflates to 300 MB."""
    data = make_dicom(syntax=DeflatedExplicitVRLittleEndian)
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    start = data.index(b"1.2.840.10008.1.2.1.99") + 22
    zeros = b"".join(deflater.compress(bytes(2**20)) for _ in range(300))
    return data[:start] + zeros + deflater.flush()


def png_bomb(png: bytes) -> bytes:
    """A PNG whose header claims 100,000 x 100,000 pixels."""
    header = b"IHDR" + (100_000).to_bytes(4) * 2 + b"\x08\x00\x00\x00\x00"
    return png[:12] + header + zlib.crc32(header).to_bytes(4) + png[33:]


@pytest.mark.parametrize("route", ["/v1/analyze", "/v1/embed"])
@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("empty", 400, "empty"),
        ("text", 415, "not-an-image"),
        ("html as png", 415, "not-an-image"),
        ("zip", 415, "not-an-image"),
        ("a png signature alone", 422, "damaged-image"),
        ("cut-off png", 422, "damaged-image"),
        ("png bomb", 422, "image-size"),
        ("cut-off dicom", 422, "damaged-image"),
        ("deflated bomb", 422, "image-size"),
        ("a dicom header alone", 415, "not-an-image"),
        ("a CT", 422, "no-chest-radiograph"),
        ("blank", 422, "blank-image"),
        ("a lateral view", 422, "no-chest-radiograph"),
    ],
)
def test_uploads(route: str, name: str, status: int, kind: str, client: TestClient, png: bytes, bomb: bytes) -> None:
    data = {
        "empty": b"",
        "text": b"hello",
        "html as png": b"<html><script>alert(1)</script>",
        "zip": b"PK\x03\x04" + bytes(100),
        "a png signature alone": png[:8],
        "cut-off png": cut(png),
        "png bomb": png_bomb(png),
        "cut-off dicom": cut(make_dicom()),
        "deflated bomb": bomb,
        "a dicom header alone": bytes(128) + b"DICM",
        "a CT": make_dicom(Modality="CT"),
        "blank": make_dicom(np.full((64, 64), 7, np.uint16)),
        "a lateral view": make_dicom(ViewPosition="LATERAL"),
    }[name]
    answer = client.post(route, content=data, headers={"Content-Type": "image/png"})
    assert (answer.status_code, kind_of(answer)) == (status, kind)


@pytest.mark.parametrize(
    "query",
    ["k=-1", "k=1001", "k=99999999999999999999999", "k=1e999", "k=NaN", "k=one", "k=", "k=1.5", "k=%00", "k=%FF",
     "where=Nonsense", "where=(", "where=%22", "where=" + "(" * 100, "where=" + "x" * 3000, "where=%00",
     "where=%ED%A0%80", "where=not", "view=SIDEWAYS", "view=PA%00", "source=" + "x" * 3000, "since=yesterday",
     "since=2020-13-45", "since=2021-01-01&until=2020-01-01", "exact=maybe", "include_same_patient=2", "results=pdf",
     "results=sr", "wher=Effusion", "__proto__=1", "patient_id=DOE", "where=Nonsense&where=", "view=PA&view=LATERAL",
     "k=1&k=1"],
)  # fmt: skip
def test_parameters(query: str, client: TestClient, png: bytes) -> None:
    answer = client.post(f"/v1/analyze?{query}", content=png)
    assert answer.status_code == 422
    assert kind_of(answer) in ("parameters", "filter", "results")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"1", b'"x"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
        b'{"embedding": null}', b'{"embedding": []}', b'{"embedding": [1]}', b'{"embedding": "12345678"}',
        b'{"embedding": [0,0,0,0,0,0,0,0]}', b'{"embedding": [2,0,0,0,0,0,0,0]}',
        b'{"embedding": [NaN,0,0,0,0,0,0,0]}', b'{"embedding": [Infinity,0,0,0,0,0,0,0]}',
        b'{"embedding": [1e400,0,0,0,0,0,0,0]}', b'{"embedding": [1e300,1e300,0,0,0,0,0,0]}',
        b'{"embedding": [[1,0,0,0,0,0,0,0]]}', b'{"embedding": ["a",0,0,0,0,0,0,0]}',
        b'{"embedding": [true,null,0,0,0,0,0,0]}', b'{"embedding": {"0": 1}}',
        b'{"embedding": [' + b"0," * 70_000 + b"1]}",
        b'{"embedding": [1,0,0,0,0,0,0,0], "case": "case-0123456789abcdef"}',
        b'{"embedding": [1,0,0,0,0,0,0,0], "k": 100000}', b'{"embedding": [1,0,0,0,0,0,0,0], "k": -1}',
        b'{"embedding": [1,0,0,0,0,0,0,0], "k": ' + b"9" * 5000 + b"}",
        b'{"embedding": [1,0,0,0,0,0,0,0], "where": 7}', b'{"embedding": [1,0,0,0,0,0,0,0], "where": "(("}',
        b'{"embedding": [1,0,0,0,0,0,0,0], "where": "\\ud800"}', b'{"embedding": [1,0,0,0,0,0,0,0], "unknown": 1}',
        b'{"embedding": [1,0,0,0,0,0,0,0], "patient_id": "\\ud800"}',
        b'{"case": "../../etc/passwd"}', b'{"case": "case-0123456789ABCDEF"}', b'{"case": 7}',
        b'{"case": "case-0123456789abcdef\\n"}', b'{"embedding": [' + b'"",' * 65_000 + b"0]}",
        b"{" + b",".join(b'"%d": 0' % number for number in range(50_000)) + b"}",
    ],
)  # fmt: skip
def test_searches(body: bytes, client: TestClient) -> None:
    answer = client.post("/v1/search", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    kind_of(answer)
    assert len(answer.content) < 20_000


def test_search_parameters_in_the_url_are_not_ignored_silently(client: TestClient) -> None:
    answer = client.post("/v1/search?include_same_patient=1", json={"case": "case-0123456789abcdef"})
    assert (answer.status_code, kind_of(answer)) == (422, "parameters")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405), ("GET", "/docs", 404), ("GET", "/redoc", 404), ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/v1/cases/..%2f..%2fetc%2fpasswd/thumbnail", 404), ("GET", "/v1/cases/%00/thumbnail", 422),
        ("GET", "/v1/cases/case-0123456789abcdef%0a/thumbnail", 422), ("GET", "/v1/cases/%FF%FE/thumbnail", 422),
        ("GET", "/v1/cases/" + "a" * 5000 + "/thumbnail", 422), ("GET", "/v1/analyze", 405),
        ("DELETE", "/v1/search", 405), ("OPTIONS", "/v1/analyze", 405), ("BREW", "/v1/analyze", 405),
        ("POST", "/health", 405), ("GET", "/v1/analyze/", 404),
    ],
)  # fmt: skip
def test_paths_and_methods(method: str, path: str, status: int, client: TestClient) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    kind_of(answer)
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "media-type"),
        ({"Content-Type": "application/json"}, 415, "media-type"),
        ({"Content-Encoding": "gzip"}, 415, "encoding"),
        ({"Content-Encoding": "identity, br"}, 415, "encoding"),
        ({"Patient-ID": "x" * 300}, 422, "parameters"),
    ],
)
def test_headers(headers: dict[str, str], status: int, kind: str, client: TestClient, png: bytes) -> None:
    answer = client.post("/v1/analyze", content=png, headers=headers)
    assert (answer.status_code, kind_of(answer)) == (status, kind)


@pytest.mark.parametrize(
    "error",
    [MissingDependencyError("highdicom is not installed"), ImportError("cannot import name 'sr'")],
)
def test_reasons_for_missing_results_are_distinguished(
    error: Exception, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is a chest radiograph that could be analysed."""
    no_study = client.post("/v1/analyze?results=sr", content=make_dicom(StudyInstanceUID=None))
    assert (no_study.status_code, kind_of(no_study)) == (422, "results")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("cbmir.runtime.dicom_output.make_results", fail)
    missing = client.post("/v1/analyze?results=sr", content=make_dicom())
    assert (missing.status_code, missing.json()["type"]) == (501, "urn:cbmir:problem:no-results")


def test_messages_of_the_gallery_are_not_shown(client: TestClient, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise GalleryError("/srv/secret: expected the id of an entry of this gallery, found 'DOE^JOHN'")

    monkeypatch.setattr("cbmir.runtime.finder.Finder.analyze", fail)
    answer = client.post("/v1/analyze", content=png)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cbmir:problem:gallery-unavailable")
    assert "DOE" not in answer.text
    assert "secret" not in answer.text


def test_every_kind_of_problem_is_in_the_docs() -> None:
    """The docs also list no other kinds."""
    root = Path(__file__).parents[3]
    table = (root / "docs/http.md").read_text("utf-8").partition("| Status |")[2].partition("\n\n")[0]
    told = {kind for row in table.splitlines()[2:] for kind in re.findall("`([a-z-]+)`", row.split("|")[2])}
    sources = [path.read_text("utf-8") for path in (root / "runtime/serving").glob("*.py")]
    raised = {kind for text in sources for kind in re.findall(r'Problem\(\s*\d{3}, "([a-z-]+)"', text)}
    assert told == raised | {kind for _, _, kind in _OF_ERROR} | {"no-such-route", "no-such-method", "http"}


def test_a_header_that_is_not_utf8_is_not_read_as_another_patient() -> None:
    """Build the header as Starlette does, since the test client cannot send such bytes."""
    assert _utf8("M\u00c3\u00bcller") == "Müller"
    with pytest.raises(Problem, match="UTF-8") as refused:
        _utf8("M\u00fcller")
    assert refused.value.status_code == 422


def test_a_body_that_is_too_large_is_refused(make_client: MakeClient) -> None:
    client = make_client(max_upload_bytes=1000)
    sent = 0

    def chunks(count: int) -> Any:
        nonlocal sent
        for _ in range(count):
            sent += 100
            yield bytes(100)

    for answer in (
        client.post("/v1/analyze", content=bytes(1001)),
        client.post("/v1/analyze", content=chunks(1000)),
        client.post("/v1/search", content=b" " * (2**20 + 1)),
    ):
        assert (answer.status_code, kind_of(answer)) == (413, "too-large")
    assert client.post("/v1/analyze", content=bytes(1000)).status_code == 415  # this size is accepted


def test_internal_errors_are_reported_without_their_message(
    client: TestClient, png: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DOE^JOHN cannot be divided by zero")

    monkeypatch.setattr("cbmir.runtime.finder.Finder.analyze", fail)
    answer = client.post("/v1/analyze", content=png)
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:cbmir:problem:unexpected"
    assert "DOE" not in answer.text
    (line,) = [one for one in caplog.records if one.getMessage() == "answered"]
    assert line.fields["error"] == "RuntimeError"  # type: ignore[attr-defined]
    assert "fail" in line.fields["at"][-1]  # type: ignore[attr-defined]
    assert "DOE" not in json.dumps(line.fields)  # type: ignore[attr-defined]
    assert "x-content-type-options" in answer.headers


def test_lack_of_memory_is_a_server_error(client: TestClient, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("cbmir.runtime.finder.Finder.analyze", fail)
    answer = client.post("/v1/analyze", content=png)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cbmir:problem:no-memory")
    assert answer.headers["retry-after"]
