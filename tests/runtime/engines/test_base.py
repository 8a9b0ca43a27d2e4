"""Freed memory is returned to the system."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest

from cbmir.runtime.engines.base import give_back_freed_memory


def resident() -> int:
    """Bytes of the process's private memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's own")
def test_freed_memory_is_returned_to_the_system() -> None:
    """Freeing alone does not return small pieces below one that is kept."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    pieces = [libc.malloc(8192) for _ in range(8000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 8192)
    for piece in pieces[:-1]:
        libc.free(piece)
    before = resident()
    give_back_freed_memory()
    assert before - resident() > 50e6
    libc.free(pieces[-1])


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("not asked"))
    give_back_freed_memory()
