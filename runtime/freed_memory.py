"""Memory that was freed and is still the process's: glibc keeps it for later allocations."""

from __future__ import annotations

import ctypes
import sys


def give_back_freed_memory() -> None:
    """Let the system have it, where the C library is glibc: after loading what takes twice its size meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
