"""A gallery with a report that contains code, and the demo that shows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.manifest import Box, Manifest, Row
from cbmir.runtime import Finder, build_gallery, open_engine
from cbmir.runtime.gallery.projection import GalleryProjection, principal_plane

TIMEOUT_MS = 90_000


@pytest.fixture(scope="session")
def report() -> str:
    """A report that would run as code if it were not escaped."""
    return "<script>document.title = 'hacked'</script> {{constructor}} ${1+1} Left pleural effusion. No mass."


@pytest.fixture(scope="session")
def demo_gallery(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_xray: Callable[..., NDArray[np.uint8]], report: str
) -> Path:
    """Eight images of four patients, all with an effusion, and no map."""
    folder = tmp_path_factory.mktemp("demo")
    rows = []
    for number in range(8):
        image = folder / f"image_{number}.png"
        Image.fromarray(make_xray(number)).save(image)
        rows.append(Row(image, f"patient_{number // 2}", (1, number % 2, 0), split="train", report=report))
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, Manifest(engine.card.labels, tuple(rows)), folder / "gallery")
    return folder / "gallery"


@pytest.fixture(scope="session")
def url(
    tiny_model: Path, demo_gallery: Path, running_demo: Callable[..., AbstractContextManager[str]]
) -> Iterator[str]:
    """The address of a demo of `demo_gallery`."""
    with running_demo(tiny_model, demo_gallery) as url:
        yield url


@pytest.fixture(scope="session")
def wall_gallery(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> Path:
    """Forty images of forty patients, two views and two sources, with a map; every fourth is upright and has a box."""
    folder = tmp_path_factory.mktemp("wall")
    rows = []
    for number in range(40):
        image = folder / f"image_{number:02}.png"
        boxes = () if number % 4 else (Box("Mass", 0.5, 0.05, 0.25, 0.5),)
        Image.fromarray(make_xray(100 + number, 128)[:, : 96 if boxes else 128]).save(image)
        labels = (number % 2, (0, 1, -1)[number % 3], None if number % 5 else 1)
        view, said = ("PA", "AP")[number % 2], "Small effusion on the left. The heart is normal."
        rows.append(Row(
            image, f"p{number}", labels, view=view, split="train", report=said if number % 3 else "",
            source="North" if number < 20 else "South", boxes=boxes,
        ))  # fmt: skip
    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, Manifest(engine.card.labels, tuple(rows)), folder / "gallery")
    with Finder.open(tiny_model, folder / "gallery", threads=1) as finder:
        assert finder.gallery is not None
        GalleryProjection.make(finder.gallery, principal_plane, "principal components").save(folder / "gallery")
    return folder / "gallery"


@pytest.fixture(scope="session")
def wall_url(
    tiny_model: Path, wall_gallery: Path, running_demo: Callable[..., AbstractContextManager[str]]
) -> Iterator[str]:
    """The address of a demo of `wall_gallery`."""
    with running_demo(tiny_model, wall_gallery) as url:
        yield url


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages. At the end, checks that all requests stayed on this machine, and no script failed."""
    contexts: list[Any] = []
    requests: list[str] = []
    errors: list[str] = []
    places: list[str] = []

    def visit(url: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        places.append(url)
        context.on("request", lambda request: requests.append(request.url))
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.locator("#viewer .film").first.wait_for()
        page.wait_for_function("sessionStorage.cbmir")  # the server has answered its first call
        return page

    yield visit
    for context in contexts:
        context.close()
    own = tuple(start for url in places for start in (f"{url}/", f"blob:{url}/", "data:"))
    assert requests
    assert [request for request in requests if not request.startswith(own)] == []
    assert errors == []


@pytest.fixture
def page(visit: Callable[..., Any], url: str) -> Any:
    """The opened demo of eight images."""
    return visit(url)


@pytest.fixture
def wall(visit: Callable[..., Any], wall_url: str) -> Any:
    """The opened demo of forty images."""
    return visit(wall_url)


@pytest.fixture
def xray(tmp_path: Path, make_xray: Callable[..., NDArray[np.uint8]]) -> Path:
    """An X-ray that is not in the galleries."""
    path = tmp_path / "xray.png"
    Image.fromarray(make_xray(50, 256)).save(path)
    return path


@pytest.fixture
def demo_with_login(tiny_model: Path, demo_gallery: Path) -> Iterator[str]:
    """A demo with the login ada, correct horse."""
    command = [sys.executable, "-m", "cbmir", "demo", str(tiny_model), str(demo_gallery), "--port", "0"]
    environment = os.environ | {"DEMO_LOGIN": "ada:correct horse"}
    with subprocess.Popen(
        [*command, "--login", "env:DEMO_LOGIN"], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0


@pytest.fixture(scope="session")
def require_axe() -> str:
    """The script of axe-core. Skips if npm has not installed it; fails in CI."""
    script = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
    if not script.exists():
        if os.environ.get("CBMIR_REQUIRE_BROWSER") == "1":
            pytest.fail("axe-core is required here (CBMIR_REQUIRE_BROWSER=1); 'make test' installs it")
        pytest.skip("axe-core is not installed: 'make test' installs it")
    return script.read_text(encoding="utf-8")
