"""Clients of the HTTP service in this process, without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from cbmir.runtime import Finder
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.settings import Settings
from http_service import MakeClient, encoded


@pytest.fixture(scope="module")
def make_client(tiny_model: Path, tiny_gallery: Path) -> Iterator[MakeClient]:
    """Make clients of services with these `Settings` fields. `gallery` and `live` replace the tiny gallery."""
    with ExitStack() as stack:

        def make(
            *, gallery: Path | None = tiny_gallery, live: ReloadableFinder | None = None, **settings: Any
        ) -> TestClient:
            live = live or ReloadableFinder(lambda: Finder.open(tiny_model, gallery, threads=1))
            app = create_app(live, Settings(**settings))
            return stack.enter_context(TestClient(app, base_url="http://localhost", raise_server_exceptions=False))

        yield make


@pytest.fixture(scope="module")
def client(make_client: MakeClient) -> TestClient:
    return make_client()


@pytest.fixture(scope="session")
def png(make_xray: Callable[..., NDArray[np.uint8]]) -> bytes:
    """An X-ray that is not in the gallery."""
    return encoded(make_xray(100))
