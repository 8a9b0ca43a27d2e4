"""Fixtures that every folder of tests uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository: skipped where it is absent, required in CI."""
    folder = ROOT.parent / "shared"
    if folder.is_dir():
        return folder
    if os.environ.get("CBMIR_REQUIRE_SHARED") == "1":
        pytest.fail(f"{folder} is required here (CBMIR_REQUIRE_SHARED=1) and is missing")
    pytest.skip("the real X-rays (../shared) are not here")
