"""Describe the machine of a measurement: its processor and the versions of installed packages."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from cbmir.process import available_threads

#: The processor flags for matrix and vector instructions that determine a model's speed.
_FEATURES = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f", "avx_vnni", "avx2",
             "asimd", "bf16", "i8mm", "sve")  # fmt: skip


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return `processor` (name), `processors` and `usable` (counts), `memory_gib`, `features` (list), `system`,
    `python`, and `packages` (name -> version of the installed ones)."""
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    has = set(flags[1].split()) if flags else set()
    return {
        "processor": name[1].strip() if name else platform.processor() or platform.machine(),
        "processors": os.cpu_count() or 1,
        "usable": available_threads(),
        "memory_gib": round(memory / 2**30, 1) if memory else None,
        "features": [feature for feature in _FEATURES if feature in has],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": versions("cbmir", "numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "torch"),
    }


def in_words(machine: dict[str, Any]) -> str:
    """Format the result of `describe_machine` as two lines of text."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['processor']}, {machine['usable']} of {machine['processors']} processors, "
        f"{' '.join(machine['features']) or 'no matrix instructions known'}\n"
        f"{machine['system']}, Python {machine['python']}, {packages}"
    )


def versions(*packages: str) -> dict[str, str]:
    """Return name -> version of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
