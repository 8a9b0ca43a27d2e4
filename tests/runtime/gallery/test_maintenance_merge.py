"""Merging, copying, and de-identified copies."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery import maintenance
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import export, export_deidentified, merge, verify
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.gallery.reader import Reader
from gallery_contents import generation

COUNT = 60
KEY = Pseudonyms(hashlib.sha512(b"a key").digest())
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]


@pytest.fixture
def other(tmp_path: Path, tiny_card: ModelCard) -> Gallery:
    return Gallery.create(tmp_path / "other", tiny_card)


def test_a_merge_is_one_write(
    store: Gallery,
    other: Gallery,
    make_entries: MakeEntries,
    make_vectors: MakeVectors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "_BLOCK", 7)
    new, vectors = make_entries(30, start=40), make_vectors(30, seed=1)
    new[3] = replace(new[3], id="another name")
    with other:
        other.add(new, vectors, [f"new jpeg {n}".encode() for n in range(30)])
        added = merge(store, other)
        assert added.ids == tuple(f"id{n:04}" for n in range(60, 70))
        assert added.duplicates[2:5] == (("id0042", "id0042"), ("another name", "id0043"), ("id0044", "id0044"))
        assert (len(store), generation(store)) == (70, 2)
        assert [store.entry(entry.id) for entry in new[20:]] == new[20:]
        np.testing.assert_array_equal(store.vector("id0065"), vectors[25])
        assert store.thumbnail("id0065") == b"new jpeg 25"
        assert merge(store, other).ids == ()
        assert generation(store) == 2
    assert verify(store.path) == []


def test_a_merge_is_all_or_nothing(
    store: Gallery, other: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors
) -> None:
    clash = replace(make_entries(1)[0], sha256="")  # so it cannot be compared by content
    with other:
        other.add([*make_entries(5, start=COUNT), clash], make_vectors(6))
        with pytest.raises(GalleryError, match="'id0000', which exists with other content"):
            merge(store, other)
    assert (len(store), generation(store)) == (COUNT, 1)


def test_another_image_with_the_same_id_gets_a_longer_id(
    store: Gallery, other: Gallery, tmp_path: Path, tiny_card: ModelCard, make_vectors: MakeVectors
) -> None:
    """Two sites may use the same names for their images."""

    def site(name: str) -> list[Entry]:
        return [Entry(f"study1/view{n}", f"/data/{name}/study1/view{n}.png", f"{name} p", "study1",
                      sha256=f"{name}{n}".encode().hex()) for n in range(2)]  # fmt: skip

    store.add(site("north"), make_vectors(2, seed=1))
    with other, Gallery.create(tmp_path / "third", tiny_card) as third:
        other.add(site("south"), make_vectors(2, seed=2))
        third.add([replace(site("west")[0], image="/data/south/study1/view0.png")], make_vectors(1, seed=3))
        added = merge(store, other)
        assert added.ids == ("south/study1/view0", "south/study1/view1")
        assert added.renamed == (("study1/view0", added.ids[0]), ("study1/view1", added.ids[1]))
        assert store.entry(added.ids[0]).patient_id == "south p"
        again = merge(store, other)
        assert (again.ids, again.renamed) == ((), ())
        assert again.duplicates == added.renamed
        assert merge(store, third).ids == ("data/south/study1/view0",)
    assert store.entry("study1/view0").patient_id == "north p"
    with pytest.raises(GalleryError, match="'study1/view1', which exists with other content"):
        store.add([replace(site("east")[1])], make_vectors(1))  # outside a merge, an existing id is an error


def test_incompatible_galleries_are_not_merged(store: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    others = {
        "fingerprint other": Gallery.create(tmp_path / "model", replace(tiny_card, fingerprint="other")),
        "found Hernia": Gallery.create(tmp_path / "labels", tiny_card, LabelSet(("Mass", "Hernia"))),
        "keeps pseudonyms, and .* none": Gallery.create(tmp_path / "pseudonyms", tiny_card, pseudonyms=KEY),
    }
    for message, other in others.items():
        with other, pytest.raises(GalleryError, match=message):
            merge(store, other)
    with (
        Gallery.create(tmp_path / "others", tiny_card, pseudonyms=Pseudonyms.throw_away()) as target,
        Gallery.open(tmp_path / "pseudonyms") as source,
        pytest.raises(GalleryError, match=r"keeps pseudonyms, and .* others"),
    ):
        merge(target, source)


def test_a_gallery_with_fewer_labels_is_merged_into_one_with_more(
    store: Gallery, tmp_path: Path, tiny_card: ModelCard
) -> None:
    with Gallery.create(tmp_path / "few", tiny_card, LabelSet(("Nodule",))) as few:
        few.add([Entry("few", "", "p", labels={"Nodule": 1})], np.eye(8, dtype=np.float32)[:1])
        merge(store, few)
    assert store.entry("few").labels == {"Effusion": None, "Mass": None, "Nodule": 1}


def test_ids_become_pseudonyms_if_the_target_has_them(store: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    with Gallery.create(tmp_path / "a", tiny_card, pseudonyms=KEY) as target:
        merge(target, store)
        assert target.entry("id0007").patient_id == KEY.patient("patient0001")
        with Gallery.create(tmp_path / "b", tiny_card, pseudonyms=KEY) as again:
            merge(again, target)
            assert again.entry("id0007") == target.entry("id0007")


def test_a_copy_is_a_snapshot(store: Gallery, tmp_path: Path, make_vectors: MakeVectors) -> None:
    export(store, tmp_path / "new" / "copy")
    store.add([Entry("later", "", "p")], make_vectors(1))
    with Gallery.open(tmp_path / "new" / "copy") as copy:
        assert copy.ids() == store.ids()[:-1]
        assert [copy.entry(name) for name in copy.ids()] == [store.entry(name) for name in copy.ids()]
        assert copy.find_case(store.case_id("id0003")) == store.entry("id0003")
        assert copy.uuid != store.uuid  # so that derived files are never mixed up
        assert copy.remove(ids=["id0000"]) == ("id0000",)
    assert verify(tmp_path / "new" / "copy") == []
    assert (tmp_path / "new" / "copy").stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy"]
    with pytest.raises(GalleryError, match="found something there"):
        export(store, tmp_path / "new")


def test_writes_during_a_copy_are_not_in_it(store: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Reader.copy

    def copy_late(reader: Reader, target: sqlite3.Connection) -> None:
        store.remove(ids=["id0000"])
        real(reader, target)

    monkeypatch.setattr(Reader, "copy", copy_late)
    export(store, tmp_path / "copy")
    with Gallery.open(tmp_path / "copy") as copy:
        assert copy.ids()[0] == "id0000"
    assert store.ids()[0] == "id0001"


def test_a_deidentified_copy_has_no_patient_data(
    store: Gallery, tmp_path: Path, make_entries: MakeEntries, make_vectors: MakeVectors
) -> None:
    assert export_deidentified(store, tmp_path / "copy") == COUNT
    data = b"".join(path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file())
    traces = [
        text.encode() for entry in make_entries(COUNT)
        for text in (entry.id, entry.image, entry.patient_id, entry.study_id, entry.sop_instance_uid, entry.source,
                     entry.date, entry.report, entry.sha256) if text
    ]  # fmt: skip
    assert [
        trace for trace in [*traces, b"jpeg00", store.uuid.encode(), store.case_id("id0000").encode()] if trace in data
    ] == []

    vectors = make_vectors(COUNT)
    with Gallery.open(tmp_path / "copy") as copy:
        names = copy.ids()
        by_vector = {copy.vector(name).tobytes(): copy.entry(name) for name in names}
    assert by_vector.keys() == {vector.tobytes() for vector in vectors}
    found = [by_vector[vector.tobytes()] for vector in vectors]
    originals = make_entries(COUNT)
    assert [(f.view, f.split, f.labels) for f in found] == [(o.view, o.split, o.labels) for o in originals]
    # Images of one patient or study still belong together, and no others.
    for kind in ("patient_id", "study_id"):
        pairs = {(getattr(f, kind), getattr(o, kind)) for f, o in zip(found, originals, strict=True)}
        assert len(pairs) == len({new for new, _ in pairs}) == len({old for _, old in pairs}) > 1
    assert names != [entry.id for entry in found]  # not in the order of addition
    assert verify(tmp_path / "copy") == []


def test_two_deidentified_copies_cannot_be_linked(store: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    with Gallery.create(tmp_path / "keyed", tiny_card, pseudonyms=KEY) as keyed:
        merge(keyed, store)
        seen: list[set[str]] = [{keyed.entry(name).patient_id for name in keyed.ids()}]
        for number in range(2):
            export_deidentified(keyed, tmp_path / f"copy{number}")
            with Gallery.open(tmp_path / f"copy{number}") as copy:
                seen.append({copy.entry(name).patient_id for name in copy.ids()} | set(copy.ids()))
    assert seen[0].isdisjoint(seen[1] | seen[2])
    assert seen[1].isdisjoint(seen[2])


def test_a_deidentified_copy_is_not_merged_with_another(
    store: Gallery, other: Gallery, tmp_path: Path, make_vectors: MakeVectors
) -> None:
    """A patient in both would count as two patients."""
    for name in ("a", "b"):
        export_deidentified(store, tmp_path / name)
    with Gallery.open(tmp_path / "a") as copy, Gallery.open(tmp_path / "b") as another, other:
        assert copy.pseudonym_check
        for target, source in ((store, copy), (copy, another)):
            with pytest.raises(GalleryError, match="keeps pseudonyms"):
                merge(target, source)
        other.add([Entry("new", "", "p")], make_vectors(1))
        with pytest.raises(GalleryError, match="expected their key"):
            merge(copy, other)
        assert len(copy) == COUNT


def test_studies_of_two_patients_have_different_pseudonyms(
    other: Gallery, tmp_path: Path, make_vectors: MakeVectors
) -> None:
    with other:
        other.add([Entry(f"{n}", "", "ab"[n // 2], "study1") for n in range(4)], make_vectors(4))
        export_deidentified(other, tmp_path / "copy")
    with Gallery.open(tmp_path / "copy") as copy:
        assert len({copy.entry(name).study_id for name in copy.ids()}) == 2


def test_a_copy_that_fails_leaves_nothing(store: Gallery, tmp_path: Path) -> None:
    with store.writing() as writer:
        writer.database.execute("UPDATE embedding SET vector = zeroblob(32) WHERE number = 5")
    for make in (export, export_deidentified):
        with pytest.raises(GalleryError, match="the embedding of the entry 'id0004' is damaged"):
            make(store, tmp_path / "copies" / "copy")
        assert list((tmp_path / "copies").iterdir()) == []


def test_an_empty_gallery_can_be_copied(other: Gallery, tmp_path: Path) -> None:
    with other:
        export(other, tmp_path / "a")
        assert export_deidentified(other, tmp_path / "b") == 0
    for name in "ab":
        assert verify(tmp_path / name) == []
