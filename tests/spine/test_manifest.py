"""The manifest: round trips in both formats, all refusals, atomic writing, the fingerprint."""

from __future__ import annotations

import csv
import gzip
import json
import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet
from cbmir.manifest import FIXED_COLUMNS, Box, Manifest, Row, read_manifest, sidecar_path, write_manifest
from cbmir.text_table import read_table

LABELS = LabelSet(("Effusion", "Mass"))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Two rows in the manifest's folder and one elsewhere, all label values, and a report that needs quotes."""
    rows = (
        Row(tmp_path / "a.png", "p1", (1, None), "s1", "PA", "train", 'Large "effusion",\nnew line.'),
        Row(tmp_path / "deep" / "b.png", "p2", (0, -1), "", "AP", "val", ""),
        Row(Path("/elsewhere/ç.dcm"), "0003", (None, 1), "s3", "", "", "Ünremarkable"),
    )
    return Manifest(LABELS, rows, {"reader": "test", "seed": 3})


@pytest.mark.parametrize("name", ["manifest.csv", "manifest.CSV", "manifest.parquet"])
def test_round_trip(manifest: Manifest, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_manifest(manifest, path)
    assert read_manifest(path) == manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "manifest.about.json"])


def test_a_link_to_a_manifest(manifest: Manifest, tmp_path: Path) -> None:
    """Reading follows the link, writing replaces it. Both find images and sidecar."""
    write_manifest(manifest, tmp_path / "m.csv")
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / "m.csv"
    link.symlink_to(tmp_path / "m.csv")
    assert read_manifest(link) == manifest and read_manifest(link).about == manifest.about
    write_manifest(manifest, link)
    assert not link.is_symlink()
    assert read_manifest(link) == read_manifest(tmp_path / "m.csv") == manifest


def test_compressed_round_trip(manifest: Manifest, tmp_path: Path) -> None:
    for name in ("m.csv.gz", "m.csv"):
        write_manifest(manifest, tmp_path / name)
    assert read_manifest(tmp_path / "m.csv.gz") == manifest
    compressed = (tmp_path / "m.csv.gz").read_bytes()
    assert gzip.decompress(compressed) == (tmp_path / "m.csv").read_bytes()
    write_manifest(manifest, tmp_path / "m.csv.gz")
    assert (tmp_path / "m.csv.gz").read_bytes() == compressed  # it has no timestamp


@pytest.mark.parametrize("name", ["m.txt", "m", "m.gz", "m.parquet.gz", "m.csv.zip"])
def test_unknown_suffixes_are_refused(manifest: Manifest, tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match=rf"expected a name that ends in \.csv, .* found '{name}'"):
        write_manifest(manifest, tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.csv", "m.csv.gz", "m.parquet"])
def test_long_reports(manifest: Manifest, tmp_path: Path, name: str) -> None:
    long = replace(manifest, rows=(replace(manifest.rows[0], report="word, " * 50_000 + "end"),))
    write_manifest(long, tmp_path / name)
    assert read_manifest(tmp_path / name) == long


def test_both_formats_store_the_same_table(manifest: Manifest, tmp_path: Path) -> None:
    for name in ("m.csv", "m.parquet"):
        write_manifest(manifest, tmp_path / name)
    csv_table, parquet_table = (read_table(tmp_path / name) for name in ("m.csv", "m.parquet"))
    assert replace(csv_table, path=Path()) == replace(parquet_table, path=Path())


def test_documented_columns(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(manifest, tmp_path / "m.csv")
    with (tmp_path / "m.csv").open(newline="", encoding="utf-8") as stream:
        header, first, *_ = csv.reader(stream)
    assert header == [*FIXED_COLUMNS, "Effusion", "Mass"]
    assert first == ["a.png", "p1", "s1", "PA", "train", 'Large "effusion",\nnew line.', "1", ""]


def test_a_folder_can_move(manifest: Manifest, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    inside = replace(manifest, rows=tuple(replace(row, image=old / "images" / row.image.name) for row in manifest))
    write_manifest(inside, old / "m.csv")
    old.rename(new)
    moved = read_manifest(new / "m.csv")
    assert [row.image for row in moved] == [new / "images" / row.image.name for row in manifest]
    assert moved.fingerprint == inside.fingerprint


def test_gzip_bom_and_optional_columns(tmp_path: Path) -> None:
    path = tmp_path / "m.csv.gz"
    path.write_bytes(gzip.compress("\ufeffMass,patient_id,image\r\n 1.0 , p1 ,x.png\r\nNaN,p2,y.png\r\n".encode()))
    found = read_manifest(path)
    assert found.labels == LabelSet(("Mass",))
    assert found.rows == (Row(tmp_path / "x.png", "p1", (1,)), Row(tmp_path / "y.png", "p2", (None,)))
    assert found.about == {}


HEADER = "image,patient_id,study_id,view,split,report,Effusion,Mass\n"
DATED = HEADER.replace("\n", ",date\n")
GOOD = "a.png,p,,PA,train,,1,0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the columns image, patient_id, found none"),
        ("image,Mass\nx.png,1\n", "expected the columns image, patient_id, found image, Mass"),
        ("image,patient_id,view\nx.png,p,PA\n", "expected a column for each label"),
        ("image,patient_id,Mass,Mass\nx.png,p,1,1\n", "found Mass more than once"),
        ("image,patient_id,patient_id,Mass\nx.png,p,q,1\n", "each column once, found patient_id more than once"),
        ("image,patient_id,No Finding\nx.png,p,1\n", "is the negative class"),
        (HEADER, "only the header"),
        (HEADER + GOOD + "b.png,p\n", "row 3: expected as many values as the header has columns"),
        (HEADER + GOOD + GOOD.replace(",1,0", ",1,0,1"), "row 3: expected as many values"),
        (HEADER + GOOD + " ,p,,PA,train,,1,0\n", "row 3: expected a value in column image"),
        (HEADER + GOOD + "b.png,,,PA,train,,1,0\n", "row 3: expected a value in column patient_id"),
        (HEADER + GOOD.replace("train", "training"), "row 2: expected split train, .* found 'training'"),
        (HEADER + GOOD.replace("PA", "LL"), "row 2: expected view PA, AP, LATERAL or empty, found 'LL'"),
        (HEADER + GOOD + GOOD.replace(",1,0", ",1,2"), "row 3: .* in label column 'Mass', found '2'"),
        (HEADER + GOOD.replace(",1,0", ",yes,0"), "row 2: .* in label column 'Effusion', found 'yes'"),
        (HEADER + '"a.png,p,,PA', "expected a CSV file in UTF-8"),
        (
            DATED + GOOD.replace("\n", ",2020-13-01\n"),
            "row 2: expected a date YYYY-MM-DD or nothing, found '2020-13-01'",
        ),
        (DATED + GOOD.replace("\n", ",20200101\n"), "row 2: expected a date YYYY-MM-DD or nothing, found '20200101'"),
        (DATED + GOOD.replace("\n", ",2020-W01-1\n"), "row 2: expected a date"),
        (DATED + GOOD.replace("\n", ",2023-02-29\n"), "row 2: expected a date"),
    ],
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(ManifestError, match=message) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("m.csv", HEADER.encode() + b"a.png,\xff\xfe,,PA,train,,1,0\n"),
        ("m.csv.gz", b"no gzip"),
        ("m.csv.gz", gzip.compress(HEADER.encode() * 50, mtime=0)[:-20]),
        ("m.parquet", b"no parquet"),
        ("m.parquet", b""),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ManifestError, match=f"{name}: expected a (CSV file in UTF-8|Parquet file), found"):
        read_manifest(tmp_path / name)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such manifest; make one with 'cbmir data"):
        read_manifest(tmp_path / "absent.csv")
    with pytest.raises(ManifestError, match="found a folder"):
        read_manifest(tmp_path)


def test_damaged_sidecar(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_manifest(manifest, path)
    assert json.loads(sidecar_path(path).read_text("utf-8")) == {"reader": "test", "seed": 3}
    for text in ("{", "[]", "[" * 200_000 + "]" * 200_000):
        sidecar_path(path).write_text(text, "utf-8")
        with pytest.raises(ManifestError, match=r"m\.about\.json: expected JSON beside the manifest"):
            read_manifest(path)
    sidecar_path(path).unlink()
    os.mkfifo(sidecar_path(path))
    with pytest.raises(ManifestError, match="found a device or pipe"):
        read_manifest(path)


@pytest.mark.parametrize("name", ["m.csv", "m.parquet"])
def test_a_failed_write_keeps_the_old_file(
    manifest: Manifest, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write_manifest(manifest, path)
    before = path.read_bytes()

    def full_disk(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_manifest(replace(manifest, rows=manifest.rows[:1]), path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "m.about.json"])  # no temporary file left


def test_nothing_is_written_in_place(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write_manifest(manifest, path)
    before = path.read_bytes()
    broken = replace(manifest.rows[-1], report="\udc80")  # cannot be encoded: fails while writing
    with pytest.raises(UnicodeEncodeError):
        write_manifest(replace(manifest, rows=(*manifest.rows, broken)), path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.about.json", "m.csv"]


@pytest.mark.parametrize("name", ["m.csv", "m.parquet"])
@pytest.mark.parametrize(
    ("column", "values"), [("source", ("NIH", "", "own")), ("date", ("1999-12-31", "", "2024-02-29"))]
)
def test_an_optional_column_is_written_only_if_it_has_values(
    manifest: Manifest, tmp_path: Path, name: str, column: str, values: tuple[str, ...]
) -> None:
    write_manifest(manifest, tmp_path / name)
    assert column not in read_table(tmp_path / name).columns
    rows = tuple(replace(row, **{column: value}) for row, value in zip(manifest, values, strict=True))
    write_manifest(replace(manifest, rows=rows), tmp_path / name)
    back = read_manifest(tmp_path / name)
    assert tuple(getattr(row, column) for row in back) == values
    assert back.labels == manifest.labels
    assert back.fingerprint == manifest.fingerprint


def test_dates_of_a_parquet_column_of_dates(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"image": ["a.png", "b.png"], "patient_id": ["1", "2"], "Mass": [1, 0], "date": [date(2020, 1, 2), None]}
    parquet.write_table(arrow.table(columns), tmp_path / "m.parquet")
    assert [row.date for row in read_manifest(tmp_path / "m.parquet")] == ["2020-01-02", ""]


def test_splits(manifest: Manifest) -> None:
    assert [row.patient_id for row in manifest.split("train", "")] == ["p1", "0003"]
    changed = manifest.with_splits(["test", "test", "train"])
    assert [row.split for row in changed] == ["test", "test", "train"]
    assert (len(changed), changed.about) == (3, manifest.about)
    with pytest.raises(ValueError, match="shorter"):
        manifest.with_splits(["test"])


@pytest.mark.parametrize(
    "change",
    [
        {"image": Path("/elsewhere/other.png")},
        {"patient_id": "p9"},
        {"study_id": "s9"},
        {"view": "LATERAL"},
        {"split": "test"},
        {"labels": (1, 0)},
        {"labels": (None, 1)},
    ],
)
def test_fingerprint_depends_on_what_training_uses(manifest: Manifest, change: dict[str, Any]) -> None:
    first, *others = manifest.rows
    changed = replace(manifest, rows=(replace(first, **change), *others))
    assert changed.fingerprint != manifest.fingerprint


def test_fingerprint_ignores_the_rest(manifest: Manifest) -> None:
    rows = tuple(replace(row, image=Path("/moved") / row.image.name, report="other") for row in manifest)
    assert Manifest(LABELS, rows, {"other": 1}).fingerprint == manifest.fingerprint


def test_fingerprint_depends_on_order_names_and_boundaries(manifest: Manifest) -> None:
    first, second, *_ = manifest.rows
    found = {
        manifest.fingerprint,
        replace(manifest, labels=LabelSet(("Mass", "Effusion"))).fingerprint,
        replace(manifest, rows=manifest.rows[::-1]).fingerprint,
        replace(manifest, rows=manifest.rows[:2]).fingerprint,
        Manifest(LABELS, (replace(first, patient_id="ab", study_id="c"), second)).fingerprint,
        Manifest(LABELS, (replace(first, patient_id="a", study_id="bc"), second)).fingerprint,
    }
    assert len(found) == 6


BOXED = HEADER.replace("\n", ",boxes\n")


def test_round_trip_of_boxes(manifest: Manifest, tmp_path: Path) -> None:
    boxes = (Box("Mass", 0.25, 0.5, 0.125, 0.5), Box("Effusion", 0, 0, 1, 1))
    rows = (replace(manifest.rows[0], boxes=boxes), *manifest.rows[1:])
    for name in ("m.csv", "m.parquet"):
        write_manifest(manifest, tmp_path / name)
        assert "boxes" not in read_table(tmp_path / name).columns
        write_manifest(replace(manifest, rows=rows), tmp_path / name)
        assert "boxes" in read_table(tmp_path / name).columns
        assert read_manifest(tmp_path / name).rows == rows
    assert replace(manifest, rows=rows).fingerprint == manifest.fingerprint


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ('[["Mass",0.5,0.5,0.6,0.1]]', "expected a box inside the image"),
        ('[["Mass",-0.1,0.5,0.5,0.1]]', "expected a box inside the image"),
        ('[["Mass",0.1,0.5,0,0.1]]', "expected a box inside the image"),
        ('[["Mass",0.1,NaN,0.5,0.1]]', "expected a box inside the image"),
        ('[["Mass",0.1,0.5,0.5]]', "expected boxes as"),
        ('[["Nodule",0.1,0.5,0.5,0.1]]', "expected boxes of Effusion, Mass; found Nodule"),
        ("[1]", "expected boxes as"),
        ("225 547 86 79", r'expected boxes as \[\["LABEL", left, top, width, height\], …\] in fractions'),
        ("[" * 5000, "expected boxes as"),
        ('[["Mass",' + "9" * 400 + ",0.5,0.5,0.1]]", "expected boxes as"),
    ],
)
def test_invalid_boxes(tmp_path: Path, cell: str, message: str) -> None:
    path = tmp_path / "m.csv"
    quoted = cell.replace('"', '""')
    path.write_text(BOXED + GOOD.replace("\n", f',"{quoted}"\n'), "utf-8")
    with pytest.raises(ManifestError, match=rf"m\.csv, row 2: .*{message}"):
        read_manifest(path)


def test_a_manifest_without_labels_is_refused() -> None:
    with pytest.raises(ManifestError, match="at least one label"):
        Manifest(LabelSet(()), ())


@pytest.mark.parametrize("name", ["manifest.csv", "manifest.csv.gz", "manifest.parquet"])
def test_formulas_in_names_and_reports_are_defused(tmp_path: Path, name: str) -> None:
    """A spreadsheet does not run them, and reading the table gives the original text."""
    formula = '=HYPERLINK("http://evil.example","chest")'
    rows = (
        Row(
            tmp_path / f"{formula}.png", f"+{formula}", (1, -1), "@s", "PA", "train", "- No mass.\n+ Nodule", "=source"
        ),
        Row(tmp_path / "'=b.png", "-3", (None, 0), "'-3", "", "", "'tis quiet"),
    )
    write_manifest(Manifest(LABELS, rows), tmp_path / name)
    assert read_manifest(tmp_path / name).rows == rows
    if name == "manifest.csv":
        with (tmp_path / name).open(newline="", encoding="utf-8") as stream:
            cells = [cell for row in csv.reader(stream) for cell in row]
        assert [cell for cell in cells if cell[:1] in "=+-@" and cell[:1]] == ["-1", "-3"]


def test_a_manifest_is_readable_only_by_its_owner(manifest: Manifest, tmp_path: Path) -> None:
    for name in ("manifest.csv", "manifest.parquet"):
        write_manifest(manifest, tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert sidecar_path(tmp_path / "manifest.csv").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_formulas_in_the_names_of_labels_are_defused(tmp_path: Path, ending: str) -> None:
    labels = LabelSet(('=HYPERLINK("http://x")', "'+x", "Mass"))
    boxes = (Box("'+x", 0.1, 0.1, 0.5, 0.5),)
    manifest = Manifest(labels, (Row(tmp_path / "a.png", "p", (1, 0, None), boxes=boxes),))
    path = tmp_path / f"manifest.{ending}"
    write_manifest(manifest, path)
    assert read_manifest(path) == manifest
    if ending == "csv":
        header = path.read_text("utf-8").splitlines()[0]
        assert header.endswith(""","'=HYPERLINK(""http://x"")",''+x,Mass""")
