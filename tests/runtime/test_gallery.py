"""The gallery: search against brute force, what it refuses, and what it survives."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import stat
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbmir.runtime.gallery as gallery_module
from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime import Entry, Gallery, open_engine
from cbmir.runtime.vector_index import VectorIndex

COUNT, DIM = 300, 8
Vectors = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="session")
def card(tiny_model: Path) -> ModelCard:
    with open_engine(tiny_model, threads=1) as engine:
        return engine.card


def unit(rng: np.random.Generator, count: int) -> Vectors:
    vectors = rng.normal(size=(count, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def entries(count: int, start: int = 0) -> list[Entry]:
    return [
        Entry(f"e{n:04}", f"/images/{n}.png", f"p{n % 10}", f"s{n}", "PA", "train", f"Report {n}: ä.",
              {"Effusion": n % 2, "Mass": -1, "Nodule": None}, f"digest{n}")
        for n in range(start, start + count)
    ]  # fmt: skip


@pytest.fixture
def vectors() -> Vectors:
    return unit(np.random.default_rng(0), COUNT)


@pytest.fixture
def gallery(tmp_path: Path, card: ModelCard, vectors: Vectors) -> Iterator[Gallery]:
    with Gallery.create(tmp_path / "gallery", card) as made:
        made.add(entries(COUNT), vectors, [f"jpeg{n}".encode() for n in range(COUNT)])
        yield made


def brute_force(vectors: Vectors, query: Vectors, k: int, excluded: str | None = None) -> list[tuple[str, float]]:
    pairs = [
        (float(np.linalg.norm(vector.astype(np.float64) - query)), f"e{n:04}")
        for n, vector in enumerate(vectors)
        if f"p{n % 10}" != excluded
    ]
    return [(name, distance) for distance, name in sorted(pairs)[:k]]


@pytest.mark.parametrize("exact", [None, True, False])
@pytest.mark.parametrize("excluded", [None, "p3", "nobody"])
@pytest.mark.parametrize("k", [1, 10, 290])
def test_search_agrees_with_brute_force(
    gallery: Gallery, vectors: Vectors, exact: bool | None, excluded: str | None, k: int
) -> None:
    for query in unit(np.random.default_rng(1), 5):
        hits = gallery.search(query, k, exclude_patients=set() if excluded is None else {excluded}, exact=exact)
        expected = brute_force(vectors, query, k, excluded)
        assert [hit.entry.id for hit in hits] == [name for name, _ in expected]
        np.testing.assert_allclose([hit.distance for hit in hits], [distance for _, distance in expected], atol=1e-7)
        np.testing.assert_allclose(
            [hit.cosine for hit in hits], 1 - np.array([d for _, d in expected]) ** 2 / 2, atol=1e-6
        )


@pytest.mark.parametrize("exact", [True, False])
def test_k_neighbours_whenever_there_are_k(tmp_path: Path, card: ModelCard, exact: bool) -> None:
    """The query's patient owns all the nearest images, and nearly all there are: the others must still be found."""
    rng = np.random.default_rng(2)
    query = unit(rng, 1)[0]
    own = query + 0.01 * rng.normal(size=(395, DIM))
    vectors = np.concatenate([own / np.linalg.norm(own, axis=1, keepdims=True), -unit(rng, 5)]).astype(np.float32)
    patients = ["mine"] * 395 + ["other"] * 5
    with Gallery.create(tmp_path / "g", card) as gallery:
        gallery.add([Entry(str(n), f"/{n}.png", patient) for n, patient in enumerate(patients)], vectors)
        hits = gallery.search(query, 3, exclude_patients={"mine"}, exact=exact)
        assert len(hits) == 3
        assert {hit.entry.patient_id for hit in hits} == {"other"}
        assert len(gallery.search(query, 10, exclude_patients={"mine"}, exact=exact)) == 5
        assert len(gallery.search(query, 1000, exact=exact)) == 400
        assert gallery.search(query, 0, exact=exact) == []


@pytest.mark.parametrize("exact", [True, False])
def test_an_empty_gallery_has_no_neighbours(tmp_path: Path, card: ModelCard, vectors: Vectors, exact: bool) -> None:
    with Gallery.create(tmp_path / "g", card) as gallery:
        assert gallery.search(vectors[0], 10, exact=exact) == []
        assert gallery.search(vectors[0], 10, exclude_patients={"p"}, exact=exact) == []
        gallery.write_index()
        assert len(gallery) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_ties_are_in_the_order_of_ids(tmp_path: Path, card: ModelCard, vectors: Vectors, exact: bool) -> None:
    """The same image thirty times: the first ids are found, however a matrix product rounds their rows."""
    names = [f"e{n:02}" for n in np.random.default_rng(3).permutation(30)]
    with Gallery.create(tmp_path / "g", card) as gallery:
        gallery.add([Entry(name, "/same.png", "p") for name in names], np.repeat(vectors[:1], 30, axis=0))
        hits = gallery.search(vectors[0], 30, exact=exact)
        assert [hit.entry.id for hit in hits] == sorted(names)
        assert {hit.distance for hit in hits} == {0.0}
        assert [hit.entry.id for hit in gallery.search(vectors[1], 4, exact=True)] == sorted(names)[:4]


def test_entries_come_back_as_they_went_in(gallery: Gallery, vectors: Vectors) -> None:
    assert gallery.entry("e0007") == entries(1, 7)[0]
    assert gallery.entry("e0007").positive == ("Effusion", "Mass")
    assert gallery.entry("e0008").positive == ("Mass",)
    np.testing.assert_array_equal(gallery.vector("e0007"), vectors[7])
    assert gallery.thumbnail("e0007") == b"jpeg7"
    assert gallery.find("digest9") == [gallery.entry("e0009")]
    assert gallery.find("other") == gallery.find("") == []
    assert [gallery.has_patient(patient) for patient in ("p9", "p10", "p", "")] == [True, False, False, False]
    assert gallery.ids() == [f"e{n:04}" for n in range(COUNT)]
    assert len(gallery) == COUNT
    for method in (gallery.entry, gallery.vector, gallery.thumbnail):
        with pytest.raises(GalleryError, match="found 'nobody'"):
            method("nobody")


def test_adding_is_all_or_nothing(gallery: Gallery, vectors: Vectors) -> None:
    with pytest.raises(GalleryError, match="nothing was added"):
        gallery.add([Entry("new", "/new.png", "p"), *entries(1, 5)], vectors[:2])
    with pytest.raises(GalleryError, match="found 'new'"):
        gallery.entry("new")
    assert gallery.info()["generation"] == 1
    gallery.add([Entry("new", "/new.png", "p")], vectors[5:6])
    assert gallery.thumbnail("new") is None
    assert [hit.entry.id for hit in gallery.search(vectors[5], 2)] == ["e0005", "new"]
    assert gallery.info()["generation"] == 2


def test_what_another_process_adds_is_found(gallery: Gallery, vectors: Vectors) -> None:
    assert gallery.search(vectors[5], 1)[0].entry.id == "e0005"
    with Gallery.open(gallery.path) as other:
        other.add([Entry("a", "/a.png", "p")], vectors[5:6])
    assert gallery.search(vectors[5], 1)[0].entry.id == "a"
    assert gallery.search(vectors[5], 1, exact=False)[0].entry.id == "a"


@pytest.mark.parametrize(
    "query",
    [np.full(DIM, np.nan, np.float32), np.ones(DIM, np.float32), np.zeros(DIM, np.float32),
     np.eye(DIM + 1, dtype=np.float32)[0], np.eye(DIM)[0]],
)  # fmt: skip
def test_an_unfit_vector_is_refused(gallery: Gallery, query: Vectors) -> None:
    with pytest.raises(GalleryError, match="expected"):
        gallery.search(query, 3)
    with pytest.raises(GalleryError, match="expected"):
        gallery.add([Entry("new", "/new.png", "p")], query[None])
    assert len(gallery) == COUNT


def test_a_negative_k_is_refused(gallery: Gallery, vectors: Vectors) -> None:
    with pytest.raises(GalleryError, match="k >= 0"):
        gallery.search(vectors[0], -1)


def test_eight_threads_search_one_gallery(gallery: Gallery) -> None:
    queries = unit(np.random.default_rng(4), 64)

    def search(query: Vectors) -> list[str]:
        return [hit.entry.id for exact in (True, False) for hit in gallery.search(query, 5, exact=exact)]

    expected = [search(query) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(search, queries)) == expected


def test_it_is_readable_by_its_owner_only(gallery: Gallery) -> None:
    assert stat.S_IMODE(gallery.path.stat().st_mode) == 0o700


def test_info(gallery: Gallery, card: ModelCard) -> None:
    info = json.loads(json.dumps(gallery.info()))
    assert info["fingerprint"] == card.fingerprint
    assert (info["images"], info["patients"], info["dim"], info["crop"]) == (COUNT, 10, DIM, 32)
    assert info["labels"] == {"Effusion": COUNT // 2, "Mass": COUNT, "Nodule": 0}
    assert info["splits"] == {"train": COUNT}
    assert info["search"] == "exact"


def test_labels_may_be_those_of_a_manifest(tmp_path: Path, card: ModelCard) -> None:
    labels = LabelSet(("Pleural Effusion", "Edema"))
    with Gallery.create(tmp_path / "g", card, labels):
        pass
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.labels == labels


def test_the_limit_decides_between_exact_and_approximate(
    gallery: Gallery, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.search(vectors[0], 3)
    assert not (gallery.path / "index.usearch").exists()
    monkeypatch.setattr(gallery_module, "EXACT_LIMIT", COUNT - 1)
    gallery.search(vectors[0], 3)
    assert (gallery.path / "index.usearch").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def as_of_another_version(path: Path) -> None:
    """Bytes that usearch does not read, under their true digest."""
    path.write_bytes(b"usearch of the future")
    restamp(path, sha256=hashlib.sha256(b"usearch of the future").hexdigest())


def restamp(path: Path, **changes: object) -> None:
    about = path.with_name("index.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | changes))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "flipped": (flip, "stale or damaged"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:100]), "stale or damaged"),
    "stale": (lambda path: restamp(path, generation=0), "stale or damaged"),
    "of another gallery": (lambda path: restamp(path, gallery="x"), "stale or damaged"),
    "unlabelled": (lambda path: path.with_name("index.json").write_text("[]"), "stale or damaged"),
    "of another version": (as_of_another_version, "cannot be loaded"),
    "garbled": (lambda path: path.with_name("index.json").write_text("{"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_rebuilt(
    gallery: Gallery, vectors: Vectors, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, reason = DAMAGES[name]
    gallery.write_index()
    good = (gallery.path / "index.usearch").read_bytes()
    gallery.close()
    damage(gallery.path / "index.usearch")
    with caplog.at_level(logging.INFO, "cbmir"), Gallery.open(gallery.path) as again:
        hits = again.search(vectors[0], 5, exact=False)
        assert [hit.entry.id for hit in hits] == [name for name, _ in brute_force(vectors, vectors[0], 5)]
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    assert (gallery.path / "index.usearch").read_bytes() == good  # built with one thread: the same to the bit
    assert {file.name for file in gallery.path.iterdir()} <= gallery_module.FILES


def test_a_good_index_is_loaded_not_rebuilt(
    gallery: Gallery, vectors: Vectors, caplog: pytest.LogCaptureFixture
) -> None:
    gallery.write_index()
    with caplog.at_level(logging.INFO, "cbmir"), Gallery.open(gallery.path) as again:
        again.search(vectors[0], 5, exact=False)
    assert caplog.messages == []


def test_a_gallery_is_readable_where_nothing_can_be_written(
    gallery: Gallery, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.close()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    before = sorted(file.name for file in gallery.path.iterdir())
    with Gallery.open(gallery.path) as again:
        assert again.search(vectors[3], 1, exact=False)[0].entry.id == "e0003"
        with pytest.raises(GalleryError, match="readonly"):
            again.add([Entry("new", "/new.png", "p")], vectors[:1])
    assert sorted(file.name for file in gallery.path.iterdir()) == before


def test_what_is_no_gallery_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "gallery.sqlite").write_bytes(b"garbage" * 1000)
    (tmp_path / "other").mkdir()
    with sqlite3.connect(tmp_path / "other" / "gallery.sqlite") as connection:
        connection.execute("CREATE TABLE something (x)")
    connection.close()
    for name in ("missing", "file", "empty", "garbage", "other"):
        with pytest.raises(GalleryError, match=name):
            Gallery.open(tmp_path / name)


def change_meta(path: Path, sql: str) -> None:
    with sqlite3.connect(path / "gallery.sqlite") as connection:
        connection.execute(sql)
    connection.close()


def test_a_newer_or_incomplete_gallery_is_refused(gallery: Gallery) -> None:
    gallery.close()
    change_meta(gallery.path, "UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(GalleryError, match="found schema 99"):
        Gallery.open(gallery.path)
    change_meta(gallery.path, "UPDATE meta SET value = '1' WHERE key = 'schema'")
    change_meta(gallery.path, "DELETE FROM meta WHERE key = 'labels'")
    with pytest.raises(GalleryError, match="found KeyError: 'labels'"):
        Gallery.open(gallery.path)
    change_meta(gallery.path, "UPDATE meta SET value = '{\"schema\": 99}' WHERE key = 'card'")
    with pytest.raises(GalleryError, match=r"found CardError: .*schema 99"):
        Gallery.open(gallery.path)


def test_damaged_embeddings_are_refused(gallery: Gallery, vectors: Vectors) -> None:
    change_meta(gallery.path, "UPDATE entry SET embedding = x'00' WHERE id = 'e0001'")
    with pytest.raises(GalleryError, match="embeddings of 8 values"):
        gallery.vector("e0001")
    with pytest.raises(GalleryError, match="embeddings of 8 values"), Gallery.open(gallery.path) as again:
        again.search(vectors[0], 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 3.0])
@pytest.mark.parametrize("exact", [True, False])
def test_one_damaged_value_is_refused_not_passed_over(
    gallery: Gallery, vectors: Vectors, value: float, exact: bool
) -> None:
    damaged = vectors[7].copy()
    damaged[:4] = value
    gallery.close()
    change_meta(gallery.path, f"UPDATE entry SET embedding = x'{damaged.tobytes().hex()}' WHERE id = 'e0007'")
    with Gallery.open(gallery.path) as again:
        for read in (lambda: again.search(vectors[0], 1, exact=exact), lambda: again.vector("e0007"), again.ids):
            with pytest.raises(GalleryError, match="norm 1, found another in the entry 'e0007'"):
                read()
        np.testing.assert_array_equal(again.vector("e0008"), vectors[8])


def test_it_is_made_only_where_nothing_is(tmp_path: Path, card: ModelCard, gallery: Gallery) -> None:
    (tmp_path / "file").touch()
    for path in (gallery.path, tmp_path / "file", tmp_path):
        with pytest.raises(GalleryError, match="found something there"):
            Gallery.create(path, card)


def test_a_gallery_of_another_model_is_refused(gallery: Gallery, card: ModelCard) -> None:
    gallery.check_model(card.with_(precision="float16"))  # one run's files share the embedding space
    with pytest.raises(GalleryError, match=r"fingerprint other.*fingerprint tiny-0"):
        gallery.check_model(card.with_(fingerprint="other"))


def test_a_closed_gallery_says_so(gallery: Gallery, vectors: Vectors) -> None:
    gallery.close()
    with pytest.raises(GalleryError, match="closed"):
        gallery.search(vectors[0], 1)


def test_several_patients_are_left_out(gallery: Gallery, vectors: Vectors) -> None:
    for exact in (True, False):
        hits = gallery.search(vectors[0], COUNT, exclude_patients={"p0", "p3", "nobody"}, exact=exact)
        assert {hit.entry.patient_id for hit in hits} == {f"p{n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)}
        assert len(hits) == 240


def test_one_patient_is_not_taken_for_its_letters(gallery: Gallery, vectors: Vectors) -> None:
    with pytest.raises(GalleryError, match="a set of patient ids"):
        gallery.search(vectors[0], 1, exclude_patients="p0")


def test_every_entry_of_a_file_is_found(gallery: Gallery, vectors: Vectors) -> None:
    gallery.add([Entry("copy", "/copy.png", "other", sha256="digest9")], vectors[9:10])
    assert [entry.id for entry in gallery.find("digest9")] == ["e0009", "copy"]


def test_reading_the_gallery_holds_the_embeddings_once(tmp_path: Path, card: ModelCard) -> None:
    count, dim = 1500, 1024
    vectors = np.eye(dim, dtype=np.float32)[np.arange(count) % dim]
    with Gallery.create(tmp_path / "wide", card.with_(embedding_dim=dim)) as gallery:
        gallery.add([Entry(str(n), "/x.png", "p") for n in range(count)], vectors)
        tracemalloc.start()
        try:
            gallery.ids()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 1.5 * vectors.nbytes


def test_others_read_while_the_index_is_built(
    gallery: Gallery, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = VectorIndex.build

    def slow(keys: Any, values: Any) -> VectorIndex:
        started.set()
        assert go_on.wait(60)
        return real(keys, values)

    monkeypatch.setattr(VectorIndex, "build", slow)
    with ThreadPoolExecutor(3) as pool:
        try:
            searches = [pool.submit(gallery.search, vectors[3], 1, exact=False) for _ in range(2)]
            assert started.wait(60)
            assert pool.submit(gallery.entry, "e0005").result(60).id == "e0005"
        finally:
            go_on.set()
        assert [search.result(60)[0].entry.id for search in searches] == ["e0003"] * 2


def test_an_index_of_the_past_is_not_written(
    gallery: Gallery, vectors: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process adds, and writes its index, while this one builds its own of what was there before."""
    real = VectorIndex.build

    def overtaken(keys: Any, values: Any) -> VectorIndex:
        monkeypatch.setattr(VectorIndex, "build", real)
        with Gallery.open(gallery.path) as other:
            other.add([Entry("new", "/new.png", "p")], vectors[:1])
            other.write_index()
        return real(keys, values)

    monkeypatch.setattr(VectorIndex, "build", overtaken)
    assert gallery.search(vectors[3], 1, exact=False)[0].entry.id == "e0003"
    assert json.loads((gallery.path / "index.json").read_text())["generation"] == 2


@pytest.mark.parametrize("replacement", [True, False])
def test_an_index_is_not_written_into_another_gallery(
    gallery: Gallery, vectors: Vectors, card: ModelCard, tmp_path: Path, replacement: bool
) -> None:
    gallery.path.rename(tmp_path / "moved")
    if replacement:
        Gallery.create(gallery.path, card).close()
    assert gallery.search(vectors[3], 1, exact=False)[0].entry.id == "e0003"
    assert not (gallery.path / "index.usearch").exists()
