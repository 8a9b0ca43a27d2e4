from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import CHEXPERT_9
from cbmir.text_table import read_table
from cbmir.training.readers.chexpert import CHEXPERT_13, read_chexpert
from published_tables import copy_tables

HEADER = "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding," + ",".join(CHEXPERT_13)
S = "CheXpert-v1.0-small/train"
# the last 13 cells are EC, CM, LO, lung lesion, ED, CS, PNA, AT, PTX, PE, pleural other, fracture, support devices
ROWS = (
    f"{S}/patient00001/study1/view1_frontal.jpg,Female,68,Frontal,AP,1.0,,,,,,,,,0.0,,,,1.0",
    f"{S}/patient00002/study2/view1_frontal.jpg,Female,87,Frontal,PA,,,-1.0,1.0,,-1.0,-1.0,,-1.0,,-1.0,,1.0,",
    f"{S}/patient00002/study2/view2_lateral.jpg,Female,87,Lateral,,,,-1.0,1.0,,-1.0,-1.0,,-1.0,,-1.0,,1.0,",
    f"{S}/patient00003/study1/view1_frontal.jpg,Male,41,Frontal,LL,1.0,,,,,,,,,,,,,",
)


def _table(folder: Path, *rows: str) -> Path:
    path = folder / "train.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n", "utf-8")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for row in ROWS:
        image = tmp_path / row.split(",")[0]
        image.parent.mkdir(parents=True, exist_ok=True)
        image.touch()
    return _table(tmp_path, *ROWS)


def test_labels_patients_and_views(table: Path) -> None:
    manifest = read_chexpert(table.parent, [table])
    assert manifest.labels.names == CHEXPERT_9
    assert [(row.patient_id, row.study_id, row.view) for row in manifest] == [
        ("patient00001", "patient00001_study1", "AP"),
        ("patient00002", "patient00002_study2", "PA"),
        ("patient00003", "patient00003_study1", ""),
    ]
    # EC, CM, LO, ED, CS, PNA, AT, PTX, PE
    assert manifest.rows[0].labels == (0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert manifest.rows[1].labels == (0, -1, 1, -1, -1, 0, -1, 0, -1)
    assert {row.split for row in manifest} == {"train", "val", "test"}
    # only support devices: no label is left, but the image is not without findings
    assert manifest.about["left_out"]["images_with_only_these"] == 1
    assert manifest.about["policies"]["blank"] == "zero"
    assert manifest.about["policies"]["left_out_by_view"] == {"LATERAL": 1}


def test_blank_can_stay_unknown(table: Path) -> None:
    manifest = read_chexpert(table.parent, [table], blank="unknown")
    assert manifest.rows[0].labels == (0,) * 9, "No Finding is the labeller's own word: nothing is unknown"
    assert manifest.rows[1].labels == (None, -1, 1, -1, -1, None, -1, None, -1)
    assert manifest.about["policies"]["blank"] == "unknown"


def test_all_views(table: Path) -> None:
    manifest = read_chexpert(table.parent, [table], frontal_only=False)
    assert [row.view for row in manifest] == ["AP", "PA", "LATERAL", ""]
    assert manifest.rows[1].split == manifest.rows[2].split


def test_thirteen_findings_are_all_except_no_finding(table: Path) -> None:
    manifest = read_chexpert(table.parent, [table], findings=13)
    assert manifest.labels.names == CHEXPERT_13
    assert "No Finding" not in manifest.labels.names
    assert manifest.rows[0].labels[-1] == 1
    assert manifest.rows[1].labels[-2] == 1
    assert "left_out" not in manifest.about
    with pytest.raises(ManifestError, match="9 or 13"):
        read_chexpert(table.parent, [table], findings=14)


def test_the_folder_of_the_data_set_may_be_renamed(table: Path) -> None:
    (table.parent / "CheXpert-v1.0-small").rename(table.parent / "chexpert")
    manifest = read_chexpert(table.parent / "chexpert", [table])
    assert all(row.image.is_file() for row in manifest)
    with pytest.raises(ManifestError, match="3 of 3 images"):
        read_chexpert(table.parent, [table])


def test_a_missing_file_is_named_by_its_path(table: Path) -> None:
    (table.parent / ROWS[0].split(",")[0]).unlink()
    with pytest.raises(ManifestError, match=r"1 of 3 .*patient00001/study1/view1_frontal\.jpg"):
        read_chexpert(table.parent, [table])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROWS[1].replace("patient00002", "person2"), "row 2.*such as CheXpert"),
        (ROWS[1].replace("AP", "PA").replace(",1.0,", ",2.0,", 1), "row 2.*'Lung Opacity'.*'2.0'"),
        (ROWS[1].rsplit(",", 1)[0], "row 2.*ends before column 'Support Devices'"),
    ],
)
def test_a_bad_row_is_named(table: Path, row: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read_chexpert(table.parent, [_table(table.parent, row)])


def test_a_table_of_lateral_images_alone_is_refused(table: Path) -> None:
    with pytest.raises(ManifestError, match="--all-views"):
        read_chexpert(table.parent, [_table(table.parent, ROWS[2])])


def test_root_must_be_a_folder(table: Path) -> None:
    with pytest.raises(ManifestError, match="found a file"):
        read_chexpert(table, [table])


def _with_images(folder: Path, images: dict[str, str]) -> None:
    """Make empty files at the paths of the given tables; `images` maps the beginning of a path to its replacement."""
    for path in folder.rglob("*.csv"):
        for _, record in read_table(path).records():
            text = record["Path"]
            for start, place in images.items():
                if text.startswith(start):
                    image = folder / (place + text.removeprefix(start))
                    image.parent.mkdir(parents=True, exist_ok=True)
                    image.touch()


def test_official_train_and_valid_keep_their_splits(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "chexpert", tmp_path) / "small"
    _with_images(folder, {"CheXpert-v1.0-small/": "CheXpert-v1.0-small/"})
    manifest = read_chexpert(folder, [folder / "train.csv", folder / "valid.csv"], frontal_only=False)
    counts = manifest.about["counts"]["splits"]
    assert {name: part["images"] for name, part in counts.items()} == {"train": 12, "val": 4}
    assert manifest.about["splits"] == "CheXpert's own: train, valid as val, test"
    alone = read_chexpert(folder, [folder / "train.csv"])
    assert {row.split for row in alone} == {"train", "val", "test"}


def test_current_batches(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "chexpert", tmp_path) / "batches"
    tables = [next(folder.rglob(name)) for name in ("train.csv", "valid.csv")]
    first = f"{tables[0].parent.name}/valid/"
    _with_images(folder, {"CheXpert-v1.0/train/": "CheXpert-v1.0 batch 2 (train 1)/", "CheXpert-v1.0/valid/": first})
    manifest = read_chexpert(folder, tables, frontal_only=False)
    assert all(row.image.is_file() for row in manifest)
    assert {row.image.parts[-4] for row in manifest if row.split == "train"} == {"CheXpert-v1.0 batch 2 (train 1)"}
    assert {row.image.parts[-4] for row in manifest if row.split == "val"} == {"valid"}
    again = folder / "CheXpert-v1.0 batch 3 (train 2)" / manifest.rows[0].patient_id
    again.mkdir(parents=True)
    manifest.rows[0].image.rename(folder / "moved")
    with pytest.raises(ManifestError, match=r"each patient in one batch, found .*batch 2.* and .*batch 3"):
        read_chexpert(folder, tables, frontal_only=False)


def test_the_test_set_has_fewer_columns(shared: Path, tmp_path: Path) -> None:
    folder = copy_tables(shared, "chexpert", tmp_path)
    (folder / "small" / "train.csv").unlink()
    _with_images(folder, {"test/": "test/"})
    manifest = read_chexpert(folder, [folder / "test_labels.csv"])
    assert [row.view for row in manifest] == [""] * 4
    # EC, CM, LO, ED, CS, PNA, AT, PTX, PE of 0,1,0,0,0,1,1,0,1,0,0,0,0,0
    assert manifest.rows[0].labels == (1, 0, 0, 1, 1, 0, 1, 0, 0)


def test_train_and_test_without_valid_have_validation_images(tmp_path: Path) -> None:
    path = ROWS[0].split(",")[0]
    rows = [ROWS[0].replace(path, path.replace("00001", f"{n:05}")) for n in range(1, 17)]
    tests = [rows[0].replace("CheXpert-v1.0-small/train/patient00001", f"test/patient{n}") for n in range(64741, 64744)]
    train = _table(tmp_path, *rows)
    test = tmp_path / "test_labels.csv"
    test.write_text("\n".join([HEADER, *tests]) + "\n", "utf-8")
    _with_images(tmp_path, {"": ""})
    manifest = read_chexpert(tmp_path, [train, test], seed=1)
    counts = manifest.about["counts"]["splits"]
    assert {name: part["images"] for name, part in counts.items()} == {"train": 14, "val": 2, "test": 3}
    assert manifest.about["splits"] == "CheXpert's own train and test; one in eight of the training patients in val"
    assert manifest.about["policies"]["val_seed"] == 1
