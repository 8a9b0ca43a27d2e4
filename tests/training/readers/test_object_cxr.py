from __future__ import annotations

from pathlib import Path

import pytest

from cbmir.errors import ManifestError
from cbmir.training.readers.object_cxr import read_object_cxr
from published_tables import draw_images


def _write(folder: Path, name: str, count: int) -> None:
    lines = [f"{n}.jpg,{'0 1 2 30 40;1 5 5 9 9' if n % 2 else ''}" for n in range(count)]
    (folder / f"{name}.csv").write_text("\n".join(["image_name,annotation", *lines]) + "\n", "utf-8")
    draw_images(folder / name, [f"{n}.jpg" for n in range(count)])


def test_the_publishers_sets(tmp_path: Path) -> None:
    _write(tmp_path, "train", 4)
    _write(tmp_path, "dev", 2)
    manifest = read_object_cxr(tmp_path)
    assert [(row.split, row.labels) for row in manifest] == [
        ("train", (0,)), ("train", (1,)), ("train", (0,)), ("train", (1,)), ("val", (0,)), ("val", (1,)),
    ]  # fmt: skip
    assert len({row.patient_id for row in manifest}) == 6, "names are the same in both sets"


def test_one_set_is_split(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"expected train\.csv or dev\.csv"):
        read_object_cxr(tmp_path)
    _write(tmp_path, "train", 10)
    assert {row.split for row in read_object_cxr(tmp_path)} == {"train", "val", "test"}
