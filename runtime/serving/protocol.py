"""uvicorn's HTTP/1.1, with an end to what it waits for without one.

uvicorn has no timeout for a request on its way in, nor for an answer that nobody takes: a client that sends or reads a
byte now and then holds its connection for ever, and its answer in memory (issue 157 of Kludex/uvicorn; what its
`timeout_keep_alive` limits is the pause between requests). Here a request, header and body, must be whole in time, an
answer be taken in time, and connections are limited. What is no HTTP is answered as every error is.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cbmir.runtime.logs import log

#: Connections at once; more are closed as they come.
MOST_CONNECTIONS = 256


class BoundedProtocol(H11Protocol):
    """`seconds` is for a whole request, and again for reading its answer; `with_deadline` makes a class for uvicorn."""

    seconds = 60.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._deadline: asyncio.TimerHandle | None = None  # of the request
        self._unread: asyncio.TimerHandle | None = None  # of what is written and not taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        # `pause_writing` is called as soon as anything waits to be taken, `resume_writing` when nothing does.
        transport.set_write_buffer_limits(0)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        on_its_way = self.conn.their_state is h11.SEND_BODY or bool(
            self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        )
        if not on_its_way:
            self._forget()
        elif self._deadline is None:
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._forget_unread()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        request = str(uuid.uuid4())
        log.info("answered", extra={"fields": {"request": request, "route": "none", "status": 400, "problem": "http"}})
        problem = {
            "type": "urn:cbmir:problem:http", "title": "Bad Request", "status": 400, "detail": msg,
            "instance": f"urn:uuid:{request}",
        }  # fmt: skip
        body = json.dumps(problem).encode()
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(body))),
                   ("Connection", "close"), ("X-Request-ID", request)]  # fmt: skip
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def with_deadline(seconds: float) -> type[BoundedProtocol]:
    """The protocol with another `seconds`."""
    return type("BoundedProtocol", (BoundedProtocol,), {"seconds": seconds})
