"""An engine that counts images, and a small manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime import Engine, open_engine
from counted_images import CountedImages


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with open_engine(tiny_model, threads=1, mode="throughput") as opened:
        yield opened


@pytest.fixture
def manifest(tiny_manifest: Path) -> Manifest:
    return read_manifest(tiny_manifest)


@pytest.fixture
def counter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> CountedImages:
    counter, real = CountedImages(), type(engine).run

    def run(self: Engine, batch: np.ndarray, **options: bool) -> object:
        if counter.images + len(batch) > counter.limit:
            raise KeyboardInterrupt
        counter.images += len(batch)
        return real(self, batch, **options)

    monkeypatch.setattr(type(engine), "run", run)
    return counter


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbmir.runtime.gallery.build.work.BATCH", 4)
