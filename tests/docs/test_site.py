"""The site builds without warnings and without network, and its pages load nothing from other machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).resolve().parents[2]
#: URLs that a browser fetches by itself, unlike links.
_FETCHED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?:[^"]*)"|<link\b[^>]*\bhref="(https?:[^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with all network access blocked."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert not _FETCHED.findall(page.read_text("utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?https?:", style.read_text("utf-8")), style


def test_equations_are_drawn_by_the_browser_itself(site: Path) -> None:
    page = (site / "method.html").read_text("utf-8")
    assert page.count("<math ") > 20
    assert "arithmatex" not in page
    assert "<p>::</p>" not in (site / "api" / "runtime.html").read_text("utf-8")


def test_the_reference_has_all_public_names_of_the_runtime(site: Path) -> None:
    from cbmir import runtime

    page = (site / "api" / "runtime.html").read_text("utf-8")
    named = {name for name in runtime.__all__ if f'id="cbmir.runtime.{name}"' in page}
    assert named == set(runtime.__all__)
