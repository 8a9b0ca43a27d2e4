"""Tables of any origin: recognised formats, refusals, and conversion of Parquet types."""

from __future__ import annotations

import gc
import gzip
import logging
import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from cbmir import text_table
from cbmir.errors import ManifestError
from cbmir.text_table import TextTable, read_table, uncollected

ROWS = [["a.png", "Müller", "1"], ["b.png", "", "0"]]


def _write(folder: Path, data: bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("separator", "encoding", "said"),
    [
        (",", "utf-8", ""),
        (",", "utf-8-sig", "byte order mark"),
        (";", "utf-8", "separated by semicolons"),
        ("\t", "utf-8", "separated by tabs"),
        (",", "cp1252", "not UTF-8; read as Windows-1252 (Latin-1)"),
        (";", "utf-16", "read as UTF-16"),
    ],
)
def test_dialects(tmp_path: Path, separator: str, encoding: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    header = ["image", "name", "Mass" if separator == "," else "Mass, left"]
    text = "\r\n".join(separator.join(row) for row in [header, *ROWS])
    with caplog.at_level(logging.INFO, "cbmir"):
        table = read_table(_write(tmp_path, text.encode(encoding)))
    assert table.columns[:2] == ["image", "name"]
    assert [list(row) for row in table.rows] == ROWS
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_a_comma_is_preferred_if_both_give_the_same_number_of_columns(tmp_path: Path) -> None:
    assert read_table(_write(tmp_path, b"a,b;c\n1,2;3\n")).columns == ["a", "b;c"]


@pytest.mark.parametrize("only", [{"image", "patient_id", "Mass"}, {"image", "patient_id", "sex"}])
def test_the_delimiter_is_the_one_that_finds_the_columns(tmp_path: Path, only: set[str]) -> None:
    header = b'image,patient_id,Mass,"Opacity (a; b; c; d; e)"\n'
    assert read_table(_write(tmp_path, header), only).columns[:3] == ["image", "patient_id", "Mass"]


def test_quotes_new_lines_and_empty_lines(tmp_path: Path) -> None:
    table = read_table(_write(tmp_path, b'image;text\n\na;"one;\ntwo ""x"""\n\n'))
    assert table.rows == [["a", 'one;\ntwo "x"']]


def test_only_requested_columns_are_kept(tmp_path: Path) -> None:
    path = _write(tmp_path, b"a,b,c,d\n1,2,3,4\n5,6,7\n8\n")
    table = read_table(path, {"d", "b", "x"})
    assert (table.columns, table.kept) == (["a", "b", "c", "d"], ["b", "d"])
    assert [list(row) for row in table.rows] == [["2", "4"], ["6"], []]
    assert [record for _, record in table.records()] == [{"b": "2", "d": "4"}, {"b": "6"}, {}]
    assert [place for place, _ in table.records()] == [f"{path}, row {number}" for number in (2, 3, 4)]
    with pytest.raises(ManifestError, match=r"row 3: the row ends before column 'd'"):
        table.column("d")
    assert read_table(path, ()).rows == [[], [], []]


@pytest.mark.parametrize("data", [b"a,b\n\0,1\n", "a,b\n\0,1".encode("utf-16"), b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfea"])
def test_binary_data_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ManifestError, match=r"t\.csv: expected a (table of text|CSV file in UTF-8), found"):
        read_table(_write(tmp_path, data))


def test_the_dialect_of_a_manifest_is_not_guessed(tmp_path: Path) -> None:
    assert read_table(_write(tmp_path, b"a;b\n1;2\n"), recognise=False).columns == ["a;b"]
    with pytest.raises(ManifestError, match="expected a CSV file in UTF-8"):
        read_table(_write(tmp_path, "ä\n".encode("cp1252")), recognise=False)


def test_garbage_collection_is_restored(tmp_path: Path) -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_gzip(tmp_path: Path) -> None:
    path = _write(tmp_path, gzip.compress(b"a;b\n1;2\n"), "t.csv.gz")
    assert read_table(path).rows == [["1", "2"]]


def test_unrequested_parquet_columns_are_not_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"a": ["1"], "b.c": ["2"], "d": ["3" * 999]}), path, use_dictionary=False)
    chunk = parquet.read_metadata(path).row_group(0).column(2)
    data = bytearray(path.read_bytes())
    start = chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    table = read_table(path, {"b.c", "x"})
    assert (table.columns, table.kept, table.rows) == (["a", "b.c", "d"], ["b.c"], [["2"]])
    with pytest.raises(ManifestError, match="expected a Parquet file, found"):
        read_table(path, {"d"})


def test_a_duplicate_parquet_column_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, cells = tmp_path / "t.parquet", arrow.array(["1"])
    parquet.write_table(arrow.Table.from_arrays([cells] * 3, names=["a", "a", "b"]), path)
    with pytest.raises(ManifestError, match="expected each column name once, found a more than once"):
        read_table(path, {"a", "b"})
    assert read_table(path, {"b"}).rows == [["1"]]


def _parquet(folder: Path, **columns: list[Any]) -> TextTable:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), folder / "t.parquet")
    return read_table(folder / "t.parquet")


def test_types_of_parquet(tmp_path: Path) -> None:
    table = _parquet(
        tmp_path,
        id=[10000032.0, None], wide=[float(2**60), 0.5], score=[0.25, float("nan")], seen=[True, None],
        day=[date(2020, 1, 2), None], midnight=[datetime(2019, 5, 31), datetime(2019, 5, 31, 13, 5)],
        zone=[datetime(2019, 5, 31, tzinfo=UTC), None], names=[["Mass", "Né"], []], text=["1.0", None],
    )  # fmt: skip
    rows = [dict(zip(table.kept, row, strict=True)) for row in table.rows]
    assert rows == [
        {"id": "10000032", "wide": "1.152921504606847e+18", "score": "0.25", "seen": "1", "day": "2020-01-02",
         "midnight": "2019-05-31", "zone": "2019-05-31 00:00:00+00:00", "names": '["Mass", "Né"]', "text": "1.0"},
        {"id": "", "wide": "0.5", "score": "", "seen": "", "day": "", "midnight": "2019-05-31 13:05:00", "zone": "",
         "names": "[]", "text": ""},
    ]  # fmt: skip


def test_nanoseconds_are_accepted(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.array([1559260800000000123], arrow.timestamp("ns"))
    parquet.write_table(arrow.table({"t": column}), tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").rows == [["2019-05-31"]]


def test_bytes_of_parquet_are_text(tmp_path: Path) -> None:
    assert _parquet(tmp_path, patient=[b"p1", "Né".encode()]).rows == [["p1"], ["Né"]]


def test_parquet_values_that_are_not_text_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pairs = arrow.array([[("a", 1)]], arrow.map_(arrow.string(), arrow.int64()))
    for values in ([b"\xff\xfe"], [{"a": 1}], pairs, [[b"a"]]):
        with pytest.raises(ManifestError, match="column 'patient' cannot be read as text: "):
            _parquet(tmp_path, patient=values)


def test_paths_that_are_not_files_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "t.csv"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "none.csv", tmp_path / "none.parquet"):
        with pytest.raises(ManifestError, match=r"a device or pipe|a folder|No such file"):
            read_table(path)


def test_the_size_of_a_table_is_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    for name, text, found in (
        ("MOST_TABLE", b"a\n1234567\n", "at most 9 bytes, found more"),
        ("_MOST_LINES", b"a\n" * 10, "at most 9 lines, found 10"),
        ("_MOST_CELLS", b"a,b,c,d\n" * 3, "at most 9 cells, found 12"),
        ("_MOST_COLUMNS", b"a,b,c,d,e,f,g,h,i,j\n", "at most 9 columns, found 10"),
        ("_MOST_LINE", b"a\n123456789\n", "a line of 9 characters or more"),
    ):
        path.write_bytes(text)
        with monkeypatch.context() as patch:
            patch.setattr(text_table, name, 9)
            with pytest.raises(ManifestError, match=found):
                read_table(path)
    path.write_text("a\n" + "1" * (2**24 + 1))
    with pytest.raises(ManifestError, match="field larger than field limit"):
        read_table(path)


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "MOST_TABLE", 2**20)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"image,patient_id\n" + b"0" * 2**22))
    with pytest.raises(ManifestError, match="at most 1,048,576 bytes, found more"):
        read_table(path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_long_value_in_many_rows_of_parquet_is_refused(
    tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dictionary has one value that is repeated often: 20 MB of text in a file of a few hundred bytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, values = tmp_path / "t.parquet", ["x" * 10_000] * 2000
    column = arrow.array([values] if nested else values)
    parquet.write_table(arrow.table({"image": column}), path, compression="zstd")
    assert path.stat().st_size < 2000
    assert len(read_table(path)) == (1 if nested else 2000)
    monkeypatch.setattr(text_table, "MOST_TABLE", 10**7)
    with pytest.raises(ManifestError, match="at most 10,000,000 characters, found more"):
        read_table(path)


def test_the_size_of_a_parquet_table_is_checked_from_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: dict[str, list[Any]] = {"a": [b"1" * 10] * 3, "b.c": [[1, 2, 3], [4, 5], [6]]}
    assert len(_parquet(tmp_path, **columns)) == 3
    for name, found in (
        ("_MOST_LINES", "at most 2 lines, found 3"),
        ("_MOST_CELLS", "at most 2 cells, found 6"),
        ("_MOST_COLUMNS", "at most 1 columns, found 2"),
        ("MOST_TABLE", r"at most 99 bytes, unpacked, found \d{3}"),
    ):
        most = {"_MOST_COLUMNS": 1, "MOST_TABLE": 99}.get(name, 2)
        with monkeypatch.context() as patch:
            patch.setattr(text_table, name, most)
            with pytest.raises(ManifestError, match=found):
                _parquet(tmp_path, **columns)
    monkeypatch.setattr(text_table, "_MOST_CELLS", 7)  # 3 rows, and 3 and 6 values
    with pytest.raises(ManifestError, match="at most 7 cells, found 9"):
        _parquet(tmp_path, **columns)
