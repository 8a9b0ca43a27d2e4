"""The tables: an earlier schema is migrated, a later one refused, and no damaged row or definition is obeyed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.card import ModelCard
from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.maintenance import verify
from cbmir.runtime.gallery.store import Store

COUNT = 30
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]

#: As cbmir 0.4 made its galleries.
SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE entry (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    image TEXT NOT NULL,
    patient_id TEXT NOT NULL,
    study_id TEXT NOT NULL,
    view TEXT NOT NULL,
    split TEXT NOT NULL,
    report TEXT NOT NULL,
    labels TEXT NOT NULL,     -- JSON object: name -> 1, 0, -1 (uncertain) or null (unknown)
    sha256 TEXT NOT NULL,     -- of the image file
    embedding BLOB NOT NULL   -- float32, little-endian, unit norm
) STRICT;
CREATE INDEX entry_sha256 ON entry (sha256);
CREATE TABLE thumbnail (number INTEGER PRIMARY KEY REFERENCES entry (number), jpeg BLOB NOT NULL) STRICT;
"""


def execute(folder: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as database, database:
        database.execute(sql, values)


@pytest.fixture
def old(tmp_path: Path, tiny_card: ModelCard, make_entries: MakeEntries, make_vectors: MakeVectors) -> Path:
    """A gallery of schema 1: every second entry has a thumbnail, and the last two are of one file."""
    folder = tmp_path / "old"
    folder.mkdir()
    meta = {
        "schema": "1", "fingerprint": tiny_card.fingerprint, "labels": json.dumps(list(tiny_card.labels.names)),
        "dim": "8", "crop": "32", "gallery": "0123456789abcdef", "created": "2026-01-01T00:00:00+00:00",
        "generation": "4", "card": tiny_card.dumps(),
    }  # fmt: skip
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(SCHEMA_1)
        database.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        for entry, vector in zip(old_entries(make_entries), make_vectors(COUNT), strict=True):
            row = (entry.id, entry.image, entry.patient_id, entry.study_id, entry.view, entry.split, entry.report,
                   json.dumps(entry.labels), entry.sha256, vector.tobytes())  # fmt: skip
            number = database.execute(
                "INSERT INTO entry (id, image, patient_id, study_id, view, split, report, labels, sha256, embedding) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
            ).lastrowid  # fmt: skip
            if number is not None and number % 2:
                database.execute("INSERT INTO thumbnail VALUES (?, ?)", (number, b"jpeg%d" % number))
    for name in ("index.usearch", "index.json"):
        (folder / name).write_text("what was derived from schema 1")
    return folder


def old_entries(make_entries: MakeEntries) -> list[Entry]:
    entries = [replace(entry, date="", sop_instance_uid="") for entry in make_entries(COUNT)]
    return [*entries[:-1], replace(entries[-1], sha256=entries[-2].sha256)]


def test_schema_1_is_migrated(old: Path, make_entries: MakeEntries, make_vectors: MakeVectors) -> None:
    entries = old_entries(make_entries)
    for _ in range(2):
        with Store.open(old) as store:
            assert store.ids() == [entry.id for entry in entries]
            assert [store.entry(entry.id) for entry in entries] == entries
            assert [store.thumbnail(name) for name in store.ids()[:2]] == [b"jpeg1", None]
            np.testing.assert_array_equal([store.vector(entry.id) for entry in entries], make_vectors(COUNT))
            assert store.find(entries[-1].sha256) == entries[-2:]  # what was there twice stays so
            assert store.created == "2026-01-01T00:00:00+00:00"
            with store.reading() as reader:
                assert reader.generation == 5
                assert reader.changes_since(3) is None  # nothing is known of what schema 1 changed
    assert verify(old) == []
    assert not {"index.usearch", "index.json"} & {path.name for path in old.iterdir()}
    with closing(sqlite3.connect(old / "gallery.sqlite")) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'")}
    assert names == schema.DEFINITIONS.keys()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE entry SET embedding = x'00' WHERE number = 20", "embeddings of 8 values"),
        ("UPDATE entry SET embedding = zeroblob(32) WHERE number = 20", "norm 1"),
        ("UPDATE entry SET labels = '{' WHERE number = 20", "labels of the entry 'id0019' in JSON"),
        ("UPDATE entry SET labels = '{\"Hip\": 1}' WHERE number = 20", "found Hip"),
        ("DELETE FROM meta WHERE key = 'labels'", "found KeyError: 'labels'"),
        ("UPDATE meta SET value = '{\"schema\": 99}' WHERE key = 'card'", "found CardError"),
    ],
)
def test_a_migration_is_all_or_nothing(old: Path, damage: str, message: str) -> None:
    execute(old, damage)
    before = (old / "gallery.sqlite").read_bytes()
    with pytest.raises(GalleryError, match=message):
        Store.open(old)
    assert (old / "gallery.sqlite").read_bytes() == before
    assert (old / "index.usearch").exists()


def test_a_migration_needs_to_write(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(GalleryError, match="found schema 1; open it once where it may be written to"):
        Store.open(old)


def test_verifying_does_not_migrate(old: Path) -> None:
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    with pytest.raises(GalleryError, match=r"found schema 1; .* to migrate it"):
        verify(old)
    assert {name: (old / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("found", "message"), [("99", "found schema 99"), ("0", "schema 0"), ("x", "found none")])
def test_an_unknown_schema_is_refused(store: Store, found: str, message: str) -> None:
    store.close()
    execute(store.path, "UPDATE meta SET value = ? WHERE key = 'schema'", found)
    with pytest.raises(GalleryError, match=message):
        Store.open(store.path)


@pytest.mark.parametrize("key", ["schema", "gallery", "card", "labels", "generation", "count", "index", "pruned"])
def test_damage_in_meta_is_refused(store: Store, key: str) -> None:
    store.close()
    execute(store.path, "UPDATE meta SET digest = digest + 1 WHERE key = ?", key)
    with pytest.raises(GalleryError, match=f"{key!r} is damaged"), Store.open(store.path) as again:
        again.ids()
    execute(store.path, "DELETE FROM meta WHERE key = ?", key)
    with pytest.raises(GalleryError, match="found"), Store.open(store.path) as again:
        again.ids()


def test_other_tables_are_refused(store: Store) -> None:
    store.close()
    execute(store.path, "DROP INDEX entry_patient")
    execute(store.path, "CREATE TABLE more (x)")
    with pytest.raises(GalleryError, match=r"entry_patient, more differ"):
        Store.open(store.path)


@pytest.mark.parametrize("column", [name for name in schema.COLUMNS if name != "number"])
def test_one_changed_value_is_noticed(store: Store, column: str) -> None:
    store.close()
    with closing(sqlite3.connect(store.path / "gallery.sqlite")) as database, database:
        (value,) = database.execute(f"SELECT {column} FROM entry WHERE number = 8").fetchone()
        database.execute(f"UPDATE entry SET {column} = ? WHERE number = 8", (value + "1",)
                         if isinstance(value, str) else (value + 1,))  # fmt: skip
    with Store.open(store.path) as again, again.reading() as reader:
        assert reader.entries([7, 9])[0].id == "id0006"
        for read in (lambda: reader.entries([8]), lambda: list(reader.columns()), reader.ids):
            with pytest.raises(GalleryError, match="damaged"):
                read()


def test_labels_as_text() -> None:
    codec = schema.LabelCodec(LabelSet(("A", "B", "C", "D")))
    text = codec.encode({"B": 0, "A": 1, "D": -1})
    assert text == "10?-"
    assert codec.decode(text) == {"A": 1, "B": 0, "C": None, "D": -1}
    assert codec.decode_many([text, "????"]).tolist() == [[1, 0, schema.UNKNOWN, -1], [schema.UNKNOWN] * 4]
    assert codec.decode_many([]).shape == (0, 4)


def test_a_value_of_another_type_has_another_digest() -> None:
    """One flipped bit makes a text of bytes, or bytes of a text: noticed as any other, and no TypeError."""
    for text in ("abc", "", "7"):
        data: Any = text.encode()
        assert schema.digest([text]) != schema.digest([data])
        assert schema.digest_bytes(text) != schema.digest_bytes(data)
        assert schema.vector_digest(1, "float32", text) != schema.vector_digest(1, "float32", data)
        assert schema.vector_digest(1, data, data) != schema.vector_digest(1, text, data)
        assert schema.change_digest(1, text) != schema.change_digest(1, data)
        assert not text or schema.patient_number(text) != schema.patient_number(data)
    assert schema.digest_bytes(None) != schema.digest_bytes(b"")


def test_numbers_are_made_from_keys_alone() -> None:
    assert schema.patient_number("") == schema.study_number("") == 0
    assert schema.patient_number("7") == schema.patient_number("7") != schema.study_number("7")
    assert all(0 < schema.patient_number(str(n)) < 2**63 for n in range(100))


def test_no_lookup_goes_through_all_entries(store: Store) -> None:
    """Each by an index, as SQLite plans it: what scanned would make adding quadratic."""
    statements: list[str] = []
    with store.reading() as reader:
        reader.database.set_trace_callback(statements.append)
        assert reader.find(f"{9:064x}") == [10]
        assert reader.find("0" * 63 + "x") == []
        assert reader.number("id0001") == 2
        assert reader.has_patient("patient0001")
        reader.entries([1])
        reader.thumbnails([1])
        reader.vectors([1])
        list(reader.columns(np.array([1, 2])))
        assert reader.changes_since(1) is not None
        reader.database.set_trace_callback(None)
        assert len(statements) >= 10
        for sql in statements:
            plan = [row[3] for row in reader.database.execute(f"EXPLAIN QUERY PLAN {sql}")]
            assert [step for step in plan if step.startswith(("SCAN e", "SCAN p", "SCAN s", "SCAN v"))] == [], sql


@pytest.mark.parametrize("damaged", [b"CREATE INDEX \xf5ntry_patient", b"CREATE INDEX entry_patienu", b"CREATD"])
def test_a_damaged_definition_is_refused(store: Store, damaged: bytes) -> None:
    """Also where the bytes are no text, which SQLite puts into its message."""
    store.compact()
    store.close()
    path = store.path / "gallery.sqlite"
    data = path.read_bytes()
    whole = b"CREATE INDEX entry_patient"[: len(damaged)]
    assert whole in data
    path.write_bytes(data.replace(whole, damaged))
    with pytest.raises(GalleryError, match="damaged"):
        Store.open(store.path)
    assert [problem.affected for problem in verify(store.path)] == [()]
