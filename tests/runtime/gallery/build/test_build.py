"""Building a gallery: added and skipped images, and interruptions."""

from __future__ import annotations

import csv
import io
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.errors import GalleryError, SplitError
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime import Engine, Gallery, add_to_gallery, build_gallery, open_engine, read_image
from cbmir.runtime.gallery.build.build import Work
from cbmir.runtime.gallery.build.folder import GalleryFolder
from cbmir.runtime.gallery.database import live_folder
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.imaging.preprocess import preprocess
from counted_images import CountedImages, drawn_manifest


def unfinished(path: Path) -> list[Path]:
    return GalleryFolder(path).unfinished()


def names_in(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_entries_match_the_manifest(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    rows = [replace(row, source="Klinik Süd" * (n == 7)) for n, row in enumerate(manifest)]
    manifest = replace(manifest, rows=tuple(rows))
    report = build_gallery(engine, manifest, tmp_path / "g")
    assert (report.images, report.unreadable) == (20, ())
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.ids() == [f"image_{n:02}" for n in range(20)]
        row, entry = manifest.rows[7], gallery.entry("image_07")
        assert (entry.image, entry.patient_id, entry.view, entry.split) == (str(row.image), "patient_03", "PA", "train")
        assert entry.source == row.source == "Klinik Süd"
        assert gallery.entry("image_06").source == ""
        assert entry.report == row.report
        assert entry.labels == dict(zip(manifest.labels.names, row.labels, strict=True))
        radiograph = read_image(row.image)
        assert entry.sha256 == radiograph.sha256
        crop = preprocess(radiograph.pixels, engine.card.preprocess)
        np.testing.assert_allclose(gallery.vector("image_07"), engine.run(crop[None, None]).embedding[0], atol=1e-6)
        thumbnail = gallery.thumbnail("image_07")
        assert thumbnail is not None
        with Image.open(io.BytesIO(thumbnail)) as picture:
            assert (picture.format, picture.size) == ("JPEG", (64, 64))
    live = live_folder(tmp_path / "g")
    assert names_in(tmp_path / "g") == {"current", "build.lock", live.name}
    assert names_in(live) <= {"gallery.sqlite", "gallery.generation"}
    assert (tmp_path / "g").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("splits", "count"), [(["train"], 20), (["test"], 4), (["train", "test"], 24), (["all"], 24)])
def test_splits(tmp_path: Path, engine: Engine, manifest: Manifest, splits: list[str], count: int) -> None:
    assert build_gallery(engine, manifest, tmp_path / "g", splits=splits).images == count


def test_an_unknown_split(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    with pytest.raises(SplitError, match="found only test, train"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["val"])


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_xray: Callable[..., np.ndarray]
) -> None:
    """With more images than are read ahead, and an unreadable one: the same entries, vectors and thumbnails."""
    table = drawn_manifest(tmp_path, manifest, make_xray, 70)
    table.rows[40].image.unlink()
    alone = build_gallery(engine, table, tmp_path / "alone", workers=0)
    assert build_gallery(engine, table, tmp_path / "g", workers=2) == alone
    assert (alone.images, len(alone.unreadable)) == (69, 1)
    with Gallery.open(tmp_path / "alone") as one, Gallery.open(tmp_path / "g") as other:
        assert one.ids() == other.ids() == [row.image.stem for n, row in enumerate(table) if n != 40]
        for name in one.ids():
            assert one.entry(name) == other.entry(name)
            assert one.thumbnail(name) == other.thumbnail(name)
            assert np.array_equal(one.vector(name), other.vector(name))


def test_unreadable_images_are_listed(
    tmp_path: Path, engine: Engine, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(manifest.rows[0].image.read_bytes()[:60])
    rows = (
        replace(manifest.rows[0], image=broken),
        *manifest.rows[1:3],
        replace(manifest.rows[3], image=tmp_path / "missing.png"),
    )
    with caplog.at_level(logging.WARNING, "cbmir"):
        report = build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g")
    assert report.images == 2
    assert [path for path, _ in report.unreadable] == [str(broken), str(tmp_path / "missing.png")]
    assert len(caplog.messages) == 2
    with (tmp_path / "g" / "unreadable.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["image", "reason"], *map(list, report.unreadable)]
    # The list is removed once a later build has nothing to list.
    build_gallery(engine, manifest, tmp_path / "g")
    assert not (tmp_path / "g" / "unreadable.csv").exists()


def test_a_build_without_readable_images_keeps_the_old_gallery(
    tmp_path: Path, engine: Engine, manifest: Manifest
) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    rows = (replace(manifest.rows[0], image=tmp_path / "missing.png"),)
    with pytest.raises(GalleryError, match="found none among 1"):
        build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g", replace_others=True)
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


def test_a_stopped_build_resumes(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, small_batches: None
) -> None:
    """The old gallery stays until the end, and no image is embedded twice."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    counter.images, counter.limit = 0, 8
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    assert counter.images == 8
    (part,) = unfinished(tmp_path / "g")
    assert part.stat().st_mode & 0o077 == 0
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 4
    counter.limit = 10**9
    report = build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    assert (report.images, report.resumed, counter.images) == (20, 8, 20)
    assert unfinished(tmp_path / "g") == []
    build_gallery(engine, manifest, tmp_path / "whole")
    with Gallery.open(tmp_path / "g") as one, Gallery.open(tmp_path / "whole") as other:
        assert list(one.every_entry()) == list(other.every_entry())
        assert all(np.array_equal(one.vector(name), other.vector(name)) for name in one.ids())


@pytest.mark.parametrize("change", ["labels", "splits", "model", "index", "key"])
def test_a_different_build_does_not_resume(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, small_batches: None,
    make_tiny_model: Callable[..., Path], change: str,
) -> None:  # fmt: skip
    """It starts over, and removes the other unfinished build at its end."""
    counter.limit = 10
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    counter.limit = 10**9
    options: dict[str, object] = {}
    if change == "labels":
        manifest = replace(manifest, rows=(replace(manifest.rows[0], labels=(1, 1, 1)), *manifest.rows[1:]))
    elif change == "splits":
        options["splits"] = ["all"]
    elif change == "index":
        options["index"] = "int8"
    elif change == "key":
        options["pseudonyms"] = Pseudonyms.throw_away()
    elif change == "model":
        engine = open_engine(make_tiny_model(tmp_path / "other.onnx", fingerprint="tiny-1"), threads=1)
    report = build_gallery(engine, manifest, tmp_path / "g", **options)  # type: ignore[arg-type]
    assert (report.images, report.resumed) == (24 if change == "splits" else 20, 0)
    assert unfinished(tmp_path / "g") == []
    if change == "model":
        engine.close()


@pytest.mark.parametrize("damage", ["no database", "an entry"])
def test_a_damaged_part_is_rebuilt(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, small_batches: None, damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    counter.limit = 10
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    counter.limit = 10**9
    (part,) = unfinished(tmp_path / "g")
    if damage == "an entry":
        with closing(sqlite3.connect(part / "gallery.sqlite")) as database, database:
            database.execute("UPDATE entry SET report = 'another' WHERE id = 'image_01'")
    else:
        (part / "gallery.sqlite").write_bytes(b"no database")
    report = build_gallery(engine, manifest, tmp_path / "g")
    assert (report.images, report.resumed) == (20, 0)
    assert any("is damaged; all images are embedded again" in message for message in caplog.messages)


def test_a_temporary_error_discards_nothing(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Another program locks the file of the unfinished work for longer than a build waits."""
    counter.limit = 10
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    counter.images, counter.limit = 0, 10**9
    (part,) = unfinished(tmp_path / "g")
    with monkeypatch.context() as patch, closing(sqlite3.connect(part / "gallery.sqlite")) as database:
        patch.setattr(Gallery, "open", partial(Gallery.open, wait=0.0))
        database.execute("PRAGMA locking_mode = EXCLUSIVE").close()
        database.execute("BEGIN EXCLUSIVE").close()
        with pytest.raises(GalleryError, match="another process is writing to it"):
            build_gallery(engine, manifest, tmp_path / "g")
    assert build_gallery(engine, manifest, tmp_path / "g").resumed == 8
    assert counter.images == 12


def test_entries_of_other_images_are_not_lost(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages
) -> None:
    """This includes entries added during the build; only --replace drops them."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    add_to_gallery(engine, manifest, tmp_path / "g")
    counter.limit = counter.images
    with pytest.raises(GalleryError, match="found 20 others in it, which would be lost"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    counter.limit = 10**9
    assert build_gallery(engine, manifest, tmp_path / "g", splits=["all"]).images == 24
    assert build_gallery(engine, manifest, tmp_path / "g", splits=["test"], replace_others=True).images == 4


def test_entries_added_during_a_build_are_not_lost(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    real = Work.fill

    def with_an_entry(*args: object, **options: object) -> object:
        with Gallery.open(tmp_path / "g") as gallery:
            gallery.add([replace(gallery.entry("image_20"), id="new", image="/new.png", sha256="")],
                        gallery.vector("image_21")[None])  # fmt: skip
        return real(*args, **options)  # type: ignore[arg-type]

    changed = replace(manifest, rows=tuple(replace(row, report="Newer.") for row in manifest))
    with monkeypatch.context() as patch:
        patch.setattr(Work, "fill", with_an_entry)
        with pytest.raises(GalleryError, match="found 1 others in it"):
            build_gallery(engine, changed, tmp_path / "g", splits=["test"])
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 5
    counter.images = 0
    report = build_gallery(engine, changed, tmp_path / "g", splits=["test"], replace_others=True)
    assert (report.images, report.resumed, counter.images) == (4, 4, 0)


def test_pseudonyms_are_not_lost(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g", pseudonyms=Pseudonyms.throw_away())
    for key in (None, Pseudonyms.throw_away()):
        with pytest.raises(GalleryError, match=r"other pseudonyms, or pseudonyms in only one of the two; .*--replace"):
            build_gallery(engine, manifest, tmp_path / "g", pseudonyms=key)
    build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    with Gallery.open(tmp_path / "g") as gallery:
        assert not gallery.pseudonym_check


def test_an_unreadable_gallery_is_replaced_only_on_request(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    (live_folder(tmp_path / "g") / "gallery.sqlite").write_bytes(b"no database")
    with pytest.raises(GalleryError, match=r"cannot be read .*--replace"):
        build_gallery(engine, manifest, tmp_path / "g")
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20


def test_an_open_gallery_is_not_mistaken_for_its_replacement(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_tiny_model: Callable[..., Path]
) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    with Gallery.open(tmp_path / "g") as old:
        query = old.vector("image_03")
        old.search(query, 20)
        model = make_tiny_model(tmp_path / "other.onnx", seed=1, fingerprint="tiny-1")
        with open_engine(model, threads=1) as other:
            build_gallery(other, manifest, tmp_path / "g")
        with pytest.raises(GalleryError, match="replaced; open it again"):
            old.search(query, 20)
    with Gallery.open(tmp_path / "g") as new:
        assert new.card.fingerprint == "tiny-1"


def test_a_foreign_folder_is_never_replaced(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    mixed = tmp_path / "mixed"
    build_gallery(engine, manifest, mixed)
    (mixed / "thesis.txt").write_text("years of work")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "gallery.generation").write_text("[]")
    (tmp_path / "file").write_text("a file")
    for path in (mixed, foreign, tmp_path / "file"):
        with pytest.raises(GalleryError, match=path.name):
            build_gallery(engine, manifest, path)
    assert (mixed / "thesis.txt").read_text() == "years of work"
    assert (foreign / "gallery.generation").exists()


def test_an_empty_folder_is_used(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    assert build_gallery(engine, manifest, tmp_path, splits=["test"]).images == 4
    with Gallery.open(tmp_path) as gallery:
        assert len(gallery) == 4


def test_derived_files_are_written_only_for_large_galleries(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fewest, written in ((21, False), (20, True)):
        monkeypatch.setattr("cbmir.runtime.gallery.build.build.FEWEST", fewest)
        build_gallery(engine, manifest, tmp_path / "g")
        assert any(live_folder(tmp_path / "g").glob("derived-*")) == written


def test_files_left_by_a_killed_build_are_removed(
    tmp_path: Path, engine: Engine, manifest: Manifest, tiny_gallery: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes a gallery that the killed build had replaced, with or without its own folder."""
    path, flat = tmp_path / "g", live_folder(tiny_gallery)
    shutil.copytree(flat, path)
    build_gallery(engine, manifest, path)
    assert names_in(path) == {"current", "build.lock", live_folder(path).name}
    shutil.copytree(flat, path, dirs_exist_ok=True)
    (path / ".current.1.1.part").touch()
    for name in ("gallery-0123456789abcdef", "shards-0123456789abcdef/000001"):
        shutil.copytree(flat, path / name)
    assert len(unfinished(path)) == 3
    build_gallery(engine, manifest, path, splits=["test"], replace_others=True)
    assert [message for message in caplog.messages if "removed" in message] == [
        f"{path / 'gallery-0123456789abcdef'}: removed the unfinished work of a build that was stopped"
    ]
    assert names_in(path) == {"current", "build.lock", live_folder(path).name}


def test_one_process_at_a_time_builds_or_adds(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    real = Work.fill

    def with_others_beside(*args: object, **options: object) -> object:
        for function in (build_gallery, add_to_gallery):
            with pytest.raises(GalleryError, match="another process is building this gallery or adding to it"):
                function(engine, manifest, tmp_path / "g")
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Work, "fill", with_others_beside)
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20
    assert add_to_gallery(engine, manifest, tmp_path / "g", splits=["all"]).images == 4


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", ["replace", "rmtree"])
def test_an_interrupted_replacement_leaves_a_gallery(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch,
    step: str, done: bool, error: type[BaseException],
) -> None:  # fmt: skip
    """Before or after each step, the old or the new gallery is there, and the same call finishes the work."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])

    where: object = shutil if step == "rmtree" else Path
    real = getattr(where, step)

    def stopped(*args: object) -> None:
        if done:
            real(*args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, step, stopped)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else GalleryError):
            build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == (20 if step == "rmtree" or (step == "replace" and done) else 4)
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20
    assert names_in(tmp_path / "g") == {"current", "build.lock", live_folder(tmp_path / "g").name}


def test_a_replaced_gallery_is_not_resumed(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is repeated, and killed before the old gallery is removed: the next one embeds all images."""
    build_gallery(engine, manifest, tmp_path / "g")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_gallery(engine, manifest, tmp_path / "g")
    assert len(unfinished(tmp_path / "g")) == 1
    counter.images = 0
    assert build_gallery(engine, manifest, tmp_path / "g").resumed == 0
    assert counter.images == 20


def test_an_unfinished_build_is_not_a_gallery(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages
) -> None:
    counter.limit = 0
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    with pytest.raises(GalleryError, match="found no gallery there"):
        Gallery.open(tmp_path / "g")


@pytest.mark.skipif(os.name != "posix", reason="another process has it open")
def test_an_open_replaced_gallery_cannot_be_written(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the build was killed before it could remove the old gallery."""
    build_gallery(engine, manifest, tmp_path / "g")
    with Gallery.open(tmp_path / "g") as old:
        monkeypatch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_gallery(engine, manifest, tmp_path / "g")
        assert (old.home / "gallery.sqlite").exists()
        with pytest.raises(GalleryError, match="replaced; open it again"):
            old.remove(ids=["image_03"])


# -- duplicates and DICOM


def test_an_image_present_under_another_name_is_left_out(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages, small_batches: None
) -> None:
    """Copies in the same batch or an earlier one are listed, and embedded once."""
    rows = [replace(row, image=tmp_path / row.image.name) for row in manifest.rows[:6]]
    for row, source in zip(rows, (0, 0, 1, 2, 3, 1), strict=True):
        shutil.copy(manifest.rows[source].image, row.image)
    report = build_gallery(engine, replace(manifest, rows=tuple(rows)), tmp_path / "g")
    assert (report.images, counter.images) == (4, 4)
    assert report.duplicates == ((str(rows[1].image), "image_00"), (str(rows[5].image), "image_02"))
    with (tmp_path / "g" / "duplicates.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["image", "id"], *map(list, report.duplicates)]


def test_missing_values_are_filled_from_the_dicom_file(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    pytest.importorskip("pydicom")
    from cbmir.training.phantom import generate

    table = read_manifest(generate(tmp_path / "p", count=12, image_format="dicom", size=64, progress=False))
    silent = replace(table, rows=tuple(replace(row, study_id="", view="", date="", split="train") for row in table))
    build_gallery(engine, silent, tmp_path / "g")
    build_gallery(engine, table, tmp_path / "own", splits=["all"])
    with Gallery.open(tmp_path / "g") as gallery, Gallery.open(tmp_path / "own") as own:
        for row, entry, said in zip(table, gallery.every_entry(), own.every_entry(), strict=True):
            assert (entry.date, entry.view) == (row.date, row.view)
            assert entry.study_id.startswith("2.25.")
            assert entry.sop_instance_uid == said.sop_instance_uid
            assert entry.sop_instance_uid.startswith("2.25.")
            assert said.study_id == row.study_id, "the manifest comes first"
