"""Searches of galleries on disk and in Milvus."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, RankError
from cbmir.runtime import EditableGallery, Entry, Filter, novelty, open_gallery
from gallery_kinds import COUNT, DIM, MakeGallery, Vectors, entry, has, unit


def brute_force(vectors: Vectors, query: Vectors, k: int, passes: Callable[[Entry], bool]) -> list[tuple[str, float]]:
    distances = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
    pairs = [(float(distances[n]), entry(n).id) for n in range(len(vectors)) if passes(entry(n))]
    return [(name, distance) for distance, name in sorted(pairs)[:k]]


def lacks(of: Entry, label: str) -> bool:
    return (of.labels or {}).get(label) == 0


FILTERS: dict[str, tuple[Filter, Callable[[Entry], bool]]] = {
    "none": (Filter(), lambda e: True),
    "patient": (Filter(exclude_patients=frozenset({"p3"})), lambda e: e.patient_id != "p3"),
    "patients": (
        Filter(exclude_patients=frozenset({"p1", "p2", "nobody", 'p"1', ""})),
        lambda e: e.patient_id not in ("p1", "p2"),
    ),
    "only patients": (Filter(only_patients=frozenset({"p1", "p2", "nobody"})), lambda e: e.patient_id in ("p1", "p2")),
    "study": (Filter(exclude_studies=frozenset({"s4", "s5"})), lambda e: e.study_id not in ("s4", "s5")),
    "label": (Filter(where="Effusion"), lambda e: has(e, "Effusion")),
    "known absent": (Filter(where="not mass"), lambda e: lacks(e, "Mass")),
    "labels": (
        Filter(where="Effusion and not (Mass or Nodule)"),
        lambda e: has(e, "Effusion") and lacks(e, "Mass") and lacks(e, "Nodule"),
    ),
    "either": (Filter(where="not Effusion or Mass"), lambda e: lacks(e, "Effusion") or has(e, "Mass")),
    "view": (Filter(view="pa"), lambda e: e.view == "PA"),
    "source": (Filter(source='ST. "SÜD"'), lambda e: e.source == 'St. "Süd"'),
    "since": (Filter(since="2015-03-01"), lambda e: e.date >= "2015-03-01"),
    "until": (Filter(until="2015-03-01"), lambda e: "" < e.date <= "2015-03-01"),
    "day": (Filter(since="2013-04-04", until="2013-04-04"), lambda e: e.date == "2013-04-04"),
    "all": (
        Filter(frozenset({"p4"}), frozenset({"s1"}), "Nodule or Effusion", "AP", "nih", "2012-01-01", "2020-12-31"),
        lambda e: (
            e.patient_id != "p4"
            and e.study_id != "s1"
            and (has(e, "Nodule") or has(e, "Effusion"))
            and e.view == "AP"
            and e.source == "NIH"
            and "2012-01-01" <= e.date <= "2020-12-31"
        ),
    ),
    "nothing": (Filter(since="2050-01-01"), lambda e: False),
}


@pytest.mark.parametrize("name", FILTERS)
def test_search_agrees_with_brute_force(gallery: EditableGallery, vectors: Vectors, name: str) -> None:
    asked, passes = FILTERS[name]
    for query in unit(np.random.default_rng(1), 2):
        for k in (3, COUNT + 1):
            found = gallery.search(query, k, filter=asked)
            expected = brute_force(vectors, query, k, passes)
            assert [hit.entry.id for hit in found.hits] == [name for name, _ in expected]
            distances = np.array([distance for _, distance in expected])
            np.testing.assert_allclose([hit.distance for hit in found.hits], distances, atol=1e-7)
            np.testing.assert_allclose([hit.cosine for hit in found.hits], 1 - distances**2 / 2, atol=1e-6)
            assert found.vectors.shape == (len(expected), DIM)
            rows = [int(hit.entry.id[-3:]) for hit in found.hits]
            np.testing.assert_array_equal(found.vectors, vectors[rows].reshape(-1, DIM))


def test_a_batch_of_searches_agrees_with_single_ones(gallery: EditableGallery) -> None:
    queries = unit(np.random.default_rng(2), 6)
    filters = [FILTERS[name][0] for name in ("none", "label", "none", "patient", "label", "nothing")]
    many = gallery.search_many(queries, 5, filters=filters)
    assert many == [gallery.search(query, 5, filter=one) for query, one in zip(queries, filters, strict=True)]
    assert gallery.search_many(queries, 4) == [gallery.search(query, 4) for query in queries]
    assert gallery.search_many(queries[:0], 4) == []
    with pytest.raises(GalleryError, match="filter for each"):
        gallery.search_many(queries, 5, filters=filters[:2])


def test_ties_are_in_the_order_of_ids(make_gallery: MakeGallery, tiny_card: ModelCard, vectors: Vectors) -> None:
    """Of forty identical images the first ids are found, independent of the engine's order."""
    names = [f"e{n:02}" for n in np.random.default_rng(3).permutation(40)]
    with make_gallery(tiny_card) as gallery:
        gallery.add([Entry(name, "/same.png", "p") for name in names], np.repeat(vectors[:1], 40, axis=0))
        gallery.add([Entry(f"x{n}", "/x.png", "p") for n in range(60)], vectors[1:61])
        for k in (1, 4, 39, 40):
            hits = gallery.search(vectors[0], k).hits
            assert [hit.entry.id for hit in hits] == sorted(names)[:k]
            assert {hit.distance for hit in hits} == {0.0}
        far = gallery.search(vectors[1], 2, filter=Filter()).hits
        assert far[0].entry.id == "x0"


def test_k(gallery: EditableGallery, vectors: Vectors) -> None:
    assert gallery.search(vectors[0], 0).hits == ()
    assert len(gallery.search(vectors[0], COUNT).hits) == COUNT
    assert len(gallery.search(vectors[0], 10 * COUNT).hits) == COUNT
    with pytest.raises(GalleryError, match="k"):
        gallery.search(vectors[0], -1)


def test_more_vectors_than_hits(gallery: EditableGallery, vectors: Vectors) -> None:
    query = unit(np.random.default_rng(4), 1)[0]
    asked, passes = FILTERS["patient"]
    many = gallery.search(query, COUNT, filter=asked)
    for k, count in ((3, 8), (0, 8), (3, COUNT), (3, 2)):
        found = gallery.search(query, k, filter=asked, vectors=count)
        assert found.hits == many.hits[:k]
        expected = [int(name[-3:]) for name, _ in brute_force(vectors, query, max(k, count), passes)]
        np.testing.assert_array_equal(found.vectors, vectors[expected])


def test_an_empty_gallery_has_no_neighbours(make_gallery: MakeGallery, tiny_card: ModelCard, vectors: Vectors) -> None:
    with make_gallery(tiny_card) as gallery:
        assert gallery.search(vectors[0], 10).hits == ()
        assert gallery.search(vectors[0], 10, filter=FILTERS["all"][0]).hits == ()
        assert (len(gallery), gallery.ids(), gallery.remove(patient_ids=["p"])) == (0, [], ())
        assert not gallery.has_patient("p")
        assert len(gallery.reference_distances) == 0
        assert gallery.add([], vectors[:0]).ids == ()


@pytest.mark.parametrize(
    "query",
    [np.full(DIM, np.nan, np.float32), np.ones(DIM, np.float32), np.zeros(DIM, np.float32),
     np.eye(DIM + 1, dtype=np.float32)[0], np.eye(DIM)[0]],
)  # fmt: skip
def test_an_invalid_vector_is_refused(gallery: EditableGallery, query: Vectors) -> None:
    with pytest.raises(GalleryError, match="expected"):
        gallery.search(query, 3)
    with pytest.raises(GalleryError, match="expected"):
        gallery.search_many(query[None], 3)
    with pytest.raises(GalleryError, match="expected"):
        gallery.add([Entry("new", "/new.png", "p")], query[None])
    assert len(gallery) == COUNT


def test_an_invalid_filter_is_refused(gallery: EditableGallery, vectors: Vectors) -> None:
    for where in ("Hernia", "Mass and", '"Mass'):
        with pytest.raises(GalleryError, match="expected"):
            gallery.search(vectors[0], 3, filter=Filter(where=where))


def test_eight_threads_search_during_writes(fresh: EditableGallery, vectors: Vectors) -> None:
    queries = unit(np.random.default_rng(4), 24)
    rest = Filter(exclude_patients=frozenset({"guest"}))
    expected = [fresh.search(query, 5, filter=rest).hits for query in queries]
    with ThreadPoolExecutor(9) as pool:
        added = [pool.submit(fresh.add, [Entry(f"n{n}", "/n.png", "guest")], queries[n : n + 1]) for n in range(8)]
        found = list(pool.map(lambda query: fresh.search(query, 5, filter=rest).hits, queries))
    assert [one.result().ids for one in added] == [(f"n{n}",) for n in range(8)]
    assert found == expected
    assert len(fresh) == COUNT + 8


def _settle(gallery: EditableGallery) -> None:
    """Calibrate a collection; a folder does so by itself."""
    calibrate = getattr(gallery, "calibrate", None)
    if calibrate is not None:
        calibrate()


def test_reference_distances(make_gallery: MakeGallery, address: str | Path, tiny_card: ModelCard) -> None:
    rng = np.random.default_rng(5)
    vectors, patients = unit(rng, 160), rng.integers(0, 40, 160)
    patients[::20] = 0
    with make_gallery(tiny_card, index="exact") as gallery:
        gallery.add([Entry(f"e{n:03}", "/x.png", f"p{p}" if p else "") for n, p in enumerate(patients)], vectors)
        _settle(gallery)
        np.testing.assert_allclose(
            gallery.reference_distances, novelty.reference_distances(vectors, patients), rtol=1e-5
        )
    with open_gallery(address) as again:
        assert len(again.reference_distances) == 160


def test_ranking_by_findings_works_or_raises_a_typed_error(
    kind: str, gallery: EditableGallery, vectors: Vectors
) -> None:
    own = Filter(view="PA")
    if kind == "milvus":
        with pytest.raises(RankError, match="every entry's labels are compared"):
            gallery.search_by_agreement(vectors[0], {"Nodule": 0.9}, 3, filter=own)
        return
    hits = gallery.search_by_agreement(vectors[0], {"Nodule": 0.9}, 3, filter=own).hits
    assert len(hits) == 3 and all("Nodule" in hit.entry.positive and hit.entry.view == "PA" for hit in hits)
