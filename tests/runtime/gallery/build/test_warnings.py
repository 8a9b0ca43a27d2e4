"""Warnings of the images that go into a gallery: kept with each, counted and listed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import command_line
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.runtime import Engine, Gallery, add_to_gallery, build_gallery
from cbmir.runtime.gallery.build import merge_galleries
from cbmir.runtime.gallery.build.work import Work
from counted_images import CountedImages
from dicom_files import STORED, make_dicom

UNTAGGED = "body part unknown", "view unknown"
LISTED = [["image", "kind"], *([f"image_{n}", kind] for n in (0, 1) for kind in UNTAGGED)]


@pytest.fixture
def untagged(tmp_path: Path, manifest: Manifest) -> Manifest:
    """The manifest, whose first two images are DICOM files that say nothing of what they are."""
    rows = list[Row]()
    for n in (0, 1):
        file = tmp_path / f"image_{n}"
        file.write_bytes(
            make_dicom(np.roll(STORED, n), BodyPartExamined=None, ViewPosition=None, SOPInstanceUID=f"1.2.{n}")
        )
        rows.append(replace(manifest.rows[n], image=file, patient_id=f"new{n}"))
    return replace(manifest, rows=(*rows, *manifest.rows[2:]))


def listed(gallery: Path) -> list[list[str]]:
    with (gallery / "warnings.csv").open(newline="") as stream:
        return [[Path(image).name, kind] for image, kind in csv.reader(stream)]


def info(gallery: Path) -> Any:
    with Gallery.open(gallery) as opened:
        return opened.info()["warnings"]


def test_a_build_lists_and_counts_warnings(tmp_path: Path, engine: Engine, untagged: Manifest) -> None:
    report = build_gallery(engine, untagged, tmp_path / "g")
    assert report.warned == tuple((str(row.image), kind) for row in untagged.rows[:2] for kind in UNTAGGED)
    assert listed(tmp_path / "g") == LISTED
    assert info(tmp_path / "g") == {"body part unknown": 2, "view unknown": 2}
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.entry("image_0").warnings == "body part unknown; view unknown"
        assert gallery.entry("image_02").warnings == ""


def test_a_stopped_build_keeps_its_warnings(
    tmp_path: Path, engine: Engine, untagged: Manifest, counter: CountedImages, small_batches: None
) -> None:
    counter.limit = 8
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, untagged, tmp_path / "g")
    counter.limit = 1000
    assert build_gallery(engine, untagged, tmp_path / "g").resumed == 8
    assert listed(tmp_path / "g") == LISTED


def test_an_addition_reports_its_own_warnings_and_lists_all(tmp_path: Path, engine: Engine, untagged: Manifest) -> None:
    rows = untagged.rows
    first, second = replace(untagged, rows=rows[:1] + rows[2:]), replace(untagged, rows=rows[1:2])
    assert len(build_gallery(engine, first, tmp_path / "g").warned) == 2
    assert {Path(path).name for path, _ in add_to_gallery(engine, second, tmp_path / "g").warned} == {"image_1"}
    assert listed(tmp_path / "g")[1:3] == LISTED[1:3]
    assert sorted(listed(tmp_path / "g")) == sorted(LISTED)
    assert add_to_gallery(engine, second, tmp_path / "g").warned == ()
    assert sorted(listed(tmp_path / "g")) == sorted(LISTED)


def test_an_addition_does_not_list_images_that_were_removed_meanwhile(
    tmp_path: Path, engine: Engine, untagged: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, replace(untagged, rows=untagged.rows[:4]), tmp_path / "g", splits=["all"])
    fill = Work.fill

    def with_a_removal(self: Work, gallery: Gallery, *rest: Any, **options: Any) -> Any:
        gallery.remove(ids=gallery.ids()[:1])
        return fill(self, gallery, *rest, **options)

    monkeypatch.setattr(Work, "fill", with_a_removal)
    add_to_gallery(engine, replace(untagged, rows=untagged.rows[4:8]), tmp_path / "g", splits=["all"])
    assert listed(tmp_path / "g") == [LISTED[0], *LISTED[3:]]


def test_an_addition_reads_the_entries_once(
    tmp_path: Path, engine: Engine, untagged: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, untagged, tmp_path / "g")
    read, every_entry = [], Gallery.every_entry
    monkeypatch.setattr(Gallery, "every_entry", lambda self: (read.append(one) or one for one in every_entry(self)))
    add_to_gallery(engine, untagged, tmp_path / "g")
    assert len(read) == len(untagged.split("train"))
    assert listed(tmp_path / "g") == LISTED


def test_merging_into_a_gallery_keeps_its_lists(tmp_path: Path, engine: Engine, untagged: Manifest) -> None:
    build_gallery(engine, untagged, tmp_path / "g", splits=("test",), workers=0)
    build_gallery(engine, untagged, tmp_path / "more", splits=("train",), workers=0)
    (tmp_path / "more" / "unreadable.csv").write_text("image,reason\nx.png,damaged\n")
    for _ in range(2):  # the second time, everything is there
        merge_galleries(tmp_path / "g", [tmp_path / "more"])
    assert (tmp_path / "g" / "unreadable.csv").read_text() == "image,reason\nx.png,damaged\n"
    rows = [(tmp_path / name / "warnings.csv").read_text().splitlines()[1:] for name in ("g", "more")]
    assert set(rows[1]) <= set(rows[0])


def test_shards_pass_on_their_warnings(tmp_path: Path, engine: Engine, untagged: Manifest) -> None:
    shards = [tmp_path / f"shard{n}" for n in (1, 2)]
    for n, shard in enumerate(shards, 1):
        build_gallery(engine, untagged, shard, shard=(n, 2))
        assert build_gallery(engine, untagged, shard, shard=(n, 2)).warned == (
            tuple((str(row.image), kind) for row in untagged.rows[:2] for kind in UNTAGGED) if n == 1 else ()
        )
    merge_galleries(tmp_path / "g", shards)
    assert listed(tmp_path / "g") == LISTED
    assert info(tmp_path / "g") == {"body part unknown": 2, "view unknown": 2}


def test_without_warnings_there_is_no_list(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    assert build_gallery(engine, manifest, tmp_path / "g").warned == ()
    assert not (tmp_path / "g" / "warnings.csv").exists()
    assert info(tmp_path / "g") == {}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """Run a command that succeeds. Returns its JSON and its stderr."""

    def run(*args: object) -> tuple[Any, str]:
        capsys.readouterr()
        code = command_line.run(*args)
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out), said.err

    return run


def test_the_commands_report_warnings(
    tmp_path: Path, tiny_model: Path, untagged: Manifest, run: Callable[..., tuple[Any, str]]
) -> None:
    path, counts = tmp_path / "m.csv", {"body part unknown": 2, "view unknown": 2}
    said = "2 images were read with a warning (2 body part unknown, 2 view unknown): see {}"
    write_manifest(untagged, path)

    answer, error = run("index", "build", tiny_model, path, "-o", tmp_path / "g", "--workers", "0", "--json")
    assert answer["warnings"] == counts
    assert said.format(f"{tmp_path / 'g'}/warnings.csv") in error
    assert run("index", "info", tmp_path / "g", "--json")[0]["warnings"] == counts

    answer, error = run("embed", tiny_model, path, "-o", tmp_path / "e.npy", "--workers", "0", "--json")
    assert answer["warnings"] == counts
    assert said.format(tmp_path / "e.warnings.csv") in error
    with (tmp_path / "e.warnings.csv").open(newline="") as stream:
        assert [(Path(row["image"]).name, row["kind"]) for row in csv.DictReader(stream)] == [
            (image, kind) for image, kind in LISTED[1:]
        ]

    answer, error = run("data", "check", path, "--json")
    assert answer["warning_kinds"] == counts
    assert {Path(image).name for image in answer["warnings"]} == {"image_0", "image_1"}
    assert said.format(tmp_path / "m.warnings.csv") in error
    with (tmp_path / "m.warnings.csv").open(newline="") as stream:
        assert sum(1 for _ in csv.DictReader(stream)) == 4
