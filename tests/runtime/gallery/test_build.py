"""Building a gallery: what goes in, what is left out, and what an interruption leaves."""

from __future__ import annotations

import csv
import io
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.errors import GalleryError, ManifestError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime import Engine, Gallery, build_gallery, open_engine, read_image
from cbmir.runtime.embedding import embed_manifest
from cbmir.runtime.gallery import build, parts
from cbmir.runtime.gallery.build import add_to_gallery
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from cbmir.runtime.imaging.preprocess import preprocess


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with open_engine(tiny_model, threads=1) as opened:
        yield opened


@pytest.fixture
def manifest(tiny_manifest: Path) -> Manifest:
    return read_manifest(tiny_manifest)


def drawn(folder: Path, manifest: Manifest, make_xray: Callable[..., np.ndarray], count: int) -> Manifest:
    """A manifest of `count` different images in `folder`, each of another patient."""
    rows = []
    for n in range(count):
        image = folder / f"drawn_{n:03}.png"
        Image.fromarray(make_xray(1000 + n)).save(image)
        rows.append(replace(manifest.rows[n % 24], image=image, patient_id=f"p{n}", split="train"))
    return replace(manifest, rows=tuple(rows))


@dataclass
class Counter:
    """Images that went through the engine; beyond `limit` it is as if Ctrl-C was pressed."""

    limit: int = 10**9
    images: int = 0


@pytest.fixture
def counter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter, real = Counter(), type(engine).run

    def run(self: Engine, batch: np.ndarray, **options: bool) -> object:
        if counter.images + len(batch) > counter.limit:
            raise KeyboardInterrupt
        counter.images += len(batch)
        return real(self, batch, **options)

    monkeypatch.setattr(type(engine), "run", run)
    return counter


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbmir.runtime.gallery.build.BATCH", 4)


def test_entries_say_what_the_manifest_says(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    report = build_gallery(engine, manifest, tmp_path / "g")
    assert (report.images, report.unreadable) == (20, ())
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.ids() == [f"image_{n:02}" for n in range(20)]
        row, entry = manifest.rows[7], gallery.entry("image_07")
        assert (entry.image, entry.patient_id, entry.view, entry.split) == (str(row.image), "patient_03", "PA", "train")
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
    assert {file.name for file in (tmp_path / "g").iterdir()} <= {"gallery.sqlite", "gallery.generation"}
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


@pytest.mark.parametrize(("splits", "count"), [(["train"], 20), (["test"], 4), (["train", "test"], 24), (["all"], 24)])
def test_splits(tmp_path: Path, engine: Engine, manifest: Manifest, splits: list[str], count: int) -> None:
    assert build_gallery(engine, manifest, tmp_path / "g", splits=splits).images == count


def test_a_split_that_is_not_there(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    with pytest.raises(SplitError, match="found only test, train"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["val"])


def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_xray: Callable[..., np.ndarray]
) -> None:
    """More images than are read ahead, and one that cannot be read: the same entries, vectors and thumbnails."""
    table = drawn(tmp_path, manifest, make_xray, 70)
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
    # It goes when a later build has nothing to list.
    build_gallery(engine, manifest, tmp_path / "g")
    assert not (tmp_path / "g" / "unreadable.csv").exists()


def test_nothing_readable_leaves_what_was_there(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    rows = (replace(manifest.rows[0], image=tmp_path / "missing.png"),)
    with pytest.raises(GalleryError, match="found none among 1"):
        build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g", replace_others=True)
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


def test_a_build_that_is_stopped_goes_on(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None
) -> None:
    """What was there stays until the end, and no image is embedded twice."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    counter.images, counter.limit = 0, 8
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    assert counter.images == 8
    (part,) = parts.unfinished(tmp_path / "g")
    assert {file.name for file in tmp_path.iterdir()} == {"g", part.name}
    assert part.stat().st_mode & 0o077 == 0
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 4
    counter.limit = 10**9
    report = build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    assert (report.images, report.resumed, counter.images) == (20, 8, 20)
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
    build_gallery(engine, manifest, tmp_path / "whole")
    with Gallery.open(tmp_path / "g") as one, Gallery.open(tmp_path / "whole") as other:
        assert list(one.every_entry()) == list(other.every_entry())
        assert all(np.array_equal(one.vector(name), other.vector(name)) for name in one.ids())


def test_a_removal_says_where_another_process_is_filling(
    tmp_path: Path, engine: Engine, manifest: Manifest, tiny_gallery: Path
) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    shutil.copytree(tiny_gallery, tmp_path / ".g.abc.add")
    with parts.hidden_part(tmp_path / "g", "abc", "add"):
        (failed,) = parts.remove_from_unfinished(tmp_path / "g", None, patient_ids=["patient_03"])
    assert failed.endswith(".g.abc.add: another process is filling it; remove again when it has ended")
    assert parts.remove_from_unfinished(tmp_path / "g", None, patient_ids=["patient_03"]) == []
    with Gallery.open(tmp_path / ".g.abc.add") as gallery:
        assert not gallery.has_patient("patient_03")


@pytest.mark.parametrize("change", ["labels", "splits", "model", "index", "key"])
def test_a_build_of_something_else_does_not_go_on(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None,
    make_tiny_model: Callable[..., Path], change: str,
) -> None:  # fmt: skip
    """It starts anew, and clears the other away once it is done."""
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
    assert parts.unfinished(tmp_path / "g") == []
    if change == "model":
        engine.close()


@pytest.mark.parametrize("damage", ["no database", "an entry"])
def test_a_part_that_is_damaged_is_made_anew(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None, damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    counter.limit = 10
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    counter.limit = 10**9
    (part,) = parts.unfinished(tmp_path / "g")
    if damage == "an entry":
        with closing(sqlite3.connect(part / "gallery.sqlite")) as database, database:
            database.execute("UPDATE entry SET report = 'another' WHERE id = 'image_01'")
    else:
        (part / "gallery.sqlite").write_bytes(b"no database")
    report = build_gallery(engine, manifest, tmp_path / "g")
    assert (report.images, report.resumed) == (20, 0)
    assert any("is damaged, and all is embedded anew" in message for message in caplog.messages)


def test_a_passing_error_throws_nothing_away(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Another program holds the file of the unfinished work for longer than a build waits."""
    counter.limit = 10
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    counter.images, counter.limit = 0, 10**9
    (part,) = parts.unfinished(tmp_path / "g")
    with monkeypatch.context() as patch, closing(sqlite3.connect(part / "gallery.sqlite")) as database:
        patch.setattr(Gallery, "open", partial(Gallery.open, wait=0.0))
        database.execute("PRAGMA locking_mode = EXCLUSIVE").close()
        database.execute("BEGIN EXCLUSIVE").close()
        with pytest.raises(GalleryError, match="another is writing to it"):
            build_gallery(engine, manifest, tmp_path / "g")
    assert build_gallery(engine, manifest, tmp_path / "g").resumed == 8
    assert counter.images == 12


def test_entries_of_other_images_are_not_lost(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter
) -> None:
    """Those that an addition brought, also while the build was under way; unless they are to be replaced."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    add_to_gallery(engine, manifest, tmp_path / "g")
    counter.limit = counter.images
    with pytest.raises(GalleryError, match="found 20 others in it, which would be lost"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    counter.limit = 10**9
    assert build_gallery(engine, manifest, tmp_path / "g", splits=["all"]).images == 24
    assert build_gallery(engine, manifest, tmp_path / "g", splits=["test"], replace_others=True).images == 4


def test_entries_that_came_while_it_was_built_are_not_lost(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    real = build.fill

    def with_an_addition(*args: object, **options: object) -> object:
        monkeypatch.setattr(build, "fill", real)
        add_to_gallery(engine, manifest, tmp_path / "g")
        return real(*args, **options)  # type: ignore[arg-type]

    changed = replace(manifest, rows=tuple(replace(row, report="Newer.") for row in manifest))
    monkeypatch.setattr(build, "fill", with_an_addition)
    with pytest.raises(GalleryError, match="found 20 others in it"):
        build_gallery(engine, changed, tmp_path / "g", splits=["test"])
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 24
    counter.images = 0
    report = build_gallery(engine, changed, tmp_path / "g", splits=["test"], replace_others=True)
    assert (report.images, report.resumed, counter.images) == (4, 4, 0)


def test_pseudonyms_are_not_lost(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g", pseudonyms=Pseudonyms.throw_away())
    for key in (None, Pseudonyms.throw_away()):
        with pytest.raises(GalleryError, match=r"other pseudonyms, or just one of the two with any; .*--replace"):
            build_gallery(engine, manifest, tmp_path / "g", pseudonyms=key)
    build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    with Gallery.open(tmp_path / "g") as gallery:
        assert not gallery.pseudonym_check


def test_a_gallery_that_cannot_be_read_is_replaced_only_when_asked(
    tmp_path: Path, engine: Engine, manifest: Manifest
) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    (tmp_path / "g" / "gallery.sqlite").write_bytes(b"no database")
    with pytest.raises(GalleryError, match=r"cannot be read .*--replace"):
        build_gallery(engine, manifest, tmp_path / "g")
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20


def test_a_gallery_that_is_open_is_not_taken_for_the_one_that_replaced_it(
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


def test_an_empty_folder_is_taken(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    assert build_gallery(engine, manifest, tmp_path, splits=["test"]).images == 4
    with Gallery.open(tmp_path) as gallery:
        assert len(gallery) == 4


def test_what_searches_need_is_written_where_they_would_use_it(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fewest, written in ((21, False), (20, True)):
        monkeypatch.setattr(build, "FEWEST", fewest)
        build_gallery(engine, manifest, tmp_path / "g")
        assert any((tmp_path / "g").glob("derived-*")) == written


def test_what_a_killed_build_left_is_cleared(
    tmp_path: Path, engine: Engine, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    for name in (".g.abc_1234.part", ".g.abc_1234.old", ".g.x.abc_1234.part", ".g.x.abc_1234.old"):
        shutil.copytree(tmp_path / "g", tmp_path / name)
    (tmp_path / ".g.empty123.part").mkdir()
    (tmp_path / ".g.foreign1.part").mkdir()
    (tmp_path / ".g.foreign1.part" / "thesis.txt").touch()
    (tmp_path / ".g.42.part").touch()
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"], replace_others=True)
    assert [message for message in caplog.messages if "removed" in message] == [
        f"{tmp_path / '.g.abc_1234.part'}: removed, with 20 images of other work that was stopped"
    ]
    kept = {".g.x.abc_1234.part", ".g.x.abc_1234.old", ".g.foreign1.part", ".g.42.part"}
    assert {file.name for file in tmp_path.iterdir()} == {"g"} | kept


def test_a_build_under_way_is_not_cleared(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build.fill

    def with_others_beside(*args: object, **options: object) -> object:
        monkeypatch.setattr(build, "fill", real)
        build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
        with pytest.raises(GalleryError, match="another process works on the same at this moment"):
            build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "fill", with_others_beside)
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


def test_a_gallery_that_a_killed_build_had_moved_comes_back(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    (tmp_path / "g").rename(tmp_path / ".g.abc_1234.old")
    rows = (replace(manifest.rows[0], image=tmp_path / "missing.png"),)
    with pytest.raises(GalleryError, match="found none among 1"):
        build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g", replace_others=True)
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(("exchange", "at"), [(True, 1), (False, 1), (False, 2)])
def test_an_interruption_while_it_takes_its_place_leaves_a_gallery(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch,
    at: int, done: bool, error: type[BaseException], exchange: bool,
) -> None:  # fmt: skip
    """At each step, before or after it, with the two changing places at once or by renames."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    calls = 0

    def stopped(real: Callable[..., object], possible: bool = True) -> Callable[..., object]:
        def step(*args: object) -> object:
            nonlocal calls
            if not possible:
                return False
            calls += 1
            if calls == at and not done:
                raise error
            result = real(*args)
            if calls == at:
                raise error
            return result

        return step

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped(Path.rename))
        patch.setattr(parts, "_exchanged", stopped(parts._exchanged, exchange))
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else GalleryError):
            build_gallery(engine, manifest, tmp_path / "g", replace_others=True)
    assert [file.name for file in tmp_path.iterdir() if not file.name.endswith(".part")] == ["g"]
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == (20 if (at, done) == (1 if exchange else 2, True) else 4)
    assert build_gallery(engine, manifest, tmp_path / "g", replace_others=True).images == 20
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


def test_a_gallery_that_was_replaced_is_not_gone_on_with(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None
) -> None:
    """Killed when the two had changed places: under the name of the work lies the gallery of before."""
    counter.limit = 8
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, tmp_path / "g")
    (part,) = parts.unfinished(tmp_path / "g")
    counter.images, counter.limit = 0, 10**9
    build_gallery(engine, manifest, tmp_path / "g")
    assert not list((tmp_path / "g").glob(".*")), "what says that work is under way goes at its end"
    (tmp_path / "g").rename(part)
    counter.images = 0
    assert build_gallery(engine, manifest, tmp_path / "g").resumed == 0
    assert counter.images == 20


def test_a_mount_point_is_refused_before_the_long_build(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "g")
    monkeypatch.delattr(build, "_fill")
    with pytest.raises(GalleryError, match="found a mount point"):
        build_gallery(engine, manifest, tmp_path / "g")
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


# -- duplicates and DICOM


def test_an_image_that_is_there_under_another_name_is_left_out(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, small_batches: None
) -> None:
    """In the same batch, and in an earlier one: listed, embedded once."""
    rows = [replace(row, image=tmp_path / row.image.name) for row in manifest.rows[:6]]
    for row, source in zip(rows, (0, 0, 1, 2, 3, 1), strict=True):
        shutil.copy(manifest.rows[source].image, row.image)
    report = build_gallery(engine, replace(manifest, rows=tuple(rows)), tmp_path / "g")
    assert (report.images, counter.images) == (4, 4)
    assert report.duplicates == ((str(rows[1].image), "image_00"), (str(rows[5].image), "image_02"))
    with (tmp_path / "g" / "duplicates.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["image", "id"], *map(list, report.duplicates)]


def test_what_a_dicom_file_says_of_itself_fills_gaps(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
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


def test_from_embedded_blocks(
    tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gallery as from the images, without a call of the engine, for any split of the manifest."""
    monkeypatch.setattr("cbmir.runtime.embedded_blocks.BLOCK", 7)
    rows = list(manifest.rows)
    rows[3] = replace(rows[3], image=tmp_path / "missing.png")
    table = replace(manifest, rows=tuple(rows))
    embed_manifest(engine, table, tmp_path / "e", workers=0)
    expected = build_gallery(engine, table, tmp_path / "images", splits=["all"])
    counter.images = 0
    assert build_gallery(engine, table, tmp_path / "blocks", splits=["all"], embeddings=tmp_path / "e") == expected
    assert counter.images == 0
    assert (expected.images, len(expected.unreadable)) == (23, 1)
    with Gallery.open(tmp_path / "images") as one, Gallery.open(tmp_path / "blocks") as other:
        assert list(one.every_entry()) == list(other.every_entry())
        for name in one.ids():
            assert one.thumbnail(name) == other.thumbnail(name)
            np.testing.assert_allclose(one.vector(name), other.vector(name), atol=1e-6)
    build_gallery(engine, table, tmp_path / "test", splits=["test"], embeddings=tmp_path / "e")
    with Gallery.open(tmp_path / "test") as gallery:
        assert gallery.ids() == ["image_20", "image_21", "image_22", "image_23"]
    (tmp_path / "e" / "part-000001.npz").unlink()
    with pytest.raises(GalleryError, match=r"part-000001\.npz first; 'cbmir embed' with the same manifest goes on"):
        build_gallery(engine, table, tmp_path / "g", embeddings=tmp_path / "e")


# -- adding


@pytest.fixture
def started(tmp_path: Path, engine: Engine, manifest: Manifest) -> Path:
    """A gallery of the four test images."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    return tmp_path / "g"


def test_adding_skips_what_is_there(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter.images = 0
    report = add_to_gallery(engine, manifest, started, splits=["all"])
    assert (report.images, report.there, report.duplicates, counter.images) == (20, 4, (), 20)
    with Gallery.open(started) as gallery:
        assert gallery.ids() == [*(f"image_{n}" for n in (20, 21, 22, 23)), *(f"image_{n:02}" for n in range(20))]
        assert gallery.entry("image_07").report == "Report 7.\nSecond line."
        with gallery.reading() as reader:
            before = reader.generation
    monkeypatch.delattr("cbmir.runtime.gallery.pictures.read_image")  # nothing is decoded again
    report = add_to_gallery(engine, manifest, started, splits=["all"], workers=0)
    assert (report.images, report.there, counter.images) == (0, 24, 20)
    with Gallery.open(started) as gallery, gallery.reading() as reader:
        assert reader.generation == before
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


def test_adding_is_one_transaction_and_goes_on_after_a_stop(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, counter: Counter, small_batches: None
) -> None:
    counter.images, counter.limit = 0, 8
    with pytest.raises(KeyboardInterrupt):
        add_to_gallery(engine, manifest, started)
    with Gallery.open(started) as gallery:
        assert len(gallery) == 4
        with gallery.reading() as reader:
            before = reader.generation
    assert len(parts.unfinished(started)) == 1
    counter.limit = 10**9
    report = add_to_gallery(engine, manifest, started)
    assert (report.images, report.resumed, counter.images) == (20, 8, 20)
    with Gallery.open(started) as gallery, gallery.reading() as reader:
        assert (reader.count, reader.generation) == (24, before + 1)
    assert parts.unfinished(started) == []


def test_adding_what_a_killed_addition_had_added(
    engine: Engine, manifest: Manifest, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the transaction and the clearing up."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "drop_part", lambda part: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add_to_gallery(engine, manifest, started)
    report = add_to_gallery(engine, manifest, started)
    assert (report.images, report.there, report.duplicates) == (0, 20, ())
    assert parts.unfinished(started) == []


def test_the_same_content_and_a_changed_image(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path
) -> None:
    """A copy of an image that is there is reported; so is a file whose content is no longer that of its entry."""
    copy, changed = tmp_path / "copy.png", tmp_path / "changed.png"
    shutil.copy(manifest.rows[20].image, copy)
    shutil.copy(manifest.rows[0].image, changed)
    rows = [replace(manifest.rows[0], image=path) for path in (copy, changed)]
    table = replace(manifest, rows=tuple(rows))
    report = add_to_gallery(engine, table, started)
    assert (report.images, report.duplicates) == (1, ((str(copy), "image_20"),))
    shutil.copy(manifest.rows[1].image, changed)
    report = add_to_gallery(engine, table, started)
    assert (report.images, report.changed) == (0, ((str(changed), "changed"),))
    for name, row in (("duplicates", [str(copy), "image_20"]), ("changed", [str(changed), "changed"])):
        with (started / f"{name}.csv").open(newline="") as stream:
            assert list(csv.reader(stream)) == [["image", "id"], row]
    with Gallery.open(started) as gallery:
        assert gallery.entry("changed").sha256 == read_image(manifest.rows[0].image).sha256


def test_a_list_keeps_what_is_of_other_images(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_xray: Callable[..., np.ndarray]
) -> None:
    """An addition speaks of its own images alone: they leave the list of those that could not be read, others stay."""
    missing = [replace(manifest.rows[0], image=tmp_path / f"missing_{n}.png") for n in range(2)]
    build_gallery(engine, replace(manifest, rows=(*missing, *manifest.rows)), tmp_path / "g")
    Image.fromarray(make_xray(99)).save(missing[1].image)
    assert add_to_gallery(engine, replace(manifest, rows=(missing[1],)), tmp_path / "g").images == 1
    with (tmp_path / "g" / "unreadable.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)] == ["image", str(missing[0].image)]


def test_an_image_whose_file_is_gone_stays(
    tmp_path: Path, engine: Engine, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    lost = tmp_path / "lost.png"
    shutil.copy(manifest.rows[0].image, lost)
    table = replace(manifest, rows=(replace(manifest.rows[0], image=lost), *manifest.rows[1:]))
    build_gallery(engine, table, tmp_path / "g")
    lost.unlink()
    report = add_to_gallery(engine, table, tmp_path / "g")
    assert (report.images, report.there) == (0, 20)
    ((path, reason),) = report.unreadable
    assert path == str(lost)
    assert reason.endswith("; it stays in the gallery as 'lost'")
    assert not any("Left out" in message for message in caplog.messages)


def test_an_id_that_is_taken_gets_a_folder(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, counter: Counter, small_batches: None
) -> None:
    """Also where another addition took it while this one was stopped."""
    other = tmp_path / "other"
    other.mkdir()
    for row, n in ((20, 0), (1, 1), (2, 2)):
        shutil.copy(manifest.rows[n].image, other / f"image_{row:02}.png")
    rows = [replace(manifest.rows[n], image=other / f"image_{row:02}.png") for row, n in ((20, 0), (1, 1), (2, 2))]
    filler = [replace(row, split="train") for row in manifest.rows[4:8]]
    table = replace(manifest, rows=(*rows, *filler))
    counter.images, counter.limit = 0, 5
    with pytest.raises(KeyboardInterrupt):
        add_to_gallery(engine, table, started)
    counter.limit = 10**9
    taken = replace(manifest, rows=(replace(manifest.rows[9], image=tmp_path / "image_01.png"),))
    shutil.copy(manifest.rows[9].image, taken.rows[0].image)
    add_to_gallery(engine, taken, started)
    counter.images = 0
    report = add_to_gallery(engine, table, started)
    assert (report.images, report.resumed, counter.images) == (7, 3, 4)
    with Gallery.open(started) as gallery:
        assert gallery.entry("other/image_20").image == str(rows[0].image)
        assert gallery.entry("other/image_01").image == str(rows[1].image)
        assert gallery.entry("image_02").image == str(rows[2].image)


def test_adding_to_what_does_not_fit(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, make_tiny_model: Callable[..., Path],
    counter: Counter,
) -> None:  # fmt: skip
    counter.limit = 0
    with (
        open_engine(make_tiny_model(tmp_path / "other.onnx", fingerprint="tiny-1"), threads=1) as other,
        pytest.raises(GalleryError, match="expected a gallery of this model"),
    ):
        add_to_gallery(other, manifest, started)
    with pytest.raises(ManifestError, match="expected one of Effusion, Mass, Nodule; found 'Fracture'"):
        add_to_gallery(engine, replace(manifest, labels=LabelSet(("Effusion", "Mass", "Fracture"))), started)
    with pytest.raises(GalleryError, match="found nothing there"):
        add_to_gallery(engine, manifest, tmp_path / "none")
    with pytest.raises(GalleryError, match="expected no key for pseudonyms, found one"):
        add_to_gallery(engine, manifest, started, pseudonyms=Pseudonyms.throw_away())


def test_pseudonyms(tmp_path: Path, engine: Engine, manifest: Manifest, counter: Counter) -> None:
    key = Pseudonyms.throw_away()
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"], pseudonyms=key)
    counter.limit = counter.images
    for wrong, found in ((None, "none"), (Pseudonyms.throw_away(), "another")):
        with pytest.raises(GalleryError, match=f"expected its key, with --pseudonyms, found {found}"):
            add_to_gallery(engine, manifest, tmp_path / "g", pseudonyms=wrong)
    counter.limit = 10**9
    assert add_to_gallery(engine, manifest, tmp_path / "g", pseudonyms=key).images == 20
    with Gallery.open(tmp_path / "g", pseudonyms=key) as gallery:
        assert gallery.has_patient("patient_03") and gallery.has_patient("patient_11")
        assert gallery.entry("image_06").patient_id == key.patient("patient_03")
    assert b"patient_03" not in (tmp_path / "g" / "gallery.sqlite").read_bytes()
