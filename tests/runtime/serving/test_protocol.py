"""A request must be complete in time, whichever way it is sent; idle connections between requests stay open."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cbmir.runtime.serving import server
from cbmir.runtime.serving.server import BoundedProtocol, with_deadline
from cbmir.runtime.sockets import bound

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def answer_much(scope: Any, receive: Any, send: Any) -> None:
    """Answer with more than the buffers of a connection hold."""
    body = bytes(32 * 2**20)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served(seconds: float) -> Iterator[socket.socket]:
    """Run a server in a thread, and yield a connection to it."""
    with serving(seconds, answer_at_once) as (_, connection):
        yield connection


@contextmanager
def serving(seconds: float, app: Any) -> Iterator[tuple[uvicorn.Server, socket.socket]]:
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(
        app, http=with_deadline(seconds), ws="none", lifespan="off", log_config=None,
        timeout_keep_alive=1000, h11_max_incomplete_event_size=10**9,  # so that no other limit applies
    )  # fmt: skip
    server = Server(config)
    with bound("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert started.wait(30)
            with socket.create_connection(listener.getsockname(), timeout=30) as connection:
                yield server, connection
        finally:
            server.should_exit = True
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    patience = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.01)


def is_cut(connection: socket.socket) -> bool:
    """Whether the peer closes the connection. Waits until data or the end arrives."""
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "part", [b"", b"G", GET[:-2], b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nxx"]
)
def test_an_endless_request_is_cut_off(part: bytes) -> None:
    with served(0.1) as connection:
        connection.sendall(part)
        if part.startswith(b"POST"):
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert is_cut(connection)


def test_a_trickling_request_is_cut_off() -> None:
    with served(0.1) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):  # a broken pipe or a reset
            while True:
                connection.sendall(b"X: y\r\n")


def test_a_second_request_has_its_own_time() -> None:
    with served(30) as connection:
        for _ in range(2):
            connection.sendall(GET[:10])
            connection.sendall(GET[10:])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_an_answer_that_is_not_read_is_cut_off() -> None:
    with serving(0.2, answer_much) as (server, connection):
        connection.sendall(GET)
        until(lambda: server.server_state.total_requests == 1)  # the answer is written
        until(lambda: not server.server_state.connections)
        taken = 0
        try:
            while data := connection.recv(2**20):
                taken += len(data)
        except ConnectionResetError:
            pass
        assert taken < 32 * 2**20


def test_an_answer_that_is_read_is_complete() -> None:
    with serving(30, answer_much) as (_, connection):
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        with connection.makefile("rb") as stream:
            assert len(stream.read()) > 32 * 2**20


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
    with served(30) as connection:
        connection.sendall(GET)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        with socket.create_connection(connection.getpeername(), timeout=30) as second:
            assert is_cut(second)


def test_uvicorn_has_the_private_parts_that_are_replaced() -> None:
    """They are why pyproject.toml sets an upper version of uvicorn. Without them, `BoundedProtocol` limits nothing."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    (asked,) = [one for one in project["optional-dependencies"]["serve"] if one.startswith("uvicorn")]
    assert "<" in asked
    replaced = {name for name, of in vars(BoundedProtocol).items() if callable(of)} - {"_begin", "_end"}
    gone = sorted(name for name in replaced if not hasattr(H11Protocol, name))
    state = uvicorn.server.ServerState()
    config = uvicorn.Config(answer_at_once, http="h11", log_config=None)
    loop = asyncio.new_event_loop()
    instance = H11Protocol(config=config, server_state=state, app_state={}, _loop=loop)
    loop.close()
    gone += sorted({"conn", "connections", "loop", "transport"} - set(vars(instance)))
    gone += sorted({"startup", "shutdown"} - set(vars(uvicorn.Server)))
    assert not gone, f"uvicorn {uvicorn.__version__} has no {', '.join(gone)} any more: see runtime/serving/server.py"


def test_a_deadline_is_forgotten_with_its_connection() -> None:
    async def run() -> list[object]:
        loop = asyncio.get_running_loop()
        instance = with_deadline(30)(
            config=uvicorn.Config(answer_at_once, http="h11", log_config=None),
            server_state=uvicorn.server.ServerState(),
            app_state={},
            _loop=loop,
        )
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await loop.create_connection(lambda: instance, sock=ours)
            before = instance._deadlines.copy()
            transport.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return [list(before), instance._deadlines]

    assert asyncio.run(run()) == [["request"], {}]
