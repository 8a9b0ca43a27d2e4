"""`cbmir serve` as a process: real sockets, signals, slow and disconnected clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

from cbmir.errors import UserError
from cbmir.process import available_threads
from cbmir.runtime import Finder
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.imaging import decoder_process
from cbmir.runtime.imaging.reader import read_image
from cbmir.runtime.serving import server
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.server import serve
from cbmir.runtime.serving.settings import Settings
from cbmir.runtime.sockets import bound, is_loopback
from command_line import run
from http_service import Service

TOKEN = "a-token-of-thirty-two-characters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
LIMIT = 2**20


@pytest.fixture(scope="module")
def gallery(tiny_gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_gallery, tmp_path_factory.mktemp("served") / "gallery"))


@pytest.fixture(scope="module")
def service(tiny_model: Path, gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a token, an audit trail, and uploads of up to 1 MiB within 1 s."""
    folder = tmp_path_factory.mktemp("service")
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    with Service.running(
        "--model", str(tiny_model), "--gallery", str(gallery), "--token-file", str(token), "--max-upload", "1",
        "--timeout", "1", "--audit", str(folder / "audit.jsonl"),
    ) as service:  # fmt: skip
        yield service


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers=BEARER, trust_env=False, timeout=60) as http:
        yield http


def test_analyze(http: httpx.Client, png: bytes) -> None:
    answer = http.post("/v1/analyze", params={"k": 3}, content=png)
    assert len(answer.json()["neighbours"]) == 3
    assert "server" not in answer.headers
    assert httpx.post(f"{http.base_url}/v1/analyze", content=png, trust_env=False).status_code == 401


def test_twenty_concurrent_clients(http: httpx.Client, png: bytes) -> None:
    def ask(_: int) -> object:
        answer = http.post("/v1/analyze", content=png)
        return answer.status_code, [one["id"] for one in answer.json()["neighbours"]]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(60)))
    assert {status for status, _ in answers} == {200}  # type: ignore[misc]
    assert all(answer == answers[0] for answer in answers)


def request(size: int, *more: str) -> bytes:
    lines = ["POST /v1/analyze HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}", *more]
    return ("\r\n".join([*lines, f"Content-Length: {size}"]) + "\r\n\r\n").encode()


def answer_of(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and body, read until the answer is complete or the peer closes the connection."""
    with connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while line := stream.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, json.loads(stream.read(length))


def test_a_stalled_upload_is_reported_and_cut_off(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(request(1000) + bytes(10))
        status, body = answer_of(connection)
        assert (status, body["type"]) == (408, "urn:cbmir:problem:slow")
        assert connection.recv(1) == b""


def test_an_aborted_upload_leaves_nothing_behind(service: Service, http: httpx.Client) -> None:
    for _ in range(50):
        with service.connect() as connection:
            connection.sendall(request(1000) + bytes(10))
    line = service.wait_for("answered")
    while line.get("problem") != "cut-off":
        line = service.wait_for("answered")
    assert line["status"] == 400
    for _ in range(1000):
        if "cbmir_requests_waiting 0.0" in http.get("/metrics").text:
            break
    else:
        pytest.fail("places are still taken")


def test_an_upload_that_is_too_large_is_refused_before_it_is_sent(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(request(LIMIT + 1, "Expect: 100-continue"))
        status, body = answer_of(connection)
    assert (status, body["type"]) == (413, "urn:cbmir:problem:too-large")


def test_memory_use_is_limited_for_any_upload(service: Service, http: httpx.Client) -> None:
    before = service.memory()

    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield bytes(LIMIT)

    assert http.post("/v1/analyze", content=chunks()).status_code == 413
    assert http.post("/v1/analyze", content=bytes(50 * LIMIT)).status_code == 413
    assert service.memory() - before < 20 * LIMIT


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"hello\r\n\r\n", b"GET /nothing HTTP/9.9\r\n\r\n",
     b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000, b"POST /v1/embed HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
     b"POST /v1/embed HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
     b"POST /v1/embed HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"],
)  # fmt: skip
def test_invalid_http_is_answered_with_a_problem(sent: bytes, service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(sent)
        status, body = answer_of(connection)
    assert 400 <= status < 500
    assert str(body["type"]).startswith("urn:cbmir:problem:")
    line = service.wait_for("answered")
    while body["instance"] != f"urn:uuid:{line['request']}":
        line = service.wait_for("answered")
    assert str(body["type"]).endswith(f":{line['problem']}")


def test_sighup_reloads_and_a_replaced_gallery_is_served_again(
    service: Service, http: httpx.Client, gallery: Path, png: bytes
) -> None:
    shutil.copytree(gallery, gallery.with_name("new"))
    shutil.rmtree(gallery)
    gallery.with_name("new").rename(gallery)
    assert http.post("/v1/analyze", content=png).status_code == 503
    assert http.get("/health/ready").status_code == 503
    service.signal(signal.SIGHUP)
    assert service.wait_for("reloaded")["generation"] == 2
    assert http.post("/v1/analyze", content=png).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(http.post, "/v1/analyze", content=png) for _ in range(20)]
        assert http.post("/v1/reload").json()["generation"] == 3
        assert {answer.result().status_code for answer in answers} == {200}


def test_every_log_line_is_json(service: Service) -> None:
    assert service.raw
    for line in service.raw:
        assert "time" in json.loads(line)
        assert TOKEN not in line


def test_sigterm_lets_a_running_request_finish(tiny_model: Path, png: bytes) -> None:
    host = "127.0.0.2"  # also loopback; requests to the announced URL must work
    with (
        Service.running("--model", str(tiny_model), "--timeout", "30", "--host", host) as service,
        socket.create_connection((host, service.port), timeout=60) as connection,
    ):
        threads = max(1, available_threads() // 2)
        assert f'threads="{threads}"' in httpx.get(f"{service.url}/metrics", trust_env=False).text
        connection.sendall(request(len(png), "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")  # it is being read
        service.signal(signal.SIGTERM)
        service.wait_for("stopping: requests in progress are finished")
        connection.sendall(png)
        assert answer_of(connection)[0] == 200
        assert service.process.wait(60) in (0, -signal.SIGTERM)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, service.port))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_hanging_decoder_fails_one_request_and_does_not_delay_a_stop(tiny_model: Path, png: bytes) -> None:
    def stop_decoder() -> None:
        tasks = Path(f"/proc/{service.process.pid}/task").glob("*/children")
        children = {int(pid) for task in tasks for pid in task.read_text().split()}
        (decoder,) = (pid for pid in children if b"decoder_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(decoder, signal.SIGSTOP)

    with (
        Service.running("--model", str(tiny_model), "--timeout", "9", "--concurrency", "1") as service,
        httpx.Client(base_url=service.url, trust_env=False, timeout=60) as http,
        socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection,
    ):
        stop_decoder()
        answer = http.post("/v1/embed", content=png)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:cbmir:problem:decoding")
        assert http.post("/v1/embed", content=png).status_code == 200
        stop_decoder()
        connection.sendall(request(len(png), "Expect: 100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        service.signal(signal.SIGTERM)
        service.wait_for("stopping: requests in progress are finished")
        connection.sendall(png)
        assert answer_of(connection)[0] == 422
        assert service.process.wait(60) in (0, -signal.SIGTERM)


HANGING = """
import os, signal, sys, threading
import httpx
from cbmir.runtime import Finder
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving.server import serve
from cbmir.runtime.serving.settings import Settings

def embed(self, images):
    print("hangs", flush=True)
    threading.Event().wait()

def ready(url):
    ask = lambda: httpx.post(f"{url}/v1/embed", content=open(sys.argv[2], "rb").read(), trust_env=False, timeout=60)
    threading.Thread(target=lambda: (ask(), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()

signal.signal(signal.SIGTERM, lambda *_: None)  # as for the first process of a container
Finder.embed = embed
serve(ReloadableFinder(lambda: Finder.open(sys.argv[1], threads=1)), Settings(timeout_s=0.2), port=0, ready=ready)
"""


@pytest.mark.slow
def test_hanging_work_does_not_outlive_a_stop(tiny_model: Path, png: bytes, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(png)
    ended = subprocess.run(
        [sys.executable, "-c", HANGING, tiny_model, image], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "hangs\n"), ended.stderr


def test_without_dicom_output_other_requests_are_answered(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ImportError("cannot import name 'sr'")

    pytest.importorskip("highdicom")
    monkeypatch.setattr(server, "warm_up", broken)
    opened: list[bool] = []
    with ReloadableFinder(lambda: Finder.open(tiny_model, threads=1)) as live:
        app = create_app(live, Settings())
        one = server.FinderServer(uvicorn.Config(app), app, live, lambda: opened.append(live.ready))
        asyncio.run(one._open())
        assert (opened, one.failed) == ([True], None)
    assert "results are not available" in caplog.text


def test_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--model", tmp_path / "model.onnx", "--port", 0) == 2
    assert "no such model file" in capsys.readouterr().err


def test_the_service_listens_before_its_decoders_start(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Pool(contextlib.nullcontext[None]):
        def __init__(self, count: int, seconds: float) -> None:
            super().__init__()
            started.append((count, seconds))

        def __enter__(self) -> Pool:  # type: ignore[override]
            return self

        read = staticmethod(read_image)

    def listen(live: ReloadableFinder, *_: object, **__: object) -> None:
        assert not started
        live.reload()
        live.reload()
        assert started == [(2, 20.0)]
        live.close()

    monkeypatch.setattr(decoder_process, "DecoderPool", Pool)
    monkeypatch.setattr(server, "serve", listen)
    assert run("serve", "--model", tiny_model) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_token(host: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--model", tiny_model, "--host", host, "--port", 0) == 2
    assert "--token-file" in capsys.readouterr().err


def test_a_port_in_use(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ReloadableFinder(lambda: Finder.open(tiny_model)) as live:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}"):
            serve(live, Settings(), port=port)


def test_a_bound_socket_does_not_listen_yet() -> None:
    with bound("127.0.0.1", 0) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())


def test_pictures_need_no_dicom() -> None:
    hidden = "import sys; sys.modules |= dict.fromkeys(('pydicom', 'highdicom', 'pynetdicom', 'torch')); "
    subprocess.run([sys.executable, "-c", f"{hidden}import cbmir.runtime.serving.server"], check=True)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
