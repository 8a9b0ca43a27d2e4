"""A gallery on disk and one in Milvus Lite, for the tests of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.labels import LabelSet
from cbmir.runtime import EditableGallery
from gallery_kinds import COUNT, MakeGallery, Vectors, address_in, create, fill, unit


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return unit(np.random.default_rng(0), COUNT)


@pytest.fixture(scope="module", params=["folder", "milvus"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def address(kind: str, tmp_path: Path) -> str | Path:
    return address_in(tmp_path, kind)


@pytest.fixture
def make_gallery(address: str | Path) -> Iterator[MakeGallery]:
    """Make galleries, which are closed at the end."""
    made: list[EditableGallery] = []

    def make(card: ModelCard, labels: LabelSet | None = None, **options: object) -> EditableGallery:
        made.append(create(address, card, labels, **options))
        return made[-1]

    yield make
    for gallery in made:
        gallery.close()


@pytest.fixture
def fresh(make_gallery: MakeGallery, tiny_card: ModelCard, vectors: Vectors) -> EditableGallery:
    """A gallery of COUNT entries; the even ones have a thumbnail."""
    made = make_gallery(tiny_card, index="exact")
    fill(made, vectors)
    return made


@pytest.fixture(scope="module")
def gallery(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tiny_card: ModelCard, vectors: Vectors
) -> Iterator[EditableGallery]:
    """Like `fresh`, but shared by all tests that do not change it."""
    with create(address_in(tmp_path_factory.mktemp("shared"), kind), tiny_card, index="exact") as made:
        fill(made, vectors)
        yield made
