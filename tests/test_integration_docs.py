"""docs/integration.md and docs/http.md: their blocks run in order, unchanged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbmir.runtime.gallery.protocol import open_gallery
from dicom_files import make_dicom

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "integration.md"
OVER_HTTP = ROOT / "docs" / "http.md"
URL = "http://127.0.0.1:8000"


@pytest.fixture
def folder(examples: Path) -> Path:
    """The folder `examples`, with images that are refused."""
    (examples / "knee.dcm").write_bytes(make_dicom(BodyPartExamined="KNEE"))
    (examples / "hip.dcm").write_bytes(make_dicom(BodyPartExamined="HIP"))
    return examples


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    """The URL of `cbmir serve`, started as on the page but on a free port."""
    command = [sys.executable, "-m", "cbmir", "serve", "--model", "model.onnx", "--gallery", "gallery", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0].rstrip("/")
        finally:
            server.terminate()


def test_python_blocks_run(folder: Path, served: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pydicom import dcmread

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace(URL, served), str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert "Effusion" in out
    assert out.count("BodyPartExamined (0018,0015): expected CHEST, found 'KNEE'") == 2  # in process and over HTTP
    assert "case-" in out
    assert dcmread(folder / "chest.sr.dcm").Modality == "SR"
    assert len(names["answers"]) == 8


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
def test_curl_blocks_run(folder: Path, served: str) -> None:
    """The page's two case ids are replaced by two of this gallery."""
    with open_gallery("gallery") as gallery:
        ours = [gallery.case_id(image) for image in gallery.ids()[:2]]
    blocks = re.findall(r"^```bash\n(curl .*?)^```", OVER_HTTP.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    theirs = dict.fromkeys(re.findall(r"case-[0-9a-f]{16}", "".join(blocks)))
    assert len(blocks) == 7 and len(theirs) == 2
    for block in blocks:
        for old, new in zip([URL, *theirs], [served, *ours], strict=True):
            block = block.replace(old, new)
        shell = ["bash", "-euo", "pipefail", "-c", block]
        answer = subprocess.run(shell, check=True, capture_output=True, text=True).stdout
        status = json.loads(answer).get("status", 200) if answer else 200
        assert status == (422 if "hip.dcm" in block else 200), answer
    assert (folder / "sr.dcm").stat().st_size


@pytest.mark.parametrize("command", ["serve", "pacs follow", "pacs node", "data dicom"])
def test_commands_take_the_options_shown(command: str) -> None:
    """Every option that the page shows with a command must exist."""
    from cbmir.cli import cli

    group: Any = cli
    for word in command.split():
        group = group.get_command(None, word)
    known = {option for parameter in group.params for option in parameter.opts}
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"cbmir {command} ")]
    for line in lines:
        assert set(re.findall(r"--[a-z-]+", line)) <= known


def test_links_are_valid() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text("utf-8")):
        assert (PAGE.parent / link).exists(), link
