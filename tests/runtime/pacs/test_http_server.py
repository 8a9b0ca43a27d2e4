"""A hostile PACS: its responses are limited in size and time, lists end, and requests can be cancelled."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cbmir.errors import AnswerSizeError, DeliveryAwayError, DeliveryError, ImageSizeError, PacsAwayError, PacsError
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import dicomweb, http_server
from cbmir.runtime.pacs.dicomweb import DicomWeb, InstanceFound, OrthancRest, StudyFound
from cbmir.runtime.pacs.http_server import PeerAnswer
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.jobs import ResultObject
from cbmir.runtime.pacs.polling import Follower, OrthancChanges, QidoPolling
from cbmir.runtime.pacs.queue import DurableQueue
from http_stub import Quiet, running

DAY = date(2026, 1, 2)
INSTANCE = InstanceFound("1.2", "1.3", "1.2.840.10008.5.1.4.1.1.1", "1.4")
RESULT = [ResultObject("sr", "1.5", b"an object")]


@dataclass
class Hostile:
    """A server that handles each request with `behave`; `over` is set at its end."""

    url: str = ""
    behave: Callable[[BaseHTTPRequestHandler], None] = lambda request: None
    asked: list[str] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def drip(self, request: BaseHTTPRequestHandler, head: bytes) -> None:
        """Send one byte at a time, without end."""
        with suppress(OSError):
            request.wfile.write(head)
            while not self.over.wait(0.02):
                request.wfile.write(b"1")
                self.begun.set()


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    server = Hostile()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            server.behave(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server.url:
        yield server
        server.over.set()


@pytest.fixture
def web(hostile: Hostile) -> Iterator[DicomWeb]:
    with DicomWeb(hostile.url) as opened:
        yield opened


@pytest.fixture
def rest(hostile: Hostile) -> Iterator[OrthancRest]:
    with OrthancRest(hostile.url) as opened:
        yield opened


@pytest.fixture
def intake(tmp_path: Path, live: ReloadableFinder) -> Iterator[Intake]:
    with DurableQueue(tmp_path / "queue", 3, quiet=0) as queue:
        yield Intake(queue, live)


def reply(request: BaseHTTPRequestHandler, value: Any) -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    request.send_response(200)
    request.send_header("Content-Type", "application/dicom+json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    with suppress(OSError):
        request.wfile.write(body)


def study(number: int) -> dict[str, Any]:
    return {"0020000D": {"Value": [f"1.2.{number}"]}}


def offset(request: BaseHTTPRequestHandler) -> int:
    return int(parse_qs(urlsplit(request.path).query)["offset"][0])


# -- lists that do not end


def test_a_server_that_ignores_the_offset_is_asked_twice(
    hostile: Hostile, web: DicomWeb, log: Callable[[], str]
) -> None:
    """A short page is the last one."""
    hostile.behave = lambda request: reply(request, [study(1), study(2)])
    assert web.studies_since(DAY, ("CR",)) == dict.fromkeys(("1.2.1", "1.2.2"), StudyFound(None, None))
    assert len(hostile.asked) == 2
    assert '"level": "error"' in log() and "the server returns the same studies again for every offset" in log()


def test_a_repeated_full_page_is_an_error(hostile: Hostile, web: DicomWeb) -> None:
    """There may be more results, with no way to get them."""
    hostile.behave = lambda request: reply(request, [study(number) for number in range(200)])
    with pytest.raises(PacsError, match="the same studies again"):
        web.studies_since(DAY, ("CR",))
    assert len(hostile.asked) == 2


def test_pages_are_read_to_the_end(hostile: Hostile, web: DicomWeb) -> None:
    def behave(request: BaseHTTPRequestHandler) -> None:
        reply(request, [study(number) for number in range(450)][offset(request) : offset(request) + 200])

    hostile.behave = behave
    assert len(web.studies_since(DAY, ("CR",))) == 450


def test_a_list_that_never_ends_is_an_error(hostile: Hostile, web: DicomWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "MOST_STUDIES", 10)
    hostile.behave = lambda request: reply(request, [study(offset(request)), {"0020000D": {"Value": ["../x"]}}])
    with pytest.raises(PacsError, match="expected at most 10 studies, found more"):
        web.studies_since(DAY, ("CR",))
    assert len(hostile.asked) < 10


def test_invalid_uids_are_skipped(hostile: Hostile, web: DicomWeb, log: Callable[[], str]) -> None:
    """It would become part of a URL."""
    pages = [[study(1), {"0020000D": {"Value": ["../../admin"]}}, {}], []]
    hostile.behave = lambda request: reply(request, pages.pop(0))
    assert list(web.studies_since(DAY, ("CR",))) == ["1.2.1"]
    assert '"count": 2' in log()


def test_a_study_with_too_many_instances_is_an_error(
    hostile: Hostile, web: DicomWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dicomweb, "MOST_INSTANCES", 5)

    def behave(request: BaseHTTPRequestHandler) -> None:
        if "instances" in request.path:
            reply(request, [{"00080018": {"Value": [f"1.{offset(request)}"]}}])
        else:
            reply(request, [] if offset(request) else [{"0020000E": {"Value": ["1.3"]}}])

    hostile.behave = behave
    with pytest.raises(PacsError, match="expected at most 5 instances, found more"):
        web.instances("1.2", ("CR",))


def test_a_change_feed_that_does_not_advance_is_an_error(hostile: Hostile, rest: OrthancRest) -> None:
    hostile.behave = lambda request: reply(request, {"Changes": [], "Last": 7, "Done": False})
    with pytest.raises(PacsError, match="continue from 7"):
        rest.changes(7)


@pytest.mark.parametrize("ids", [["../system"], ["a" * 100], [str(number) for number in range(30)], [1]])
def test_invalid_changes_are_an_error(hostile: Hostile, rest: OrthancRest, ids: list[Any]) -> None:
    changes = [{"ChangeType": "StableStudy", "ID": each} for each in ids]
    hostile.behave = lambda request: reply(request, {"Changes": changes, "Last": 7, "Done": True})
    with pytest.raises(PacsError, match="does not follow the standard"):
        rest.changes(0)


# -- answers that are too long or too deep

ASK = {
    "studies": lambda web, rest: web.studies_since(DAY, ("CR",)),
    "instances": lambda web, rest: web.instances("1.2", ("CR",)),
    "file": lambda web, rest: web.retrieve(INSTANCE, 10_000),
    "results": lambda web, rest: web.send(RESULT),
    "changes": lambda web, rest: rest.changes(0),
    "last change": lambda web, rest: rest.last_change(),
    "study": lambda web, rest: rest.study_uid("a"),
}
Ask = Callable[[DicomWeb, OrthancRest], Any]


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_an_endless_answer_is_an_error(
    hostile: Hostile, web: DicomWeb, rest: OrthancRest, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_BYTES", 10_000)
    monkeypatch.setattr(dicomweb, "_HEADERS_SIZE", 0)
    monkeypatch.setattr(http_server, "_CHUNK", 1000)

    def behave(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/dicom+json\r\n\r\n[")
        with suppress(OSError):
            while True:
                request.wfile.write(b"[],")

    hostile.behave = behave
    with pytest.raises((AnswerSizeError, DeliveryError, ImageSizeError), match="10,000 bytes, found more"):
        ask(web, rest)


@pytest.mark.parametrize("ask", [ASK["studies"], ASK["changes"], ASK["results"]])
@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"Changes": [], "Last": 1e999, "Done": true, "00081198": 7, "0020000D": 7}', b"1", b"\xff"],
)
def test_json_of_an_unexpected_form_is_an_error(
    hostile: Hostile, web: DicomWeb, rest: OrthancRest, ask: Ask, body: bytes
) -> None:
    hostile.behave = lambda request: reply(request, body)
    with pytest.raises((PacsError, DeliveryError)):
        ask(web, rest)


def test_compressed_answers_are_refused(hostile: Hostile, web: DicomWeb) -> None:
    def behave(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]")

    hostile.behave = behave
    with pytest.raises(PacsError, match="does not follow the standard"):
        web.instances("1.2", ("CR",))


# -- answers that take too long

HEADS = {
    "headers": b"HTTP/1.1 200 OK\r\nX: ",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "body": b"HTTP/1.0 200 OK\r\nContent-Type: application/dicom+json\r\n\r\n",
    "body of a length": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("ask", [ASK["studies"], ASK["file"], ASK["results"], ASK["changes"]])
def test_a_trickling_answer_ends_at_its_deadline(
    hostile: Hostile, web: DicomWeb, rest: OrthancRest, head: bytes, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives in time, but the answer does not."""
    monkeypatch.setattr(http_server, "ANSWER_TIME", 0.2)
    monkeypatch.setattr(dicomweb, "FILE_TIME", 0.2)
    hostile.behave = lambda request: hostile.drip(request, head)
    with pytest.raises((PacsAwayError, DeliveryAwayError), match=r"no complete answer within 0\.2 seconds"):
        ask(web, rest)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", ["orthanc", "dicomweb"])
def test_stopping_aborts_a_trickling_answer(
    hostile: Hostile, web: DicomWeb, rest: OrthancRest, intake: Intake, kind: str, head: bytes, log: Callable[[], str]
) -> None:
    hostile.behave = lambda request: hostile.drip(request, head)
    feed = QidoPolling(web, intake) if kind == "dicomweb" else OrthancChanges(rest, web, intake, since=0)
    follower = Follower(feed)
    follower.start()
    assert hostile.begun.wait(60)
    follower.stop()
    assert not follower._thread.is_alive()
    assert "cannot be followed" not in log()  # it was told to stop
    with pytest.raises(PacsAwayError, match="stopped"):
        web.instances("1.2", ("CR",))


def test_stopping_aborts_a_tls_handshake(intake: Intake) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        DicomWeb(f"https://127.0.0.1:{silent.getsockname()[1]}") as web,
    ):
        follower = Follower(QidoPolling(web, intake))
        follower.start()
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)  # its greeting
            follower.stop()
        assert not follower._thread.is_alive()


def test_a_redirect_is_not_followed(hostile: Hostile, web: DicomWeb) -> None:
    asked = []

    def behave(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        request.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")

    hostile.behave = behave
    with pytest.raises(PacsError, match="the server answered with status 302"):
        web.instances("1.2", ("CR",))
    assert len(asked) == 1


@pytest.mark.parametrize("body", [b"[" * 70 + b"]" * 70, b"[" * 100_000, b"\xff", b"{"])
def test_json_that_is_damaged_or_nested_too_deeply(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        PeerAnswer(200, "application/json", body).json()


@pytest.mark.parametrize("body", [b'["\\ud800"]', b'\xef\xbb\xbf["a"]', b""])
def test_json_in_other_encodings(body: bytes) -> None:
    assert PeerAnswer(200, "application/json", body).json() in (["\ud800"], ["a"], None)
