"""The machine that a figure was measured on, in words."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from cbmir.runtime.engine import available_threads

#: What a processor says of its matrix and vector instructions, the ones that decide a model's speed.
_FEATURES = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f", "avx_vnni", "avx2",
             "asimd", "bf16", "i8mm", "sve")  # fmt: skip
_PACKAGES = ("cbmir", "numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "torch")


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """`processor` (its name), `processors` and `usable` (counts), `features` (list), `system`, `python`, and
    `packages`: name -> version of those that are installed."""
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "processor": name[1].strip() if name else platform.processor() or platform.machine(),
        "processors": os.cpu_count() or 1,
        "usable": available_threads(),
        "features": [feature for feature in _FEATURES if feature in has],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": {package: version for package in _PACKAGES if (version := _version(package))},
    }


def in_words(machine: dict[str, Any]) -> str:
    """Two lines of `describe_machine`'s answer."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['processor']}, {machine['usable']} of {machine['processors']} processors, "
        f"{' '.join(machine['features']) or 'no matrix instructions known'}\n"
        f"{machine['system']}, Python {machine['python']}, {packages}"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
