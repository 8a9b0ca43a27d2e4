"""`make fuzz` fails if a target ends with an error or a signal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("imagecodecs")  # encodes some of the initial files


@pytest.mark.parametrize(("codes", "code"), [([0, 0, 0], 0), ([0, 77, 0], 1), ([-9, 0, 0], 1)])
def test_a_target_that_ends_badly(codes: list[int], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).parent / "fuzz.py")
    assert spec is not None and spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds the helpers
    spec.loader.exec_module(fuzz)
    ended = iter(codes)
    monkeypatch.setattr(
        fuzz, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=next(ended)))
    )
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--keep", str(tmp_path)])
    assert fuzz.main() == code
