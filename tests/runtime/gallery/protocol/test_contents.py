"""The contents of galleries on disk and in Milvus: adding, reading, updating and removing entries."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.manifest import Box
from cbmir.runtime import EditableGallery, Entry, Filter, Pseudonyms, SearchableGallery, open_gallery
from cbmir.runtime.gallery.protocol import is_milvus
from gallery_kinds import COUNT, DIM, MakeGallery, Vectors, entry, has


def test_round_trip_of_entries(gallery: EditableGallery, vectors: Vectors) -> None:
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


def test_case_ids(fresh: EditableGallery, address: str | Path, vectors: Vectors) -> None:
    cases = {name: fresh.case_id(name) for name in fresh.ids()}
    assert all(re.fullmatch("case-[0-9a-f]{16}", case) for case in cases.values())
    assert len(set(cases.values())) == COUNT
    fresh.remove(ids=[entry(5).id])
    fresh.add([replace(entry(5), id="again")], vectors[5:6])
    with open_gallery(address) as other:
        for name, case in cases.items():
            assert other.case_id(name) == case
            assert (
                fresh.find_case(case) == other.find_case(case) == (None if name == entry(5).id else fresh.entry(name))
            )
        assert other.find_case(fresh.case_id("again")) == fresh.entry("again")
        assert other.find_case("case-0000000000000000") is other.find_case("") is None


def test_a_gallery_is_persistent(
    fresh: EditableGallery, address: str | Path, vectors: Vectors, tiny_card: ModelCard
) -> None:
    before = fresh.search(vectors[5], 10)
    fresh.close()
    with open_gallery(address) as again:
        assert again.search(vectors[5], 10).hits == before.hits
        assert (again.card, again.labels) == (tiny_card, tiny_card.labels)
        assert len(again) == COUNT


def test_writes_are_visible_to_others(fresh: EditableGallery, address: str | Path, vectors: Vectors) -> None:
    """With the default consistency, all earlier writes are visible."""
    with open_gallery(address) as other:
        assert other.search(vectors[5], 1).hits[0].entry.id == entry(5).id
        fresh.remove(ids=[entry(5).id])
        assert other.search(vectors[5], 1).hits[0].entry.id != entry(5).id
        other.add([replace(entry(5), id="again")], vectors[5:6])
        assert fresh.search(vectors[5], 1).hits[0].entry.id == "again"


def test_existing_content_is_skipped_and_reported(fresh: EditableGallery, vectors: Vectors) -> None:
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
def test_adding_is_all_or_nothing(gallery: EditableGallery, vectors: Vectors, bad: Entry) -> None:
    with pytest.raises(GalleryError, match="expected"):
        gallery.add([Entry("new", "/new.png", "p"), bad], vectors[:2])
    assert len(gallery) == COUNT
    assert gallery.entry(entry(5).id) == entry(5)


def test_update_changes_only_the_given_fields(fresh: EditableGallery, vectors: Vectors) -> None:
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
def test_updating_is_all_or_nothing(gallery: EditableGallery, bad: Entry) -> None:
    with pytest.raises(GalleryError, match="expected"):
        gallery.update([replace(entry(5), report="new"), bad])
    assert gallery.entry(entry(5).id) == entry(5)


def test_remove(fresh: EditableGallery, vectors: Vectors) -> None:
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


def test_a_gallery_of_another_model_is_refused(gallery: EditableGallery, tiny_card: ModelCard) -> None:
    gallery.check_model(tiny_card.with_(precision="float16"))
    with pytest.raises(GalleryError, match=r"fingerprint other.*fingerprint tiny-0"):
        gallery.check_model(tiny_card.with_(fingerprint="other"))


def test_labels_may_come_from_a_manifest(make_gallery: MakeGallery, address: str | Path, tiny_card: ModelCard) -> None:
    labels = LabelSet(("Pleural Effusion", "Edema"))
    with make_gallery(tiny_card, labels) as gallery:
        gallery.add([Entry("a", "/a.png", "p", labels={"Edema": 1})], np.eye(DIM, dtype=np.float32)[:1])
    with open_gallery(address) as again:
        assert again.labels == labels
        found = again.search(np.eye(DIM, dtype=np.float32)[0], 1, filter=Filter(where="edema"))
        assert found.hits[0].entry.labels == {"Pleural Effusion": None, "Edema": 1}


def test_only_an_unused_address_is_accepted(
    fresh: EditableGallery, make_gallery: MakeGallery, tiny_card: ModelCard
) -> None:
    with pytest.raises(GalleryError, match="found"):
        make_gallery(tiny_card)
    assert len(fresh) == COUNT


def test_an_address_without_a_gallery_is_refused(address: str | Path) -> None:
    with pytest.raises(GalleryError, match="found"):
        open_gallery(address)
    assert not Path(str(address).removeprefix("milvus:")).exists()


def test_a_closed_gallery_raises_an_error(fresh: EditableGallery, vectors: Vectors) -> None:
    fresh.close()
    fresh.close()
    for use in (lambda: fresh.search(vectors[0], 1), lambda: fresh.add([entry(0)], vectors[:1]), fresh.ids):
        with pytest.raises(GalleryError, match="closed"):
            use()


def test_pseudonyms(make_gallery: MakeGallery, address: str | Path, tiny_card: ModelCard, vectors: Vectors) -> None:
    key = Pseudonyms(bytes(range(40)))
    with make_gallery(tiny_card, pseudonyms=key) as gallery:
        gallery.add([entry(n) for n in range(20)], vectors[:20])
        assert gallery.entry(entry(3).id).patient_id == key.patient("p3")
        assert gallery.entry(entry(3).id).study_id == key.study("s3")
        assert gallery.entry(entry(0).id).patient_id == ""
        assert [gallery.has_patient(one) for one in ("p3", key.patient("p3"), "p")] == [True, True, False]
        assert gallery.finds_patients
    without = Filter(exclude_patients=frozenset({"p3"}))
    with open_gallery(address, pseudonyms=key) as gallery:
        hits = gallery.search(vectors[3], 20, filter=without).hits
        assert {entry(3).id, entry(15).id}.isdisjoint(hit.entry.id for hit in hits)
        assert len(hits) == 18
        assert gallery.remove(patient_ids=["p3"]) == (entry(3).id, entry(15).id)
    with open_gallery(address) as gallery:
        assert not gallery.finds_patients
        assert len(gallery.search(vectors[3], 20).hits) == 18
        for use in (
            lambda: gallery.has_patient("p4"),
            lambda: gallery.search(vectors[3], 1, filter=without),
            lambda: gallery.add([entry(30)], vectors[:1]),
        ):
            with pytest.raises(GalleryError, match="pseudonyms"):
                use()


def test_info(gallery: EditableGallery, tiny_card: ModelCard) -> None:
    info = json.loads(json.dumps(gallery.info()))
    assert info["fingerprint"] == tiny_card.fingerprint
    assert (info["images"], info["dim"], info["crop"]) == (COUNT, DIM, 32)
    assert info["splits"] == {"train": COUNT // 2, "val": COUNT // 2}
    counts = {name: sum(has(entry(n), name) for n in range(COUNT)) for name in tiny_card.labels.names}
    assert info["labels"] == counts
    assert (info["pseudonyms"], info["index"]) == (False, "exact")
    assert "exact" in info["search"] or "flat" in info["search"]


def test_a_milvus_address_is_text() -> None:
    assert is_milvus("milvus://host:19530/name")
    assert is_milvus("milvus+https://host/name")
    assert is_milvus("milvus:./file.db")
    assert is_milvus("MILVUS+http://host/name")
    assert not is_milvus("milvus")
    assert not is_milvus(Path("gallery"))
    with pytest.raises(GalleryError, match="as text"):
        is_milvus(Path("milvus://host:19530/name"))


def test_label_shares_are_over_entries_with_a_known_label(
    kind: str, fresh: EditableGallery, make_gallery: MakeGallery, tiny_card: ModelCard
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
