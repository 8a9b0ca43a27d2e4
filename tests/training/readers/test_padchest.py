from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.labels import NIH_14
from cbmir.manifest import write_manifest
from cbmir.text_table import read_table
from cbmir.training.manifest_check import check_manifest
from cbmir.training.readers.padchest import DAMAGED, MAPPED, read_padchest
from published_tables import copy_tables, draw_images

TABLE = "PADCHEST_chest_x_ray_images_labels_160K_01.02.19.csv"


@pytest.fixture
def padchest(shared: Path, tmp_path: Path) -> Path:
    folder = copy_tables(shared, "padchest", tmp_path)
    records = [record for _, record in read_table(folder / TABLE).records()]
    draw_images(folder, [f"{record['ImageDir']}/{record['ImageID']}" for record in records], bits=16)
    return folder


def _shown(labels: tuple[int | None, ...]) -> set[str] | None:
    return None if None in labels else {name for name, value in zip(NIH_14, labels, strict=True) if value}


def test_labels_are_mapped_to_those_of_nih(padchest: Path) -> None:
    assert tuple(MAPPED) == NIH_14
    manifest = read_padchest(padchest, frontal_only=False)
    assert [_shown(row.labels) for row in manifest][:8] == [
        set(), {"Effusion"}, {"Cardiomegaly"}, {"Pneumonia", "Infiltration"}, None, None, set(), None,
    ]  # fmt: skip
    first, lateral = manifest.rows[:2]
    assert (first.patient_id, first.study_id, first.view, first.date) == ("99000000", "99900000", "PA", "2015-01-01")
    assert first.report == "texto del informe"
    assert lateral.view == "LATERAL"
    policies = manifest.about["policies"]
    assert policies["findings_not_mapped"] == [
        "air trapping", "aortic elongation", "copd signs", "costophrenic angle blunting", "kyphosis",
    ]  # fmt: skip
    assert policies["images_with_only_these"] == 2, "COPD signs and air trapping: neither healthy nor positive"
    assert policies["labels"] == MAPPED
    assert policies["labelled_by"] == {"Physician": len(manifest)}


def test_labels_by_the_network_are_counted(padchest: Path) -> None:
    path = padchest / TABLE
    path.write_text(path.read_text("utf-8").replace(",Physician,", ",RNN_model,", 1), "utf-8")
    manifest = read_padchest(padchest, frontal_only=False)
    assert manifest.about["policies"]["labelled_by"] == {"RNN_model": 1, "Physician": len(manifest) - 1}


def test_own_labels(padchest: Path) -> None:
    manifest = read_padchest(padchest, labels="own")
    assert "normal" not in manifest.labels.names
    assert "unchanged" not in manifest.labels.names
    assert manifest.rows[1].view == "AP"
    shown = [n for n, value in zip(manifest.labels.names, manifest.rows[1].labels, strict=True) if value]
    assert shown == ["aortic elongation", "cardiomegaly"]
    assert manifest.rows[0].labels == (0,) * len(manifest.labels)
    assert manifest.about["policies"]["images_with_only_these"] == 0


def test_sixteen_bits_are_read(padchest: Path, tmp_path: Path) -> None:
    manifest = read_padchest(padchest)
    write_manifest(manifest, tmp_path / "manifest.csv")
    report = check_manifest(manifest)
    assert report.ok
    assert report.warnings == {}


def test_damaged_and_excluded_images_are_left_out(padchest: Path) -> None:
    path = padchest / TABLE
    text = path.read_text("utf-8").replace("99900000_x0.png", DAMAGED[0]).replace("['unchanged']", "['exclude']", 1)
    path.write_text(text, "utf-8")
    (padchest / "more.txt").write_text("99900002_x2.png\n", "utf-8")
    manifest = read_padchest(padchest, damaged=padchest / "more.txt")
    assert manifest.about["policies"]["left_out"] == {"damaged": 2, "labelled 'exclude'": 1}
    assert len(manifest) == len(read_table(path)) - 4 - 3, "four lateral ones too"


@pytest.mark.parametrize("cell", ["['mass", "mass", '"[1]"', "{}"])
def test_labels_that_are_not_a_list_are_refused(padchest: Path, cell: str) -> None:
    path = padchest / TABLE
    path.write_text(path.read_text("utf-8").replace("['normal']", cell, 1), "utf-8")
    with pytest.raises(ManifestError, match=r"row 2: .*a list such as \['cardiomegaly'\]"):
        read_padchest(padchest)


def test_rib_views_are_left_out(padchest: Path) -> None:
    path = padchest / TABLE
    path.write_text(path.read_text("utf-8").replace(",PA,Manual", ",COSTAL,Manual", 1), "utf-8")
    assert read_padchest(padchest, frontal_only=False).about["policies"]["left_out_by_view"] == {"COSTAL": 1}
