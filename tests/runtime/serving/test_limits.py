"""Limits on running and waiting requests, and when a slot becomes free."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from cbmir.runtime.serving import limits
from cbmir.runtime.serving.limits import MOST_HELD, BodyLimit, RequestLimiter, body_chunks, body_size, read_body
from cbmir.runtime.serving.problems import Problem
from http_service import Held


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held(lambda *_: "done")
    yield held
    held.let.set()


async def ask(limiter: RequestLimiter, work: Callable[[], str]) -> str:
    return await limiter.run(lambda _: work())


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def test_more_than_the_slots_are_refused(held: Held) -> None:
    async def run() -> None:
        limiter = RequestLimiter(1, 1, 10)
        first = asyncio.create_task(ask(limiter, held))
        await until(held.begun.is_set)
        second = asyncio.create_task(ask(limiter, held))
        await until(lambda: limiter.taken == 2)
        assert (limiter.working, limiter.waiting, limiter.capacity) == (1, 1, 2)
        with pytest.raises(Problem) as refused:
            await ask(limiter, held)
        assert refused.value.status_code == 429
        assert int((refused.value.headers or {})["Retry-After"]) >= 1
        held.let.set()
        assert [await first, await second] == ["done", "done"]
        assert (limiter.taken, limiter.working) == (0, 0)
        limiter.close()

    asyncio.run(run())


def test_work_that_takes_too_long_keeps_its_slot_until_it_ends(held: Held) -> None:
    async def run() -> None:
        limiter = RequestLimiter(1, 0, 0.01)
        with pytest.raises(Problem) as late:
            await ask(limiter, held)
        assert (late.value.status_code, late.value.kind) == (503, "timeout")
        assert limiter.taken == 1
        with pytest.raises(Problem, match="at most 1 requests"):
            await ask(limiter, held)
        held.let.set()
        await until(lambda: limiter.taken == 0)
        limiter.close()

    asyncio.run(run())


class Body:
    """The body of an upload."""


def test_requests_that_waited_too_long_are_dropped(held: Held) -> None:
    async def run() -> None:
        limiter, second, body = RequestLimiter(1, 1, 0.01), Held(lambda *_: "done"), Body()
        is_kept = weakref.ref(body)
        first = asyncio.create_task(ask(limiter, held))
        await until(held.begun.is_set)
        with pytest.raises(Problem, match="within"):
            await ask(limiter, partial(second, body))
        assert limiter.taken == 1
        del body
        gc.collect()
        assert is_kept() is None
        held.let.set()
        with pytest.raises(Problem):
            await first
        await until(lambda: limiter.taken == 0)
        assert not second.begun.is_set()
        limiter.close()

    asyncio.run(run())


def test_an_exception_frees_the_slot() -> None:
    async def run() -> None:
        limiter = RequestLimiter(1, 0, 10)

        def fail() -> str:
            raise TimeoutError("the work's own")

        async def cut_off() -> bytes:
            raise RuntimeError

        with pytest.raises(TimeoutError, match="own"):
            await limiter.run(lambda _: fail())
        with pytest.raises(RuntimeError):
            await limiter.run(lambda _: fail(), cut_off)
        assert limiter.taken == 0
        limiter.close()

    asyncio.run(run())


def test_closing_does_not_wait(held: Held) -> None:
    async def run() -> None:
        limiter = RequestLimiter(1, 1, 0.01)
        with pytest.raises(Problem):
            await ask(limiter, held)
        limiter.close()  # `held` continues
        assert limiter.taken == 1
        held.let.set()
        await until(lambda: limiter.taken == 0)

    asyncio.run(run())


def request(*messages: Message, **headers: str) -> Request:
    """A request that receives these messages, and then waits for ever."""
    waiting = list(messages)

    async def receive() -> Message:
        return waiting.pop(0) if waiting else await asyncio.Event().wait()  # type: ignore[return-value]

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (request(part(b"12"), part(b"345", more=False)), 0),
        (request(part(b"123"), part(b"456")), 413),
        (request(content_length="6"), 413),
        (request(part(b"12")), 408),
        (request(part(b"12"), {"type": "http.disconnect"}), 400),
        (request(part(b"12", more=False), content_length="3"), 400),
        (request(content_encoding="gzip"), 415),
    ],
)
def test_a_body_is_counted_and_timed(asked: Request, status: int) -> None:
    try:
        assert asyncio.run(read_body(asked, 5, 0.05)) == b"12345"
        assert status == 0
    except Problem as problem:
        assert problem.status_code == status


def test_only_waiting_for_the_client_counts_as_slow() -> None:
    """A disk that is slow to store a chunk is not the client's fault."""

    async def run() -> bytes:
        taken = b""
        async for chunk in body_chunks(request(part(b"12"), part(b"345", more=False)), 5, 0.01):
            await asyncio.sleep(0.02)
            taken += chunk
        return taken

    assert asyncio.run(run()) == b"12345"


def test_a_limited_body_is_read_completely() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        asked = Request(scope, receive)
        await Response(await asked.body() or b"none")(scope, receive, send)

    client = TestClient(BodyLimit(echo, 5, 10, streamed=("/upload",)))
    assert client.post("/", content=b"12345").content == b"12345"
    assert client.get("/").content == b"none"
    assert client.post("/upload", content=b"123456").content == b"123456"
    answer = client.post("/", content=b"123456")
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:cbmir:problem:too-large")


def test_refused_requests_leave_no_body_in_memory() -> None:
    left: list[weakref.ref[Body]] = []

    def refuse(_: Any) -> None:
        try:
            raise KeyError
        except KeyError as error:
            raise ValueError("no image") from error

    async def run() -> None:
        limiter, waiting = RequestLimiter(1, 1, 10), [Body() for _ in range(5)]

        async def read() -> Any:
            return waiting.pop()

        left.extend(map(weakref.ref, waiting))
        while waiting:
            with pytest.raises(ValueError, match="no image"):
                await limiter.run(refuse, read)
        limiter.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert [one() for one in left] == [None] * 5
    finally:
        gc.enable()


def headed(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


def test_size_of_a_body() -> None:
    assert body_size(headed(), 9) == 0
    assert body_size(headed(content_length="7"), 9) == 7
    assert body_size(headed(content_length="70"), 9) == 9
    assert body_size(headed(transfer_encoding="chunked"), 9) == 9


def test_the_total_size_of_all_bodies_is_limited(held: Held) -> None:
    async def run() -> None:
        limiter = RequestLimiter(1, 9, 10)
        first = asyncio.create_task(limiter.run(held, size=2 * MOST_HELD))  # alone, it may have any size
        await until(held.begun.is_set)
        with pytest.raises(Problem, match="of 1024 MiB in all") as refused:
            await limiter.run(lambda _: "", size=1)
        assert refused.value.status_code == 429
        held.let.set()
        assert await first == "done"
        assert await limiter.run(lambda _: "next", size=1) == "next"
        limiter.close()

    asyncio.run(run())


def test_the_total_size_of_bodies_to_parse_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow body counts with its announced size."""
    monkeypatch.setattr(limits, "_MOST_AT_ONCE", 1)
    answered: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("ok")(scope, receive, send)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    async def run() -> None:
        more, limit = asyncio.Event(), BodyLimit(app, 5, 10)

        async def slow() -> Message:
            await more.wait()
            return {"type": "http.request", "body": b"12345", "more_body": False}

        def ask() -> asyncio.Task[None]:
            scope = {"type": "http", "path": "/", "method": "POST", "headers": [(b"content-length", b"5")]}
            return asyncio.create_task(limit(scope, slow, send))

        first, second = ask(), ask()
        await second
        assert answered == [429]
        more.set()
        await first
        await ask()
        assert answered == [429, 200, 200]

    asyncio.run(run())
