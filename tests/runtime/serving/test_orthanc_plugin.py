"""The example plugin, with a stand-in for Orthanc: requests, stored reports, and retries."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dicom_files import make_dicom
from http_service import MakeClient
from http_stub import Quiet, running
from script_files import load_script

PLUGIN = Path(__file__).parents[3] / "docs/orthanc-plugin/cbmir_plugin.py"
TOKEN = "a-token-of-thirty-two-characters"
STABLE, OTHER = "a study is stable", "something else"


class Orthanc(ModuleType):
    """The part of the module `orthanc` that the plugin uses: one study, with `files` by modality of the series."""

    ChangeType = SimpleNamespace(STABLE_STUDY=STABLE)

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__("orthanc")
        self.files = files
        self.stored: list[bytes] = []
        self.answered: dict[str, str] = {}
        self.log: list[str] = []
        self.LogInfo = self.LogWarning = self.log.append

    def RegisterOnChangeCallback(self, callback: Any) -> None:  # noqa: N802 - Orthanc's own name
        self.changed = callback

    def RestApiGet(self, path: str) -> bytes:  # noqa: N802
        _, kind, name, *part = path.split("/")
        if kind == "studies":
            return json.dumps([
                {"MainDicomTags": {"Modality": modality}, "Instances": list(files)}
                for modality, files in self.files.items()
            ]).encode()  # fmt: skip
        if part == ["metadata"]:
            return json.dumps(["1848"] if name in self.answered else []).encode()
        return next(files[name] for files in self.files.values() if name in files)

    def RestApiPost(self, path: str, data: bytes) -> bytes:  # noqa: N802
        assert path == "/instances"
        self.stored.append(data)
        return b"{}"

    def RestApiPut(self, path: str, data: str) -> bytes:  # noqa: N802
        _, _, name, _, metadata = path.split("/")
        assert metadata == "1848"
        self.answered[name] = data
        return b""


@pytest.fixture
def orthanc(monkeypatch: pytest.MonkeyPatch) -> Orthanc:
    orthanc = Orthanc({
        "DX": {"chest": make_dicom(SeriesInstanceUID="1.2.5"), "knee": make_dicom(BodyPartExamined="KNEE")},
        "CT": {"slice": b"never asked for"},
    })  # fmt: skip
    monkeypatch.setitem(sys.modules, "orthanc", orthanc)
    return orthanc


@pytest.fixture
def url(make_client: MakeClient) -> Iterator[str]:
    """The URL of the service, behind a real socket."""
    client = make_client(token=TOKEN)

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = client.post(self.path, content=body, headers=dict(self.headers))
            self.send_response(answer.status_code)
            self.end_headers()
            self.wfile.write(answer.content)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def load(monkeypatch: pytest.MonkeyPatch, url: str, token: Path) -> None:
    """Run the plugin's file, as Orthanc does when it starts."""
    monkeypatch.setenv("CBMIR_URL", url)
    monkeypatch.setenv("CBMIR_TOKEN_FILE", str(token))
    load_script(PLUGIN)


def test_each_radiograph_is_analysed_once(
    orthanc: Orthanc, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    load(monkeypatch, url, token)
    orthanc.changed(OTHER, 0, "study")
    assert not orthanc.answered
    for _ in range(2):
        orthanc.changed(STABLE, 0, "study")
    (report,) = orthanc.stored
    assert report[128:132] == b"DICM"
    assert set(orthanc.answered) == {"chest", "knee"}
    assert orthanc.log == ["cbmir: refused (urn:cbmir:problem:no-chest-radiograph)"]


def test_unanswered_radiographs_are_retried(
    orthanc: Orthanc, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("another")
    load(monkeypatch, url, token)
    orthanc.changed(STABLE, 0, "study")
    assert not orthanc.answered
    assert orthanc.log == ["cbmir: 401; the image is sent again when its study changes"] * 2
    load(monkeypatch, "http://127.0.0.1:1", token)  # nothing listens there
    orthanc.changed(STABLE, 0, "study")
    assert not orthanc.answered
    assert orthanc.log[2:] == ["cbmir: no answer (URLError)"] * 2
    token.write_text(TOKEN)
    load(monkeypatch, url, token)
    orthanc.changed(STABLE, 0, "study")
    assert set(orthanc.answered) == {"chest", "knee"}
