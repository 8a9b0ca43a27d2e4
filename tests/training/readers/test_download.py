"""Downloading archives from a local server that aborts, changes its file, or does not support ranges."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cbmir.errors import DownloadError
from cbmir.training.readers.download import download, unpack
from http_stub import Quiet, running

DATA = bytes(range(256)) * 4096  # 1 MiB


class Publisher(ThreadingHTTPServer):
    """A server of `data` under every name; `breaks` has the numbers of bytes after which the next answers abort."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.data, self.etag, self.breaks, self.status = DATA, '"1"', list[int](), 200
        self.asked: list[tuple[str | None, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/archive.tgz"


class Answer(Quiet, BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        publisher = self.server
        wanted, version = self.headers["Range"], self.headers["If-Range"]
        publisher.asked.append((wanted, version))
        if publisher.status != 200:
            self.send_error(publisher.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and version == publisher.etag else 0
        if start >= len(publisher.data):
            self.send_error(416)
            return
        body = publisher.data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if publisher.etag:
            self.send_header("ETag", publisher.etag)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(publisher.data) - 1}/{len(publisher.data)}")
        self.end_headers()
        self.wfile.write(body[: publisher.breaks.pop(0)] if publisher.breaks else body)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with running(server := Publisher()):
        yield server


def test_a_broken_connection_is_resumed(publisher: Publisher, tmp_path: Path) -> None:
    publisher.breaks = [1000, 500]
    waits: list[float] = []
    path = tmp_path / "new" / "archive.tgz"
    digest = download(publisher.url, path, wait=waits.append)
    assert path.read_bytes() == DATA
    assert digest == hashlib.sha256(DATA).hexdigest()
    assert (path.parent / "archive.tgz.sha256").read_text("utf-8") == f"{digest}  archive.tgz\n"
    assert publisher.asked == [(None, None), ("bytes=1000-", '"1"'), ("bytes=1500-", '"1"')]
    assert waits == [1, 2]
    assert sorted(one.name for one in path.parent.iterdir()) == ["archive.tgz", "archive.tgz.sha256"]


def test_another_call_resumes_the_download(publisher: Publisher, tmp_path: Path) -> None:
    publisher.breaks = [1000, 500]
    path = tmp_path / "archive.tgz"
    with pytest.raises(DownloadError, match="ended early, 2 times; 1,500 bytes are kept"):
        download(publisher.url, path, tries=2, wait=lambda _: None)
    assert not path.exists()
    download(publisher.url, path)
    assert publisher.asked[-1][0] == "bytes=1500-"
    assert path.read_bytes() == DATA


def test_a_changed_file_is_downloaded_again(publisher: Publisher, tmp_path: Path) -> None:
    publisher.breaks = [1000]
    path = tmp_path / "archive.tgz"
    with pytest.raises(DownloadError):
        download(publisher.url, path, tries=1)
    publisher.data, publisher.etag = DATA[::-1], '"2"'
    download(publisher.url, path)
    assert path.read_bytes() == DATA[::-1]


def test_a_server_without_etags_is_asked_from_the_start(publisher: Publisher, tmp_path: Path) -> None:
    publisher.etag, publisher.breaks = "", [1000]
    path = tmp_path / "archive.tgz"
    download(publisher.url, path, wait=lambda _: None)
    assert path.read_bytes() == DATA
    assert [wanted for wanted, _ in publisher.asked] == [None, None]


def test_a_part_that_is_too_long_is_discarded(publisher: Publisher, tmp_path: Path) -> None:
    publisher.breaks = [1000]
    path = tmp_path / "archive.tgz"
    with pytest.raises(DownloadError):
        download(publisher.url, path, tries=1)
    part = tmp_path / ".archive.tgz.part"
    part.write_bytes(bytes(2 * len(DATA)))
    download(publisher.url, path, wait=lambda _: None)
    assert path.read_bytes() == DATA


def test_an_existing_file_is_compared_instead_of_downloaded(publisher: Publisher, tmp_path: Path) -> None:
    path = tmp_path / "archive.tgz"
    download(publisher.url, path)
    publisher.status = 500
    assert download(publisher.url, path) == hashlib.sha256(DATA).hexdigest()
    path.write_bytes(b"damaged")
    with pytest.raises(DownloadError, match=r"archive\.tgz: expected SHA-256 .*delete the file"):
        download(publisher.url, path)


def test_a_wrong_digest_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    path = tmp_path / "archive.tgz"
    with pytest.raises(DownloadError, match="expected SHA-256 00, found"):
        download(publisher.url, path, digest="00")
    assert not path.exists()


@pytest.mark.parametrize(("status", "asked", "message"), [(404, 1, "refuses it .404"), (503, 3, "503.*3 times")])
def test_missing_files_and_unavailable_servers(
    publisher: Publisher, tmp_path: Path, status: int, asked: int, message: str
) -> None:
    publisher.status = status
    with pytest.raises(DownloadError, match=message):
        download(publisher.url, tmp_path / "archive.tgz", tries=3, wait=lambda _: None)
    assert len(publisher.asked) == asked


def test_an_unreachable_server(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="0 bytes are kept"):
        download("http://127.0.0.1:9/archive.tgz", tmp_path / "archive.tgz", tries=1)


def _tar(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    return stream.getvalue()


def test_unpacking(tmp_path: Path) -> None:
    archive = tmp_path / "a.tgz"
    archive.write_bytes(_tar("one.png", "deep/two.png"))
    unpack(archive, tmp_path / "a")
    assert (tmp_path / "a" / "deep" / "two.png").read_bytes() == b"abc"
    archive.unlink()
    unpack(archive, tmp_path / "a")  # it exists already


def test_unpacking_requires_the_filter_of_python_3_11_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tarfile.data_filter")
    (tmp_path / "a.tgz").write_bytes(_tar("one.png"))
    with pytest.raises(DownloadError, match=r"expected Python 3\.11\.4 or later"):
        unpack(tmp_path / "a.tgz", tmp_path / "a")


def test_files_left_by_a_killed_process_are_deleted(tmp_path: Path) -> None:
    archive = tmp_path / "a.tgz"
    archive.write_bytes(_tar("one.png"))
    left = tmp_path / ".a.unpacked-1234"
    left.mkdir()
    (left / "one.png").touch()
    unpack(archive, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.tgz"]


# With ids: gzip writes the time, so test processes would otherwise collect different names.
@pytest.mark.parametrize(
    "data", [_tar("../outside.png"), _tar("one.png")[:-20], b"no archive"], ids=["outside", "cut off", "no archive"]
)
def test_a_bad_archive_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "a.tgz"
    archive.write_bytes(data)
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tgz"]


def test_the_unpacked_size_of_an_archive_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "images.tgz"
    with tarfile.open(archive, "w:gz") as made:
        for name in ("one", "two"):
            member = tarfile.TarInfo(name)
            member.size = 10_000
            made.addfile(member, io.BytesIO(bytes(member.size)))
    monkeypatch.setattr("cbmir.training.readers.download._MOST_UNPACKED", 20_000)
    with pytest.raises(DownloadError, match="it unpacks to more than 20,000 bytes"):
        unpack(archive, tmp_path / "images")
    assert not (tmp_path / "images").exists()
