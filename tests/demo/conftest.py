"""A gallery with a report that would run if it could, and the demo that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
def url(
    tiny_model: Path, demo_gallery: Path, running_demo: Callable[..., AbstractContextManager[str]]
) -> Iterator[str]:
    """Where the demo answers."""
    with running_demo(tiny_model, demo_gallery) as url:
        yield url
