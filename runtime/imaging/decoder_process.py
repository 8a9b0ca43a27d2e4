"""Processes that read untrusted image files and can be killed: a decoder that hangs, crashes or takes too much memory
causes a typed error, and the service continues.

The file and its pixels pass through shared memory, and everything else through a socket. The digest is computed here
while the process decodes. This is not a sandbox: a hijacked decoder can do everything that the service may do.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.errors import DecodingError, NotReadyError, WorkerError
from cbmir.preprocessing import PreprocessSpec
from cbmir.process import Closing
from cbmir.runtime.imaging.radiograph import ImageLimits, Radiograph
from cbmir.runtime.imaging.reader import decode_image, image_bytes, read_image
from cbmir.runtime.logs import fields, log

#: Seconds per file, unless the caller sets another limit.
DEADLINE = 20.0
_START = 60.0  # seconds that a process may take to import its libraries
_MOST_MEMORY = 4 * 2**30  # bytes per process: the largest image takes a quarter of it
_KEPT = 64 * 2**20  # bytes of shared memory that each process may keep for the next file
_DIED = (EOFError, ConnectionError)
#: For glibc: keep 64 MiB for the next file, because fresh pages cost some ms per image. 32 MiB is the allowed maximum.
_MALLOC = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "33554432"}


class DecoderPool(Closing):
    """A pool of processes that read images. Any number of threads may share it; a file waits for a free process."""

    def __init__(self, count: int, seconds: float = DEADLINE) -> None:
        """Start `count` processes and wait until they are ready; a file may take `seconds`. Raises WorkerError. On
        Windows, where memory cannot be shared like this, files are read in this process, without limits."""
        if sys.platform == "win32":
            log.warning("images are decoded without limits of time and memory: a damaged one may stop this service")
            count = 0
        self._is_here, self._seconds = count == 0, seconds
        self._closed = False
        self._lock = threading.Lock()  # guards `_closed` and `_processes`
        self._processes: set[_Process] = set()
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._memories: list[_Memory] = []
        for process in [self._new() for _ in range(count)]:
            try:
                process.wait_until_ready()
            except WorkerError:
                self.close()
                raise
            self._idle.put(process)

    def read(
        self, source: str | Path | bytes | bytearray | memoryview | NDArray[np.generic], *,
        limits: ImageLimits | None = None, intensity: str = "header", allow_lateral: bool = False, threads: int = 1,
        reduced_for: PreprocessSpec | None = None,
    ) -> Radiograph:  # fmt: skip
        """Read an image as `read_image` does, within the deadline. Arrays need no decoder and are read in this process.

        Raises:
            ImageError: As `read_image`.
            DecodingError: The file took too long or too much memory, or crashed its decoder.
            NotReadyError: No process can be started at the moment, or the pool is closed.
        """
        limits = limits or ImageLimits()
        options = {"limits": limits, "intensity": intensity, "allow_lateral": allow_lateral, "threads": threads,
                   "reduced_for": reduced_for}  # fmt: skip
        if self._is_here or isinstance(source, np.ndarray):
            return read_image(source, **options)  # type: ignore[arg-type]
        data, name = image_bytes(source, limits)
        process = self._idle.get()
        try:
            if process.is_dead:
                process = self._replaced(process)
            process.wait_until_ready()
            return self._read_by(process, data, name, options)
        except WorkerError as error:
            raise NotReadyError(f"{error}; try again") from error
        except _DIED:
            reason = process.why_it_died()
            if self._closed:
                raise NotReadyError("expected a running service, found it closed") from None
            log.warning("a decoder died", extra=fields(reason=reason))
            raise DecodingError(f"{name}: expected an image, found a file whose decoder {reason}") from None
        finally:
            if process.is_busy:  # this thread was interrupted, so nothing reads the answer
                process.kill()
            with suppress(WorkerError):  # on failure the dead process stays, and is replaced when it is next used
                process = self._replaced(process) if process.is_dead else process
            self._idle.put(process)

    def close(self) -> None:
        """Kill all processes; unfinished reads raise NotReadyError."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()

    def _read_by(self, process: _Process, data: bytes, name: str, options: dict[str, Any]) -> Radiograph:
        memory = self._memories.pop() if self._memories else _Memory()
        memory.write(data)
        process.ask(memory, (name, len(data), options))
        digest = hashlib.sha256(data).hexdigest()
        answer = process.answer(self._seconds)
        if answer is None:
            process.kill()
            log.warning("a decoder was killed", extra=fields(seconds=self._seconds))
            raise DecodingError(
                f"{name}: expected an image that is decoded within {self._seconds:g} s, found a file that takes "
                f"longer; save the image again, as PNG or uncompressed"
            )
        if isinstance(answer, Exception):
            self._keep(memory)
            try:
                raise answer
            finally:
                del answer  # else the frame and the error refer to each other, and the file stays in memory
        pickled, sizes = answer
        ends = list(accumulate(sizes, initial=0))
        block = memory.block(ends[-1])
        radiograph: Radiograph = pickle.loads(pickled, buffers=[block[start:end] for start, end in pairwise(ends)])
        weakref.finalize(block, self._keep, memory).atexit = False  # when its last array is gone
        return replace(radiograph, sha256=digest)

    def _keep(self, memory: _Memory) -> None:
        """Keep memory for another file, unless it is large or there is enough."""
        if memory.size <= _KEPT and len(self._memories) < len(self._processes):
            self._memories.append(memory)

    def _new(self) -> _Process:
        with self._lock:
            try:
                process = _Process(self._seconds)
            except OSError as error:
                raise WorkerError(f"a process that reads images cannot be started: {error.strerror}") from error
            self._processes.add(process)
            if self._closed:
                process.kill()
            return process

    def _replaced(self, process: _Process) -> _Process:
        with self._lock:
            self._processes.discard(process)
            if self._closed:
                return process
        return self._new()


class _Memory:
    """Memory behind a file descriptor. It is reused, because fresh pages cost more than writing to them."""

    def __init__(self) -> None:
        self._descriptor = _unnamed_file()
        weakref.finalize(self, os.close, self._descriptor)
        self._map: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """The size in bytes, which never decreases."""
        return os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes) -> None:
        os.pwrite(self.fileno(), data, 0)

    def block(self, size: int) -> NDArray[np.uint8]:
        """Return the first `size` bytes, read-only."""
        if self._map is None or len(self._map) < size:
            self._map = mmap.mmap(self.fileno(), self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8, size)


def _unnamed_file() -> int:
    """Open a file in memory that disappears with the last process that has it open; on disk if this is not Linux."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("cbmir")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Process:
    """One process that reads images, and the socket to it."""

    def __init__(self, seconds: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from {__name__} import main; main({theirs.fileno()}, {seconds})"
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, env=_MALLOC | os.environ,
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        self._connection = Connection(ours.detach())
        self._ready = False
        self.is_busy = False

    @property
    def is_dead(self) -> bool:
        return self._child.poll() is not None

    def wait_until_ready(self) -> None:
        """Wait until the process has started. Raises WorkerError."""
        if self._ready:
            return
        with suppress(*_DIED):
            self._ready = self._connection.poll(_START) and self._connection.recv()
        if not self._ready:
            self.kill()
            raise WorkerError(f"a process that reads images did not start: it {self.why_it_died()}; stderr has more")

    def ask(self, memory: _Memory, question: tuple[str, int, dict[str, Any]]) -> None:
        self.is_busy = True
        self._connection.send(question)
        reduction.send_handle(self._connection, memory.fileno(), self._child.pid)

    def answer(self, seconds: float) -> Any:
        """Return what the process sends; None if it sends nothing in time."""
        if not self._connection.poll(seconds):
            return None
        answer = self._connection.recv()
        self.is_busy = False
        return answer

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self.is_busy = False

    def why_it_died(self) -> str:
        code = self._child.wait()
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL), as Linux does when memory runs out"
        return f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended (exit code {code})"


def main(descriptor: int, seconds: float) -> None:
    """Run in the process of a `_Process`: read images until the parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may be sent to the whole process group
        signal.signal(number, signal.SIG_IGN)
    import resource  # not on Windows

    if sys.platform == "linux":  # macOS counts shared memory too
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    connection = Connection(descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    connection.send(True)
    while True:
        try:
            name, size, options = connection.recv()
            memory = reduction.recv_handle(connection)
        except _DIED:
            return
        # This ends a decoder that holds Python's lock after its parent is gone.
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        most = int(used + seconds * options["threads"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        try:
            connection.send(_answer(memory, name, size, options))
        finally:
            os.close(memory)


def _answer(memory: int, name: str, size: int, options: dict[str, Any]) -> tuple[bytes, list[int]] | Exception:
    """Return an image without its arrays, and the sizes of the arrays, which are written to `memory` in a row."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        radiograph = decode_image(os.pread(memory, size, 0), name, **options)
        pickled = pickle.dumps(radiograph, protocol=5, buffer_callback=buffers.append)
    except MemoryError:
        most = f"{_MOST_MEMORY >> 30} GiB"
        return DecodingError(
            f"{name}: expected an image that takes at most {most} to decode, found one that takes more"
        )
    except Exception as error:  # noqa: BLE001 - raised again by the parent
        return error
    views = [buffer.raw() for buffer in buffers]
    os.lseek(memory, 0, os.SEEK_SET)
    for view in views:
        os.write(memory, view)
    return pickled, [view.nbytes for view in views]


def _end_with_parent(descriptor: int) -> None:
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    hung_up.poll()
    os._exit(1)
