from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import ManifestError, SplitError
from cbmir.labels import NIH_14
from cbmir.manifest import Manifest
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


def test_columns_are_read_by_their_given_names(tmp_path: Path) -> None:
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


def test_columns_that_are_not_named_are_not_guessed(tmp_path: Path) -> None:
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
    assert "empty 'findings' in 1 of" in caplog.text


def test_joined_labels_with_fixed_names(tmp_path: Path) -> None:
    table = _write(tmp_path, *JOINED)
    manifest = read_own_table(table, cells=LabelCells("findings", ";"), labels=["Nodule", "Mass", "Edema"])
    assert manifest.labels.names == ("Nodule", "Mass", "Edema")
    assert manifest.rows[0].labels == (0, 1, 1)
    with pytest.raises(ManifestError, match=r"row 2.*'findings'"):
        read_own_table(table, cells=LabelCells("findings", ";"), labels=["Edema"])


def test_the_error_for_a_missing_patient_column_explains_it(tmp_path: Path) -> None:
    table = _write(tmp_path, "image,Mass", "a.png,1", "b.png,0", "c.png,1")
    with pytest.raises(ManifestError, match=r"'patient_id'.*look similar.*--patient-column image"):
        read_own_table(table, labels=["Mass"])
    manifest = read_own_table(table, columns=ColumnMapping(patient="image"), labels=["Mass"])
    assert [row.patient_id for row in manifest] == ["a.png", "b.png", "c.png"]
    assert manifest.about["policies"]["each_image_its_own_patient"] is True


def test_images_may_be_in_another_folder(tmp_path: Path) -> None:
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
        ("d.png,nan,,,train,,1,1,0", "row 5.*'pid'.*expected a value, found 'nan'"),
        ("d.png,<NA>,,,train,,1,1,0", "row 5.*'pid'.*expected a value, found '<NA>'"),
        ("None,p4,,,train,,1,1,0", "row 5.*'file'.*expected a value, found 'None'"),
        ("d.png,p4,NULL,,train,,1,1,0", "row 5.*'study'.*expected a value, found 'NULL'"),
        (",p4,,,train,,1,1,0", "row 5.*'file'.*empty"),
        ("d.png,p4,,,train,,1,1", "row 5.*ends before column 'Edema'"),
        ("d.png,p4,,,train,Large heart, clear,1,1,0", "row 5: expected at most 9 cells, as in the header, found 10"),
        ("a.png,p1,,,train,,1,1,0", r"a\.png in two rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read_own_table(_write(tmp_path, HEADER, *ROWS, row), columns=OWN, labels=["Mass", "Edema"])


def test_a_patient_in_two_splits_of_the_table(tmp_path: Path) -> None:
    table = _write(tmp_path, HEADER, *ROWS, "d.png,p1,,,test,,1,1,0")
    with pytest.raises(SplitError, match=r"p1 \(test and train\)"):
        read_own_table(table, columns=OWN, labels=["Mass"])


def test_labels_must_be_named_and_present(tmp_path: Path) -> None:
    table = _write(tmp_path, HEADER, *ROWS)
    with pytest.raises(ManifestError, match="--labels-column"):
        read_own_table(table, columns=OWN)
    with pytest.raises(ManifestError, match="column Nodule"):
        read_own_table(table, columns=OWN, labels=["Nodule"])
    with pytest.raises(ManifestError, match="negative class"):
        read_own_table(_write(tmp_path, "image,patient_id,No Finding", "a.png,1,1"), labels=["No Finding"])


def test_a_table_without_labels_is_accepted_on_request(tmp_path: Path) -> None:
    path = _write(tmp_path, "image,patient_id,Mass", "a.png,1,1", "b.png,2,0", "c.png,3,1")
    manifest = read_own_table(path, unlabelled=True)
    assert manifest.labels.names == tuple(NIH_14) and {row.labels for row in manifest} == {(None,) * 14}
    assert {row.split for row in manifest} == {""}, "a gallery takes all of them"
    assert read_own_table(path, labels=("Nodule",), unlabelled=True).labels.names == ("Nodule",)
    with pytest.raises(ManifestError, match="found both"):
        read_own_table(path, cells=LabelCells("Mass"), unlabelled=True)


def test_a_duplicate_column_is_refused(tmp_path: Path) -> None:
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


# --- joined labels ----------------------------------------------------------------------------------------------------


def _joined(folder: Path, *cells: str, **options: Any) -> Manifest:
    for number in range(len(cells)):
        (folder / f"{number}.png").touch()
    lines = ["image,patient_id,findings", *(f'{n}.png,p{n},"{cell}"' for n, cell in enumerate(cells))]
    path = folder / "joined.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    cells_ = LabelCells("findings", **{key: options.pop(key) for key in ("separator", "format") if key in options})
    return read_own_table(path, cells=cells_, **options)


@pytest.mark.parametrize(
    ("cell", "option"),
    [
        ("['kyphosis', 'pleural effusion']", "--labels-format list"),
        ('[""a""]', "--labels-format list"),
        ("'a'", "--labels-format list"),
        ("a; b", "--separator ';'"),
        ("a, b", "--separator ','"),
        ("a\tb", r"--separator '\\t'"),
        ("a/b", "--separator '/'"),
        ("a + b", r"--separator '\+'"),
        ("a & b", "--separator '&'"),
        ("a and b", "--separator ' and '"),
    ],
)
def test_labels_joined_by_another_separator_are_refused(tmp_path: Path, cell: str, option: str) -> None:
    with pytest.raises(ManifestError, match=rf"row 3, column 'findings': expected findings joined by '\|'.*{option}"):
        _joined(tmp_path, "Mass", cell, "Nodule|Mass")


def test_a_label_with_a_separator_is_kept_if_it_is_named(tmp_path: Path) -> None:
    manifest = _joined(tmp_path, "Opacity, left", "Mass", "No Finding", labels=["Opacity, left", "Mass"])
    assert [row.labels for row in manifest] == [(1, 0), (0, 1), (0, 0)]
    manifest = _joined(
        tmp_path, "Nodule/Mass", "Normal variant", "No-Finding", labels=["Nodule/Mass", "Normal variant"]
    )
    assert [row.labels for row in manifest] == [(1, 0), (0, 1), (0, 0)]


@pytest.mark.parametrize("word", ["nan", "None", "NULL", "n/a", "<NA>", "-"])
@pytest.mark.parametrize("form", ["text", "list"])
def test_a_word_for_a_missing_value_is_an_empty_cell(
    tmp_path: Path, word: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    mass = "Mass" if form == "text" else "['Mass']"
    with caplog.at_level(logging.WARNING, "cbmir"):
        manifest = _joined(tmp_path, mass, word, mass, format=form)
    assert [row.labels for row in manifest] == [(1,), (None,), (1,)]
    assert "empty 'findings' in 1 of" in caplog.text
    assert f"joined.csv: {word!r} in column 'findings' is read as an empty cell" in caplog.text


@pytest.mark.parametrize(
    ("cell", "form"),
    [("Normal study", "text"), ("no acute disease", "text"), ("Mass|nan", "text"), ("['Normal chest']", "list"),
     ("['None']", "list")],
)  # fmt: skip
def test_unclear_words_for_no_finding_are_refused(tmp_path: Path, cell: str, form: str) -> None:
    with pytest.raises(
        ManifestError, match=r"row 2, column 'findings': expected findings, found .*'No Finding'.*empty"
    ):
        _joined(tmp_path, cell, "", "", format=form)


def test_lists_are_read_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = ("['kyphosis', 'pleural effusion']", '[""kyphosis"", ""caf\\u00e9 \\/""]')
    cells = (*listed, "[]", "", "['normal']", "('kyphosis',)")
    with caplog.at_level(logging.WARNING, "cbmir"):
        manifest = _joined(tmp_path, *cells, format="list")
    assert manifest.labels.names == ("café /", "kyphosis", "pleural effusion")
    assert [row.labels for row in manifest] == [
        (0, 1, 1), (1, 1, 0), (None,) * 3, (None,) * 3, (0, 0, 0), (0, 1, 0),
    ]  # fmt: skip
    assert "empty 'findings' in 2 of" in caplog.text
    assert manifest.about["policies"]["labels"] == "a list in findings"


@pytest.mark.parametrize("cell", ["Mass", "['Mass'", "[1, 2]", "{'Mass': 1}", "__import__('os')", "[['Mass']]"])
def test_invalid_lists_are_refused(tmp_path: Path, cell: str) -> None:
    with pytest.raises(ManifestError, match="row 2, column 'findings': expected a list such as"):
        _joined(tmp_path, cell, "['Mass']", "[]", format="list")


@pytest.mark.parametrize(
    "spelled", ["no finding", "No_Finding", "No-Finding", "NO FINDING", "normal", "NORMAL", " No  finding "]
)
def test_variants_of_no_finding_are_read_as_no_finding(
    tmp_path: Path, spelled: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cbmir"):
        manifest = _joined(tmp_path, spelled, "Mass", "Mass|Edema")
    assert manifest.labels.names == ("Edema", "Mass")
    assert manifest.rows[0].labels == (0, 0)
    assert manifest.about["policies"]["labels_read_as"] == {spelled.strip(): "No Finding"}
    assert "is read as 'No Finding'" in caplog.text
    with pytest.raises(ManifestError, match=r"row 3.*expected No Finding, or some of"):
        _joined(tmp_path, "Mass", f"Mass|{spelled}", "Edema")


def test_labels_that_differ_only_in_case_or_separators_are_merged(tmp_path: Path) -> None:
    usual = "Pleural_Thickening"
    manifest = _joined(tmp_path, usual, "pleural thickening|Mass", "Pleural  thickening", usual)
    assert manifest.labels.names == ("Mass", "Pleural_Thickening")
    assert [row.labels for row in manifest] == [(0, 1), (1, 1), (0, 1), (0, 1)]
    named = _joined(tmp_path, "MASS", "mass|edema", "No Finding", labels=["Edema", "Mass"])
    assert [row.labels for row in named] == [(0, 1), (1, 1), (0, 0)]
    with pytest.raises(ManifestError, match="differ in more than case"):
        _joined(tmp_path, "Mass", "Edema", "Mass", labels=["Mass", "mass", "Edema"])


# --- ids, values and dates --------------------------------------------------------------------------------------------


def test_ids_stored_as_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["image,patient_id,study,Mass", "a.png,10000032.0,1.0,1", "b.png,10000033.0,,0", "c.png,10000033.0,2.0,0"]
    lines.append("d.png,10000034.0,3.0,1")
    with caplog.at_level(logging.INFO, "cbmir"):
        manifest = read_own_table(_write(tmp_path, *lines), columns=ColumnMapping(study="study"), labels=["Mass"])
    assert [row.patient_id for row in manifest] == ["10000032", "10000033", "10000033", "10000034"]
    assert [row.study_id for row in manifest] == ["1", "", "2", "3"]
    assert "column 'patient_id' holds integers as floats (10000032.0)" in caplog.text


def test_ids_that_resemble_numbers_are_unchanged(tmp_path: Path) -> None:
    """A pseudonym may consist of hexadecimal digits."""
    lines = ["image,patient_id,Mass", "a.png,1.0,1", "b.png,1.5,0", "c.png,1234e567,0"]
    manifest = read_own_table(_write(tmp_path, *lines), labels=["Mass"])
    assert [row.patient_id for row in manifest] == ["1.0", "1.5", "1234e567"]


def test_an_id_in_two_forms_is_refused(tmp_path: Path) -> None:
    """They are one patient, who could be in two splits."""
    lines = ["image,patient_id,Mass", "a.png,10000032.0,1", "b.png,10000032,0", "c.png,P1,0"]
    with pytest.raises(ManifestError, match=r"'patient_id': .* in one form, found 10000032 also as 10000032\.0"):
        read_own_table(_write(tmp_path, *lines), labels=["Mass"])


def test_a_rounded_id_is_refused(tmp_path: Path) -> None:
    lines = ["image,patient_id,Mass", "a.png,1,1", "b.png,1.0000032e+17,0", "c.png,2,0"]
    with pytest.raises(ManifestError, match=r"row 3, column 'patient_id': expected an id, found .*, a rounded number"):
        read_own_table(_write(tmp_path, *lines), labels=["Mass"])


def test_parquet_of_pandas(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    _write(tmp_path, HEADER)
    data = {
        "image": ["a.png", "b.png", "c.png"],
        "patient_id": [10000032.0, 10000033.0, 10000034.0],
        "Mass": [True, False, None],
        "day": [datetime(2019, 5, 31), None, datetime(2019, 6, 1)],
    }
    parquet.write_table(arrow.table(data), tmp_path / "own.parquet")
    manifest = read_own_table(tmp_path / "own.parquet", labels=["Mass"], columns=ColumnMapping(date="day"))
    assert [(row.patient_id, row.labels, row.date) for row in manifest] == [
        ("10000032", (1,), "2019-05-31"), ("10000033", (0,), ""), ("10000034", (None,), "2019-06-01"),
    ]  # fmt: skip


def test_known_words_and_words_defined_by_an_option(tmp_path: Path) -> None:
    lines = ["image,patient_id,Mass,Edema", "a.png,1,YES,True", "b.png,2,No,false", "c.png,3,Perhaps,"]
    table = _write(tmp_path, *lines)
    with pytest.raises(ManifestError, match=r"row 4, column 'Mass': .*found 'Perhaps'.*--label-values"):
        read_own_table(table, labels=["Mass", "Edema"])
    manifest = read_own_table(table, labels=["Mass", "Edema"], cells=LabelCells(values={"perhaps": -1}))
    assert [row.labels for row in manifest] == [(1, 1), (0, 0), (-1, None)]


def test_a_word_for_a_missing_value_is_an_unknown_label(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R writes NA. A hyphen may also mean that the finding is absent."""
    table = _write(tmp_path, "image,patient_id,Mass", "a.png,1,1", "b.png,2,NA", "c.png,3,0", "d.png,4,NA")
    assert [row.labels for row in read_own_table(table, labels=["Mass"])] == [(1,), (None,), (0,), (None,)]
    assert caplog.messages.count("'NA' in a label column is read as an empty cell: unknown") == 1
    defined = read_own_table(table, labels=["Mass"], cells=LabelCells(values={"na": 0}))
    assert [row.labels for row in defined] == [(1,), (0,), (0,), (0,)]
    with pytest.raises(ManifestError, match="found '-'"):
        read_own_table(_write(tmp_path, "image,patient_id,Mass", "a.png,1,-"), labels=["Mass"])


def test_empty_cells_after_the_last_column_are_ignored(tmp_path: Path) -> None:
    table = _write(tmp_path, "image,patient_id,Mass", "a.png,1,1,,", "b.png,2,0", "c.png,3,1,")
    assert [row.labels for row in read_own_table(table, labels=["Mass"])] == [(1,), (0,), (1,)]


@pytest.mark.parametrize(
    ("text", "date_format", "day"),
    [
        ("20190531", None, "2019-05-31"),
        ("20190531.0", None, "2019-05-31"),
        ("31052019.0", "%d%m%Y", "2019-05-31"),
        ("20191331.0", None, None),
        ("2019-05-31 00:00:00", None, "2019-05-31"),
        ("2019-05-31T00:00", None, "2019-05-31"),
        ("31.5.2019", "%d.%m.%Y", "2019-05-31"),
        ("2019-05-31 13:05", None, None),
        ("2019-05-31 00:00:00+00:00", None, None),
        ("20191331", None, None),
        ("5/6/2019", None, None),
        ("2019-05-31", "%d.%m.%Y", None),
    ],
)
def test_dates_in_other_forms(tmp_path: Path, text: str, date_format: str | None, day: str | None) -> None:
    lines = ["image,patient_id,day,Mass", f"a.png,1,{text},1", "b.png,2,,1", "c.png,3,,1"]
    table, columns = _write(tmp_path, *lines), ColumnMapping(date="day")
    if day is None:
        with pytest.raises(ManifestError, match=r"row 2, column 'day'.*--date-format"):
            read_own_table(table, columns=columns, labels=["Mass"], date_format=date_format)
    else:
        manifest = read_own_table(table, columns=columns, labels=["Mass"], date_format=date_format)
        assert [row.date for row in manifest] == [day, "", ""]


@pytest.mark.parametrize("name", ["long" * 100 + ".png", "deep/" * 2000 + "a.png"])
def test_an_impossible_file_name_is_a_missing_file(tmp_path: Path, name: str) -> None:
    lines = ["image,patient_id,Mass", "a.png,1,1", "b.png,2,0", "c.png,3,0", f"{name},4,1"]
    with pytest.raises(ManifestError, match="1 of 4 images of the table are not in"):
        read_own_table(_write(tmp_path, *lines), labels=["Mass"])
