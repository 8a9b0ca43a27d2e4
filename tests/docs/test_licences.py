"""The licences of every extra are compatible with Apache-2.0, and docs/licences.md lists them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from script_files import load_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "docs/licences.py")


def test_no_licence_is_unknown_or_asks_for_more_than_notices(script: ModuleType) -> None:
    assert script.refused() == {}
    brought = set().union(*map(script.brought_by, script.extras()))
    assert {"numpy", "pydicom", "pyjpegls", "imagecodecs", "torch", "gradio"} <= brought
    assert not any(name.startswith("pylibjpeg") for name in brought)


def test_the_tools_of_this_repository_are_in_no_other_extra(script: ModuleType) -> None:
    assert {name: extras for name, extras in script.packages().items() if name in script.TOOLS} == {
        name: {"dev"} for name in script.TOOLS
    }


def test_the_page_names_each_package(script: ModuleType) -> None:
    """These are the packages for this Python and platform; the page may have more."""
    lines = set(script.PAGE.read_text("utf-8").splitlines())
    assert set(script.rows().values()) <= lines, "run: python docs/licences.py"


@pytest.mark.parametrize(
    ("said", "licence", "allowed"),
    [
        ("License-Expression: MIT", "MIT", True),
        ("License: BSD-3-Clause", "BSD", True),
        ("Classifier: License :: OSI Approved :: Apache Software License", "Apache-2.0", True),
        ("License-Expression: MPL-2.0 AND MIT", "MIT and MPL-2.0", True),
        ("License: GPL V3.0", "GPL V3.0", False),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
         "GNU General Public License v3 (GPLv3)", False),
        ("License-Expression: AGPL-3.0-only", "AGPL-3.0-only", False),
        ("License-Expression: LGPL-2.1-or-later", "LGPL-2.1-or-later", False),
        ("Classifier: License :: Other/Proprietary License", "Other/Proprietary License", False),
        ("Summary: nothing", "unknown", False),
    ],
)  # fmt: skip
def test_licences_in_metadata(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, licence: str, allowed: bool
) -> None:
    folder = tmp_path / "some_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: some-package\nVersion: 1.0\n{said}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert script.licence_of("some-package") == licence
    assert script.is_allowed(licence) is allowed
