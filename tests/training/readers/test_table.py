from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cbmir.errors import ManifestError, SplitError
from cbmir.training.readers.table import ColumnMapping, LabelCells, read_own_table

OWN = ColumnMapping("file", "pid", study="study", view="view", split="part", report="text")
HEADER = "file,pid,study,view,part,text,age,Mass,Edema"
ROWS = (
    'a.png,p1,s1,pa,train,"A mass, left.",50,1,0',
    "b.png,p2,s2,LATERAL,val,,51,-1,",
    "c.png,p3,,,test,Clear.,52,0.0,1.0",
)


def _write(folder: Path, *lines: str) -> Path:
    for name in "abcd":
        (folder / f"{name}.png").touch()
    path = folder / "own.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_columns_are_taken_as_named(tmp_path: Path) -> None:
    table = _write(tmp_path, HEADER, *ROWS)
    manifest = read_own_table(table, columns=OWN, labels=["Edema", "Mass"])
    assert manifest.labels.names == ("Edema", "Mass")
    first, second, third = manifest
    assert first.image == tmp_path.resolve() / "a.png"
    assert (first.patient_id, first.study_id, first.view, first.split) == ("p1", "s1", "PA", "train")
    assert first.report == "A mass, left."
    assert [row.labels for row in manifest] == [(0, 1), (None, -1), (1, 0)]
    assert (second.view, third.view, third.split) == ("LATERAL", "", "test")
    assert manifest.about["splits"] == "column part"
    assert manifest.about["policies"]["columns_not_used"] == ["age"]


def test_what_is_not_named_is_not_guessed(tmp_path: Path) -> None:
    lines = ["image,patient_id,split,Mass", *(f"{name}.png,p{name},train,1" for name in "abc")]
    manifest = read_own_table(_write(tmp_path, *lines), labels=["Mass"])
    assert {row.split for row in manifest} == {"train", "val", "test"}  # assigned, not read
    assert manifest.about["policies"]["columns_not_used"] == ["split"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    _write(tmp_path, HEADER)
    data = {
        "image": ["a.png", "b.png", "c.png"],
        "patient_id": [1, 2, 3],
        "Mass": [1, None, -1],
        "Edema": [1.0, 0.0, None],
    }
    parquet.write_table(arrow.table(data), tmp_path / "own.parquet")
    manifest = read_own_table(tmp_path / "own.parquet", labels=["Mass", "Edema"])
    assert [row.patient_id for row in manifest] == ["1", "2", "3"]
    assert [row.labels for row in manifest] == [(1, 1), (None, 0), (-1, None)]


def test_damaged_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "own.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(ManifestError, match="expected a Parquet file"):
        read_own_table(path, labels=["Mass"])


JOINED = ["image,patient_id,findings", "a.png,1,Mass; Edema", "b.png,2,No Finding", "c.png,3,Edema", "d.png,4,"]


def test_joined_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = _write(tmp_path, *JOINED)
    with caplog.at_level(logging.WARNING, "cbmir"):
        manifest = read_own_table(table, cells=LabelCells("findings", ";"))
    assert manifest.labels.names == ("Edema", "Mass")
    assert [row.labels for row in manifest] == [(1, 1), (0, 0), (1, 0), (None, None)]
    assert "1 rows have an empty 'findings'" in caplog.text


def test_joined_labels_with_fixed_names(tmp_path: Path) -> None:
    table = _write(tmp_path, *JOINED)
    manifest = read_own_table(table, cells=LabelCells("findings", ";"), labels=["Nodule", "Mass", "Edema"])
    assert manifest.labels.names == ("Nodule", "Mass", "Edema")
    assert manifest.rows[0].labels == (0, 1, 1)
    with pytest.raises(ManifestError, match=r"row 2.*'findings'"):
        read_own_table(table, cells=LabelCells("findings", ";"), labels=["Edema"])


def test_a_missing_patient_column_explains_itself(tmp_path: Path) -> None:
    table = _write(tmp_path, "image,Mass", "a.png,1", "b.png,0", "c.png,1")
    with pytest.raises(ManifestError, match=r"'patient_id'.*look alike.*--patient-column image"):
        read_own_table(table, labels=["Mass"])
    manifest = read_own_table(table, columns=ColumnMapping(patient="image"), labels=["Mass"])
    assert [row.patient_id for row in manifest] == ["a.png", "b.png", "c.png"]
    assert manifest.about["policies"]["each_image_its_own_patient"] is True


def test_images_may_stand_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    _write(folder)
    table = tmp_path / "own.csv"
    table.write_text("\n".join([HEADER, *ROWS]), "utf-8")
    with pytest.raises(ManifestError, match="3 of 3 images"):
        read_own_table(table, columns=OWN, labels=["Mass"])
    manifest = read_own_table(table, columns=OWN, labels=["Mass"], images=folder)
    assert all(row.image.is_file() for row in manifest)
    (folder / "b.png").unlink()
    assert len(read_own_table(table, columns=OWN, labels=["Mass"], images=folder, missing="skip")) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("d.png,p4,,,train,,1,perhaps,0", "row 5.*'Mass'.*'perhaps'.*--label-values"),
        ("d.png,p4,,LL,train,,1,1,0", "row 5.*'view'.*'LL'"),
        ("d.png,p4,,,dev,,1,1,0", "row 5.*'part'.*'dev'"),
        ("d.png,,,,train,,1,1,0", "row 5.*'pid'.*empty"),
        (",p4,,,train,,1,1,0", "row 5.*'file'.*empty"),
        ("d.png,p4,,,train,,1,1", "row 5.*ends before column 'Edema'"),
        ("a.png,p1,,,train,,1,1,0", r"a\.png in two rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read_own_table(_write(tmp_path, HEADER, *ROWS, row), columns=OWN, labels=["Mass", "Edema"])


def test_a_patient_in_two_of_the_table_s_splits(tmp_path: Path) -> None:
    table = _write(tmp_path, HEADER, *ROWS, "d.png,p1,,,test,,1,1,0")
    with pytest.raises(SplitError, match=r"p1 \(test and train\)"):
        read_own_table(table, columns=OWN, labels=["Mass"])


def test_labels_must_be_named_and_there(tmp_path: Path) -> None:
    table = _write(tmp_path, HEADER, *ROWS)
    with pytest.raises(ManifestError, match="--labels-column"):
        read_own_table(table, columns=OWN)
    with pytest.raises(ManifestError, match="column Nodule"):
        read_own_table(table, columns=OWN, labels=["Nodule"])
    with pytest.raises(ManifestError, match="negative class"):
        read_own_table(_write(tmp_path, "image,patient_id,No Finding", "a.png,1,1"), labels=["No Finding"])


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="found Mass more than once"):
        read_own_table(_write(tmp_path, "image,patient_id,Mass,Mass", "a.png,1,1,0"), labels=["Mass"])


def test_dates(tmp_path: Path) -> None:
    lines = ["image,patient_id,day,Mass", *(f"{name}.png,p{name},2020-01-0{n},1" for n, name in enumerate("abc", 1))]
    columns = ColumnMapping(date="day")
    manifest = read_own_table(_write(tmp_path, *lines), columns=columns, labels=["Mass"])
    assert [row.date for row in manifest] == ["2020-01-01", "2020-01-02", "2020-01-03"]
    assert manifest.about["policies"]["columns"]["date"] == "day"
    table = _write(tmp_path, *lines[:-1], "c.png,pc,3.1.2020,1")
    with pytest.raises(
        ManifestError, match=r"row 4, column 'day': expected YYYY-MM-DD or nothing, found '3\.1\.2020'.*--date-format"
    ):
        read_own_table(table, columns=columns, labels=["Mass"])
