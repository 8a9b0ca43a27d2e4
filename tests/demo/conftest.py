"""The demo, running as `cbmir demo` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.manifest import Manifest, Row
from cbmir.runtime import build_gallery, open_engine


@pytest.fixture(scope="session")
def report() -> str:
    """A report that would run if it could."""
    return "<script>document.title = 'hacked'</script> {{constructor}} ${1+1} Heart enlarged."


@pytest.fixture(scope="session")
def demo_gallery(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_xray: Callable[..., NDArray[np.uint8]], report: str
) -> Path:
    """Eight images of four patients, all with an effusion."""
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
def url(tiny_model: Path, demo_gallery: Path) -> Iterator[str]:
    """Where the demo answers. Ctrl-C must end it with exit code 0."""
    command = [sys.executable, "-m", "cbmir", "demo", str(tiny_model), str(demo_gallery), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        try:
            assert first.startswith("http://127.0.0.1:"), first
            yield first.split()[0]
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        assert "Traceback" not in errors, errors
