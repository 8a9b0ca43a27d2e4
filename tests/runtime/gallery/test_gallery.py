"""Reading back what was written to a gallery, transactions, and complete removal."""

from __future__ import annotations

import sqlite3
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery.entry import Added, Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import verify
from cbmir.runtime.gallery.schema import UNKNOWN
from gallery_contents import generation, stored_bytes

COUNT = 60
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]


def test_round_trip(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    entries, vectors = make_entries(COUNT), make_vectors(COUNT)
    for place in (store, Gallery.open(store.path)):
        with place:
            assert [place.entry(entry.id) for entry in entries] == entries
            assert place.ids() == [entry.id for entry in entries]
            assert place.thumbnail("id0007") == b"jpeg0007"
            assert place.find(entries[9].sha256) == [entries[9]]
            assert place.find("") == place.find("other") == []
            assert [place.has_patient(one) for one in ("patient0003", "patient", "")] == [True, False, False]
            np.testing.assert_array_equal(place.vector("id0007"), vectors[7])
            assert len(place) == COUNT
            for read in (place.entry, place.vector, place.thumbnail):
                with pytest.raises(GalleryError, match="found 'nobody'"):
                    read("nobody")


def test_columns_have_what_a_search_needs(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    with store.reading() as reader:
        blocks = list(reader.columns(size=25))
        (some,) = reader.columns(np.array([7, 3, 3, 999]))
        assert [entry.id for entry in reader.entries(some.numbers)] == ["id0002", "id0006"]
        assert list(reader.columns(np.array([], np.int64))) == []
        patient = reader.meta.patient_numbers({"patient0000"})
        study = reader.meta.study_numbers({"study0001"})
        assert reader.meta.patient_numbers({""}) == reader.meta.study_numbers({""}) == set()
    assert [len(block.numbers) for block in blocks] == [25, 25, 10]
    first = blocks[0]
    assert set(first.patients[:6].tolist()) == patient
    assert {int(n) for n in first.numbers[np.isin(first.studies, sorted(study))]} == {3, 4}
    assert [first.names[view] for view in first.views[:4]] == ["PA", "AP", "", "PA"]
    assert [first.names[source] for source in first.sources[1:5]] == ["Mercy Hospital", *["Klinik Süd"] * 2, ""]
    assert first.dates[:3].tolist() == [0, 20200102, 20200103]
    assert first.labels.dtype == np.int8
    assert first.labels[:, :2].T.tolist() == [[0, -1, UNKNOWN], [1, -1, UNKNOWN]]
    np.testing.assert_array_equal(np.concatenate([block.vectors for block in blocks]), make_vectors(COUNT))


def test_an_entry_may_have_few_values(store: Gallery, make_vectors: MakeVectors) -> None:
    little = Entry("little", "", "")
    store.add([little, replace(little, id="more")], make_vectors(2, seed=1))
    assert store.entry("little") == replace(little, labels={"Effusion": None, "Mass": None, "Nodule": None})
    assert store.thumbnail("little") is None
    with store.reading() as reader:
        (block,) = reader.columns(np.array([61]))
    assert (block.patients[0], block.studies[0], block.dates[0]) == (0, 0, 0)
    assert block.labels[:, 0].tolist() == [UNKNOWN] * 3


def test_counts(store: Gallery) -> None:
    with store.reading() as reader:
        counts = reader.counts()
    assert counts == {
        "patients": 10,
        "studies": 30,
        "splits": {"train": COUNT},
        "views": {"": 20, "AP": 20, "PA": 20},
        "sources": {"": 20, "Klinik Süd": 20, "Mercy Hospital": 20},
        "labels": {"Effusion": 30, "Mass": COUNT, "Nodule": 0},
        "days": ["2020-01-01", "2020-01-28"],
        "warnings": {},
    }


def test_existing_content_is_left_out(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    new = make_entries(2, start=COUNT)
    copies = [replace(new[0], id="copy"), replace(make_entries(1)[0], id="another name"), make_entries(2)[1]]
    added = store.add([*new, *copies], make_vectors(5, seed=1))
    assert added == Added(("id0060", "id0061"), (("copy", "id0060"), ("another name", "id0000"), ("id0001", "id0001")))
    assert len(store) == COUNT + 2
    before = generation(store)
    assert store.add(copies, make_vectors(3, seed=1)).ids == ()
    assert generation(store) == before  # nothing changed


def bad(entry: Entry, vector: NDArray[np.float32]) -> dict[str, tuple[Entry, NDArray[np.float32], str]]:
    return {
        "an id that exists": (replace(entry, id="id0003"), vector, "which exists with other content"),
        "no id": (replace(entry, id=""), vector, "an id for every entry"),
        "a label": (replace(entry, labels={"Hip": 1}), vector, "found Hip"),
        "a label's value": (replace(entry, labels={"Mass": 2}), vector, "for a label, found 2"),
        "a date": (replace(entry, date="2020-02-30"), vector, "found '2020-02-30'"),
        "a date's form": (replace(entry, date="20200203"), vector, "found '20200203'"),
        "text": (replace(entry, report="\udc80"), vector, "text in UTF-8"),
        "the norm": (entry, 2 * vector, "norm 1"),
        "NaN": (entry, np.full_like(vector, np.nan), "norm 1"),
        "the size": (entry, np.eye(9, dtype=np.float32)[:1], r"found float32 \[2, 9\]"),
        "the type": (entry, vector.astype(np.float64), "found float64"),
    }


@pytest.mark.parametrize("what", bad(Entry("", "", ""), np.eye(8, dtype=np.float32)[:1]))
def test_adding_is_all_or_nothing(
    store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors, what: str
) -> None:
    good = make_entries(2, start=COUNT)
    entry, vector, message = bad(good[1], make_vectors(1, seed=1))[what]
    with pytest.raises(GalleryError, match=message):
        store.add([good[0], entry], np.concatenate([np.zeros_like(vector) + vector, vector]))
    assert len(store) == COUNT
    assert generation(store) == 1
    assert store.find(good[0].sha256) == []
    assert store.add(good, make_vectors(2, seed=1)).ids == ("id0060", "id0061")


def test_no_error_quotes_a_report(store: Gallery, make_vectors: MakeVectors) -> None:
    with pytest.raises(GalleryError, match="text in UTF-8") as refused:
        store.add([Entry("new", "", "p", report="Herr Mustermann \udc80")], make_vectors(1))
    with store.writing() as writer:
        writer.database.execute("UPDATE entry SET report = CAST(X'4865727220ff' AS TEXT) WHERE number = 8")
    with pytest.raises(GalleryError, match="text that is not UTF-8") as damaged:
        store.entry("id0007")
    problems = verify(store.path)
    assert problems
    told = [*traceback.format_exception(refused.value), *traceback.format_exception(damaged.value), str(problems)]
    assert [line for line in told if "Herr" in line and "report=" not in line] == []


def test_an_update_changes_the_entry(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    old = make_entries(3)
    new = [replace(old[0], patient_id="somebody", report="", labels={"Mass": 1}, date="1999-12-31", sha256=""), old[1]]
    assert store.update(new) == 1
    expected = replace(new[0], labels={"Effusion": None, "Mass": 1, "Nodule": None}, sha256=old[0].sha256)
    assert [store.entry(entry.id) for entry in old] == [expected, *old[1:]]
    np.testing.assert_array_equal(store.vector("id0000"), make_vectors(1)[0])
    assert store.thumbnail("id0000") == b"jpeg0000"
    with store.reading() as reader:
        assert reader.changes_since(1).tolist() == [1]  # type: ignore[union-attr]
    with pytest.raises(GalleryError, match="found 'nobody'"):
        store.update([replace(old[1], report="new"), Entry("nobody", "", "")])
    with pytest.raises(GalleryError, match="found other content"):
        store.update([replace(old[1], sha256="f" * 64)])
    assert store.entry("id0001") == old[1]
    store.update([replace(entry, patient_id="somebody") for entry in make_entries(6)])
    assert not store.has_patient("patient0000")
    assert verify(store.path) == []


def test_removing_by_id_patient_and_study(store: Gallery) -> None:
    assert store.remove(ids=["id0059", "nobody"], patient_ids=["patient0000"]) == (
        "id0000", "id0001", "id0002", "id0003", "id0004", "id0005", "id0059",
    )  # fmt: skip
    assert len(store) == COUNT - 7
    assert not store.has_patient("patient0000")
    assert store.has_patient("patient0001")
    assert generation(store) == 2
    assert store.remove(ids=["nobody"], patient_ids=["", "patient0000"]) == ()
    assert generation(store) == 2
    with store.reading() as reader:
        assert reader.changes_since(1).tolist() == [1, 2, 3, 4, 5, 6, 60]  # type: ignore[union-attr]
        assert reader.changes_since(2).tolist() == []  # type: ignore[union-attr]
        assert reader.changes_since(3) is None
    assert store.remove(ids=["id0050"], study_ids=["study0004", ""]) == ("id0008", "id0009", "id0050")
    with pytest.raises(GalleryError, match="put it into a list"):
        store.remove(patient_ids="patient0001")


def test_a_study_id_shared_by_patients_is_refused(store: Gallery, make_vectors: MakeVectors) -> None:
    """Study ids may only be unique per patient, as in CheXpert."""
    entries = [Entry(f"{patient} {study} {n}", "", patient, f"study{study}")
               for patient in ("a", "b", "") for study in "12" for n in "12"]  # fmt: skip
    store.add(entries, make_vectors(12, seed=1))
    with store.reading() as reader:
        assert reader.counts()["studies"] == 30 + 6
    for given in (["study1"], ["study2", "study0004"]):
        with pytest.raises(GalleryError, match="found one of 3 patients; nothing was removed: name the patient"):
            store.remove(ids=["id0000"], study_ids=given)
    assert len(store) == COUNT + 12
    assert store.remove(patient_ids=["a"], study_ids=["study1"]) == ("a 1 1", "a 1 2")
    assert store.remove(ids=["id0000"], patient_ids=["a", "b"], study_ids=["study2", "study0004"]) == (
        "a 2 1", "a 2 2", "b 2 1", "b 2 2", "id0000",
    )  # fmt: skip
    assert store.remove(study_ids=["study2"]) == (" 2 1", " 2 2")
    assert verify(store.path) == []


def test_numbers_are_never_reused(store: Gallery, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    store.remove(ids=["id0059"])
    store.add(make_entries(1, start=70), make_vectors(1))
    with store.reading() as reader:
        assert reader.number("id0070") == 61


def test_removed_entries_leave_no_trace(store: Gallery, make_vectors: MakeVectors) -> None:
    """No report, path, id, key, embedding or thumbnail is left, immediately after the removal."""
    vectors = make_vectors(COUNT)
    traces = {b"Bericht 0020", b"id0020", b"/images/0020", b"patient0003", b"study0010", b"jpeg0020", b"1.2.20",
              f"{20:064x}".encode(), vectors[20].tobytes()}  # fmt: skip
    before = stored_bytes(store.path)
    assert [trace for trace in traces if trace not in before] == []
    store.remove(patient_ids=["patient0003"])
    after = stored_bytes(store.path)
    assert [trace for trace in traces if trace in after] == []
    assert b"Bericht 0030" in after
    assert vectors[30].tobytes() in after


def test_compact_removes_what_a_reader_kept_in_the_log(store: Gallery) -> None:
    with store.reading():
        store.remove(ids=["id0020"])
        assert b"Bericht 0020" in stored_bytes(store.path)  # the reader may still need it
        with Gallery.open(store.path, wait=0.0) as other, pytest.raises(GalleryError, match="compact it again"):
            other.compact()
    store.compact()
    assert b"Bericht 0020" not in stored_bytes(store.path)


def test_compact_frees_space(store: Gallery) -> None:
    store.update([replace(store.entry(f"id{n:04}"), report="x" * 20_000) for n in range(COUNT)])
    before = len(stored_bytes(store.path))
    store.remove(ids=[f"id{n:04}" for n in range(1, COUNT)])
    store.compact()
    assert (store.path / "gallery.sqlite").stat().st_size < before / 4
    assert (store.path / "gallery.sqlite-wal").stat().st_size == 0
    assert store.ids() == ["id0000"]
    with store.reading() as reader:
        assert reader.changes_since(2) is None  # pruned
        assert reader.changes_since(3).tolist() == []  # type: ignore[union-attr]
    assert verify(store.path) == []


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("empty", "garbage", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "garbage" / "gallery.sqlite").write_bytes(b"garbage" * 1000)
    with sqlite3.connect(tmp_path / "other" / "gallery.sqlite") as connection:
        connection.execute("CREATE TABLE something (x)")
    connection.close()
    for name in ("missing", "file", "empty", "garbage", "other"):
        with pytest.raises(GalleryError, match=name):
            Gallery.open(tmp_path / name)


def test_a_gallery_is_created_only_at_an_unused_path(store: Gallery, tmp_path: Path, tiny_card: ModelCard) -> None:
    (tmp_path / "file").touch()
    for path in (store.path, tmp_path / "file", tmp_path):
        with pytest.raises(GalleryError, match="found something there"):
            Gallery.create(path, tiny_card)
    with pytest.raises(GalleryError, match="found 'fast'"):
        Gallery.create(tmp_path / "new", tiny_card, index="fast")


def test_the_index_setting_is_kept(store: Gallery) -> None:
    assert store.info()["index"] == "auto"
    for _ in range(2):
        store.rebuild("int8")
        assert generation(store) == 2
    with Gallery.open(store.path) as again:
        assert again.info()["index"] == "int8"
        with pytest.raises(GalleryError, match="auto, exact, bf16, int8; found 'i8'"):
            again.rebuild("i8")


def test_labels_may_come_from_a_manifest(tmp_path: Path, tiny_card: ModelCard) -> None:
    labels = LabelSet(("Pleural Effusion", "Edema"))
    Gallery.create(tmp_path / "g", tiny_card, labels).close()
    with Gallery.open(tmp_path / "g") as again:
        assert again.labels == labels
        assert again.card == tiny_card


def test_a_closed_gallery_raises_an_error(store: Gallery) -> None:
    with store.reading() as reader:
        store.close()
        assert reader.count == len(reader.ids())  # an active reader can finish
    with pytest.raises(GalleryError, match="closed"):
        len(store)
