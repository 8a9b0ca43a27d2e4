"""`make fuzz` fails if a target ends with an error or a signal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from script_files import load_script

pytest.importorskip("imagecodecs")  # encodes some of the initial files


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0], 0), ([0, 77, 0], 1), ([-9, 0, 0], 1)])
def test_a_target_that_ends_badly(codes: list[int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = load_script(Path(__file__).parent / "fuzz.py")
    ended = iter(codes)
    monkeypatch.setattr(
        fuzz, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=next(ended)))
    )
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--keep", str(tmp_path)])
    assert fuzz.main() == code
