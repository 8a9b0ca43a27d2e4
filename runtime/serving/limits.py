"""Limits on the number of running and waiting requests, and on the size and time of a body.

A request takes a slot before its body is read, and releases it when nothing of the request is left in memory, so
clients cannot exhaust memory. Work that has begun cannot be stopped: after a timeout it keeps its slot until it ends.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbmir.runtime.serving.problems import Problem, Trace, refuse

_T = TypeVar("_T")


#: Bytes of all requests' bodies together; a single body may have more.
MOST_HELD = 2**30
_MOST_AT_ONCE = 128


class RequestLimiter:
    """A pool of `concurrency` threads, with slots for these and for `queue` more requests."""

    def __init__(self, concurrency: int, queue: int, timeout_s: float) -> None:
        self.concurrency, self.capacity, self._timeout = concurrency, concurrency + queue, timeout_s
        self.taken = 0  # slots
        self._held = 0  # announced bytes of bodies
        self.working = 0  # threads
        self._seconds = 0.1  # per answer: a moving mean of weight 0.1
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="answer")

    @property
    def waiting(self) -> int:
        """The number of requests that are being uploaded or wait."""
        return max(0, self.taken - self.working)

    async def run(
        self, work: Callable[[bytes], _T], read: Callable[[], Awaitable[bytes]] | None = None, size: int = 0
    ) -> _T:
        """Take a slot, read a body of at most `size` bytes, and work on it in a thread. Raises Problem: 429 if there is
        no free slot or no room for the body, and 503 if the work does not end in time."""
        with self._lock:
            if self.taken >= self.capacity or (self._held and self._held + size > MOST_HELD):
                seconds = math.ceil(self.taken * self._seconds / self.concurrency)
                raise Problem(429, "busy", f"Expected at most {self.capacity} requests at once, of {MOST_HELD >> 20} "
                                           f"MiB in all, found more; try again later.",
                              retry_after=min(max(seconds, 1), 60))  # fmt: skip
            self.taken += 1
            self._held += size
        future: Future[_T] | None = None
        try:
            held: list[Callable[[], _T]] = [partial(work, await read() if read else b"")]
            future = self._pool.submit(self._timed, held)
            future.add_done_callback(lambda _: held.clear())  # the pool keeps cancelled jobs: drop the body
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout)
        except TimeoutError:
            if future is None or (future.done() and not future.cancelled()):  # raised by `read` or `work`
                raise
            raise Problem(503, "timeout", f"Expected an answer within {self._timeout:g} s, found none; try again when "
                                          "there is less load.", retry_after=5) from None  # fmt: skip
        finally:
            self._leave(size) if future is None else future.add_done_callback(lambda _: self._leave(size))

    def close(self) -> None:
        """Begin no more work. Running work is not waited for, because it cannot be stopped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, held: list[Callable[[], _T]]) -> _T:
        work = held.pop()
        with self._lock:
            self.working += 1
        start = time.monotonic()
        try:
            return work()
        except BaseException as error:
            _forget_locals(error)
            raise
        finally:
            del work
            with self._lock:
                self.working -= 1
                self._seconds += 0.1 * (time.monotonic() - start - self._seconds)

    def _leave(self, size: int) -> None:
        with self._lock:
            self.taken -= 1
            self._held -= size


def _forget_locals(error: BaseException | None) -> None:
    """Clear the frames of an error. It forms a cycle with the frames that wait for it, which would keep bodies in
    memory until it is collected."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_HOW = "send the file itself as the body: curl --data-binary @chest.dcm -H 'Content-Type: application/dicom'"


def body_size(request: Request, most: int) -> int:
    """Return how many bytes a request's body may have: as many as it announces, but `most` at most."""
    announced = request.headers.get("content-length", "")
    return min(int(announced), most) if announced.isdecimal() else most * ("transfer-encoding" in request.headers)


async def read_upload(request: Request, most: int, timeout_s: float) -> bytes:
    """Read the whole body, a file. Raises Problem as `read_body`, 415 for a form or JSON, 400 for an empty body."""
    if request.headers.get("content-type", "").lower().startswith(("multipart/", "application/json")):
        raise Problem(415, "media-type", f"Expected an image file, found a form or JSON; {_HOW}")
    body = await read_body(request, most, timeout_s)
    if not body:
        raise Problem(400, "empty", f"Expected an image file as the body, found none; {_HOW}")
    Trace.of(request.scope).uploaded = len(body)
    return body


async def read_body(request: Request, most: int, timeout_s: float) -> bytes:
    """Read the whole body. Raises Problem as `body_chunks`."""
    whole = io.BytesIO()  # `getvalue` does not copy
    async for chunk in body_chunks(request, most, timeout_s):
        whole.write(chunk)
    return whole.getvalue()


async def body_chunks(request: Request, most: int, timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives, counted and timed. Raises Problem: 413 for more than `most` bytes, 408 after
    `timeout_s`, 400 if cut off, 415 if encoded."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "encoding", "Expected a body without Content-Encoding, found one; send it plain.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    stream, taken = request.stream(), 0
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        while True:
            async with asyncio.timeout_at(deadline):  # never interrupts the caller's own work
                chunk = await anext(stream, None)
            if chunk is None:
                break
            taken += len(chunk)
            if taken > most:
                raise _too_large(most)
            yield chunk
    except TimeoutError:
        raise Problem(
            408, "slow", f"Expected the whole body within {timeout_s:g} s, found {taken:,} bytes of it.",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise _cut_off() from None
    if announced.isdecimal() and taken != int(announced):
        raise _cut_off()


# Functions, so that no local variable holds the error: its frame would keep the caller's body in memory.
def _too_large(most: int) -> Problem:
    return Problem(413, "too-large", f"Expected a body of at most {most:,} bytes, found more.")


def _cut_off() -> Problem:
    return Problem(400, "cut-off", "Expected the whole body, found it cut off.", headers={"Connection": "close"})


class BodyLimit:
    """ASGI middleware that reads a request's body, of at most `most` bytes within `timeout_s`, before anything parses
    it. All requests together may have 128 times as many. The paths `streamed` limit their own with `body_chunks`."""

    def __init__(self, app: ASGIApp, most: int, timeout_s: float, streamed: Collection[str] = ()) -> None:
        self._app, self._most, self._timeout, self._streamed = app, most, timeout_s, streamed
        self._left = _MOST_AT_ONCE * most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._streamed:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        size = body_size(request, self._most)
        self._left -= size
        try:
            if self._left < 0:
                raise Problem(429, "busy", "Expected fewer requests at once, found more; try again.", retry_after=5)
            body = await read_body(request, self._most, self._timeout)
        except Problem as problem:
            await refuse(problem, scope, receive, send)
        else:
            messages = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive_again() -> Message:
                return next(messages, None) or await receive()

            await self._app(scope, receive_again, send)
        finally:
            self._left += size
