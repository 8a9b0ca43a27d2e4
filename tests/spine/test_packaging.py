"""The handwritten parts of packaging against the tree: mistakes here would only show in a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cbmir

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"cbmir": "src/cbmir"} | {f"cbmir.{name}": name for name in ("demo", "export", "runtime", "training")}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def modules() -> list[tuple[str, Path]]:
    """(package, file) of every module; the symlinks in src/cbmir are not followed."""
    found = []
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT / folder)
            linked = package == "cbmir" and (ROOT / folder / inside.parts[0]).is_symlink()
            if not linked:
                found.append((".".join((package, *inside.parts[:-1])), file))
    return found


def test_all_packages_of_the_tree_are_listed(pyproject: dict[str, Any]) -> None:
    setuptools = pyproject["tool"]["setuptools"]
    assert setuptools["packages"] == sorted({package for package, _ in modules()})
    assert setuptools["package-dir"] == FOLDERS


def test_every_package_has_an_init_with_a_docstring() -> None:
    folders = {file.parent for _, file in modules()}
    assert all((folder / "__init__.py").read_text("utf-8").startswith('"""') for folder in folders)


@pytest.mark.parametrize("package", [name for name in FOLDERS if name != "cbmir"])
def test_symlinks_show_one_tree_to_editors(package: str) -> None:
    link = ROOT / "src" / package.replace(".", "/")
    if not link.exists():
        pytest.skip("a clone without symlinks: only type checkers and editors miss them")
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / FOLDERS[package]


def test_no_module_shadows_the_standard_library() -> None:
    names = {file.stem for package, file in modules() if package in FOLDERS and package != "cbmir"}
    assert not names & sys.stdlib_module_names


def test_versions_agree(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert version == cbmir.__version__ == metadata.version("cbmir")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_typing_marker_is_packaged(pyproject: dict[str, Any]) -> None:
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"]["cbmir"]
    assert (ROOT / "src" / "cbmir" / "py.typed").exists()


def test_the_extra_all_includes_every_extra(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    # gpu replaces cpu (two builds of one package), TensorRT needs a GPU, dev and docs are for work on cbmir, and
    # quantise includes export.
    elsewhere = {"all", "dev", "docs", "gpu", "tensorrt", "tensorrt-rtx", "export"}
    assert set(everything[len("cbmir[") : -1].split(",")) == set(extras) - elsewhere


def test_constraints_pin_the_requirements_of_pyproject(pyproject: dict[str, Any]) -> None:
    """`make venv` installs from constraints.txt, so that a test run can be repeated."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        pin = Requirement(line)
        assert [one.operator for one in pin.specifier] == ["=="], line
        pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    project = pyproject["project"]
    extras = {
        name: asked for name, asked in project["optional-dependencies"].items() if name not in ("gpu", "tensorrt")
    }
    asked = [Requirement(text) for texts in (project["dependencies"], *extras.values()) for text in texts]
    for requirement in asked:
        if requirement.name == "cbmir" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        # setuptools is a tool of pip, which `pip freeze` omits before Python 3.12.
        if (version := pins.get(canonicalize_name(requirement.name))) is None and requirement.name != "setuptools":
            raise AssertionError(f"{requirement}: expected a pin in constraints.txt; run: make constraints")
        assert version is None or requirement.specifier.contains(version), requirement


def test_a_failed_virtual_environment_leaves_nothing(tmp_path: Path) -> None:
    """Debian's Python without python3-venv leaves .venv/bin/python; the next `make` must not take it as done."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || { mkdir -p .venv/bin; touch .venv/bin/python; exit 1; }\n')
    python.chmod(0o755)
    command = ["make", ".venv/bin/python", f"PYTHON={python}"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 2 and "apt install python3-venv" in made.stderr
    assert not (tmp_path / ".venv").exists()
