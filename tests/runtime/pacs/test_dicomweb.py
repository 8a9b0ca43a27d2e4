"""Clients of DICOMweb and Orthanc's REST API, with a server of canned answers: requests and errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cbmir.errors import DeliveryAwayError, DeliveryError, ImageSizeError, PacsAwayError, PacsError
from cbmir.runtime.pacs import dicomweb, http_server
from cbmir.runtime.pacs.dicomweb import DicomWeb, InstanceFound, OrthancRest, StudyFound
from cbmir.runtime.pacs.jobs import ResultObject
from http_stub import Quiet, running
from pacs_rig import PLANTED

STUDY = f"{PLANTED[2]}.1"
INSTANCE = InstanceFound(STUDY, f"{STUDY}.0", "1.2.840.10008.5.1.4.1.1.1", f"{STUDY}.1")


@dataclass
class Server:
    """A server with answers (status, content type, body) by path prefix; other paths are not found."""

    url: str = ""
    answers: dict[str, tuple[int, str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    posted: list[bytes] = field(default_factory=list)

    def json(self, path: str, value: Any, status: int = 200) -> None:
        self.answers[path] = (status, "application/dicom+json", json.dumps(value).encode())

    def answer(self, path: str) -> tuple[int, str, bytes]:
        self.asked.append(path)
        if "offset=" in path and "offset=0" not in path:  # there is only one page
            return 200, "application/dicom+json", b"[]"
        for begins, answer in self.answers.items():
            if path.startswith(begins):
                return answer
        return 404, "text/plain", b"none"


@pytest.fixture
def server() -> Iterator[Server]:
    canned = Server()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = canned.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            canned.posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as canned.url:
        yield canned


@pytest.fixture
def web(server: Server) -> Iterator[DicomWeb]:
    opened = DicomWeb(f"{server.url}/dicom-web")
    yield opened
    opened.close()


def multipart(data: bytes) -> tuple[int, str, bytes]:
    head = b"--edge\r\nContent-Type: application/dicom\r\n\r\n"
    return 200, 'multipart/related; type="application/dicom"; boundary="edge"', head + data + b"\r\n--edge--\r\n"


def studies(*uids: str, count: int | None = 2, day: str = "20260102") -> list[dict[str, Any]]:
    more: dict[str, Any] = {"00080020": {"vr": "DA", "Value": [day]}}
    more |= {} if count is None else {"00201208": {"vr": "IS", "Value": [count]}}
    return [{"0020000D": {"vr": "UI", "Value": [uid]}} | more for uid in uids]


def test_studies_are_queried_by_day_and_modality(server: Server, web: DicomWeb) -> None:
    server.json("/dicom-web/studies", studies(STUDY))
    assert web.studies_since(date(2026, 1, 2), ("CR", "DX")) == {STUDY: StudyFound(date(2026, 1, 2), 2)}
    first = [path for path in server.asked if "offset=0" in path]
    assert [
        ("20260102-" in path, f"ModalitiesInStudy={m}" in path) for path, m in zip(first, ("CR", "DX"), strict=True)
    ]
    server.json("/dicom-web/studies", studies(STUDY, count=None, day="2026"))
    assert web.studies_since(date(2026, 1, 2), ("CR",)) == {STUDY: StudyFound(None, None)}


def test_instances_of_other_modalities_are_skipped(server: Server, web: DicomWeb) -> None:
    series = [
        {"0020000E": {"Value": [f"{STUDY}.0"]}, "00080060": {"Value": ["CR"]}},
        {"0020000E": {"Value": [f"{STUDY}.7"]}, "00080060": {"Value": ["SR"]}},
    ]
    server.json(f"/dicom-web/studies/{STUDY}/series/{STUDY}.0/instances", [
        {"00080016": {"Value": [INSTANCE.sop_class_uid]}, "00080018": {"Value": [INSTANCE.sop_instance_uid]}}
    ])  # fmt: skip
    server.json(f"/dicom-web/studies/{STUDY}/series?", series)
    assert web.instances(STUDY, ("CR", "DX")) == [INSTANCE]
    assert not any(f"{STUDY}.7/" in path for path in server.asked)


@pytest.mark.parametrize("data", [b"\r\n--edge", b"--edg", b"", b"\r\n\r\n" * 10, bytes(range(256)) * 5000])
def test_a_file_is_retrieved_unchanged(server: Server, web: DicomWeb, data: bytes) -> None:
    path = f"/dicom-web/studies/{STUDY}/series/{STUDY}.0/instances/{STUDY}.1"
    server.answers[path] = multipart(data)
    if data == b"\r\n--edge":  # the boundary cannot occur in a part
        data, server.answers[path] = b"x", multipart(b"x")
    assert web.retrieve(INSTANCE, 10**7) == data
    server.answers[path] = (200, "application/dicom", data)  # as some servers answer
    assert web.retrieve(INSTANCE, 10**7) == data


def test_a_deleted_instance_is_not_retrieved(web: DicomWeb) -> None:
    assert web.retrieve(INSTANCE, 10**7) is None


def test_a_file_that_is_too_long_is_refused(server: Server, web: DicomWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "_HEADERS_SIZE", 1000)
    server.answers["/"] = multipart(bytes(5000))
    with pytest.raises(ImageSizeError, match="at most 2,000 bytes"):
        web.retrieve(INSTANCE, 2000)


def test_results_are_stored(server: Server, web: DicomWeb, radiograph: Callable[..., bytes]) -> None:
    server.json("/dicom-web/studies", {})
    files = [radiograph(1), radiograph(2)]
    web.send([ResultObject("sr", "", data) for data in files])
    parts = server.posted[0].split(b"\r\n\r\n", 1)[0]
    assert parts.startswith(b"--cbmir-") and parts.endswith(b"Content-Type: application/dicom")
    edge = parts.split(b"\r\n")[0]
    found = [part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in server.posted[0].split(edge)[1:-1]]
    assert found == files  # byte by byte
    web.send([])
    assert len(server.posted) == 1


def test_refused_results_are_reported(server: Server, web: DicomWeb, radiograph: Callable[..., bytes]) -> None:
    for status in (200, 202, 409):
        server.json("/dicom-web/studies", failures(0x0110), status=status)
        with pytest.raises(DeliveryError, match=r"refused 1 of 1 results \(reason 0x0110\)"):
            web.send([ResultObject("sr", "", radiograph())])
    server.json("/dicom-web/studies", {"00081198": {"vr": "SQ", "Value": [{}]}}, status=409)
    with pytest.raises(DeliveryError, match=r"refused 1 of 1 results$"):
        web.send([ResultObject("sr", "", radiograph())])
    for status, kind, body in ((409, "text/plain", b"no"), (202, "application/dicom+xml", b"<no/>"), (202, "", b"")):
        server.answers["/"] = server.answers["/dicom-web/studies"] = (status, kind, body)
        with pytest.raises(DeliveryError, match=f"status {status}"):
            web.send([ResultObject("sr", "", radiograph())])


def test_a_server_without_space_is_away(server: Server, web: DicomWeb, radiograph: Callable[..., bytes]) -> None:
    for answer, status in ((failures(0xA701), 409), ({}, 503)):
        server.json("/dicom-web/studies", answer, status=status)
        with pytest.raises(DeliveryAwayError):
            web.send([ResultObject("sr", "", radiograph())])


def failures(*reasons: int) -> dict[str, Any]:
    """The FailedSOPSequence of a STOW-RS response."""
    return {"00081198": {"vr": "SQ", "Value": [{"00081197": {"vr": "US", "Value": [reason]}} for reason in reasons]}}


def test_existing_results_count_as_stored(server: Server, web: DicomWeb, radiograph: Callable[..., bytes]) -> None:
    """A process may have ended between sending and recording it."""
    results = [ResultObject("sr", "", radiograph(1)), ResultObject("sc", "", radiograph(2))]
    server.json("/dicom-web/studies", failures(0x0111, 45070), status=409)
    web.send(results)
    server.json("/dicom-web/studies", failures(0x0111, 0x0110), status=202)
    with pytest.raises(DeliveryError, match=r"refused 1 of 2 results \(reason 0x0110\)"):
        web.send(results)


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_errors_name_the_server_but_no_uid(server: Server, web: DicomWeb, status: int) -> None:
    server.answers["/"] = (status, "text/plain", PLANTED[0].encode())
    for ask in (
        lambda: web.instances(STUDY, ("CR",)), lambda: web.retrieve(INSTANCE, 10),
        lambda: web.studies_since(date(2026, 1, 1), ("CR",)),
    ):  # fmt: skip
        with pytest.raises(PacsError, match=f"status {status}") as caught:
            ask()
        assert server.url in str(caught.value)
        assert isinstance(caught.value, PacsAwayError) is (status != 500)
        assert not any(text in str(caught.value) for text in PLANTED)
        assert caught.value.__suppress_context__


def test_invalid_answers_are_reported(server: Server, web: DicomWeb) -> None:
    for kind, body in (
        ("application/dicom+json", b"<html>"),
        ("application/dicom+json", b'["' + STUDY.encode() + b'"]'),
    ):
        server.answers["/"] = (200, kind, body)
        with pytest.raises(PacsError, match=r"does not follow the standard|JSON") as caught:
            web.instances(STUDY, ("CR",))
        assert STUDY not in str(caught.value)
    server.answers["/"] = (200, "multipart/related; boundary=edge", b"nothing")
    with pytest.raises(PacsError, match="does not follow the standard"):
        web.retrieve(INSTANCE, 10**7)


def test_an_unreachable_server_is_reported() -> None:
    web = DicomWeb("http://127.0.0.1:1/dicom-web")
    with pytest.raises(PacsAwayError, match="cannot search for series: ConnectionError"):
        web.instances(STUDY, ("CR",))
    web.close()


def test_a_server_that_does_not_answer_in_time_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TIMEOUT", (60, 0.05))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        web = DicomWeb(f"http://127.0.0.1:{silent.getsockname()[1]}/dicom-web")
        with pytest.raises(PacsAwayError, match="ReadTimeout"):
            web.retrieve(INSTANCE, 10)
        web.close()


@pytest.mark.parametrize("open_url", [DicomWeb, OrthancRest])
@pytest.mark.parametrize("url", ["", "localhost:8042", "ftp://host/", "http://", "http://[", "http://host:SECRET"])
def test_invalid_urls_are_refused(open_url: Callable[[str], Any], url: str) -> None:
    with pytest.raises(PacsError, match="expected the URL") as caught:
        open_url(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("open_url", [DicomWeb, OrthancRest])
@pytest.mark.parametrize("begin", ["http://", "https://", "ftp://", "http:/", "", "http://["])
def test_credentials_in_a_url_are_refused_and_not_shown(open_url: Callable[[str], Any], begin: str) -> None:
    with pytest.raises(PacsError, match="netrc") as caught:
        open_url(f"{begin}user:SECRET@pacs.example/dicom-web")
    assert "SECRET" not in str(caught.value) and "user" not in str(caught.value)


def test_orthancs_changes(server: Server) -> None:
    rest = OrthancRest(server.url)
    kinds = ("NewInstance", "StableStudy", "StableStudy", "StableStudy")
    changes = [{"ChangeType": kind, "ID": "abc"[n % 3]} for n, kind in enumerate(kinds)]
    server.json("/changes?last", {"Changes": [], "Done": True, "Last": 41})
    server.json("/changes", {"Changes": [*changes, changes[1]], "Done": False, "Last": 9})
    server.json("/studies/b", {"MainDicomTags": {"StudyInstanceUID": STUDY}})
    assert rest.changes(5) == (["b", "c", "a"], 9, False)
    assert "/changes?since=5&limit=20" in server.asked
    assert rest.last_change() == 41
    assert rest.study_uid("b") == STUDY
    assert rest.study_uid("gone") is None
    rest.close()
