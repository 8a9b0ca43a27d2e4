"""What a user gets: the wheel holds the whole tree, and its runtime works where there is no PyTorch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("demo", "export", "runtime", "training")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy without the symlinks of src/cbmir, as in a clone on a system that has none."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    rubbish = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=rubbish)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", *PARTS))
    # Without isolation the build takes the setuptools that is here, and no network.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(output), str(source)], check=True, capture_output=True)
    (path,) = output.glob("*.whl")
    return path


def test_the_wheel_holds_the_tree(wheel: Path) -> None:
    spine = ROOT / "src" / "cbmir"
    expected = {f"cbmir/{name}" for name in ("cli/" + file.name for file in (spine / "cli").glob("*.py"))}
    expected |= {f"cbmir/{file.name}" for file in spine.iterdir() if file.is_file()}
    for part in PARTS:
        expected |= {f"cbmir/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / part).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"cbmir/py.typed", "cbmir/training/losses/proxy.py"} < expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_a_query_without_torch(
    wheel: Path, tmp_path: Path, tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path
) -> None:
    """Installs the wheel with the `cpu` extra alone into a fresh environment: needs a package index."""
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    subprocess.run([binaries / "pip", "install", "--quiet", f"cbmir[cpu] @ {wheel.as_uri()}"], check=True)
    code = "import cbmir.runtime, importlib.util as u; print(cbmir.runtime.__file__, u.find_spec('torch'))"
    found = subprocess.run([binaries / "python", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.startswith(str(tmp_path / "venv"))
    assert found.stdout.endswith(" None\n")
    image = tiny_manifest.parent / "image_20.png"
    command = [binaries / "cbmir", "query", tiny_model, tiny_gallery, image, "-k", "3", "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert len(json.loads(answer.stdout)[0]["neighbours"]) == 3
