"""`cbmir index`: arguments, output and exit codes."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.manifest import read_manifest, write_manifest
from cbmir.runtime import Gallery
from cbmir.runtime.gallery.build import IndexReport
from cbmir.runtime.gallery.database import live_folder
from command_line import run

ROOT = Path(__file__).resolve().parents[2]


Captured = pytest.CaptureFixture[str]


def test_build_and_info(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    path = tmp_path / "gallery"
    assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--workers", 1) == 0
    assert capsys.readouterr().out == f"{path}: 20 images\n"
    assert run("index", "info", path, "--json") == 0
    captured = capsys.readouterr()
    info = json.loads(captured.out)
    assert (info["images"], info["patients"], info["fingerprint"], info["splits"]) == (20, 10, "tiny-0", {"train": 20})
    assert (info["index"], info["search"], info["unfinished"]) == ("auto", "exact", [])
    assert captured.err.startswith("A gallery is patient data")
    shutil.copytree(live_folder(path), path / "gallery-0123456789abcdef")
    assert run("index", "info", path) == 0
    text = capsys.readouterr().out
    assert "images:        20\n" in text
    assert f"  {'Effusion':<26} {10:>8}\n" in text and "sources" not in text
    assert f"unfinished:    {path}/gallery-0123456789abcdef\n" in text


def test_splits_replace_what_was_there(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    path = tmp_path / "gallery"
    for splits, count in (
        (["--split", "all"], 24),
        (["--split", "test"], 4),
        (["--split", "test", "--split", "train"], 24),
    ):
        assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--replace", *splits) == 0
        with Gallery.open(path) as gallery:
            assert len(gallery) == count
    assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--split", "val") == 2
    assert "choose others with --split" in capsys.readouterr().err
    assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--split", "test") == 2
    assert "found 20 others in it, which would be lost; 'cbmir index add' adds to it" in capsys.readouterr().err


def test_a_manifest_without_splits_is_indexed_as_a_whole(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured
) -> None:
    table = read_manifest(tiny_manifest)
    write_manifest(table.with_splits([""] * len(table)), tmp_path / "none.csv")
    assert run("index", "build", tiny_model, tmp_path / "none.csv", "-o", tmp_path / "gallery") == 0
    assert "The manifest has no splits: all images are used." in capsys.readouterr().err
    with Gallery.open(tmp_path / "gallery") as gallery:
        assert len(gallery) == 24
    assert run("index", "build", tiny_model, tmp_path / "none.csv", "-o", tmp_path / "other", "--split", "val") == 2


def test_unreadable_images_give_exit_code_2_and_a_gallery(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured
) -> None:
    manifest = tmp_path / "manifest.csv"
    (tmp_path / "text.png").write_text("not an image")
    manifest.write_text(
        "image,patient_id,split,Mass\n"
        f"{tiny_manifest.parent / 'image_00.png'},a,train,1\n"
        "text.png,b,train,0\n"
        "missing.png,c,train,0\n"
    )
    assert run("index", "build", tiny_model, manifest, "-o", tmp_path / "g") == 2
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'g'}: 1 images\n"
    assert f"2 images could not be read: see {tmp_path / 'g'}/unreadable.csv" in captured.err
    assert len((tmp_path / "g" / "unreadable.csv").read_text().splitlines()) == 3


def test_mistakes(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    for args in (
        ("build", tmp_path / "no.onnx", tiny_manifest, "-o", tmp_path / "g"),
        ("build", tiny_model, tmp_path / "no.csv", "-o", tmp_path / "g"),
        ("build", tiny_model, tiny_manifest, "-o", tmp_path / "own"),
        ("build", tiny_model, tiny_manifest, "-o", tiny_manifest / "below a file"),
        ("build", tiny_model, tiny_manifest, "-o", tmp_path / ("x" * 300)),
        ("build", tmp_path / ("x" * 300), tiny_manifest, "-o", tmp_path / "g"),
        ("build", tiny_model, tiny_manifest),
        ("info", tmp_path / ("x" * 300)),
        ("info", tmp_path / "no"),
        ("add", tmp_path / "no", tiny_model, tiny_manifest),
        ("update", tmp_path / "no", tiny_manifest),
        ("remove", tmp_path / "no", "--id", "x"),
        ("verify", tmp_path / "no"),
        ("rebuild", tmp_path / "no"),
        ("compact", tmp_path / "no"),
        ("export", tmp_path / "no", "-o", tmp_path / "copy"),
        ("merge", tmp_path / "no", tmp_path / "no"),
    ):
        assert run("index", *args) == 2
        captured = capsys.readouterr()
        assert "Error: " in captured.err
        assert "Traceback" not in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["own"]


@pytest.fixture
def gallery(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> Path:
    """A new gallery of the four test images."""
    assert run("index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g", "--split", "test") == 0
    capsys.readouterr()
    return tmp_path / "g"


def test_add(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, gallery: Path, make_xray: Callable[..., np.ndarray],
    capsys: Captured,
) -> None:  # fmt: skip
    assert run("index", "add", gallery, tiny_model, tiny_manifest, "--split", "all") == 0
    assert capsys.readouterr().out == f"{gallery}: 20 images added, 4 were already there\n"
    images = [tmp_path / "copy.png", tmp_path / "other.png", tmp_path / "text.png"]
    Image.fromarray(make_xray(30)).save(images[1])
    images[0].write_bytes((tiny_manifest.parent / "image_00.png").read_bytes())
    images[2].write_text("not an image")
    more = tmp_path / "more.csv"
    more.write_text("image,patient_id,split,Mass\n" + "".join(f"{image},x,train,1\n" for image in images))
    assert run("index", "add", gallery, tiny_model, more) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{gallery}: 1 images added, 0 were already there\n"
    assert f"1 images are copies of others and were left out: see {gallery}/duplicates.csv" in captured.err
    assert f"1 images could not be read: see {gallery}/unreadable.csv" in captured.err
    images[1].write_bytes((tiny_manifest.parent / "image_01.png").read_bytes())
    images[2].unlink()
    more.write_text(f"image,patient_id,split,Mass\n{images[1]},x,train,1\n")
    assert run("index", "add", gallery, tiny_model, more) == 2
    assert "1 image files have changed since they were added" in capsys.readouterr().err


def test_update(tmp_path: Path, tiny_manifest: Path, gallery: Path, capsys: Captured) -> None:
    """Images match by path, or by content after a move; values without a column stay; missing images are listed."""
    moved = tmp_path / "moved.png"
    moved.write_bytes((tiny_manifest.parent / "image_21.png").read_bytes())
    folder = tiny_manifest.parent
    table = tmp_path / "new.csv"
    table.write_text(
        "image,patient_id,study_id,date,split,report,source,Mass\n"
        f"{folder / 'image_20.png'},renamed,s1,2021-02-03,val,New.,Mercy,-1\n"
        f"{moved},patient_10,,,test,Moved.,,1\n"
        f"{folder / 'image_00.png'},patient_00,,,train,,,1\n"
        f"{folder / 'never.png'},patient_00,,,train,,,1\n"
    )
    assert run("index", "update", gallery, table) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"{gallery}: 2 of 2 images changed",
        f"not in the gallery: {folder / 'image_00.png'}",
        f"not in the gallery: {folder / 'never.png'}",
    ]
    with Gallery.open(gallery) as opened:
        first, second, third = (opened.entry(f"image_{number}") for number in (20, 21, 22))
        assert (first.patient_id, first.study_id, first.date, first.split) == ("renamed", "s1", "2021-02-03", "val")
        assert (first.view, first.report, first.labels) == ("PA", "New.", {"Effusion": 0, "Mass": -1, "Nodule": 1})
        assert (first.source, third.source) == ("Mercy", "")
        assert (second.image, second.report) == (str(moved), "Moved.")
        assert third.report == "Report 22.\nSecond line."
    assert run("index", "update", gallery, table, "--split", "val") == 0
    assert capsys.readouterr().out == f"{gallery}: 0 of 1 images changed\n"
    assert run("index", "info", gallery) == 0
    assert f"sources:\n  {'(none)':<26} {3:>8}\n  {'Mercy':<26} {1:>8}\n" in capsys.readouterr().out
    text = table.read_text().splitlines()[:3]
    with Gallery.open(gallery) as opened:
        before = list(opened.every_entry())
    twice = tmp_path / "twice.png"
    twice.write_bytes(moved.read_bytes())
    table.write_text("\n".join([*text, text[2].replace(str(moved), str(twice))]) + "\n")
    assert run("index", "update", gallery, table) == 2
    assert "expected one row per entry, found two for 'image_21'" in capsys.readouterr().err
    with Gallery.open(gallery) as opened:
        assert list(opened.every_entry()) == before


def test_update_keeps_what_the_table_has_no_column_for(
    tmp_path: Path, tiny_manifest: Path, gallery: Path, capsys: Captured
) -> None:
    """If the table has a column for split or report, an empty cell clears the value."""
    image = tiny_manifest.parent / "image_20.png"
    table = tmp_path / "new.csv"
    table.write_text(f"image,patient_id,Mass\n{image},patient_10,-1\n")
    assert run("index", "update", gallery, table) == 0
    with Gallery.open(gallery) as opened:
        entry = opened.entry("image_20")
    assert (entry.split, entry.report, entry.view) == ("test", "Report 20.\nSecond line.", "PA")
    assert entry.labels == {"Effusion": 0, "Mass": -1, "Nodule": 1}
    table.write_text(f"image,patient_id,split,report,view,Mass\n{image},patient_10,,,,-1\n")
    assert run("index", "update", gallery, table) == 0
    with Gallery.open(gallery) as opened:
        entry = opened.entry("image_20")
    assert (entry.split, entry.report, entry.view) == ("", "", "PA")


def test_the_same_name_is_not_the_same_image(tmp_path: Path, gallery: Path, capsys: Captured) -> None:
    """Labels of another hospital's image_20 must not be given to ours."""
    (tmp_path / "image_20.png").write_bytes(b"something else")
    (tmp_path / "t.csv").write_text("image,patient_id,Mass\nimage_20.png,stranger,1\n")
    assert run("index", "update", gallery, tmp_path / "t.csv") == 2
    assert f"not in the gallery: {tmp_path / 'image_20.png'}" in capsys.readouterr().out
    with Gallery.open(gallery) as opened:
        assert opened.entry("image_20").patient_id == "patient_10"


def test_two_entries_with_the_same_path_are_told_apart_by_content(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, gallery: Path, capsys: Captured
) -> None:
    """A merge keeps both, if two machines have different files there."""
    with Gallery.open(gallery) as opened:
        other = replace(opened.entry("image_20"), id="other", patient_id="stranger", sha256="0" * 64)
        opened.add([other], opened.vector("image_21")[None])
    table = tmp_path / "new.csv"
    table.write_text(f"image,patient_id,Mass\n{other.image},patient_10,-1\n")
    assert run("index", "update", gallery, table) == 0
    with Gallery.open(gallery) as opened:
        assert opened.entry("image_20").labels == {"Effusion": 0, "Mass": -1, "Nodule": 1}
        assert opened.entry("other") == other
    assert run("index", "build", tiny_model, tiny_manifest, "-o", gallery, "--split", "all") == 2
    assert "found 1 others in it, which would be lost" in capsys.readouterr().err


def test_remove(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, gallery: Path, capsys: Captured) -> None:
    part = gallery / "gallery-0123456789abcdef"
    shutil.copytree(live_folder(gallery), part)
    (gallery / "duplicates.csv").write_text("image,id\n/a/copy.png,image_20\n")
    assert run("index", "remove", gallery, "--patient-id", "patient_10") == 0
    assert not (gallery / "duplicates.csv").exists(), "it may name what is removed"
    captured = capsys.readouterr()
    assert captured.out == f"{gallery}: 2 images removed\n"
    assert "gallery-0123456789abcdef: 2 images removed from unfinished work" in captured.err
    with Gallery.open(part) as unfinished:
        assert unfinished.ids() == ["image_22", "image_23"]
    assert run("index", "remove", gallery, "--id", "image_22", "--id", "image_20") == 2
    captured = capsys.readouterr()
    assert captured.out == f"{gallery}: 1 images removed\n"
    assert "not in the gallery: image_20" in captured.err.splitlines()
    (part / "gallery.sqlite").write_bytes(b"no database")
    assert run("index", "remove", gallery, "--id", "image_22", "--patient-id", "patient_11") == 2
    assert (
        "gallery-0123456789abcdef: unfinished work that may hold the same images; delete the folder"
        in capsys.readouterr().err
    )
    shutil.rmtree(part)
    assert run("index", "remove", gallery, "--patient-id", "patient_10", "--patient-id", "patient_11") == 2
    assert "2 of 2 patient ids are not in the gallery" in capsys.readouterr().err
    assert run("index", "remove", gallery, "--study-id", "none") == 2
    assert "1 of 1 study ids are not in the gallery" in capsys.readouterr().err
    assert run("index", "remove", gallery) == 2
    assert "expected what to remove" in capsys.readouterr().err
    assert run("index", "add", gallery, tiny_model, tiny_manifest, "--split", "test") == 0
    assert capsys.readouterr().out == f"{gallery}: 4 images added, 0 were already there\n"


def test_damage_does_not_prevent_a_removal(gallery: Path, capsys: Captured) -> None:
    with closing(sqlite3.connect(live_folder(gallery) / "gallery.sqlite")) as database, database:
        database.execute("UPDATE entry SET report = 'another' WHERE id = 'image_20'")
    assert run("index", "remove", gallery, "--patient-id", "patient_10") == 2
    captured = capsys.readouterr()
    assert captured.out == f"{gallery}: 2 images removed\n"
    assert "cannot check whether all given ids were in the gallery" in captured.err


def test_verify_rebuild_and_compact(gallery: Path, capsys: Captured) -> None:
    assert run("index", "verify", gallery) == 0
    assert capsys.readouterr().out == f"{gallery}: nothing is damaged\n"
    assert run("index", "rebuild", gallery, "--index", "int8") == 0
    assert capsys.readouterr().out == f"{gallery}: 4 images, search: hnsw int8\n"
    assert run("index", "compact", gallery) == 0
    assert capsys.readouterr().out.startswith(f"{gallery}: ")
    (index,) = gallery.glob("gallery-*/derived-*/index.usearch")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)
    assert run("index", "verify", gallery) == 2
    told = capsys.readouterr().out
    assert "What to do: " in told
    assert told.endswith(f"{gallery}: 1 problem\n")
    assert run("index", "verify", gallery, "--json") == 2
    (problem,) = json.loads(capsys.readouterr().out)
    assert set(problem) == {"what", "affected", "remedy"}
    assert run("index", "rebuild", gallery) == 0
    assert run("index", "verify", gallery) == 0


def test_export_and_merge(tmp_path: Path, tiny_gallery: Path, gallery: Path, capsys: Captured) -> None:
    assert run("index", "export", gallery, "-o", tmp_path / "copy") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'copy'}: 4 images\n"
    assert "patient data" in captured.err
    assert run("index", "merge", tmp_path / "copy", tiny_gallery, gallery) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'copy'}: 20 images of {tiny_gallery} added, 0 were already there",
        f"{tmp_path / 'copy'}: 0 images of {gallery} added, 4 were already there",
    ]
    assert run("index", "export", gallery, "-o", tmp_path / "shared", "--deidentified") == 0
    assert "not anonymous" in capsys.readouterr().err
    with Gallery.open(tmp_path / "shared") as opened:
        assert not any(entry.report or entry.image for entry in opened.every_entry())
    assert run("index", "export", gallery, "-o", tmp_path / "copy") == 2


def test_shards(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    shards = [tmp_path / f"shard{number}" for number in (1, 2)]
    for _ in range(2):  # an existing shard is kept
        for number, shard in enumerate(shards, 1):
            assert run("index", "build", tiny_model, tiny_manifest, "-o", shard, "--shard", f"{number}/2") == 0
            assert capsys.readouterr().out == f"{shard}: 10 images\n"
    path = tmp_path / "g"
    assert run("index", "merge", path, shards[1]) == 2
    assert "expected all 2 shards of the build, found 1; missing: 1" in capsys.readouterr().err
    assert run("index", "merge", path, *shards[::-1]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 10 images of {shard} added, 0 were already there" for shard in shards
    ]
    for words in (["0/2"], ["3/2"], ["2"], ["a/b"], ["-1/2"], [""]):
        assert run("index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "x", "--shard", *words) == 2
        assert "expected a shard such as 3/64" in capsys.readouterr().err


def test_by_ray(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the options are tested; tests/runtime/gallery/build/test_shards.py runs Ray."""
    asked: list[object] = []

    def built(address: str, model: Path, manifest: object, path: str, **how: object) -> IndexReport:
        asked.append((address, model, path, how["engine"], how["splits"], how["replace_others"]))
        return IndexReport(20)

    monkeypatch.setattr("cbmir.runtime.gallery.build.build_on_ray", built)
    build = ["index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g", "--ray", "auto"]
    assert run(*build) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'g'}: 20 images\n"
    assert asked == [("auto", tiny_model, str(tmp_path / "g"), "auto", ("train",), False)]
    for more in (["--workers", 2], ["--shard", "1/2"]):
        assert run(*build, *more) == 2
        assert "--workers and --shard cannot be used with --ray" in capsys.readouterr().err


def test_pseudonyms(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBMIR_TEST_KEY", bytes(range(64, 96)).hex())
    build = ["index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g", "--split", "test"]
    assert run(*build, "--pseudonyms", "env:CBMIR_TEST_KEY") == 0
    assert "reports, SOP instance UIDs, dates and sources stay in plain text" in capsys.readouterr().err
    assert run("index", "info", tmp_path / "g") == 0
    assert "reports, SOP instance UIDs, dates and sources stay in plain text" in capsys.readouterr().err
    assert run(*build) == 2
    assert "--replace replaces it" in capsys.readouterr().err
    with Gallery.open(tmp_path / "g") as opened:
        assert all(entry.patient_id.startswith("patient-") for entry in opened.every_entry())
    assert run("index", "remove", tmp_path / "g", "--patient-id", "patient_10") == 2
    assert "expected their key" in capsys.readouterr().err
    removal = ["index", "remove", tmp_path / "g", "--patient-id", "patient_10"]
    assert run(*removal, "--patient-id", "x", "--pseudonyms", "env:CBMIR_TEST_KEY") == 2
    captured = capsys.readouterr()
    assert "2 images removed" in captured.out
    assert "1 of 2 patient ids are not in the gallery" in captured.err
    monkeypatch.setenv("CBMIR_TEST_KEY", "weak")
    assert run(*build, "--pseudonyms", "env:CBMIR_TEST_KEY") == 2
    assert "expected a key for pseudonyms of 32 random bytes or more" in capsys.readouterr().err


def test_ctrl_c_says_that_the_same_command_continues(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    build = ["index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g"]
    with monkeypatch.context() as patch:
        patch.setattr("cbmir.runtime.gallery.build.work.embed_pictures", pressed)
        assert run(*build) == 130
    assert "Finished work is kept: run the same command again to continue." in capsys.readouterr().err
    assert run(*build) == 0


def test_a_finished_demo_is_not_made_again(
    tmp_path: Path, tiny_manifest: Path, tiny_model: Path, tiny_run: Path, tiny_export: Path
) -> None:
    """Every step of the Makefile must create the file that is its target."""
    data = tmp_path / "demo-data"
    (data / "phantoms").mkdir(parents=True)
    shutil.copyfile(tiny_manifest, data / "phantoms/manifest.csv")
    (data / "run").mkdir()
    shutil.copyfile(tiny_run / "card.json", data / "run/card.json")
    (data / "evaluation").mkdir()
    (data / "evaluation/per_query.csv").touch()
    shutil.copyfile(tiny_export / "model.fp16.onnx", data / "model.fp16.onnx")
    assert run("index", "build", tiny_model, tiny_manifest, "-o", data / "gallery", "--workers", 1) == 0
    assert run("index", "map", data / "gallery", "--method", "pca") == 0
    steps = ["make", "-n", "-o", ".venv/demo", "demo-steps", f"DATA={data}"]
    made = subprocess.run(steps, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ".venv/bin/cbmir" not in made.stdout
