"""Attacks on `cbmir serve`, which runs in its own process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import httpx
from hostile import BOMBS, deep_json
from lab import Lab, attack, png, told, unless

from broken_files import broken_files
from http_service import Service
from process_memory import resident_tree

DEADLINE = 10.0  # seconds for an answer of these services
#: MiB by which memory may grow after the first requests: caches, the allocator, and large images in broken files.
GROWTH = 300


def serving(lab: Lab) -> object:
    return Service.running("--model", str(lab.model), "--gallery", str(lab.gallery), "--timeout", f"{DEADLINE:g}")


def asked(service: Service, data: bytes) -> str:
    """Send a file, and return what is wrong with the answer, or ""."""
    start = time.monotonic()
    answer = httpx.post(f"{service.url}/v1/analyze", content=data, timeout=12 * DEADLINE, trust_env=False)
    seconds = time.monotonic() - start
    if answer.status_code >= 500 and answer.status_code != 503:
        return f"answered with {answer.status_code}"
    return unless(seconds <= 2 * DEADLINE, f"answered after {seconds:.0f} s")


def ended(process: subprocess.Popen[str], seconds: float = 40) -> str:
    """Send SIGTERM, and return why the process does not end properly, or ""."""
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"SIGTERM did not end it within {seconds:g} s"
    return unless(code in (0, -signal.SIGTERM), f"ended with {code}")


@attack(24)
def bombs_over_http(lab: Lab, count: int) -> Iterator[str]:
    """Small images that are expensive to decode, two at a time: each is answered within twice the deadline, and so are
    good requests meanwhile. Memory stays under 3 GiB, and SIGTERM ends the service."""
    with serving(lab) as service, ThreadPoolExecutor(2) as pool:
        some = [(name, make()) for name, make in islice(BOMBS.items(), max(1, count // 3))]
        sent = [(name, pool.submit(asked, service, data)) for name, data in some]
        for name, answer in sent:
            reason = asked(service, png(0))
            yield told("a good request beside them", reason)
            reason = answer.result()
            yield told(name, reason)
            yield unless((used := resident_tree(service.process.pid)) < 3072, f"{name}: {used:.0f} MiB")
        if count >= 3:  # again, without waiting for answers
            for data in (some[0][1], some[-1][1]):
                pool.submit(asked, service, data)
            time.sleep(1)
        reason = ended(service.process)
        service.process.kill()
        yield reason


@attack(200)
def broken_files_over_http(lab: Lab, count: int) -> Iterator[str]:
    """Files that were cut, flipped or spliced: each gets an answer or a typed error without a patient's name. Memory
    stays flat."""
    with serving(lab) as service, httpx.Client(base_url=service.url, trust_env=False, timeout=60) as client:
        warm = 0.0
        for number, (name, data) in enumerate(broken_files(count, seed=11)):
            if number == min(50, count // 2):
                warm = resident_tree(service.process.pid)
            answer = client.post("/v1/analyze", content=data)
            well = (answer.status_code == 200 or 400 <= answer.status_code < 500) and "SECRET" not in answer.text
            yield unless(well, f"{name}: {answer.status_code}")
        yield unless((grown := resident_tree(service.process.pid) - warm) < GROWTH, f"memory grew by {grown:.0f} MiB")


@attack(2000, whole=True)
def flood_of_requests(lab: Lab, count: int) -> Iterator[str]:
    """500 requests at once, again and again: each is answered (200), asked to try again (429, 503), or closed if more
    than 256 connections are open. Afterwards the service works as before."""

    async def flood(url: str) -> list[httpx.Response | BaseException]:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=limits) as client:
            sent = [client.post("/v1/analyze", content=png(1)) for _ in range(min(500, count))]
            return await asyncio.gather(*sent, return_exceptions=True)

    with serving(lab) as service:
        for answer in chain.from_iterable(asyncio.run(flood(service.url)) for _ in range(max(1, count // 500))):
            if isinstance(answer, httpx.Response):
                yield unless(answer.status_code in (200, 429, 503), f"answered with {answer.status_code}")
            else:
                yield unless(isinstance(answer, httpx.NetworkError | httpx.RemoteProtocolError), type(answer).__name__)
        yield asked(service, png(2))
        yield unless((used := resident_tree(service.process.pid)) < 2048, f"{used:.0f} MiB")


POST = b"POST /v1/analyze HTTP/1.1\r\nHost: localhost\r\n"
SEARCH = POST.replace(b"analyze", b"search") + b"Content-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
#: Request -> bytes, and the allowed statuses; b"" if the connection may be closed.
REQUESTS: dict[str, tuple[bytes, tuple[bytes, ...]]] = {
    "40 KB of headers": (POST + b"X: " + b"y" * 40_000 + b"\r\n\r\n", (b"400", b"413", b"431", b"")),
    "40 KB of many headers": (POST + b"X: y\r\n" * 8000 + b"\r\n", (b"400", b"413", b"431", b"")),
    "half a header": (POST, (b"408", b"400", b"")),
    "half a body": (POST + b"Content-Length: 9000\r\n\r\nxx", (b"408", b"400", b"")),
    "1 GB announced": (POST + b"Content-Length: 1000000000\r\n\r\n", (b"413",)),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", (b"400", b"")),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n", (b"400", b"")),
    "length and chunks": (CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", (b"400", b"415", b"")),
    "a chunk of 2^72": (CHUNKED + b"\r\nffffffffffffffffff\r\n", (b"400", b"413", b"408", b"")),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", (b"400", b"403", b"421")),
    "not HTTP": (bytes(range(256)) * 200, (b"400", b"")),
    "deep JSON": (SEARCH + b"Content-Length: 200000\r\n\r\n" + deep_json(100_000), (b"400", b"413", b"422")),
}  # fmt: skip


def said(service: Service, data: bytes) -> bytes:
    """Send bytes, and return the status of the answer; b"" if the connection is closed."""
    with service.connect() as connection:
        try:
            connection.sendall(data)
            return connection.recv(1000)[9:12]
        except OSError:
            return b""


@attack(len(REQUESTS))
def malformed_requests(lab: Lab, count: int) -> Iterator[str]:
    """Header lists of 40 KB, incomplete requests, wrong lengths, deeply nested JSON: a status of 4xx or a closed
    connection, within twice the deadline."""
    with serving(lab) as service:
        for name, (data, expected) in islice(REQUESTS.items(), count):
            start = time.monotonic()
            status = said(service, data)
            seconds = time.monotonic() - start
            well = status in expected and seconds < 2 * DEADLINE + 5
            yield unless(well, f"{name}: {status.decode() or 'cut'} after {seconds:.0f} s")
        yield asked(service, png(3))
