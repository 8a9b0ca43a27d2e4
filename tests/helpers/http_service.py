"""The HTTP service for tests: in this process without a network, or in its own process."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from PIL import Image

MakeClient = Callable[..., TestClient]
PATIENCE = 60.0  # seconds to wait before a test fails


def encoded(pixels: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    """An image file's bytes."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


class Held:
    """A function that starts, and continues when released with `let`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun, self.let = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.begun.set()
        assert self.let.wait(PATIENCE)
        return self._function(*arguments, **more)


class Service:
    """A process of `cbmir serve`, with its URL and the lines that it logs."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cbmir", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._said: queue.Queue[str] = queue.Queue()
        self._logged: queue.Queue[dict[str, Any]] = queue.Queue()
        takers = ((self.process.stdout, self._said.put), (self.process.stderr, self._take))
        self._readers = [threading.Thread(target=self._read, args=both, daemon=True) for both in takers]
        for reader in self._readers:
            reader.start()
        try:
            self.url = self._said.get(timeout=PATIENCE).split()[0]
        except queue.Empty:
            self.process.kill()
            raise AssertionError(f"it never came up: {self.raw}") from None

    @classmethod
    @contextmanager
    def running(cls, *arguments: str) -> Iterator[Self]:
        """A running service, which is killed at the end if it still runs."""
        service = cls(*arguments)
        try:
            yield service
        finally:
            service.process.kill()
            service.process.wait()
            for reader in service._readers:
                reader.join()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def connect(self) -> socket.socket:
        """A raw TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, message: str) -> dict[str, Any]:
        """The next log line with this message."""
        while True:
            line = self._logged.get(timeout=PATIENCE)
            if line["message"] == message:
                return line

    def memory(self) -> int:
        """Its peak resident memory so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        with stream:
            for line in stream:
                take(line)

    def _take(self, line: str) -> None:
        self.raw.append(line)
        try:
            self._logged.put(json.loads(line))
        except ValueError:  # not JSON; `raw` has it
            return
