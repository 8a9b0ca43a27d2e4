"""The service as a process: socket, signals, start and stop, and deadlines for slow clients.

uvicorn does not limit the time of an incoming request or of an unread answer (issue 157 of Kludex/uvicorn): a client
that sends or reads a byte now and then would keep its connection, and its answer in memory, forever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from cbmir.runtime.dicom_output import warm_up
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.logs import error_fields, fields, log
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.problems import Problem, Trace, response_of
from cbmir.runtime.serving.security import MOST_OF_HEADERS
from cbmir.runtime.serving.settings import Settings
from cbmir.runtime.sockets import bound, is_loopback, url_of

MOST_CONNECTIONS = 256  # further ones are closed on arrival


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with a limited number of connections. A request must be complete within `seconds`, and its answer be
    read within as many. Input that is not HTTP gets an error like any other."""

    seconds = 60.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._deadlines: dict[str, asyncio.TimerHandle] = {}  # "request": to be complete; "answer": to be read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        # With 0, `pause_writing` is called as soon as any output waits to be read, `resume_writing` when none does.
        transport.set_write_buffer_limits(0)
        self._begin("request")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        on_its_way = self.conn.their_state is h11.SEND_BODY or bool(
            self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        )
        if not on_its_way:
            self._end("request")
        elif "request" not in self._deadlines:
            self._begin("request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin("answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end("answer")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in tuple(self._deadlines):
            self._end(what)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        trace = Trace(status=400, problem="http")
        answer = response_of(Problem(400, "http", msg, headers={"Connection": "close"}), trace.id)
        log.info("answered", extra=fields(request=trace.id, route="none", status=400, problem="http"))
        headers = [*answer.raw_headers, (b"X-Request-ID", trace.id.encode())]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _begin(self, what: str) -> None:
        self._deadlines[what] = self.loop.call_later(self.seconds, self.transport.abort)

    def _end(self, what: str) -> None:
        if what in self._deadlines:
            self._deadlines.pop(what).cancel()


def with_deadline(seconds: float) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"seconds": seconds})


_GRACE = 10.0  # seconds beyond a request's timeout: before its connection is cut, and when stopping


def serve(
    live: ReloadableFinder, settings: Settings, *, host: str = "127.0.0.1", port: int = 8000,
    ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve until SIGTERM or Ctrl-C, after which requests in progress finish; SIGHUP reloads. Port 0 takes any free
    port.

    A `live` that is not open yet is opened once the health checks answer; `ready` is called with the URL when it is
    warm. `live` is closed at the end; if a request is still running then, the process ends with status 143. Raises
    UserError for a port or host that is not available, and the errors of opening.
    """
    with bound(host, port) as listener:
        if not is_loopback(host):
            who = "those with the token" if settings.token else "EVERYONE"
            log.warning("%s is open to %s on other machines, without encryption: put a proxy with TLS in front of it",
                        host, who)  # fmt: skip
        app = create_app(live, settings)
        config = uvicorn.Config(
            app, http=with_deadline(settings.timeout_s + _GRACE), ws="none", lifespan="on", log_config=None,
            access_log=False, server_header=False, proxy_headers=False, h11_max_incomplete_event_size=MOST_OF_HEADERS,
            timeout_graceful_shutdown=round(settings.timeout_s + _GRACE),
        )  # fmt: skip
        server = FinderServer(config, app, live, lambda: ready(url_of(listener, host)))
        try:
            server.run(sockets=[listener])
        finally:
            if app.state.limiter.working or app.state.checks.working:  # the interpreter would wait for their threads
                log.warning("shut down with requests still running; their clients had disconnected")
                os._exit(128 + signal.SIGTERM)
    if server.failed is not None:
        raise server.failed


class Server(uvicorn.Server):
    """A server that calls `started` in its event loop as soon as it listens."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()


class FinderServer(Server):
    """A server that opens the finder once it listens, and reloads it on SIGHUP."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, live: ReloadableFinder, ready: Callable[[], None]) -> None:
        super().__init__(config, self._start)
        self._app, self._live, self._ready = app, live, ready
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference
        self.failed: Exception | None = None

    def _start(self) -> None:
        self._begin(self._open())
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: self._begin(self._reload()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping: requests in progress are finished")
        await super().shutdown(sockets)
        log.info("stopped")

    async def _open(self) -> None:
        try:
            if not self._live.ready:
                await asyncio.to_thread(self._live.reload)
            if find_spec("highdicom") is not None:  # else no results can be requested
                await self._warm_up()
            log.info("ready")
            self._ready()
        except Exception as error:  # noqa: BLE001 - raised again by `serve`
            self.failed = error
            self.should_exit = True

    async def _warm_up(self) -> None:
        try:
            await asyncio.to_thread(warm_up)
        except Exception as error:  # noqa: BLE001 - logged: everything else works without it
            log.error("results are not available: the extra dicom is broken", extra=fields(**error_fields(error)))

    async def _reload(self) -> None:
        try:
            done = await asyncio.to_thread(self._app.state.service.reload)
            log.info("reloaded", extra=fields(generation=done.generation))
        except Problem as problem:
            log.error("%s", problem.detail)
        except Exception as error:  # noqa: BLE001 - logged: the old model stays
            log.error("reloading failed; the old model and gallery stay in use", extra=fields(**error_fields(error)))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
