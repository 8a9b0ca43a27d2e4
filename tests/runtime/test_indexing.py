"""Building a gallery: what goes in, what is left out, and what an interruption leaves."""

from __future__ import annotations

import csv
import io
import logging
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
    assert {file.name for file in (tmp_path / "g").iterdir()} == {"gallery.sqlite", "index.usearch", "index.json"}
    assert [file.name for file in tmp_path.iterdir()] == ["g"]


@pytest.mark.parametrize(("splits", "count"), [(["train"], 20), (["test"], 4), (["train", "test"], 24), (["all"], 24)])
def test_splits(tmp_path: Path, engine: Engine, manifest: Manifest, splits: list[str], count: int) -> None:
    assert build_gallery(engine, manifest, tmp_path / "g", splits=splits).images == count


def test_a_split_that_is_not_there(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    with pytest.raises(SplitError, match="found only test, train"):
        build_gallery(engine, manifest, tmp_path / "g", splits=["val"])


def test_more_images_than_are_read_ahead(tmp_path: Path, engine: Engine, manifest: Manifest) -> None:
    rows = []
    for n in range(150):
        image = tmp_path / f"copy_{n:03}.png"
        image.hardlink_to(manifest.rows[n % 24].image)
        rows.append(replace(manifest.rows[n % 24], image=image, split="train"))
    assert build_gallery(engine, replace(manifest, rows=tuple(rows)), tmp_path / "g").images == 150
    with Gallery.open(tmp_path / "g") as gallery:
        assert gallery.ids() == [row.image.stem for row in rows]
        np.testing.assert_allclose(gallery.vector("copy_000"), gallery.vector("copy_144"), atol=1e-6)


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


def test_ids_are_names_made_unique_by_their_folder() -> None:
    def rows(*paths: str) -> list[Row]:
        return [Row(Path(path), "p", (1,)) for path in paths]

    assert indexing.entry_ids(rows("/a/x.png", "/b/y.png")) == ["x", "y"]
    ids = indexing.entry_ids(rows("/a/x.png", "/b/x.png", "/b/y.png"))
    assert ids == indexing.entry_ids(rows("/a/x.png", "/b/x.png", "/c/y.png"))
    assert len(set(ids)) == 3
    assert all(name.startswith("x-") and len(name) == 10 for name in ids[:2])
    with pytest.raises(GalleryError, match=r"found /a/x.png, /a/x.png"):
        indexing.entry_ids(rows("/a/x.png", "/a/x.png"))
