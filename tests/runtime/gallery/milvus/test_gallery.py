"""Tests specific to Milvus: addresses, expressions, limits, the embedded engine. The rest is in `test_protocol`."""

from __future__ import annotations

import logging
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, MissingDependencyError
from cbmir.labels import LabelSet
from cbmir.runtime import Entry, Filter, Finder, Pseudonyms, build_gallery, open_engine, open_gallery
from cbmir.runtime.gallery.build.build import open_collection
from cbmir.runtime.gallery.milvus import client, records
from cbmir.runtime.gallery.milvus.client import Connection, MilvusAddress
from cbmir.runtime.gallery.milvus.gallery import MilvusGallery
from cbmir.runtime.gallery.pseudonyms import Keys

LABELS = LabelSet(("Effusion", "Mass", "Nodule"))
Vectors = NDArray[np.float32]


def unit(count: int, seed: int = 0) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(count, 8))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"milvus:{tmp_path}/file.db"


@pytest.fixture
def gallery(place: str, tiny_card: ModelCard) -> Iterator[MilvusGallery]:
    with MilvusGallery.create(place, tiny_card) as made:
        made.add([Entry(f"e{n:03}", "/x.png", f"p{n}", sha256=f"d{n}") for n in range(40)], unit(40))
        yield made


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, tiny_card: ModelCard) -> Iterator[MilvusGallery]:
    """A gallery shared by all tests that do not change it."""
    with MilvusGallery.create(f"milvus:{tmp_path_factory.mktemp('kept')}/file.db", tiny_card) as made:
        made.add([Entry(f"e{n:03}", "/x.png", f"p{n}", sha256=f"d{n}") for n in range(40)], unit(40))
        yield made


@pytest.mark.parametrize(
    ("text", "uri", "name", "options"),
    [
        ("milvus://host:19530/chests", "http://host:19530", "chests", ("strong", 1, 1)),
        ("milvus://host/chests", "http://host:19530", "chests", ("strong", 1, 1)),
        ("milvus+https://host/chests", "https://host:443", "chests", ("strong", 1, 1)),
        ("milvus://[::1]:1/a_1?consistency=bounded&shards=4&replicas=2", "http://[::1]:1", "a_1", ("bounded", 4, 2)),
        ("milvus:/data/file.db?consistency=session", "/data/file.db", "gallery", ("session", 1, 1)),
        ("milvus:/data/a@b/file.db", "/data/a@b/file.db", "gallery", ("strong", 1, 1)),
    ],
)
def test_addresses(text: str, uri: str, name: str, options: tuple[str, int, int]) -> None:
    place = MilvusAddress.parse(text)
    assert (place.uri, place.name) == (uri, name)
    assert (place.consistency, place.shards, place.replicas) == options
    assert place.embedded == uri.endswith(".db")


def test_a_relative_path_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert MilvusAddress.parse("milvus:./file.db").uri == f"{tmp_path}/file.db"


@pytest.mark.parametrize(
    "text",
    [
        "milvus:file", "milvus://host:19530", "milvus://host:19530/", "milvus:///name", "milvus://host:port/name",
        "milvus://host:99999/name", "milvus://[host/name", "milvus://host/two/names", "milvus://host/has-dash", "milvus://host/1name",
        "milvus://host/name?consistency=weak", "milvus://host/name?shards=0", "milvus://host/name?shards=many",
        "milvus://host/name?index=HNSW", "milvus+http://host/name", "http://host/name", f"milvus://host/{'a' * 201}",
    ],
)  # fmt: skip
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(GalleryError, match="expected"):
        MilvusAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "milvus://root:secret@host:19530/name", "milvus://root:secret@host:port/name", "milvus://root:se/secret@host/n",
        "milvus+https://root:secret@host/has-dash", "milvus+https://secret@host", "milvus://root:secret@[host/name",
        "milvus:root:secret@host/name", "milvus:/root:secret@host/name", "milvus://host/name?token=secret",
        "milvus:./file.db?password=secret", "milvus+http://root:secret@host/name", "MILVUS://root:secret@host/name",
        "milvus://root:secret@host/name?shards=0",
    ],
)  # fmt: skip
def test_a_password_in_an_address_is_refused(text: str) -> None:
    with pytest.raises(GalleryError, match=r"CBMIR_MILVUS_TOKEN|a place is") as caught:
        MilvusAddress.parse(text)
    assert "secret" not in str(caught.value)
    with pytest.raises(GalleryError) as caught:
        open_gallery(Path(text))
    assert "secret" not in str(caught.value)


def test_expressions() -> None:
    keys = Keys(Path("x"), "", None)

    def of(**asked: Any) -> str:
        return records.expression(Filter(**asked), LABELS, keys)

    assert of() == ""
    assert of(exclude_patients=["b", 'a"\\', ""]) == 'patient not in ["a\\"\\\\", "b"]'
    assert of(only_patients=["b", "a"]) == 'patient in ["a", "b"]'
    assert of(exclude_studies=["1.2"], view="Pa") == 'study not in ["1.2"] and view == "pa"'
    assert of(view="PA", source='St. "Süd"') == 'view == "pa" and source == "st. \\"süd\\""'
    assert of(since="2020-01-02") == "date >= 20200102 and date <= 99991231"
    assert of(until="2020-01-02") == "date >= 1 and date <= 20200102"  # 0 is an unknown day
    assert of(where="mass and not (Effusion or nodule)") == (
        "(array_contains(positive, 1) and (array_contains(negative, 0) and array_contains(negative, 2)))"
    )
    assert of(where="not mass or nodule", view="AP") == (
        'view == "ap" and (array_contains(negative, 1) or array_contains(positive, 2))'
    )
    key = Pseudonyms(bytes(range(40)))
    hidden = records.expression(Filter(frozenset({"a"})), LABELS, Keys(Path("x"), key.check, key))
    assert hidden == f'patient not in ["{key.patient("a")}"]'


@pytest.mark.parametrize(
    "value", ['"', "\\", "\\n", "\n\r\t", "' or id != '", '" or id != "', "ä€😀", "{a}", "%_", "$meta", "", " "]
)
def test_any_text_is_found_exactly(kept: MilvusGallery, value: str) -> None:
    kept.add([Entry("odd" + value, "/x.png", value, study_id=value, sha256=value)], unit(1, 9))
    assert kept.entry("odd" + value).patient_id == value
    assert kept.has_patient(value) == (value != "")
    assert len(kept.find(value)) == (value != "")
    left = kept.search(unit(1, 9)[0], 100, filter=Filter(frozenset({value})))
    assert len(left.hits) == 40 + (value == "")
    assert kept.remove(patient_ids=[value]) == (("odd" + value,) if value else ())
    assert kept.remove(ids=["odd" + value]) == (() if value else ("odd",))
    assert len(kept) == 40


@pytest.mark.parametrize(
    "entry",
    [
        Entry("i" * 513, "/x.png", "p"),
        Entry("i", "/x.png", "ä" * 129),  # the server limits bytes
        Entry("i", "/x.png", "p", view="v" * 65),
        Entry("i", "/x.png", "p", source="ß" * 129),
        Entry("i", "/x.png", "p", report="r" * 65_536),
        Entry("i\udcff", "/x.png", "p"),
    ],
)
def test_too_long_texts_are_refused(kept: MilvusGallery, entry: Entry) -> None:
    with pytest.raises(GalleryError, match=r"expected .* in Milvus|in Unicode"):
        kept.add([Entry("new", "/x.png", "p"), entry], unit(2))
    with pytest.raises(GalleryError, match="65,535"):
        kept.add([Entry("new", "/x.png", "p")], unit(1), [bytes(50_000)])
    assert len(kept) == 40


def test_a_path_that_is_not_unicode_is_kept(gallery: MilvusGallery) -> None:
    gallery.add([Entry("odd", "/caf\udce9.png", "p")], unit(1, 9))
    assert gallery.entry("odd").image == "/caf\udce9.png"


def test_a_duplicate_entry_of_another_program_is_read_once(
    gallery: MilvusGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both checked before either wrote: the last write wins, and there is one row."""
    with monkeypatch.context() as patch:
        patch.setattr(gallery, "_there", lambda entries: ({}, {}))
        gallery.add([Entry("e000", "/again.png", "p0", sha256="d0")], unit(1))
    assert len(gallery) == 40
    assert gallery.entry("e000").image == "/again.png"


def test_adding_continues_after_a_failure(gallery: MilvusGallery, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [Entry(f"n{n}", "/x.png", "p", sha256=f"n{n}") for n in range(9)]
    real, calls = Connection.call, 0

    def fails(self: Connection, method: str, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += method == "upsert"
        if method == "upsert" and calls == 3:
            raise GalleryError("the server went away")
        return real(self, method, *args, **options)

    monkeypatch.setattr(client, "_BYTES", 2700)  # two rows in a request
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "call", fails)
        with pytest.raises(GalleryError, match="went away"):
            gallery.add(entries, unit(9, 1))
    assert len(gallery) == 44
    assert gallery.add(entries, unit(9, 1)).ids == ("n4", "n5", "n6", "n7", "n8")
    assert len(gallery) == 49


def test_thumbnails_are_removed_with_their_entries(gallery: MilvusGallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.add([Entry(name, "/x.png", "p") for name in "ab"], unit(2, 1), [b"of a", b"of b"])
    with monkeypatch.context() as patch:
        patch.setattr(type(gallery._rows), "upsert", lambda self, made: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gallery.add([Entry("c", "/x.png", "p")], unit(1, 2), [b"of c"])
    assert set(gallery._pictures.read()) == {"a", "b", "c"}
    assert gallery.remove(ids=["c"], patient_ids=["p"]) == ("a", "b")  # c was never added; its picture is removed
    assert gallery._pictures.read() == {}


def test_an_interrupted_removal_is_completed_by_the_next(
    gallery: MilvusGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.add([Entry("a", "/x.png", "p")], unit(1, 1), [b"of a"])
    for fails in (type(gallery._rows), type(gallery._pictures)):
        with monkeypatch.context() as patch:
            patch.setattr(fails, "delete", lambda self, ids: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                gallery.remove(patient_ids=["p"])
    assert gallery.remove(patient_ids=["p"]) == ("a",)
    assert gallery._pictures.read() == {}


@pytest.mark.parametrize(("setting", "kind"), [("auto", "hnsw"), ("int8", "hnsw_sq")])
def test_k_neighbours_are_returned_if_there_are_k(place: str, tiny_card: ModelCard, setting: str, kind: str) -> None:
    """The graph alone would not reach the few entries that pass."""
    vectors = unit(1500, 2)
    entries = [Entry(f"e{n:04}", "/x.png", f"p{n}", date=f"20{20 + (n % 250 == 0)}-01-01") for n in range(1500)]
    with MilvusGallery.create(place, tiny_card, index=setting) as made:
        made.add(entries, vectors)
    with MilvusGallery.open(place) as opened:  # reopened, so that its rows are in indexed segments
        found = opened.search(vectors[1], 5, filter=Filter(since="2021-01-01"))
        expected = sorted(range(0, 1500, 250), key=lambda n: -float(vectors[n] @ vectors[1]))[:5]
        assert [hit.entry.id for hit in found.hits] == [f"e{n:04}" for n in expected]
        assert found.method == f"milvus {kind}"
        assert (opened.count(Filter(since="2021-01-01")), opened.count(Filter())) == (6, 1500)
        nearest = {f"e{n:04}" for n in np.argsort(-(vectors @ vectors[1]))[:10]}
        assert len({hit.entry.id for hit in opened.search(vectors[1], 10).hits} & nearest) >= 9
        with pytest.raises(GalleryError, match="exact search"):
            opened.search(vectors[1], 5, exact=True)


def test_splits_with_other_names_are_counted_together(place: str, tiny_card: ModelCard) -> None:
    with MilvusGallery.create(place, tiny_card, pseudonyms=Pseudonyms(bytes(range(40)))) as made:
        names = ("", "train", "train", "fold 1", "fold 2")
        made.add([Entry(f"e{n}", "/x.png", "", split=name) for n, name in enumerate(names)], unit(5))
        assert made.info()["splits"] == {"": 1, "train": 2, "other": 2}
        assert (made.info()["pseudonyms"], made.info()["index"]) == (True, "auto")
    other = Pseudonyms(bytes(range(1, 41)))
    for index in (None, "auto"):
        with pytest.raises(GalleryError, match="expected the key for pseudonyms, found another"):
            open_collection(place, tiny_card, tiny_card.labels, other, index)


def test_too_few_reachable_vectors_are_an_error_not_a_short_answer(
    kept: MilvusGallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = kept._rows
    monkeypatch.setattr(type(rows), "candidates", lambda self, queries, *rest: [[] for _ in queries])
    assert len(kept.search(unit(1)[0], 5).hits) == 5  # all entries were compared
    monkeypatch.setattr(client, "MOST", 30)
    with pytest.raises(GalleryError, match="found 0 of 5 neighbours"):
        kept.search(unit(1)[0], 5)


def test_k_is_limited_by_milvus(kept: MilvusGallery) -> None:
    with pytest.raises(GalleryError, match="16,384"):
        kept.search(unit(1)[0], 16_385)
    assert len(kept.search(unit(1)[0], 16_384).hits) == 40


def test_a_damaged_vector_is_refused(gallery: MilvusGallery) -> None:
    row = gallery._rows.query('id == "e005"', ["*"])[0]
    gallery._connection.call("upsert", "gallery", [dict(row) | {"vector": (2 * unit(40)[5]).tolist()}])
    with pytest.raises(GalleryError, match="norm 1"):
        gallery.search(unit(40)[5], 3)


@pytest.mark.parametrize("level", client.CONSISTENCY)
def test_reads_use_the_consistency_level_of_the_address(
    gallery: MilvusGallery, place: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, set[str]] = {}
    real = Connection.call

    def listen(self: Connection, method: str, *args: Any, **options: Any) -> Any:
        if "consistency_level" in options and args[0] == "gallery":
            asked.setdefault(method, set()).add(options["consistency_level"])
        return real(self, method, *args, **options)

    with MilvusGallery.open(f"{place}?consistency={level}") as other:
        monkeypatch.setattr(Connection, "call", listen)
        other.search(unit(1)[0], 3)
        other.entry("e001")
        other.ids()
        assert other.info()["consistency"] == level
    assert asked == {method: {level.capitalize()} for method in ("search", "query")}


def test_the_folder_is_readable_only_by_its_owner(gallery: MilvusGallery, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "file.db").stat().st_mode) == 0o700


def test_the_embedded_engine_stops_with_its_last_user(place: str, tiny_card: ModelCard) -> None:
    def serving() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "_serve" in thread.name}

    before = serving()  # of `kept`
    gallery = MilvusGallery.create(place, tiny_card)
    other = MilvusGallery.open(place)
    gallery.close()
    assert len(other) == 0
    assert serving() > before
    other.close()
    other.close()
    for thread in serving() - before:
        thread.join(30)
    assert serving() == before
    with MilvusGallery.open(place) as again:
        assert len(again) == 0


def test_one_process_at_a_time(gallery: MilvusGallery, place: str) -> None:
    code = (
        "from cbmir.errors import GalleryError; from cbmir.runtime import open_gallery\n"
        f"try: open_gallery({place!r})\n"
        "except GalleryError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "another process may have it open" in result.stdout
    assert result.stderr == ""


def test_other_collections_are_refused(tmp_path: Path, tiny_card: ModelCard, place: str) -> None:
    (tmp_path / "file.db").mkdir()
    (tmp_path / "file.db" / "notes.txt").touch()
    with pytest.raises(GalleryError, match="found something there"):
        MilvusGallery.create(place, tiny_card)
    (tmp_path / "file.db" / "notes.txt").unlink()
    connection = Connection(MilvusAddress.parse(place), make=True)
    with pytest.raises(GalleryError, match="found no gallery"):
        MilvusGallery.open(place)
    client.Collection.make(connection, 8, "exact")
    about = client.Texts(connection, "about", "strong")
    about.make()
    client.Texts(connection, "pictures", "strong").make()
    with pytest.raises(GalleryError, match="found KeyError: 'schema'"):  # an interrupted creation
        MilvusGallery.open(place)
    about.write({"schema": "9"})
    with pytest.raises(GalleryError, match="found schema 9"):
        MilvusGallery.open(place)
    connection.close()


def test_an_unreachable_server(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(client, "_CONNECT", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # nothing listens there
        with pytest.raises(GalleryError, match=r"cannot open .*check that the server runs"):
            MilvusGallery.open(f"milvus://127.0.0.1:{port}/name")
    assert capfd.readouterr().err == ""


def test_an_error_names_no_patient(
    kept: MilvusGallery, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(GalleryError, match="cannot query") as caught:
        kept._rows.query('patient == "Jane Doe" nonsense', ["id"])
    assert "Jane" not in str(caught.value)
    assert "Jane" not in caplog.text + capfd.readouterr().err


def test_the_error_without_pymilvus_says_how_to_install_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(MissingDependencyError, match=r"\.\[milvus\]"):
        MilvusGallery.open(place)


def test_a_finder_over_milvus(tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path, place: str) -> None:
    """Its answers equal those with a folder."""
    from cbmir.manifest import read_manifest

    with open_engine(tiny_model, threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), place, index="exact")
    for name in ("image_06.png", "image_20.png"):
        image = tiny_manifest.parent / name
        with Finder.open(tiny_model, place, threads=1) as one, Finder.open(tiny_model, tiny_gallery) as other:
            over_milvus, over_folder = one.analyze(image, k=50), other.analyze(image, k=50)
        assert over_milvus.to_json() == over_folder.to_json()
        for neighbour in over_milvus.neighbours:
            np.testing.assert_array_equal(
                over_milvus.evidence_for_neighbour(neighbour.id), over_folder.evidence_for_neighbour(neighbour.id)
            )
