"""Building a gallery: what goes in, what is left out, and what an interruption leaves."""

from __future__ import annotations

import csv
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cbmir.runtime.indexing as indexing
from cbmir.errors import GalleryError, SplitError
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.runtime import Engine, Gallery, build_gallery, open_engine, preprocess, read_image


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with open_engine(tiny_model, threads=1) as opened:
        yield opened


@pytest.fixture
def manifest(tiny_manifest: Path) -> Manifest:
    return read_manifest(tiny_manifest)


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
    assert {file.name for file in (tmp_path / "g").iterdir()} == {"gallery.sqlite"}
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


@pytest.mark.parametrize(("splits", "count"), [(["train"], 20), (["test"], 4), (["train", "test"], 24), (["all"], 24)])
def test_splits(tmp_path: Path, engine: Engine, manifest: Manifest, splits: list[str], count: int) -> None:
    assert build_gallery(engine, manifest, tmp_path / "g", splits=splits).images == count


def test_a_split_that_is_not_there(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    with pytest.raises(SplitError, match="found only test, train"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["val"])


def test_the_number_of_workers_changes_nothing(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    """More images than are read ahead, and some that cannot be read: the same entries, vectors and thumbnails."""
    rows = []
    for n in range(100):
        image = tmp_path / f"copy_{n:03}.png"
        image.hardlink_to(manifest.rows[n % 24].image)
        rows.append(replace(manifest.rows[n % 24], image=image, split="train"))
    rows[40] = replace(rows[40], image=tmp_path / "missing.png")
    table = replace(manifest, rows=tuple(rows))
    alone = build_gallery(engine, table, tmp_path / "alone", workers=0)
    assert build_gallery(engine, table, tmp_path / "g", workers=2) == alone
    assert (alone.images, len(alone.unreadable)) == (99, 1)
    with Gallery.open(tmp_path / "alone") as one, Gallery.open(tmp_path / "g") as other:
        assert one.ids() == other.ids() == [row.image.stem for n, row in enumerate(rows) if n != 40]
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
        build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g")
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


def test_an_interrupted_build_leaves_what_was_there(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(indexing, "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_gallery(engine, manifest, tmp_path / "g")
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 4


def test_a_gallery_that_is_open_survives_its_replacement(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_tiny_model: Callable[..., Path]
) -> None:
    """The demo goes on answering from the old gallery; its index is never taken from the new one's folder."""
    build_gallery(engine, manifest, tmp_path / "g")
    with Gallery.open(tmp_path / "g") as old:
        expected = [(hit.entry.id, hit.distance) for hit in old.search(old.vector("image_03"), 20, exact=True)]
        model = make_tiny_model(tmp_path / "other.onnx", seed=1, fingerprint="tiny-1")
        with open_engine(model, threads=1) as other:
            build_gallery(other, manifest, tmp_path / "g")
        found = [(hit.entry.id, hit.distance) for hit in old.search(old.vector("image_03"), 20, exact=False)]
    assert found == expected
    with Gallery.open(tmp_path / "g") as new:
        assert new.card.fingerprint == "tiny-1"


def test_a_foreign_folder_is_never_replaced(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    mixed = tmp_path / "mixed"
    build_gallery(engine, manifest, mixed)
    (mixed / "thesis.txt").write_text("years of work")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "index.json").write_text("{}")
    (tmp_path / "file").write_text("a file")
    for path in (mixed, foreign, tmp_path / "file"):
        with pytest.raises(GalleryError, match=path.name):
            build_gallery(engine, manifest, path)
    assert (mixed / "thesis.txt").read_text() == "years of work"
    assert (foreign / "index.json").exists()


def test_an_empty_folder_is_taken(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    assert build_gallery(engine, manifest, tmp_path, splits=["test"]).images == 4
    with Gallery.open(tmp_path) as gallery:
        assert len(gallery) == 4


def ids_of(*paths: str) -> list[str]:
    return indexing.entry_ids([Row(Path(path), "p", (1,)) for path in paths])


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["a/x.png", "b/y.png"], ["x", "y"]),
        (["a/x.png", "b/x.png", "b/y.png"], ["a/x", "b/x", "y"]),
        (["p1/s1/v.jpg", "p1/s2/v.jpg", "p2/s1/v.jpg"], ["p1/s1/v", "s2/v", "p2/s1/v"]),
        (["x.png", "sub/x.png"], ["x", "sub/x"]),
        (["x.png", "x.jpg", "x.png.jpg", "y.png"], ["x.png", "x.jpg", "x.png.jpg", "y.png"]),
        (["a/x.png", "a/x.dcm", "b/x.png"], ["a/x.png", "x.dcm", "b/x.png"]),
        (["x.png"], ["x"]),
    ],
)
def test_ids_are_the_shortest_names_that_tell_images_apart(paths: list[str], ids: list[str]) -> None:
    for folder in ("/", "/data/", "/some/where/x/"):
        assert ids_of(*(folder + path for path in paths)) == ids


def test_the_same_file_twice_is_refused() -> None:
    with pytest.raises(GalleryError, match=r"each image once, found /a/x.png more than once"):
        ids_of("/a/x.png", "/b/x.png", "/a/x.png")


def test_ids_of_a_data_set_as_large_as_chexpert() -> None:
    """Every file of CheXpert has one of a few names: 32 bits of a digest were not enough to tell 188,000 apart."""
    paths = [
        f"/data/CheXpert-v1.0/train/patient{n:05}/study{study}/view1_frontal.jpg"
        for n in range(47_000)
        for study in range(1, 5)
    ]
    ids = ids_of(*paths)
    assert len(set(ids)) == len(paths) == 188_000
    assert ids[0] == "patient00000/study1/view1_frontal"


def test_an_index_is_written_only_where_a_search_would_use_it(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, written in ((20, False), (19, True)):
        monkeypatch.setattr(indexing, "EXACT_LIMIT", limit)
        build_gallery(engine, manifest, tmp_path / "g")
        assert (tmp_path / "g" / "index.usearch").exists() == written


def test_what_a_killed_build_left_is_cleared(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    for name in (".g.abc_1234.part", ".g.abc_1234.old", ".g.x.abc_1234.part", ".g.x.abc_1234.old"):
        shutil.copytree(tmp_path / "g", tmp_path / name)
    (tmp_path / ".g.empty123.part").mkdir()
    (tmp_path / ".g.foreign1.part").mkdir()
    (tmp_path / ".g.foreign1.part" / "thesis.txt").touch()
    (tmp_path / ".g.42.part").touch()
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    kept = {".g.x.abc_1234.part", ".g.x.abc_1234.old", ".g.foreign1.part", ".g.42.part"}
    assert {file.name for file in tmp_path.iterdir()} == {"g"} | kept


def test_a_build_under_way_is_not_cleared(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = indexing._write

    def with_another_beside(*args: object) -> object:
        monkeypatch.setattr(indexing, "_write", real)
        build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(indexing, "_write", with_another_beside)
    assert build_gallery(engine, manifest, tmp_path / "g").images == 20
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


def test_a_gallery_that_a_killed_build_had_moved_comes_back(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    build_gallery(engine, manifest, tmp_path / "g")
    (tmp_path / "g").rename(tmp_path / ".g.abc_1234.old")
    rows = (replace(manifest.rows[0], image=tmp_path / "missing.png"),)
    with pytest.raises(GalleryError, match="found none among 1"):
        build_gallery(engine, replace(manifest, rows=rows), tmp_path / "g")
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_between_the_renames_leaves_a_gallery(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch,
    at: int, done: bool, error: type[BaseException],
) -> None:  # fmt: skip
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    real = Path.rename
    calls = 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == at and not done:
            raise error
        result = real(self, target)
        if calls == at:
            raise error
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else GalleryError):
            build_gallery(engine, manifest, tmp_path / "g")
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == (20 if at == 2 and done else 4)


def test_a_mount_point_is_refused_before_the_long_build(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "g")
    monkeypatch.delattr(indexing, "_write")
    with pytest.raises(GalleryError, match="found a mount point"):
        build_gallery(engine, manifest, tmp_path / "g")
    assert [file.name for file in tmp_path.iterdir()] == ["g"]
