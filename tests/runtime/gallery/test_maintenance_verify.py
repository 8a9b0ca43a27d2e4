"""`verify`: no problems in an intact gallery; for a damaged one, what is affected and what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cbmir.errors import GalleryError
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import GalleryProblem, verify

COUNT = 60


def test_an_intact_gallery_has_no_problems(store: Gallery) -> None:
    assert verify(store.path) == []
    store.remove(patient_ids=["patient0003"])
    store.compact()
    assert verify(store.path) == []


DAMAGES = {
    "an entry": ("UPDATE entry SET report = 'x' WHERE number = 8", "the entry", ("id0007",), "remove these entries"),
    "a vector": ("UPDATE embedding SET vector = zeroblob(32) WHERE number IN (8, 9)", "the embedding",
                 ("id0007", "id0008"), "remove these entries"),
    "a vector gone": ("DELETE FROM embedding WHERE number = 8", "the embedding", ("id0007",), "remove these entries"),
    "a thumbnail": ("UPDATE thumbnail SET jpeg = x'00' WHERE number = 8", "the thumbnail", ("id0007",), "remove"),
    "a thumbnail gone": ("DELETE FROM thumbnail WHERE number = 8", "the thumbnail", ("id0007",), "remove"),
    "an entry gone": ("DELETE FROM entry WHERE number = 8", "expected 60 entries, found 59", (), "restore a copy"),
    "a patient": ("UPDATE entry SET patient_id = 'x' WHERE patient_id = 'patient0001'", "the entry",
                  tuple(f"id{n:04}" for n in range(6, 12)), "remove these entries"),
    "a change": ("UPDATE change SET numbers = x'00'", "the record of changes", (), "'cbmir index compact'"),
    "a reference": ("PRAGMA foreign_keys = OFF; DELETE FROM entry WHERE number = 8", "embedding 8 refers", (), "rem"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_with_the_affected_entries(store: Gallery, name: str) -> None:
    sql, what, affected, remedy = DAMAGES[name]
    with closing(sqlite3.connect(store.path / "gallery.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA foreign_keys = ON")
        database.executescript(sql)
    problems = verify(store.path)
    assert [p.affected for p in problems if what in p.what and p.remedy.startswith(remedy)] == [affected], problems


def damage_page(path: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Change the first page of a table or index in the file."""
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,)).fetchone()
    data = bytearray(path.read_bytes())
    own = data[4096 * (page - 1) : 4096 * page]
    change(own)
    data[4096 * (page - 1) : 4096 * page] = own
    path.write_bytes(data)


def test_compact_rebuilds_a_damaged_index_of_the_database(store: Gallery) -> None:
    store.compact()
    store.close()

    def rename(page: bytearray) -> None:
        at = page.index(b"id0007")
        page[at : at + 6] = b"id9999"

    damage_page(store.path / "gallery.sqlite", "entry_id", rename)
    problems = verify(store.path)
    assert problems
    assert {problem.remedy for problem in problems} == {"'cbmir index compact' rebuilds the database's indexes"}
    with Gallery.open(store.path) as again:
        with pytest.raises(GalleryError):
            again.entry("id0007")
        again.compact()
        assert again.entry("id0007").id == "id0007"
    assert verify(store.path) == []


def test_a_lost_page_of_vectors_affects_every_entry(store: Gallery) -> None:
    """The page of vectors is unreadable: every entry is reported by its id."""
    store.compact()
    store.close()
    damage_page(store.path / "gallery.sqlite", "embedding", lambda page: page.__setitem__(slice(0, 4096), bytes(4096)))
    problems = verify(store.path)
    (missing,) = [p for p in problems if "embedding is missing" in p.what]
    assert missing.affected == tuple(f"id{n:04}" for n in range(COUNT))
    assert any("cannot be read completely" in p.what for p in problems)
    with Gallery.open(store.path) as again:
        assert again.entry("id0007").id == "id0007"  # intact entries are still readable
        with pytest.raises(GalleryError, match="damaged"):
            again.vector("id0007")


def test_an_unreadable_database_is_one_problem(store: Gallery, tmp_path: Path) -> None:
    store.close()
    path = store.path / "gallery.sqlite"
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    (problem,) = verify(store.path)
    assert problem.affected == ()
    assert problem.remedy == "restore a copy of the gallery, or build it again"
    with pytest.raises(GalleryError, match="nothing there"):
        verify(tmp_path / "none")


@pytest.mark.parametrize("damaged", ["a key", "the file"])
def test_no_remedy_is_to_verify(store: Gallery, damaged: str) -> None:
    if damaged == "a key":
        with store.writing() as writer:
            writer.database.execute("UPDATE meta SET digest = digest + 1 WHERE key = 'count'")
            writer.finish = lambda: 1  # type: ignore[method-assign]
    store.close()
    path = store.path / "gallery.sqlite"
    if damaged == "the file":
        path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    (problem,) = verify(store.path)
    assert "index verify" not in problem.what + problem.remedy


def test_verifying_changes_nothing(store: Gallery) -> None:
    """Not even the identity of a copy, which opening it normally renews."""
    store.close()
    (store.path / "gallery.generation").unlink()
    before = (store.path / "gallery.sqlite").read_bytes()
    assert verify(store.path) == []
    assert (store.path / "gallery.sqlite").read_bytes() == before
    assert not (store.path / "gallery.generation").exists()


def test_damage_in_derived_files_is_reported(store: Gallery) -> None:
    store.close()
    with Gallery.open(store.path) as gallery:
        gallery.rebuild("bf16")
    assert verify(store.path) == []
    (vectors,) = store.path.glob("derived-*/vectors.npy")
    data = bytearray(vectors.read_bytes())
    data[-3] ^= 1
    vectors.write_bytes(data)
    (problem,) = verify(store.path)
    assert problem == GalleryProblem(problem.what, (), problem.remedy)
    assert "vectors.npy" in problem.what
    assert "'cbmir index rebuild'" in problem.remedy


def test_a_damaged_entry_can_be_removed(store: Gallery) -> None:
    with store.writing() as writer:
        writer.database.execute("UPDATE entry SET report = 'x', study_id = '' WHERE number = 8")
        writer.database.execute("UPDATE embedding SET vector = x'' WHERE number = 8")
    assert verify(store.path)
    assert store.remove(ids=["id0007"]) == ("id0007",)
    assert verify(store.path) == []
