"""Attacks on `cbmir demo`, which runs in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx
from hostile import deep_json
from lab import Lab, attack, png, told, unless

from process_memory import resident_tree

GROWTH = 400  # MiB by which a demo's memory may grow
_MIB = bytes(2**20)


@dataclass(frozen=True)
class Demo:
    process: subprocess.Popen[str]
    url: str
    folder: Path  # its temporary files

    def post(self, path: str, data: object, **headers: str) -> str:
        """Send a POST request, and return the status or the error."""
        try:
            answer = httpx.post(self.url + path, content=data, headers=headers, timeout=120, trust_env=False)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            return type(error).__name__
        return str(answer.status_code)

    def kept(self) -> float:
        """MiB of the demo's temporary files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) / 2**20


@contextmanager
def demo(lab: Lab) -> Iterator[Demo]:
    folder = lab.new()
    command = [sys.executable, "-m", "cbmir", "demo", str(lab.model), str(lab.gallery), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"TMPDIR": str(folder)}
    ) as process:
        assert process.stdout is not None
        try:
            yield Demo(process, process.stdout.readline().split()[0].rstrip("/"), folder)
        finally:
            process.kill()


def megabytes(count: int, start: bytes = b"") -> Iterator[bytes]:
    """A body of `count` megabytes, in chunks."""
    yield start
    for _ in range(count):
        yield _MIB


def form(name: str, megabytes_: int, file: bool = True) -> tuple[bytes, dict[str, str]]:
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"' + ('; filename="a.png"' if file else "")
    return head.encode() + b"\r\n\r\n" + _MIB * megabytes_ + b"\r\n--x--\r\n", {
        "content-type": "multipart/form-data; boundary=x"
    }


@attack(18)
def bodies_to_the_demo(lab: Lab, count: int) -> Iterator[str]:
    """400 MB of JSON, form fields, chunks, deeply nested JSON and twelve uploads of 63 MB: refused, or kept within
    bounds (400 MiB more memory, 512 MiB on disk for each visitor)."""
    json_type = {"content-type": "application/json"}
    field, of_field = form("session", 200, file=False)
    upload, of_upload = form("files", 63)
    bodies = [
        ("400 MB of JSON", "/gradio_api/queue/join", lambda: megabytes(400, b'{"data": ["'), json_type),
        ("400 MB to a call", "/gradio_api/call/ask", lambda: megabytes(400, b'{"data": ["'), json_type),
        ("brackets", "/gradio_api/queue/join", deep_json, json_type),
        ("200 MB as a form field", "/gradio_api/upload", lambda: field, of_field),
        ("400 MB in chunks as an upload", "/gradio_api/upload", lambda: megabytes(400, upload[:90]), of_upload),
        *[(f"upload {n} of 63 MB", "/gradio_api/upload", lambda: upload, of_upload) for n in range(12)],
    ]
    with demo(lab) as page:
        before = resident_tree(page.process.pid)
        for name, path, data, headers in islice(bodies, count):
            status = page.post(path, data(), **headers)
            grown = resident_tree(page.process.pid) - before
            reason = "" if grown < GROWTH else f"took {grown:.0f} MiB"
            reason = reason or unless(page.kept() <= 512, f"kept {page.kept():.0f} MiB on disk")
            reason = reason or unless(not status.startswith("5"), f"answered with {status}")
            yield told(name, reason)
        yield unless(httpx.get(page.url, trust_env=False, timeout=60).status_code == 200, "the page is away")


#: Gradio's routes that the page does not use.
ROUTES = (
    ("POST", "/gradio_api/deep_link?session_hash=x"), ("GET", "/gradio_api/deep_link?session_hash=x"),
    ("GET", "/gradio_api/file={upload}"), ("GET", "/file={upload}"), ("GET", "/gradio_api/file/{upload}"),
    ("GET", "/gradio_api/proxy=http://127.0.0.1:1/x"), ("POST", "/gradio_api/run/predict"),
    ("POST", "/gradio_api/run/ask"),
    ("POST", "/gradio_api/api/predict"), ("GET", "/gradio_api/monitoring"),
    ("GET", "/gradio_api/upload_progress?upload_id=x"), ("GET", "/gradio_api/stream/a/b/c/playlist.m3u8"),
    ("GET", "/gradio_api/custom_component/a/server/b/c"), ("GET", "/login_check"), ("GET", "/gradio_api/token"),
    ("POST", "/gradio_api/simple_predict/ask"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/robots.txt"),
    ("GET", "/manifest.json"), ("GET", "/gradio_api/app_id"), ("GET", "/gradio_api/run_history"),
)  # fmt: skip


@attack(len(ROUTES))
def routes_of_gradio(lab: Lab, count: int) -> Iterator[str]:
    """Routes that the page does not use do not exist (403, 404, 405), no upload is handed out, and no temporary file is
    left after SIGTERM."""
    with demo(lab) as page:
        body, headers = form("files", 0)
        answer = httpx.post(
            f"{page.url}/gradio_api/upload", content=body.replace(b"\r\n\r\n\r\n", b"\r\n\r\n" + png(4) + b"\r\n"),
            headers=headers, trust_env=False, timeout=60,
        )  # fmt: skip
        upload = answer.json()[0] if answer.status_code == 200 else "/etc/hostname"
        for method, path in islice(ROUTES, count):
            path = path.format(upload=upload)
            status = httpx.request(method, page.url + path, trust_env=False, timeout=60).status_code
            yield unless(status in (403, 404, 405), f"{method} {path}: {status}")
        page.process.send_signal(signal.SIGTERM)
        page.process.wait(60)
        left = [str(path) for path in page.folder.rglob("*") if path.is_file()]
        yield unless(not left, f"left on disk: {json.dumps(left)}")
