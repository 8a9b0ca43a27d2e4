"""The tables: other schemas, damaged rows and damaged definitions are refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import GalleryError
from cbmir.labels import LabelSet
from cbmir.runtime.gallery import schema
from cbmir.runtime.gallery.entry import Entry
from cbmir.runtime.gallery.gallery import Gallery
from cbmir.runtime.gallery.maintenance import verify

COUNT = 30
MakeEntries = Callable[..., list[Entry]]
MakeVectors = Callable[..., NDArray[np.float32]]


def execute(folder: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "gallery.sqlite")) as database, database:
        database.execute(sql, values)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("99", "found schema 99; upgrade cbmir, or build the gallery again"),
        ("1", "found schema 1; build the gallery again with 'cbmir index build'"),
        ("x", "found none"),
    ],
)
def test_another_schema_is_refused(store: Gallery, found: str, message: str) -> None:
    store.close()
    execute(store.path, "UPDATE meta SET value = ? WHERE key = 'schema'", found)
    with pytest.raises(GalleryError, match=message):
        Gallery.open(store.path)


@pytest.mark.parametrize(
    "key", ["schema", "gallery", "card", "labels", "generation", "count", "index", "pruned", "case_key"]
)
def test_damage_in_meta_is_refused(store: Gallery, key: str) -> None:
    store.close()
    execute(store.path, "UPDATE meta SET digest = digest + 1 WHERE key = ?", key)
    with pytest.raises(GalleryError, match=f"{key!r} is damaged"), Gallery.open(store.path) as again:
        again.ids()
    execute(store.path, "DELETE FROM meta WHERE key = ?", key)
    with pytest.raises(GalleryError, match="found"), Gallery.open(store.path) as again:
        again.ids()


def test_other_tables_are_refused(store: Gallery) -> None:
    store.close()
    execute(store.path, "DROP INDEX entry_case")
    execute(store.path, "CREATE TABLE more (x)")
    with pytest.raises(GalleryError, match=r"entry_case, more differ"):
        Gallery.open(store.path)


@pytest.mark.parametrize("column", [name for name in schema.COLUMNS if name != "number"])
def test_one_changed_value_is_noticed(store: Gallery, column: str) -> None:
    store.close()
    with closing(sqlite3.connect(store.path / "gallery.sqlite")) as database, database:
        (value,) = database.execute(f"SELECT {column} FROM entry WHERE number = 8").fetchone()
        database.execute(f"UPDATE entry SET {column} = ? WHERE number = 8", (value + "1",)
                         if isinstance(value, str) else (value + 1,))  # fmt: skip
    with Gallery.open(store.path) as again, again.reading() as reader:
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
    """One flipped bit can turn text into bytes or the reverse: it is detected like any other, without a TypeError."""
    for text in ("abc", "", "7"):
        data: Any = text.encode()
        assert schema.digest([text]) != schema.digest([data])
        assert schema.digest_bytes(text) != schema.digest_bytes(data)
        assert schema.digest_bytes(text, 1, "float32") != schema.digest_bytes(data, 1, "float32")
        assert schema.digest_bytes(data, 1, data) != schema.digest_bytes(data, 1, text)
        assert schema.digest_bytes(text, 1) != schema.digest_bytes(data, 1)
        assert not text or schema.patient_number(text) != schema.patient_number(data)
    assert schema.digest_bytes(None) != schema.digest_bytes(b"")


def test_numbers_depend_only_on_keys() -> None:
    assert schema.patient_number("") == schema.study_number("") == 0
    assert schema.patient_number("7") == schema.patient_number("7") != schema.study_number("7")
    assert all(0 < schema.patient_number(str(n)) < 2**63 for n in range(100))


def test_no_lookup_scans_all_entries(store: Gallery) -> None:
    """SQLite plans each lookup with an index; scans would make adding quadratic."""
    statements: list[str] = []
    with store.reading() as reader:
        reader.database.set_trace_callback(statements.append)
        assert reader.find(f"{9:064x}") == [10]
        assert reader.find("0" * 63 + "x") == []
        assert reader.number("id0001") == 2
        assert reader.find_case(store.case_id("id0001")) == reader.entries([2])[0]
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


@pytest.mark.parametrize("damaged", [b"CREATE INDEX \xf5ntry_sha256", b"CREATE INDEX entry_sha257", b"CREATD"])
def test_a_damaged_definition_is_refused(store: Gallery, damaged: bytes) -> None:
    """This includes bytes that are not text, which SQLite quotes in its message."""
    store.compact()
    store.close()
    path = store.path / "gallery.sqlite"
    data = path.read_bytes()
    whole = b"CREATE INDEX entry_sha256"[: len(damaged)]
    assert whole in data
    path.write_bytes(data.replace(whole, damaged))
    with pytest.raises(GalleryError, match="damaged"):
        Gallery.open(store.path)
    assert [problem.affected for problem in verify(store.path)] == [()]
