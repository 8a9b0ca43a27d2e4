"""The Dockerfile: linted, and with all files that the wheel is built from. No container is built here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not in this environment")
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_build_context_has_all_it_needs() -> None:
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {package.split(".")[1] for package in project["tool"]["setuptools"]["packages"] if "." in package}
    own = {"cli"}  # in src
    assert given == {"pyproject.toml", "src", *project["project"]["license-files"], project["project"]["readme"]} | (
        folders - own
    )
    assert all((ROOT / name).exists() for name in given)
