"""Run each attack once or twice, so that the script keeps working; `make attack` runs them fully."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbmir.runtime.gallery import search
from script_files import load_script

for name in ("imagecodecs", "httpx", "pynetdicom", "gradio", "fastapi", "pyarrow", "onnx"):
    pytest.importorskip(name)


SCRIPT = load_script(Path(__file__).parent / "attack.py")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return SCRIPT.Lab.made_in(tmp_path_factory.mktemp("lab"))


@pytest.fixture(autouse=True)
def _search_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks on galleries let the index propose all entries; this restores the settings."""
    for name in ("_AND", "_AND_RANKED"):
        monkeypatch.setattr(search, name, getattr(search, name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("attack", SCRIPT.ATTACKS, ids=lambda attack: attack.name)
def test_attack(attack: Any, lab: Any) -> None:
    result = SCRIPT.attempt(attack, lab, scale=0.0, seconds=30)
    assert result.is_kept, f"{result.reason} ({result.kept} of {result.tried})"
