"""The contract of galleries: one class of tests, run with a folder and with Milvus Lite."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, RankError
from cbmir.labels import LabelSet
from cbmir.manifest import Box
from cbmir.runtime import EditableGallery, Entry, Filter, Gallery, Pseudonyms, SearchableGallery, novelty, open_gallery
from cbmir.runtime.gallery.protocol import is_milvus

COUNT, DIM = 120, 8
Vectors = NDArray[np.float32]
Make = Callable[..., EditableGallery]
Known = dict[str, tuple[Entry, Vectors]]


def unit(rng: np.random.Generator, count: int) -> Vectors:
    vectors = rng.normal(size=(count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def entry(n: int) -> Entry:
    """An entry with a value in every field; labels take all values."""
    return Entry(
        id=f"folder/e{n:03}",
        image=f"/images/{n}.png",
        patient_id=f"p{n % 12}" if n % 10 else "",
        study_id=f"s{n % 30}",
        sop_instance_uid=f"1.2.{n}",
        view=("PA", "AP", "")[n % 3],
        source=("", 'St. "Süd"', "NIH")[n // 2 % 3],
        date="" if n % 7 == 0 else f"20{10 + n % 12}-{n % 12 + 1:02}-{n % 28 + 1:02}",
        split=("train", "val")[n % 2],
        report=f'Report {n}: "größer" \\ {{$1}}\n2nd line.',
        labels={"Effusion": (1, 0, -1, None)[n % 4], "Mass": (0, 1, None)[n % 3], "Nodule": n % 2},
        sha256=f"digest{n}",
        boxes=(Box("Mass", 0.25, n / COUNT / 2, 1 / 3, 0.5), Box('"Größe"', 0, 0, 1, 1)) if n % 3 == 1 else (),
    )


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return unit(np.random.default_rng(0), COUNT)


@pytest.fixture(scope="module", params=["folder", "milvus"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> str | Path:
    return place_in(tmp_path, kind)


@pytest.fixture
def make(place: str | Path) -> Iterator[Make]:
    """Make galleries, which are closed at the end."""
    made: list[EditableGallery] = []

    def make(card: ModelCard, labels: LabelSet | None = None, **options: object) -> EditableGallery:
        made.append(create(place, card, labels, **options))
        return made[-1]

    yield make
    for gallery in made:
        gallery.close()


@pytest.fixture
def fresh(make: Make, tiny_card: ModelCard, vectors: Vectors) -> EditableGallery:
    """A gallery of COUNT entries; the even ones have a thumbnail."""
    made = make(tiny_card, index="exact")
    fill(made, vectors)
    return made


@pytest.fixture(scope="module")
def gallery(
    kind: str, tmp_path_factory: pytest.TempPathFactory, tiny_card: ModelCard, vectors: Vectors
) -> Iterator[EditableGallery]:
    """Like `fresh`, but shared by all tests that do not change it."""
    with create(place_in(tmp_path_factory.mktemp("kept"), kind), tiny_card, index="exact") as made:
        fill(made, vectors)
        yield made


def place_in(folder: Path, kind: str) -> str | Path:
    return folder / "gallery" if kind == "folder" else f"milvus:{folder}/gallery.db"


def create(place: str | Path, card: ModelCard, labels: LabelSet | None = None, **options: object) -> EditableGallery:
    if is_milvus(place):
        from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

        return MilvusGallery.create(str(place), card, labels, **options)  # type: ignore[arg-type]
    return Gallery.create(place, card, labels, **options)  # type: ignore[arg-type]


def fill(gallery: EditableGallery, vectors: Vectors) -> None:
    jpegs = [f"jpeg{n}".encode() if n % 2 == 0 else None for n in range(COUNT)]
    gallery.add([entry(n) for n in range(COUNT)], vectors, jpegs)  # type: ignore[arg-type]


def brute_force(vectors: Vectors, query: Vectors, k: int, passes: Callable[[Entry], bool]) -> list[tuple[str, float]]:
    distances = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
    pairs = [(float(distances[n]), entry(n).id) for n in range(len(vectors)) if passes(entry(n))]
    return [(name, distance) for distance, name in sorted(pairs)[:k]]


def has(of: Entry, label: str) -> bool:
    return (of.labels or {}).get(label) in (1, -1)


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


class TestAnyGallery:
    @pytest.mark.parametrize("name", FILTERS)
    def test_search_agrees_with_brute_force(self, gallery: EditableGallery, vectors: Vectors, name: str) -> None:
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

    def test_a_batch_of_searches_agrees_with_single_ones(self, gallery: EditableGallery) -> None:
        queries = unit(np.random.default_rng(2), 6)
        filters = [FILTERS[name][0] for name in ("none", "label", "none", "patient", "label", "nothing")]
        many = gallery.search_many(queries, 5, filters=filters)
        assert many == [gallery.search(query, 5, filter=one) for query, one in zip(queries, filters, strict=True)]
        assert gallery.search_many(queries, 4) == [gallery.search(query, 4) for query in queries]
        assert gallery.search_many(queries[:0], 4) == []
        with pytest.raises(GalleryError, match="filter for each"):
            gallery.search_many(queries, 5, filters=filters[:2])

    def test_round_trip_of_entries(self, gallery: EditableGallery, vectors: Vectors) -> None:
        for n in (0, 1, 7, 40):
            assert gallery.entry(entry(n).id) == entry(n)
            assert gallery.find(f"digest{n}") == [entry(n)]
            assert gallery.thumbnail(entry(n).id) == (f"jpeg{n}".encode() if n % 2 == 0 else None)
            np.testing.assert_array_equal(gallery.vector(entry(n).id), vectors[n])
        assert gallery.ids() == [entry(n).id for n in range(COUNT)]
        assert list(gallery.every_entry()) == [entry(n) for n in range(COUNT)]
        assert len(gallery) == COUNT
        assert [gallery.has_patient(patient) for patient in ("p0", "p11", "p12", "p", "")] == [True, True] + 3 * [False]
        assert gallery.find("other") == gallery.find("") == []
        some = [entry(n).id for n in (4, 1, 4, 0)]
        assert [one.id for one in gallery.entries(some)] == some
        assert gallery.thumbnails(some) == [b"jpeg4", None, b"jpeg4", b"jpeg0"]
        assert gallery.entries([]) == gallery.thumbnails([]) == []
        for method in (gallery.entry, gallery.vector, gallery.thumbnail):
            with pytest.raises(GalleryError, match="found 'nobody'"):
                method("nobody")

    def test_case_ids(self, fresh: EditableGallery, place: str | Path, vectors: Vectors) -> None:
        cases = {name: fresh.case_id(name) for name in fresh.ids()}
        assert all(re.fullmatch("case-[0-9a-f]{16}", case) for case in cases.values())
        assert len(set(cases.values())) == COUNT
        fresh.remove(ids=[entry(5).id])
        fresh.add([replace(entry(5), id="again")], vectors[5:6])
        with open_gallery(place) as other:
            for name, case in cases.items():
                assert other.case_id(name) == case
                assert (
                    fresh.find_case(case)
                    == other.find_case(case)
                    == (None if name == entry(5).id else fresh.entry(name))
                )
            assert other.find_case(fresh.case_id("again")) == fresh.entry("again")
            assert other.find_case("case-0000000000000000") is other.find_case("") is None

    def test_a_gallery_is_persistent(
        self, fresh: EditableGallery, place: str | Path, vectors: Vectors, tiny_card: ModelCard
    ) -> None:
        before = fresh.search(vectors[5], 10)
        fresh.close()
        with open_gallery(place) as again:
            assert again.search(vectors[5], 10).hits == before.hits
            assert (again.card, again.labels) == (tiny_card, tiny_card.labels)
            assert len(again) == COUNT

    def test_writes_are_visible_to_others(self, fresh: EditableGallery, place: str | Path, vectors: Vectors) -> None:
        """With the default consistency, all earlier writes are visible."""
        with open_gallery(place) as other:
            assert other.search(vectors[5], 1).hits[0].entry.id == entry(5).id
            fresh.remove(ids=[entry(5).id])
            assert other.search(vectors[5], 1).hits[0].entry.id != entry(5).id
            other.add([replace(entry(5), id="again")], vectors[5:6])
            assert fresh.search(vectors[5], 1).hits[0].entry.id == "again"

    def test_existing_content_is_skipped_and_reported(self, fresh: EditableGallery, vectors: Vectors) -> None:
        new = [Entry(name, "/x.png", "p", sha256=digest) for name, digest in (("a", "A"), ("b", "A"), ("c", "digest9"))]
        added = fresh.add([*new, entry(3), Entry("d", "/d.png", "p")], vectors[:5])
        assert added.ids == ("a", "d")
        assert added.duplicates == (("b", "a"), ("c", entry(9).id), (entry(3).id, entry(3).id))
        assert len(fresh) == COUNT + 2
        assert fresh.entry("d").labels == {"Effusion": None, "Mass": None, "Nodule": None}
        assert fresh.add([Entry("a", "/x.png", "p", sha256="A")], vectors[:1]).ids == ()

    @pytest.mark.parametrize(
        "bad",
        [
            replace(entry(5), sha256="other"),
            replace(entry(5), sha256=""),
            Entry("", "/x.png", "p"),
            Entry("x", "/x.png", "p", date="2020-02-30"),
            Entry("x", "/x.png", "p", labels={"Hernia": 1}),
            Entry("x", "/x.png", "p", labels={"Mass": 2}),
        ],
    )
    def test_adding_is_all_or_nothing(self, gallery: EditableGallery, vectors: Vectors, bad: Entry) -> None:
        with pytest.raises(GalleryError, match="expected"):
            gallery.add([Entry("new", "/new.png", "p"), bad], vectors[:2])
        assert len(gallery) == COUNT
        assert gallery.entry(entry(5).id) == entry(5)

    def test_update_changes_only_the_given_fields(self, fresh: EditableGallery, vectors: Vectors) -> None:
        new = replace(
            entry(5), patient_id="other", study_id="s", view="LATERAL", source="Own", date="2001-02-03", report="",
            split="test", labels={"Effusion": 0, "Mass": -1, "Nodule": None}, image="/moved.png", sha256="",
            boxes=(Box("Nodule", 0, 0, 0.5, 0.5),),
        )  # fmt: skip
        assert fresh.update([new, entry(6)]) == 1
        assert fresh.entry(new.id) == replace(new, sha256="digest5")
        np.testing.assert_array_equal(fresh.vector(new.id), vectors[5])
        assert fresh.thumbnail(entry(6).id) == b"jpeg6"
        only = Filter(where="Mass and not Effusion", view="lateral", source="own", since="2001-02-03",
                      until="2001-02-03")  # fmt: skip
        assert [hit.entry.id for hit in fresh.search(vectors[0], COUNT, filter=only).hits] == [new.id]
        without = fresh.search(vectors[5], 1, filter=Filter(frozenset({"other"})))
        assert without.hits[0].entry.id != new.id
        assert len(fresh) == COUNT

    @pytest.mark.parametrize("bad", [Entry("nobody", "/x.png", "p"), replace(entry(7), sha256="other")])
    def test_updating_is_all_or_nothing(self, gallery: EditableGallery, bad: Entry) -> None:
        with pytest.raises(GalleryError, match="expected"):
            gallery.update([replace(entry(5), report="new"), bad])
        assert gallery.entry(entry(5).id) == entry(5)

    def test_remove(self, fresh: EditableGallery, vectors: Vectors) -> None:
        gone = {n for n in range(COUNT) if n == 5 or entry(n).patient_id == "p3"}
        removed = fresh.remove(ids=[entry(5).id, "nobody"], patient_ids={"p3", "nobody", ""})
        assert removed == tuple(sorted(entry(n).id for n in gone))
        with pytest.raises(GalleryError, match=r"found one of \d patients; nothing was removed"):
            fresh.remove(ids=[entry(0).id], study_ids={"s8", 's"', ""})
        of_both = {n for n in range(COUNT) if (entry(n).patient_id, entry(n).study_id) == ("p8", "s8")}
        removed = fresh.remove(patient_ids={"p8"}, study_ids={"s8", "nothing", ""})
        assert removed == tuple(entry(n).id for n in sorted(of_both)) != ()
        for patient, study in (("p8", ""), ("", "s9")):
            assert fresh.remove(patient_ids={patient}, study_ids={study}) == ()
        gone |= of_both
        assert len(fresh) == COUNT - len(gone)
        hits = fresh.search(vectors[5], COUNT).hits
        assert {hit.entry.id for hit in hits} == {entry(n).id for n in range(COUNT) if n not in gone}
        assert not fresh.has_patient("p3")
        assert fresh.find("digest5") == []
        with pytest.raises(GalleryError, match="found 'folder/e005'"):
            fresh.thumbnail(entry(5).id)
        assert fresh.remove(ids=[entry(5).id]) == ()
        assert fresh.add([entry(5)], vectors[5:6]).ids == (entry(5).id,)
        with pytest.raises(GalleryError, match="single text"):
            fresh.remove(patient_ids="p4")

    def test_ties_are_in_the_order_of_ids(self, make: Make, tiny_card: ModelCard, vectors: Vectors) -> None:
        """Of forty identical images the first ids are found, independent of the engine's order."""
        names = [f"e{n:02}" for n in np.random.default_rng(3).permutation(40)]
        with make(tiny_card) as gallery:
            gallery.add([Entry(name, "/same.png", "p") for name in names], np.repeat(vectors[:1], 40, axis=0))
            gallery.add([Entry(f"x{n}", "/x.png", "p") for n in range(60)], vectors[1:61])
            for k in (1, 4, 39, 40):
                hits = gallery.search(vectors[0], k).hits
                assert [hit.entry.id for hit in hits] == sorted(names)[:k]
                assert {hit.distance for hit in hits} == {0.0}
            far = gallery.search(vectors[1], 2, filter=Filter()).hits
            assert far[0].entry.id == "x0"

    def test_k(self, gallery: EditableGallery, vectors: Vectors) -> None:
        assert gallery.search(vectors[0], 0).hits == ()
        assert len(gallery.search(vectors[0], COUNT).hits) == COUNT
        assert len(gallery.search(vectors[0], 10 * COUNT).hits) == COUNT
        with pytest.raises(GalleryError, match="k"):
            gallery.search(vectors[0], -1)

    def test_more_vectors_than_hits(self, gallery: EditableGallery, vectors: Vectors) -> None:
        query = unit(np.random.default_rng(4), 1)[0]
        asked, passes = FILTERS["patient"]
        many = gallery.search(query, COUNT, filter=asked)
        for k, count in ((3, 8), (0, 8), (3, COUNT), (3, 2)):
            found = gallery.search(query, k, filter=asked, vectors=count)
            assert found.hits == many.hits[:k]
            expected = [int(name[-3:]) for name, _ in brute_force(vectors, query, max(k, count), passes)]
            np.testing.assert_array_equal(found.vectors, vectors[expected])

    def test_an_empty_gallery_has_no_neighbours(self, make: Make, tiny_card: ModelCard, vectors: Vectors) -> None:
        with make(tiny_card) as gallery:
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
    def test_an_invalid_vector_is_refused(self, gallery: EditableGallery, query: Vectors) -> None:
        with pytest.raises(GalleryError, match="expected"):
            gallery.search(query, 3)
        with pytest.raises(GalleryError, match="expected"):
            gallery.add([Entry("new", "/new.png", "p")], query[None])
        assert len(gallery) == COUNT

    def test_an_invalid_filter_is_refused(self, gallery: EditableGallery, vectors: Vectors) -> None:
        for where in ("Hernia", "Mass and", '"Mass'):
            with pytest.raises(GalleryError, match="expected"):
                gallery.search(vectors[0], 3, filter=Filter(where=where))

    def test_a_gallery_of_another_model_is_refused(self, gallery: EditableGallery, tiny_card: ModelCard) -> None:
        gallery.check_model(tiny_card.with_(precision="float16"))
        with pytest.raises(GalleryError, match=r"fingerprint other.*fingerprint tiny-0"):
            gallery.check_model(tiny_card.with_(fingerprint="other"))

    def test_labels_may_come_from_a_manifest(self, make: Make, place: str | Path, tiny_card: ModelCard) -> None:
        labels = LabelSet(("Pleural Effusion", "Edema"))
        with make(tiny_card, labels) as gallery:
            gallery.add([Entry("a", "/a.png", "p", labels={"Edema": 1})], np.eye(DIM, dtype=np.float32)[:1])
        with open_gallery(place) as again:
            assert again.labels == labels
            found = again.search(np.eye(DIM, dtype=np.float32)[0], 1, filter=Filter(where="edema"))
            assert found.hits[0].entry.labels == {"Pleural Effusion": None, "Edema": 1}

    def test_only_an_unused_address_is_accepted(self, fresh: EditableGallery, make: Make, tiny_card: ModelCard) -> None:
        with pytest.raises(GalleryError, match="found"):
            make(tiny_card)
        assert len(fresh) == COUNT

    def test_an_address_without_a_gallery_is_refused(self, place: str | Path) -> None:
        with pytest.raises(GalleryError, match="found"):
            open_gallery(place)
        assert not Path(str(place).removeprefix("milvus:")).exists()

    def test_a_closed_gallery_raises_an_error(self, fresh: EditableGallery, vectors: Vectors) -> None:
        fresh.close()
        fresh.close()
        for use in (lambda: fresh.search(vectors[0], 1), lambda: fresh.add([entry(0)], vectors[:1]), fresh.ids):
            with pytest.raises(GalleryError, match="closed"):
                use()

    def test_eight_threads_search_during_writes(self, fresh: EditableGallery, vectors: Vectors) -> None:
        queries = unit(np.random.default_rng(4), 24)
        rest = Filter(exclude_patients=frozenset({"guest"}))
        expected = [fresh.search(query, 5, filter=rest).hits for query in queries]
        with ThreadPoolExecutor(9) as pool:
            added = [pool.submit(fresh.add, [Entry(f"n{n}", "/n.png", "guest")], queries[n : n + 1]) for n in range(8)]
            found = list(pool.map(lambda query: fresh.search(query, 5, filter=rest).hits, queries))
        assert [one.result().ids for one in added] == [(f"n{n}",) for n in range(8)]
        assert found == expected
        assert len(fresh) == COUNT + 8

    def test_pseudonyms(self, make: Make, place: str | Path, tiny_card: ModelCard, vectors: Vectors) -> None:
        key = Pseudonyms(bytes(range(40)))
        with make(tiny_card, pseudonyms=key) as gallery:
            gallery.add([entry(n) for n in range(20)], vectors[:20])
            assert gallery.entry(entry(3).id).patient_id == key.patient("p3")
            assert gallery.entry(entry(3).id).study_id == key.study("s3")
            assert gallery.entry(entry(0).id).patient_id == ""
            assert [gallery.has_patient(one) for one in ("p3", key.patient("p3"), "p")] == [True, True, False]
            assert gallery.finds_patients
        without = Filter(exclude_patients=frozenset({"p3"}))
        with open_gallery(place, pseudonyms=key) as gallery:
            hits = gallery.search(vectors[3], 20, filter=without).hits
            assert {entry(3).id, entry(15).id}.isdisjoint(hit.entry.id for hit in hits)
            assert len(hits) == 18
            assert gallery.remove(patient_ids=["p3"]) == (entry(3).id, entry(15).id)
        with open_gallery(place) as gallery:
            assert not gallery.finds_patients
            assert len(gallery.search(vectors[3], 20).hits) == 18
            for use in (
                lambda: gallery.has_patient("p4"),
                lambda: gallery.search(vectors[3], 1, filter=without),
                lambda: gallery.add([entry(30)], vectors[:1]),
            ):
                with pytest.raises(GalleryError, match="pseudonyms"):
                    use()

    def test_reference_distances(self, make: Make, place: str | Path, tiny_card: ModelCard) -> None:
        rng = np.random.default_rng(5)
        vectors, patients = unit(rng, 160), rng.integers(0, 40, 160)
        patients[::20] = 0
        with make(tiny_card, index="exact") as gallery:
            gallery.add([Entry(f"e{n:03}", "/x.png", f"p{p}" if p else "") for n, p in enumerate(patients)], vectors)
            _settle(gallery)
            np.testing.assert_allclose(
                gallery.reference_distances, novelty.reference_distances(vectors, patients), rtol=1e-5
            )
        with open_gallery(place) as again:
            assert len(again.reference_distances) == 160

    def test_info(self, gallery: EditableGallery, tiny_card: ModelCard) -> None:
        info = json.loads(json.dumps(gallery.info()))
        assert info["fingerprint"] == tiny_card.fingerprint
        assert (info["images"], info["dim"], info["crop"]) == (COUNT, DIM, 32)
        assert info["splits"] == {"train": COUNT // 2, "val": COUNT // 2}
        counts = {name: sum(has(entry(n), name) for n in range(COUNT)) for name in tiny_card.labels.names}
        assert info["labels"] == counts
        assert (info["pseudonyms"], info["index"]) == (False, "exact")
        assert "exact" in info["search"] or "flat" in info["search"]


def _settle(gallery: EditableGallery) -> None:
    """Calibrate a collection; a folder does so by itself."""
    calibrate = getattr(gallery, "calibrate", None)
    if calibrate is not None:
        calibrate()


def test_a_milvus_address_is_text() -> None:
    assert is_milvus("milvus://host:19530/name")
    assert is_milvus("milvus+https://host/name")
    assert is_milvus("milvus:./file.db")
    assert is_milvus("MILVUS+http://host/name")
    assert not is_milvus("milvus")
    assert not is_milvus(Path("gallery"))
    with pytest.raises(GalleryError, match="as text"):
        is_milvus(Path("milvus://host:19530/name"))


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


def test_label_shares_are_over_entries_with_a_known_label(
    kind: str, fresh: EditableGallery, make: Make, tiny_card: ModelCard
) -> None:
    if kind == "milvus":
        assert fresh.label_shares == dict.fromkeys(fresh.labels.names)
        fresh.calibrate()  # type: ignore[attr-defined]
        with open_gallery(fresh.place) as again:
            assert again.label_shares == fresh.label_shares
    # labels repeat: Effusion 1, 0, -1 (uncertain), unknown; Mass 0, 1, unknown; Nodule 0, 1
    assert fresh.label_shares == pytest.approx({"Effusion": 2 / 3, "Mass": 1 / 2, "Nodule": 1 / 2})
    if kind == "folder":
        fresh.remove(ids=[f"folder/e{n:03}" for n in range(COUNT) if n % 4 != 3])
        assert fresh.label_shares["Effusion"] is None
        assert fresh.label_shares["Nodule"] == 1


def test_a_gallery_that_lacks_a_member_cannot_be_instantiated() -> None:
    class Half(SearchableGallery):
        def ids(self) -> list[str]:
            return []

    with pytest.raises(TypeError, match="abstract method"):
        Half()  # type: ignore[abstract]
