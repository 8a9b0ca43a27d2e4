"""Attacks by a DICOMweb server on `cbmir pacs follow`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

from hostile import deep_json
from lab import Lab, attack, told
from service import ended

from pacs_rig import node_process
from process_memory import resident_tree

LOOKED_AT = 10.0  # seconds to observe each server; one second for a single attempt
MOST_REQUESTS = 200  # during this time, at an interval of a minute
MOST_MEMORY = 900.0  # MiB


def study(number: int) -> dict[str, object]:
    return {"0020000D": {"vr": "UI", "Value": [f"1.2.3.{number}"]}, "00080020": {"vr": "DA", "Value": ["20260101"]},
            "00201208": {"vr": "IS", "Value": [1]}}  # fmt: skip


PAGE = json.dumps([study(number) for number in range(200)]).encode()


def same_page(ask: BaseHTTPRequestHandler) -> None:
    """The same page for any offset."""
    begin(ask, len(PAGE))
    ask.wfile.write(PAGE)


def huge(ask: BaseHTTPRequestHandler) -> None:
    """600 MB of studies."""
    begin(ask)
    ask.wfile.write(b"[")
    part = b",".join(json.dumps(study(number)).encode() for number in range(10_000)) + b","
    for _ in range(600_000_000 // len(part)):
        ask.wfile.write(part)


def dripping(ask: BaseHTTPRequestHandler) -> None:
    """One byte per second, for ever."""
    begin(ask)
    while True:
        ask.wfile.write(b"[")
        time.sleep(1)


def brackets(ask: BaseHTTPRequestHandler) -> None:
    begin(ask)
    ask.wfile.write(deep_json())


def new_pages(ask: BaseHTTPRequestHandler) -> None:
    """Always 200 new studies."""
    start = time.monotonic_ns()
    begin(ask)
    ask.wfile.write(json.dumps([study(start + number) for number in range(200)]).encode())


def round_about(ask: BaseHTTPRequestHandler) -> None:
    """A redirect to itself."""
    ask.send_response(302)
    ask.send_header("Location", ask.path)
    ask.end_headers()


def begin(ask: BaseHTTPRequestHandler, length: int | None = None) -> None:
    ask.send_response(200)
    ask.send_header("Content-Type", "application/dicom+json")
    if length is not None:
        ask.send_header("Content-Length", str(length))
    ask.end_headers()


@contextmanager
def lying(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """Run a server with this answer, and yield its URL and a list of requested paths."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            try:
                answer(self)
            except OSError:  # the client has disconnected
                return

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/dicom-web", paths
    finally:
        server.shutdown()
        server.server_close()


SERVERS = {
    "the same page for ever": same_page,
    "600 MB of studies": huge,
    "a byte a second": dripping,
    "200,000 brackets": brackets,
    "new pages for ever": new_pages,
    "redirections": round_about,
}


@attack(2 * len(SERVERS))
def lists_from_peers(lab: Lab, count: int) -> Iterator[str]:
    """A PACS that repeats a page, never ends, drips or sends 600 MB: requests and memory are bounded (900 MiB), and
    SIGTERM ends `pacs follow`."""
    for name, answer in islice(SERVERS.items(), max(1, count // 2)):
        folder = lab.new()
        words = ["pacs", "follow", "--model", str(lab.model), "--state", str(folder / "state"), "--interval", "60"]
        with (
            lying(answer) as (url, paths),
            node_process(folder / "log", *words, "--dicomweb", url, "--since", "2026-01-01") as follower,
        ):
            most, until = 0.0, time.monotonic() + (LOOKED_AT if count > 2 else 1)
            while time.monotonic() < until and most < MOST_MEMORY:
                most = max(most, resident_tree(follower.process.pid))
                time.sleep(0.1)
            reason = f"took {most:.0f} MiB" if most >= MOST_MEMORY else ""
            if len(paths) > MOST_REQUESTS and answer is not new_pages:
                reason = f"asked {len(paths)} times"
            yield told(name, reason)
            yield told(name, ended(follower.process))
