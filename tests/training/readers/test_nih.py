from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import CbmirError, ManifestError, SplitError
from cbmir.labels import NIH_13, NIH_14
from cbmir.manifest import Box, Manifest, read_manifest, write_manifest
from cbmir.training.readers.nih import GOOGLE_4, read_entries, read_nih
from published_tables import copy_tables, draw_images

HEADER = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
)
ROWS = (
    "00000001_000.png,Cardiomegaly|Emphysema,0,1,57,M,PA,2682,2749,0.143,0.143",
    "00000001_001.png,Hernia,1,1,58,M,AP,2682,2749,0.143,0.143",
    "00000002_000.png,No Finding,0,2,80,F,PA,2500,2048,0.171,0.171",
    "00000003_000.png,Hernia|Mass,0,3,80,F,PA,2500,2048,0.171,0.171",
)


def _write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    return _write(tmp_path / "entries.csv", HEADER, *ROWS)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for number, name in enumerate(["00000001_000.png", "00000001_001.png", "00000002_000.jpg", "00000003_000.JPEG"]):
        path = folder / f"images_00{number % 2 + 1}" / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def _shown(labels: tuple[int | None, ...]) -> set[str]:
    assert set(labels) <= {0, 1}
    return {name for name, value in zip(NIH_14, labels, strict=False) if value}


def test_official_table_and_nested_folders(entries: Path, images: Path) -> None:
    manifest = read_nih(images, entries)
    assert manifest.labels.names == NIH_14
    assert [row.image.name for row in manifest] == [
        "00000001_000.png", "00000001_001.png", "00000002_000.jpg", "00000003_000.JPEG",
    ]  # fmt: skip
    assert all(row.image.is_absolute() and row.image.is_file() for row in manifest)
    assert [(row.patient_id, row.study_id, row.view) for row in manifest] == [
        ("1", "1_0", "PA"), ("1", "1_1", "AP"), ("2", "2_0", "PA"), ("3", "3_0", "PA"),
    ]  # fmt: skip
    assert [_shown(row.labels) for row in manifest] == [
        {"Cardiomegaly", "Emphysema"},
        {"Hernia"},
        set(),
        {"Hernia", "Mass"},
    ]
    assert {row.split for row in manifest} == {"train", "val", "test"}


def test_thirteen_findings_exclude_hernia_and_count_the_images_it_hides(entries: Path, images: Path) -> None:
    manifest = read_nih(images, entries, findings=13)
    assert manifest.labels.names == NIH_13
    assert [sum(v or 0 for v in row.labels) for row in manifest] == [2, 0, 0, 1]
    assert manifest.about["left_out"] == {"findings": ["Hernia"], "images_with_only_these": 1}
    with pytest.raises(ManifestError, match="13 or 14"):
        read_nih(images, entries, findings=12)


@pytest.mark.parametrize(
    ("header", "tail"),
    [
        (HEADER + ",", ","),
        (HEADER, ","),
        (HEADER.replace("[Width,Height]", "[Width Height]").replace("[x,y]", "[x y]"), ""),
        ("\ufeff" + HEADER, ""),
    ],
    ids=["trailing comma of 2017", "only in the rows", "no commas within names", "byte order mark"],
)
def test_other_editions_of_the_table(tmp_path: Path, entries: Path, header: str, tail: str) -> None:
    other = _write(tmp_path / "other.csv", header, *(row + tail for row in ROWS))
    assert read_entries(other) == read_entries(entries)


def test_gzip(tmp_path: Path, entries: Path) -> None:
    packed = tmp_path / "entries.csv.gz"
    packed.write_bytes(gzip.compress(entries.read_bytes()))
    assert read_entries(packed) == read_entries(entries)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ManifestError, match=r"entries\.csv\.gz"):
        read_entries(packed)


def test_a_missing_image_is_an_error_or_is_left_out(entries: Path, images: Path) -> None:
    next(images.rglob("00000001_001.png")).unlink()
    with pytest.raises(ManifestError, match=r"1 of 4 images .* 00000001_001\.png.*--missing skip"):
        read_nih(images, entries)
    manifest = read_nih(images, entries, missing="skip")
    assert len(manifest) == 3
    assert manifest.about["policies"]["missing_images"] == 1
    # counts skipped findings only on existing images
    assert read_nih(images, entries, missing="skip", findings=13).about["left_out"]["images_with_only_these"] == 0


def test_a_folder_without_images_is_always_an_error(tmp_path: Path, entries: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with pytest.raises(ManifestError, match="found none"):
        read_nih(folder, entries, missing="skip")
    (folder / "other.png").touch()
    with pytest.raises(ManifestError, match="4 of 4"):
        read_nih(folder, entries, missing="skip")
    with pytest.raises(ManifestError, match="found nothing"):
        read_nih(folder / "absent", entries)


def test_a_duplicate_image_is_refused(entries: Path, images: Path) -> None:
    (images / "00000002_000.png").touch()
    with pytest.raises(ManifestError, match="00000002_000 twice"):
        read_nih(images, entries)


def test_a_duplicate_row_is_refused(tmp_path: Path, images: Path) -> None:
    with pytest.raises(ManifestError, match="in two rows"):
        read_nih(images, _write(tmp_path / "twice.csv", HEADER, *ROWS, ROWS[0]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROWS[0].replace("Emphysema", "Emphysemia"), "row 3.*Emphysemia"),
        (ROWS[0].replace("Emphysema", "No Finding"), "row 3.*No Finding"),
        (ROWS[0].replace("|", ","), "row 3.*whole numbers"),  # a stray comma shifts all later columns
        (ROWS[0].replace(",PA,", ",LL,"), "row 3.*view PA or AP"),
        ("00000001_000.png,Mass", "row 3.*ends before column 'Follow-up #'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read_entries(_write(tmp_path / "bad.csv", HEADER, ROWS[1], row))


def test_a_bad_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        read_entries(tmp_path / "absent.csv")
    with pytest.raises(ManifestError, match="a folder"):
        read_entries(tmp_path)
    with pytest.raises(ManifestError, match="only the header"):
        read_entries(_write(tmp_path / "header.csv", HEADER))
    with pytest.raises(ManifestError, match="column Patient ID; found"):
        read_entries(_write(tmp_path / "other.csv", HEADER.replace("Patient ID", "Person"), *ROWS))


def test_splits_file(tmp_path: Path, entries: Path, images: Path) -> None:
    lines = [
        "image,split",
        "00000001_000.jpg,val",
        "00000001_001.jpg,val",
        "00000002_000.jpg,train",
        "00000003_000.jpg,test",
    ]
    splits = _write(tmp_path / "splits.csv", *lines, "99999999_000.jpg,train")
    manifest = read_nih(images, entries, splits=splits)
    assert [row.split for row in manifest] == ["val", "val", "train", "test"]
    assert manifest.about["splits"] == "splits.csv"
    assert manifest.about["seed"] is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1_000.jpg,val", "1_001.jpg,test", "2_000.jpg,train", "3_000.jpg,test"], r"1 \(test and val\)"),
        (["1_000.jpg,val", "1_001.jpg,val", "2_000.jpg,train"], r"none for 1: 00000003_000\.JPEG"),
        (["1_000.jpg,val", "1_000.png,test"], "one split for 00000001_000"),
        (["1_000.jpg,dev"], "row 2.*'dev'"),
    ],
)
def test_bad_splits_are_refused(tmp_path: Path, entries: Path, images: Path, lines: list[str], message: str) -> None:
    splits = _write(tmp_path / "splits.csv", "image,split", *(f"0000000{line}" for line in lines))
    with pytest.raises(SplitError, match=message):
        read_nih(images, entries, splits=splits)


def test_the_seed_is_recorded_and_counts_are_right(entries: Path, images: Path) -> None:
    about = read_nih(images, entries, seed=7).about
    assert about["reader"] == "nih"
    assert about["sources"] == ["entries.csv"]
    assert about["seed"] == 7
    counts = about["counts"]
    assert (counts["images"], counts["patients"], counts["views"]) == (4, 3, {"AP": 1, "PA": 3})
    assert sum(split["positive"] for split in counts["labels"]["Hernia"].values()) == 2


def test_too_few_patients_to_split_are_reported(tmp_path: Path, images: Path) -> None:
    with pytest.raises(CbmirError, match="nih: expected at least 3 patients"):
        read_nih(images, _write(tmp_path / "few.csv", HEADER, *ROWS[:3]))


def test_round_trip_of_the_real_part(shared: Path, tmp_path: Path) -> None:
    nih = shared / "nih"
    manifest = read_nih(nih / "images", nih / "Data_Entry_2017_v2020.csv", splits=nih / "splits.csv")
    write_manifest(manifest, tmp_path / "manifest.csv")
    again = read_manifest(tmp_path / "manifest.csv")
    assert again == manifest
    counts = again.about["counts"]
    assert (counts["images"], counts["patients"]) == (1776, 1400)
    assert {name: split["images"] for name, split in counts["splits"].items()} == {
        "train": 1237,
        "val": 206,
        "test": 333,
    }
    positives = {name: sum(c["positive"] for c in splits.values()) for name, splits in counts["labels"].items()}
    assert positives == {
        "Atelectasis": 216, "Cardiomegaly": 84, "Effusion": 189, "Infiltration": 333, "Mass": 93, "Nodule": 114,
        "Pneumonia": 518, "Pneumothorax": 72, "Consolidation": 118, "Edema": 122, "Emphysema": 62, "Fibrosis": 81,
        "Pleural_Thickening": 103, "Hernia": 29,
    }  # fmt: skip


@pytest.mark.slow
def test_the_whole_official_table(shared: Path) -> None:
    table = read_entries(shared / "nih" / "Data_Entry_2017_v2020.full.csv.gz")
    assert len(table) == 112_120
    assert len({row.patient_id for row in table}) == 30_805
    positives = [sum(row.labels[i] or 0 for row in table) for i in range(14)]
    assert dict(zip(NIH_14, positives, strict=True))["Infiltration"] == 19_894
    assert min(zip(positives, NIH_14, strict=True)) == (227, "Hernia")


def _nih(shared: Path, **options: Any) -> Manifest:
    nih = shared / "nih"
    return read_nih(nih / "images", nih / "Data_Entry_2017_v2020.csv", **options)


@pytest.mark.slow
def test_the_official_split(shared: Path) -> None:
    manifest = _nih(shared, official=shared / "nih", seed=1)
    with gzip.open(shared / "nih" / "test_list.txt.gz", "rt") as stream:
        test = {Path(line.strip()).stem for line in stream}
    assert {row.image.stem for row in manifest if row.split == "test"} == {
        row.image.stem for row in manifest if row.image.stem in test
    }
    patients = {name: {row.patient_id for row in manifest.split(name)} for name in ("train", "val", "test")}
    assert len(patients["val"]) == round((len(patients["train"]) + len(patients["val"])) / 8)
    assert not patients["train"] & patients["val"]
    assert "test_list.txt" in manifest.about["splits"]
    assert manifest.about["policies"]["val_seed"] == 1
    assert manifest.fingerprint == _nih(shared, official=shared / "nih", seed=1).fingerprint
    assert manifest.fingerprint != _nih(shared, official=shared / "nih", seed=2).fingerprint


def test_official_lists_that_do_not_match_are_refused(tmp_path: Path, entries: Path, images: Path) -> None:
    lists = {"train_val_list": ["00000001_000.png", "00000001_001.png"], "test_list": ["00000002_000.png"]}
    for name, lines in lists.items():
        _write(tmp_path / f"{name}.txt", *lines)
    with pytest.raises(SplitError, match="found none for 1: 00000003_000"):
        read_nih(images, entries, official=tmp_path)
    _write(tmp_path / "test_list.txt", *lists["test_list"], "00000003_000.png", "00000001_000.png")
    with pytest.raises(SplitError, match="each image in one list, found 00000001_000 in both"):
        read_nih(images, entries, official=tmp_path)
    with pytest.raises(SplitError, match="one source of splits"):
        read_nih(images, entries, official=tmp_path, splits=entries)
    with pytest.raises(ManifestError, match=r"train_val_list\.txt or train_val_list\.txt\.gz .*found none"):
        read_nih(images, entries, official=images)


def test_the_real_boxes(shared: Path) -> None:
    manifest = _nih(shared, boxes=shared / "nih" / "BBox_List_2017.csv")
    boxes = [(row, box) for row in manifest for box in row.boxes]
    assert len(boxes) == 63
    assert manifest.about["policies"]["boxes"] == 63
    with (shared / "nih" / "BBox_List_2017.csv").open(newline="", encoding="utf-8") as stream:
        given = {(Path(line[0]).stem, line[1], *line[2:6]) for line in list(csv.reader(stream))[1:]}
    for row, box in boxes:
        edges = (box.left, box.top, box.width, box.height)
        label = {"Infiltration": "Infiltrate"}.get(box.label, box.label)
        assert any(
            (name, kind) == (row.image.stem, label)
            and all(abs(float(pixels) / 1024 - edge) < 1e-6 for pixels, edge in zip(numbers, edges, strict=True))
            for name, kind, *numbers in given
        )
    assert len(_nih(shared, boxes=shared / "nih" / "BBox_List_2017.csv", findings=13).rows[0].boxes) == len(
        manifest.rows[0].boxes
    )


def test_round_trip_of_boxes(shared: Path, tmp_path: Path) -> None:
    manifest = _nih(shared, boxes=shared / "nih" / "BBox_List_2017.csv")
    for name in ("m.csv", "m.parquet"):
        write_manifest(manifest, tmp_path / name)
        assert [row.boxes for row in read_manifest(tmp_path / name)] == [row.boxes for row in manifest]


BOX_HEADER = "Image Index,Finding Label,Bbox [x,y,w,h],,,"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("00000001_000.png,Lump,1,2,3,4", "row 2: expected one of .* found 'Lump'"),
        ("00000001_000.png,Mass,1,2,wide,4", "row 2: expected a number in column 'w', found 'wide'"),
        ("00000001_000.png,Mass,1100,2,3,4", "row 2: expected a box inside an image of 1024 by 1024 pixels"),
        ("00000001_000.png,Mass,1,2,0,4", "row 2: expected a box inside"),
        ("00000001_000.png,Mass,1,2,3", "row 2: the row ends before column 'h]'"),
    ],
)
def test_a_bad_box_is_named(tmp_path: Path, entries: Path, images: Path, row: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read_nih(images, entries, boxes=_write(tmp_path / "boxes.csv", BOX_HEADER, row))


def test_a_box_beyond_the_edge_is_clipped(tmp_path: Path, entries: Path, images: Path) -> None:
    boxes = _write(tmp_path / "boxes.csv", BOX_HEADER, "00000001_000.png,Infiltrate,-10,512,522,1000")
    assert read_nih(images, entries, boxes=boxes).rows[0].boxes == (Box("Infiltration", 0, 0.5, 0.5, 0.5),)


def test_google_labels(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "nih-google", tmp_path)
    draw_images(folder / "images", [f"0009900{n}_000.png" for n in range(6)])
    table = folder / "labels.csv"
    manifest = read_nih(folder / "images", relabelled=[table])
    assert manifest.labels.names == GOOGLE_4
    assert [row.labels for row in manifest][:3] == [(1, 1, 1, 0), (1, 1, 1, 1), (1, 0, 1, 0)]
    assert [row.split for row in manifest] == ["val", "val", "test", "val", "test", "test"]
    assert manifest.rows[0].patient_id == "99000"
    text = table.read_text("utf-8")
    table.write_text(text.replace("YES", "HEDGE", 1), "utf-8")
    assert read_nih(folder / "images", relabelled=[table]).rows[0].labels == (-1, 1, 1, 0)
    table.write_text(text.replace("YES", "MAYBE", 1), "utf-8")
    with pytest.raises(ManifestError, match=r"row 2: expected YES, NO or HEDGE .*found MAYBE"):
        read_nih(folder / "images", relabelled=[table])
    without = [line.rpartition(",")[0] for line in text.splitlines()]
    named = _write(folder / "test_labels.csv", *without)
    assert {row.split for row in read_nih(folder / "images", relabelled=[named])} == {"test"}
    with pytest.raises(ManifestError, match="one of the two"):
        read_nih(folder / "images", table, relabelled=[table])


def test_relabelled_images_have_four_findings(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "nih-google", tmp_path)
    draw_images(folder / "images", [f"0009900{n}_000.png" for n in range(6)])
    with pytest.raises(ManifestError, match="expected --findings only with --entries"):
        read_nih(folder / "images", relabelled=[folder / "labels.csv"], findings=13)
    policies = read_nih(folder / "images", relabelled=[folder / "labels.csv"]).about["policies"]
    assert "findings" not in policies
    assert policies["labels"] == "Google's radiologists: YES 1, NO 0, HEDGE -1 (uncertain)"
