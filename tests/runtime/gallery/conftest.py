"""Small galleries, entries and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery

COUNT = 60
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]


@pytest.fixture(scope="session")
def make_vectors() -> MakeVectors:
    """Make `count` unit vectors float32 [count, 8] from a seed."""

    def vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
        values = np.random.default_rng(seed).normal(size=(count, 8))
        unit: NDArray[np.float32] = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
        return unit

    return vectors


@pytest.fixture(scope="session")
def make_entries() -> MakeEntries:
    """Make `count` entries, numbered from `start`, six images per patient, with a value in every field."""

    def entries(count: int, start: int = 0) -> list[Entry]:
        return [
            Entry(
                id=f"id{n:04}", image=f"/images/{n:04}.png", patient_id=f"patient{n // 6:04}",
                study_id=f"study{n // 2:04}", sop_instance_uid=f"1.2.{n}", view=("PA", "AP", "")[n % 3],
                source=("Mercy Hospital", "Klinik Süd", "")[n // 2 % 3],
                date=f"2020-01-{1 + n % 28:02}" if n % 5 else "", split="train", report=f"Bericht {n:04}: Erguß.",
                labels={"Effusion": n % 2, "Mass": -1, "Nodule": None}, sha256=f"{n:064x}",
            )
            for n in range(start, start + count)
        ]  # fmt: skip

    return entries


@pytest.fixture
def store(
    tmp_path: Path, tiny_card: ModelCard, make_entries: MakeEntries, make_vectors: MakeVectors
) -> Iterator[Gallery]:
    """A gallery of 60 entries with thumbnails, at generation 1."""
    with Gallery.create(tmp_path / "gallery", tiny_card) as made:
        made.add(make_entries(COUNT), make_vectors(COUNT), [f"jpeg{n:04}".encode() for n in range(COUNT)])
        yield made


@pytest.fixture
def gallery(store: Gallery) -> Iterator[Gallery]:
    """The gallery of `store`, with an int8 index."""
    store.close()
    with Gallery.open(store.path) as opened:
        opened.rebuild("int8")
        yield opened
