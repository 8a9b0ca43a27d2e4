"""Ranking by findings: expected agreement computed by hand, and the gallery's order against plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime import Entry, Filter, Gallery
from cbmir.runtime.gallery import search
from cbmir.runtime.gallery.schema import UNKNOWN
from cbmir.runtime.gallery.search import expected_agreement

COUNT = 300
LABELS = ("Effusion", "Mass", "Nodule")
P = {"Effusion": 0.8, "Mass": 0.25, "Nodule": 0.5}
Make = Callable[..., Any]


def columns(*rows: tuple[int, ...]) -> list[NDArray[np.int8]]:
    """Transpose one row per image to one column per label."""
    return list(np.array(rows, np.int8).T)


def test_expected_agreement_by_hand() -> None:
    """p = 0.8 and 0.25, so "no finding" has 0.2 * 0.75 = 0.15, and the sum is 1.2."""
    rows = {
        (1, 0): 0.8 / (1.2 + 1 - 0.8),
        (-1, 0): 0.8 / (1.2 + 1 - 0.8),  # uncertain counts as positive
        (1, 1): 1.05 / (1.2 + 2 - 1.05),
        (0, 0): 0.15 / (1.2 + 1 - 0.15),  # no finding
        (1, UNKNOWN): 0.8 / (1.2 + 1 - 0.8),  # an unknown label is no advantage over the first row
        (0, UNKNOWN): 0.0,
        (UNKNOWN, UNKNOWN): 0.0,
    }
    found = expected_agreement([0.8, 0.25], columns(*rows))
    np.testing.assert_allclose(found, list(rows.values()), rtol=1e-12)
    assert expected_agreement([0.0], columns((UNKNOWN,), (0,))).tolist() == [0.0, 1.0]


def agreement(p: dict[str, float], labels: dict[str, int | None]) -> float:
    """Expected agreement in plain Python."""
    pairs = [(p[name], int(labels[name] in (1, -1))) for name in p]
    pairs.append((prod(1 - one for one in p.values()), int(all(labels[name] == 0 for name in p))))
    both = sum(p * y for p, y in pairs)
    return both / (sum(p for p, _ in pairs) + sum(y for _, y in pairs) - both)


@pytest.fixture(scope="module")
def entries(make_entries: Make) -> list[Entry]:
    rng = np.random.default_rng(5)
    values = rng.choice(np.array([1, 0, 0, -1, None], object), (COUNT, 3))
    return [
        replace(entry, labels=dict(zip(LABELS, row, strict=True)))
        for entry, row in zip(make_entries(COUNT), values.tolist(), strict=True)
    ]


@pytest.fixture(scope="module", params=["exact", "int8"])
def gallery(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_card: ModelCard,
    entries: list[Entry], make_vectors: Make,
) -> Iterator[Gallery]:  # fmt: skip
    """300 entries: 40 are newer than the derived files, and the labels of 20 have changed since then."""
    with Gallery.create(tmp_path_factory.mktemp("agreement") / "gallery", tiny_card, index=request.param) as made:
        older = [replace(e, labels=dict.fromkeys(LABELS, 1)) if n % 13 == 0 else e for n, e in enumerate(entries)]
        made.add(older[:260], make_vectors(COUNT)[:260])
        made.write_index()
        made.add(entries[260:], make_vectors(COUNT)[260:])
        assert made.update(entries[:260:13]) == 20
        yield made


FILTERS: dict[str, tuple[Filter, Callable[[Entry], bool]]] = {
    "none": (Filter(), lambda entry: True),
    "a patient": (Filter(exclude_patients=frozenset({"patient0003"})), lambda entry: entry.patient_id != "patient0003"),
    "a label": (Filter(where="not Effusion"), lambda entry: (entry.labels or {})["Effusion"] == 0),
    "a view": (Filter(view="PA"), lambda entry: entry.view == "PA"),
    "a source": (Filter(source="Klinik Süd"), lambda entry: entry.source == "Klinik Süd"),
    "nobody": (Filter(only_patients=frozenset({"nobody"})), lambda entry: False),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("k", [0, 1, 10, 1000])
@pytest.mark.parametrize("p", [P, {"Mass": 0.7}, {"Nodule": 0.01, "Effusion": 0.99}])
@pytest.mark.parametrize("gathered", [search._GATHERED, 7])
def test_the_order_agrees_with_brute_force(
    gallery: Gallery, entries: list[Entry], make_vectors: Make, name: str, k: int, p: dict[str, float], gathered: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(search, "_GATHERED", gathered)
    own, passes = FILTERS[name]
    query, vectors = make_vectors(1, seed=9)[0], make_vectors(COUNT).astype(np.float64)
    values = {
        entry.id: agreement(p, entry.labels or {}) + 0.1 * float(vector @ query)
        for entry, vector in zip(entries, vectors, strict=True)
        if passes(entry)
    }
    found = gallery.search_by_agreement(query, p, k, filter=own)
    assert [hit.entry.id for hit in found.hits] == sorted(values, key=lambda one: -values[one])[:k]
    distances = [np.linalg.norm(vectors[int(hit.entry.id[2:])] - query) for hit in found.hits]
    np.testing.assert_allclose([hit.distance for hit in found.hits], distances, atol=1e-12)
    np.testing.assert_array_equal(
        found.vectors, [vectors[int(hit.entry.id[2:])] for hit in found.hits] or found.vectors
    )
    assert (found.method, found.generation) == ("exact", 3)


def test_ties_are_broken_by_distance_then_by_id(tmp_path: Path, tiny_card: ModelCard, make_vectors: Make) -> None:
    """Twenty copies of one image and a nearer image all have the same labels."""
    names = [f"e{n:02}" for n in np.random.default_rng(3).permutation(20)]
    near, far, other = make_vectors(3)
    near, far = (near, far) if near @ other > far @ other else (far, near)
    labels: dict[str, int | None] = {"Effusion": 1, "Mass": 0, "Nodule": None}
    made = [Entry(name, f"/{name}.png", "p", labels=labels) for name in [*names, "nearer"]]
    with Gallery.create(tmp_path / "g", tiny_card) as gallery:
        gallery.add(made, np.stack([*[far] * 20, near]))
        for k in (1, 5, 21):
            found = gallery.search_by_agreement(other, P, k)
            assert [hit.entry.id for hit in found.hits] == ["nearer", *sorted(names)][:k]


def test_an_empty_gallery_and_invalid_queries(
    tmp_path: Path, tiny_card: ModelCard, gallery: Gallery, make_vectors: Make
) -> None:
    query = make_vectors(1)[0]
    with Gallery.create(tmp_path / "g", tiny_card) as empty:
        assert empty.search_by_agreement(query, P, 3).hits == ()
    for p in ({}, {"Fracture": 0.5}):
        with pytest.raises(GalleryError, match="expected probabilities for labels among Effusion, Mass, Nodule"):
            gallery.search_by_agreement(query, p, 3)
    with pytest.raises(GalleryError, match="k >= 0"):
        gallery.search_by_agreement(query, P, -1)
    with pytest.raises(GalleryError, match="expected"):
        gallery.search_by_agreement(2 * query, P, 3)
