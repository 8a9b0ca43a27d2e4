"""The gallery's search against brute force, refusals, and answers from one generation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.runtime import Entry, Gallery
from cbmir.runtime.gallery import search
from cbmir.runtime.gallery.filters import Filter
from cbmir.runtime.gallery.gallery import is_gallery_file
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.reader import Reader

COUNT, DIM = 300, 8
Make = Callable[..., Any]
Vectors = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(autouse=True)
def exact_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the index propose and rank all entries, so that its answers are exact."""
    for name in ("_AND", "_AND_RANKED"):
        monkeypatch.setattr(search, name, COUNT)


@pytest.fixture(scope="module", params=["exact", "bf16", "int8"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_card: ModelCard,
    make_entries: Make, make_vectors: Make,
) -> Path:  # fmt: skip
    """300 entries, searched exactly or by an index; the last 40 are newer than the derived files."""
    path = tmp_path_factory.mktemp("written") / "gallery"
    with Gallery.create(path, tiny_card, index=request.param) as made:
        made.add(make_entries(260), make_vectors(COUNT)[:260])
        made.write_index()
        made.add(make_entries(40, 260), make_vectors(COUNT)[260:])
    return path


@pytest.fixture
def gallery(written: Path, tmp_path: Path) -> Iterator[Gallery]:
    """An open copy of `written`."""
    shutil.copytree(written, tmp_path / "gallery")
    with Gallery.open(tmp_path / "gallery") as opened:
        yield opened


def brute_force(
    entries: list[Entry], vectors: Vectors, query: Vectors, k: int, passes: Callable[[Entry], bool] = lambda entry: True
) -> list[tuple[str, float]]:
    pairs = [
        (float(np.linalg.norm(vector.astype(np.float64) - query)), entry.id)
        for entry, vector in zip(entries, vectors, strict=True)
        if passes(entry)
    ]
    return [(name, distance) for distance, name in sorted(pairs)[:k]]


FILTERS: dict[str, tuple[Filter, Callable[[Entry], bool]]] = {
    "none": (Filter(), lambda entry: True),
    "a patient": (Filter(exclude_patients=frozenset({"patient0003"})), lambda entry: entry.patient_id != "patient0003"),
    "only a patient": (
        Filter(only_patients=frozenset({"patient0003", "nobody"})), lambda entry: entry.patient_id == "patient0003"
    ),
    "only nobody": (Filter(only_patients=frozenset({"nobody"})), lambda entry: False),
    "nobody": (Filter(exclude_patients=frozenset({"nobody"})), lambda entry: True),
    "a study": (Filter(exclude_studies=frozenset({"study0007"})), lambda entry: entry.study_id != "study0007"),
    "a label": (Filter(where="Effusion"), lambda entry: "Effusion" in entry.positive),
    "no label": (Filter(where="not Effusion"), lambda entry: (entry.labels or {})["Effusion"] == 0),
    "a view": (Filter(view="pa"), lambda entry: entry.view == "PA"),
    "a source": (Filter(source="klinik süd"), lambda entry: entry.source == "Klinik Süd"),
    "days": (Filter(since="2020-01-05", until="2020-01-06"), lambda entry: entry.date in ("2020-01-05", "2020-01-06")),
    "all at once": (
        Filter(exclude_patients=frozenset({"patient0003"}), where="Effusion and Mass", view="AP", since="2020-01-11"),
        lambda entry: entry.patient_id != "patient0003" and entry.view == "AP" and "Effusion" in entry.positive
        and entry.date >= "2020-01-11",
    ),
    "nothing passes": (Filter(where="Nodule"), lambda entry: False),
}  # fmt: skip


@pytest.mark.parametrize("exact", [None, True])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("k", [1, 10, 290])
def test_search_agrees_with_brute_force(
    gallery: Gallery, make_entries: Make, make_vectors: Make, exact: bool | None, name: str, k: int
) -> None:
    own, passes = FILTERS[name]
    for query in make_vectors(4, seed=1):
        found = gallery.search(query, k, filter=own, exact=exact)
        expected = brute_force(make_entries(COUNT), make_vectors(COUNT), query, k, passes)
        assert [hit.entry.id for hit in found.hits] == [name for name, _ in expected]
        distances = np.array([distance for _, distance in expected])
        np.testing.assert_allclose([hit.distance for hit in found.hits], distances, atol=1e-12)
        np.testing.assert_allclose([hit.cosine for hit in found.hits], 1 - distances**2 / 2, atol=1e-6)
        assert found.generation == 2
    assert all(hit.entry == gallery.entry(hit.entry.id) for hit in found.hits)


@pytest.mark.parametrize("name", FILTERS)
def test_images_that_pass_are_counted(gallery: Gallery, make_entries: Make, name: str) -> None:
    own, passes = FILTERS[name]
    assert gallery.count(own) == sum(map(passes, make_entries(COUNT)))


def test_the_method_is_reported(gallery: Gallery, make_vectors: Make) -> None:
    query = make_vectors(1, seed=1)[0]
    expected = {"exact": "exact", "bf16": "hnsw bf16", "int8": "hnsw int8"}[gallery.info()["index"]]
    assert gallery.search(query, 3).method == expected == gallery.info()["search"]
    assert gallery.search(query, 3, exact=True).method == "exact"


@pytest.mark.parametrize("exact", [None, True])
def test_a_batch_of_searches_agrees_with_single_ones(gallery: Gallery, make_vectors: Make, exact: bool | None) -> None:
    filters = [own for own, _ in FILTERS.values()] * 2
    queries = make_vectors(len(filters), seed=1)
    together = gallery.search_many(queries, 7, filters=filters, exact=exact)
    alone = [gallery.search(query, 7, filter=own, exact=exact) for query, own in zip(queries, filters, strict=True)]
    assert [one.hits for one in together] == [one.hits for one in alone]
    assert [one.hits for one in gallery.search_many(queries[:3], 7, exact=exact)] == [
        gallery.search(query, 7, exact=exact).hits for query in queries[:3]
    ]
    assert gallery.search_many(queries[:0], 7, exact=exact) == []


@pytest.mark.parametrize("exact", [None, True])
def test_k_neighbours_are_returned_if_there_are_k(
    tmp_path: Path, tiny_card: ModelCard, make_vectors: Make, exact: bool | None
) -> None:
    """Nearly all images, and all nearest ones, are the query patient's: the others must still be found."""
    rng = np.random.default_rng(2)
    query = make_vectors(1, seed=2)[0]
    own = query + 0.01 * rng.normal(size=(395, DIM))
    others = -make_vectors(5, seed=3)
    vectors = np.concatenate([own / np.linalg.norm(own, axis=1, keepdims=True), others]).astype(np.float32)
    patients = ["mine"] * 395 + ["other"] * 5
    mine = Filter(exclude_patients=frozenset({"mine"}))
    with Gallery.create(tmp_path / "g", tiny_card, index="int8") as gallery:
        gallery.add([Entry(str(n), f"/{n}.png", patient) for n, patient in enumerate(patients)], vectors)
        gallery.write_index()
        hits = gallery.search(query, 3, filter=mine, exact=exact).hits
        assert len(hits) == 3 and {hit.entry.patient_id for hit in hits} == {"other"}
        assert len(gallery.search(query, 10, filter=mine, exact=exact).hits) == 5
        assert len(gallery.search(query, 1000, exact=exact).hits) == 400
        assert gallery.search(query, 0, exact=exact).hits == ()


@pytest.mark.parametrize("exact", [None, True])
def test_an_empty_gallery_has_no_neighbours(
    tmp_path: Path, tiny_card: ModelCard, make_vectors: Make, exact: bool | None
) -> None:
    with Gallery.create(tmp_path / "g", tiny_card, index="int8") as gallery:
        for _ in range(2):
            for own in (Filter(), Filter(view="PA")):
                found = gallery.search(make_vectors(1)[0], 10, filter=own, exact=exact)
                assert (found.hits, found.generation) == ((), 0)
            gallery.write_index()
        assert len(gallery) == 0 and len(gallery.reference_distances) == 0


@pytest.mark.parametrize("exact", [None, True])
def test_ties_are_in_the_order_of_ids(
    tmp_path: Path, tiny_card: ModelCard, make_vectors: Make, exact: bool | None
) -> None:
    """Of thirty identical images the first ids are found, however a matrix product rounds their rows."""
    names = [f"e{n:02}" for n in np.random.default_rng(3).permutation(30)]
    vectors = np.repeat(make_vectors(1), 30, axis=0)
    with Gallery.create(tmp_path / "g", tiny_card, index="int8") as gallery:
        gallery.add([Entry(name, f"/{name}.png", "p") for name in names], vectors)
        gallery.write_index()
        hits = gallery.search(vectors[0], 30, exact=exact).hits
        assert [hit.entry.id for hit in hits] == sorted(names)
        assert {hit.distance for hit in hits} == {0.0}
        other = make_vectors(2)[1]
        assert [hit.entry.id for hit in gallery.search(other, 4, exact=True).hits] == sorted(names)[:4]


def test_other_invalid_searches_are_refused(gallery: Gallery, make_vectors: Make) -> None:
    queries = make_vectors(2)
    with pytest.raises(GalleryError, match="k >= 0"):
        gallery.search(queries[0], -1)
    with pytest.raises(GalleryError, match="a filter for each of 2"):
        gallery.search_many(queries, 3, filters=[Filter()])
    with pytest.raises(GalleryError, match="among Effusion, Mass, Nodule; found 'Efusion'"):
        gallery.search(queries[0], 3, filter=Filter(where="Efusion"))
    gallery.close()
    with pytest.raises(GalleryError, match="closed"):
        gallery.search(queries[0], 1)


def test_a_gallery_of_another_model_is_refused(gallery: Gallery, tiny_card: ModelCard) -> None:
    gallery.check_model(tiny_card.with_(precision="float16"))  # files of one run share the embedding space
    with pytest.raises(GalleryError, match=r"fingerprint other.*fingerprint tiny-0"):
        gallery.check_model(tiny_card.with_(fingerprint="other"))


def test_filters_take_original_ids_if_pseudonyms_are_stored(
    tmp_path: Path, tiny_card: ModelCard, make_entries: Make, make_vectors: Make
) -> None:
    own = Filter(exclude_patients=frozenset({"patient0000"}), exclude_studies=frozenset({"study0003"}))
    keys = Pseudonyms(bytes(range(32)))
    with Gallery.create(tmp_path / "g", tiny_card, pseudonyms=keys) as gallery:
        gallery.add(make_entries(12), make_vectors(12))
        found = gallery.search(make_vectors(12)[1], 20, filter=own)
        assert sorted(hit.entry.id for hit in found.hits) == ["id0008", "id0009", "id0010", "id0011"]
        assert found.hits[0].entry.patient_id not in ("patient0001", "")
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery.search(make_vectors(12)[1], 20).hits) == 12
        with pytest.raises(GalleryError, match="key"):
            gallery.search(make_vectors(12)[1], 20, filter=own)


def test_found_entries_are_verified(gallery: Gallery, make_vectors: Make) -> None:
    """SQLite does not notice a flipped bit in a value; a neighbour with a wrong report would be worse than none."""
    query = make_vectors(COUNT)[7]
    assert gallery.search(query, 1).hits[0].entry.id == "id0007"
    with gallery.writing() as writer:
        writer.database.execute("UPDATE entry SET report = 'Bericht 0007: Ergus.' WHERE id = 'id0007'").close()
    for exact in (None, True):
        with pytest.raises(GalleryError, match="damaged"):
            gallery.search(query, 1, exact=exact)


def test_eight_threads_search_during_writes(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    """Each answer matches the generation that it names."""
    new = make_vectors(20, seed=5)
    query = new[0]
    by_generation = {2: brute_force(make_entries(COUNT), make_vectors(COUNT), query, 5)}
    entries, vectors = make_entries(COUNT), make_vectors(COUNT)
    for n in range(20):
        entries, vectors = [*entries, *make_entries(1, COUNT + n)], np.concatenate([vectors, new[n : n + 1]])
        by_generation[3 + n] = brute_force(entries, vectors, query, 5)

    def search(exact: bool | None) -> None:
        seen = 0
        while seen < 22:
            found = gallery.search(query, 5, exact=exact)
            assert [hit.entry.id for hit in found.hits] == [name for name, _ in by_generation[found.generation]]
            assert found.generation >= seen
            seen = found.generation

    with ThreadPoolExecutor(8) as pool:
        searches = [pool.submit(search, exact) for exact in (None, True) * 4]
        for n in range(20):
            gallery.add(make_entries(1, COUNT + n), new[n : n + 1])
        for one in searches:
            one.result(60)


def test_exact_search_is_exact_for_rounded_vectors(tmp_path: Path, tiny_card: ModelCard) -> None:
    """With half precision, the norms of vectors differ by more than their distances to a query."""
    rng = np.random.default_rng(0)
    near = rng.normal(size=(1, DIM)) + 1e-2 * rng.normal(size=(COUNT, DIM))
    rounded = (near / np.linalg.norm(near, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)
    entries = [Entry(f"{n:03}", f"/{n}.png", "p") for n in range(COUNT)]
    with Gallery.create(tmp_path / "g", tiny_card, index="exact") as gallery:
        gallery.add(entries, rounded)
        stored = np.stack([gallery.vector(entry.id) for entry in entries])
        np.testing.assert_allclose(stored, rounded, atol=1e-3)
        np.testing.assert_allclose(np.linalg.norm(stored.astype(np.float64), axis=1), 1, atol=2.5e-7)
        for query in stored[:20]:
            found = [hit.entry.id for hit in gallery.search(query, 10).hits]
            assert found == [name for name, _ in brute_force(entries, stored, query, 10)]


def test_only_returned_entries_of_many_equal_ones_are_read(
    tmp_path: Path, tiny_card: ModelCard, make_vectors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are not read either if only their vectors are needed."""
    read = []
    real = Reader.entries
    monkeypatch.setattr(Reader, "entries", lambda self, numbers: read.extend(numbers) or real(self, numbers))
    vectors = make_vectors(1).repeat(200, axis=0)
    vectors[7] = -vectors[7]
    with Gallery.create(tmp_path / "g", tiny_card, index="exact") as gallery:
        gallery.add([Entry(f"{999 - n}", f"/{n}.png", "p") for n in range(200)], vectors)
        for query, expected in ((vectors[0], ["800", "801", "802"]), (vectors[7], ["992", "800", "801"])):
            read.clear()
            assert [hit.entry.id for hit in gallery.search(query, 3).hits] == expected
            found = gallery.search(query, 3, vectors=50)
            assert [hit.entry.id for hit in found.hits] == expected and len(found.vectors) == 50
            assert len(read) == 6


def test_info_during_a_removal(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file disappears between being listed and being examined."""
    real = os.walk
    monkeypatch.setattr(
        os, "walk", lambda top: [(at, folders, [*names, "gone.npy"]) for at, folders, names in real(top)]
    )
    assert gallery.info()["bytes"] == sum(file.stat().st_size for file in gallery.path.rglob("*") if file.is_file())


def test_info(gallery: Gallery, tiny_card: ModelCard) -> None:
    info = json.loads(json.dumps(gallery.info()))
    assert info["fingerprint"] == tiny_card.fingerprint
    assert (info["images"], info["patients"], info["studies"], info["dim"], info["crop"]) == (COUNT, 50, 150, DIM, 32)
    assert info["labels"] == {"Effusion": COUNT // 2, "Mass": COUNT, "Nodule": 0}
    assert info["splits"] == {"train": COUNT} and info["views"] == {"": 100, "AP": 100, "PA": 100}
    assert info["sources"] == {"": 100, "Klinik Süd": 100, "Mercy Hospital": 100}
    assert info["days"] == ["2020-01-01", "2020-01-28"]
    assert (info["generation"], info["changed"], info["index"]) == (2, 40, gallery.info()["index"])
    assert info["bytes"] > 260 * 4 * DIM and not info["pseudonyms"]


def test_every_file_of_a_gallery_is_recognised(gallery: Gallery, make_vectors: Make) -> None:
    gallery.remove(ids=["id0000"])
    assert all(is_gallery_file(file.name) for file in gallery.path.iterdir())
    assert is_gallery_file("unreadable.csv") and not is_gallery_file("holiday.jpg")


def test_a_search_imports_few_modules(gallery: Gallery) -> None:
    """A process that answers once starts quickly."""
    heavy = {"torch", "pandas", "matplotlib", "faiss", "pymilvus", "ray", "multiprocessing.pool", "cbmir.training"}
    code = (
        "import sys; import numpy as np; from pathlib import Path; from cbmir.runtime import Gallery\n"
        "with Gallery.open(Path(sys.argv[1])) as gallery:\n"
        "    gallery.search(np.eye(8, dtype=np.float32)[0], 3)\n"
        f"print(sorted({heavy!r} & sys.modules.keys()), 'usearch.index' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code, str(gallery.path)], check=True, stdout=subprocess.PIPE).stdout
    assert output.decode().strip() == f"[] {gallery.info()['index'] != 'exact'}"


def test_a_gallery_sees_the_writes_of_another(gallery: Gallery, make_entries: Make, make_vectors: Make) -> None:
    with Gallery.open(gallery.path) as store:
        store.update([replace(gallery.entry("id0009"), view="LATERAL", source="New")])
    for asked in (Filter(view="lateral"), Filter(source="new")):
        assert [hit.entry.id for hit in gallery.search(make_vectors(1)[0], 3, filter=asked).hits] == ["id0009"]
