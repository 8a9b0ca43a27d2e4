"""Reading broken files: an image or a typed error within ten seconds and a gigabyte, and no crash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("imagecodecs")  # encodes some of the files
from broken_files import broken_files, whole_files
from dicom_files import make_dicom

HERE = Path(__file__).parent


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """The outcome of each file in a folder, read in a separate process."""
    command = [sys.executable, "-W", "error", HERE / "read_files.py", folder]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    files = sorted(path.name for path in folder.iterdir())
    assert child.returncode == 0, f"{files[len(lines)]}: exit code {child.returncode}\n{child.stderr}"
    assert [line["file"] for line in lines] == files
    assert child.stderr == ""
    assert not any("SECRET" in line["outcome"] for line in lines)
    assert max(line["most"] for line in lines) < 1024
    return lines


def test_good_files_are_read(tmp_path: Path) -> None:
    for name, data in whole_files().items():
        (tmp_path / name).write_bytes(data)
    assert {line["outcome"] for line in outcomes(tmp_path)} == {"uint8"}


def test_the_memory_of_this_process_is_not_counted(tmp_path: Path) -> None:
    ballast = np.ones(400 * 2**20, np.uint8)
    (tmp_path / "x.png").write_bytes(whole_files()["x.png"])
    (line,) = outcomes(tmp_path)
    assert line["most"] < ballast.nbytes / 2**20


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.release)])
def test_broken_files(count: int, tmp_path: Path) -> None:
    for name, data in broken_files(count, seed=count):
        (tmp_path / name).write_bytes(data)
    kinds = Counter(line["outcome"].split(":")[0] for line in outcomes(tmp_path))
    assert sum(kinds.values()) == count
    assert kinds["DamagedImageError"] > count / 20
    assert kinds["uint8"] > count / 50


def test_earlier_finds(tmp_path: Path) -> None:
    """Files that once caused a crash, a stall or too much memory; see finds/README.md."""
    finds = [path for path in (HERE / "finds").iterdir() if path.suffix != ".md"]
    for path in finds:
        shutil.copy(path, tmp_path)
    if finds:
        outcomes(tmp_path)


def absurd_files() -> dict[str, bytes]:
    """Valid headers that are built to be expensive: each file is read or refused like any other."""
    plain = make_dicom()
    pixels = plain.rindex(b"\xe0\x7f\x10\x00")
    depth = 3000
    nested = (b"\x29\x00\x10\x10SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff") * depth
    closed = (b"\xfe\xff\x0d\xe0\0\0\0\0" + b"\xfe\xff\xdd\xe0\0\0\0\0") * depth
    elements = b"".join(
        group.to_bytes(2, "little") + element.to_bytes(2, "little") + b"LO\x04\x00abcd"
        for group in range(0x0031, 0x0051, 2)
        for element in range(0x1000, 0x3000)
    )
    item = b"\xfe\xff\x00\xe0\x0c\0\0\0" + b"\x08\x00\x00\x01SH\x04\x00abcd"
    items = item * 100_000
    sequence = b"\x54\x00\x20\x02SQ\0\0" + len(items).to_bytes(4, "little") + items
    windows = make_dicom(WindowCenter=[2048] * 6000, WindowWidth=[0] * 6000)
    return {
        "nested.dcm": plain[:pixels] + nested + closed + plain[pixels:],
        "unclosed.dcm": plain[:pixels] + nested,
        "elements.dcm": plain[:pixels] + elements + plain[pixels:],
        "items.dcm": plain[:pixels] + sequence + plain[pixels:],
        "windows.dcm": windows,
    }


def test_headers_that_are_built_to_be_expensive(tmp_path: Path) -> None:
    for name, data in absurd_files().items():
        (tmp_path / name).write_bytes(data)
    found = {line["file"]: line["outcome"].split(":")[0] for line in outcomes(tmp_path)}
    assert found == {
        "elements.dcm": "DamagedImageError",
        "items.dcm": "DicomImageError",  # the view's code is not valid
        "nested.dcm": "DamagedImageError",
        "unclosed.dcm": "DamagedImageError",
        "windows.dcm": "uint8",
    }
