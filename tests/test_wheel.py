"""What a user gets: the wheel holds the whole tree, and its runtime works where there is no PyTorch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
        (facts,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"cbmir/py.typed", "cbmir/training/losses/proxy.py"} < expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in facts


def link_requirements(site: Path, extra: str) -> None:
    """Link what the cbmir in `site` requires with an extra, and all that those require, from this environment: what pip
    would install, without a package index."""
    (info,) = site.glob("cbmir-*.dist-info")
    done: set[str] = set()
    waiting: list[tuple[Distribution, set[str]]] = [(PathDistribution(info), {extra, ""})]
    while waiting:
        distribution, extras = waiting.pop()
        for requirement in map(Requirement, distribution.requires or []):
            wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": name}) for name in extras)
            if not wanted or canonicalize_name(requirement.name) in done:
                continue
            done.add(canonicalize_name(requirement.name))
            found = metadata.distribution(requirement.name)
            for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
            waiting.append((found, {*requirement.extras, ""}))


def test_a_query_without_torch(
    wheel: Path, tmp_path: Path, tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path
) -> None:
    """The wheel with the `cpu` extra alone, in a fresh environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    link_requirements(site, "cpu")
    code = (
        "import importlib.util as u, cbmir.runtime; print(cbmir.runtime.__file__); "
        "print([m for m in ('torch', 'pandas', 'sklearn', 'gradio', 'pydicom', 'lightning') if u.find_spec(m)])"
    )
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    file, present = found.stdout.splitlines()
    assert file.startswith(str(site)) and present == "[]"
    image = tiny_manifest.parent / "image_20.png"
    command = [python, "-m", "cbmir", "query", tiny_model, tiny_gallery, image, "-k", "3", "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert len(json.loads(answer.stdout)[0]["neighbours"]) == 3

    refused = subprocess.run(
        [python, "-m", "cbmir", "train", tiny_manifest, "-o", "run"], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 2 and 'pip install "cbmir[train]"' in refused.stderr
