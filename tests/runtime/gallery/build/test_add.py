"""Adding to a gallery: added and unchanged images, and interruptions."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cbmir.errors import GalleryError, ManifestError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest
from cbmir.runtime import Engine, Gallery, build_gallery, open_engine, read_image
from cbmir.runtime.gallery.build import add_to_gallery
from cbmir.runtime.gallery.database import live_folder
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from counted_images import CountedImages


@pytest.fixture
def started(tmp_path: Path, engine: Engine, manifest: Manifest) -> Path:
    """A gallery of the four test images."""
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"])
    return tmp_path / "g"


def test_adding_skips_existing_images(
    tmp_path: Path,
    engine: Engine,
    manifest: Manifest,
    started: Path,
    counter: CountedImages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter.images = 0
    report = add_to_gallery(engine, manifest, started, splits=["all"])
    assert (report.images, report.there, report.duplicates, counter.images) == (20, 4, (), 20)
    with Gallery.open(started) as gallery:
        assert gallery.ids() == [*(f"image_{n}" for n in (20, 21, 22, 23)), *(f"image_{n:02}" for n in range(20))]
        assert gallery.entry("image_07").report == "Report 7.\nSecond line."
        with gallery.reading() as reader:
            before = reader.generation
    monkeypatch.delattr("cbmir.runtime.gallery.build.work.read_image")  # nothing is decoded again
    report = add_to_gallery(engine, manifest, started, splits=["all"], workers=0)
    assert (report.images, report.there, counter.images) == (0, 24, 20)
    with Gallery.open(started) as gallery, gallery.reading() as reader:
        assert reader.generation == before


def test_a_stopped_addition_keeps_whole_batches_and_resumes(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, counter: CountedImages, small_batches: None
) -> None:
    counter.images, counter.limit = 0, 8
    with pytest.raises(KeyboardInterrupt):
        add_to_gallery(engine, manifest, started)
    with Gallery.open(started) as gallery:
        assert gallery.ids() == [*(f"image_{n}" for n in (20, 21, 22, 23)), *(f"image_{n:02}" for n in range(8))]
    counter.limit = 10**9
    report = add_to_gallery(engine, manifest, started)
    assert (report.images, report.there, counter.images) == (12, 8, 20)
    with Gallery.open(started) as gallery:
        assert len(gallery) == 24


def test_the_same_content_and_a_changed_image(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path
) -> None:
    """A copy of an image in the gallery is reported, and so is a file whose content differs from that of its entry."""
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


def test_a_list_keeps_rows_of_other_images(
    tmp_path: Path, engine: Engine, manifest: Manifest, make_xray: Callable[..., np.ndarray]
) -> None:
    """An addition only updates its own images in the list of unreadable ones; other rows stay."""
    missing = [replace(manifest.rows[0], image=tmp_path / f"missing_{n}.png") for n in range(2)]
    build_gallery(engine, replace(manifest, rows=(*missing, *manifest.rows)), tmp_path / "g")
    Image.fromarray(make_xray(99)).save(missing[1].image)
    assert add_to_gallery(engine, replace(manifest, rows=(missing[1],)), tmp_path / "g").images == 1
    with (tmp_path / "g" / "unreadable.csv").open(newline="") as stream:
        assert [row[0] for row in csv.reader(stream)] == ["image", str(missing[0].image)]


def test_an_image_whose_file_is_missing_stays(
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


def test_a_duplicate_id_gets_a_folder(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, counter: CountedImages, small_batches: None
) -> None:
    """This also applies if another addition took the id while this one was interrupted."""
    other = tmp_path / "other"
    other.mkdir()
    for row, n in ((20, 0), (1, 1), (2, 2)):
        shutil.copy(manifest.rows[n].image, other / f"image_{row:02}.png")
    rows = [replace(manifest.rows[n], image=other / f"image_{row:02}.png") for row, n in ((20, 0), (1, 1), (2, 2))]
    filler = [replace(row, split="train") for row in manifest.rows[4:8]]
    table = replace(manifest, rows=(*filler, *rows))
    counter.images, counter.limit = 0, 5
    with pytest.raises(KeyboardInterrupt):
        add_to_gallery(engine, table, started)
    counter.limit = 10**9
    taken = replace(manifest, rows=(replace(manifest.rows[9], image=tmp_path / "image_01.png"),))
    shutil.copy(manifest.rows[9].image, taken.rows[0].image)
    add_to_gallery(engine, taken, started)
    counter.images = 0
    report = add_to_gallery(engine, table, started)
    assert (report.images, report.there, counter.images) == (3, 4, 3)
    with Gallery.open(started) as gallery:
        assert gallery.entry("other/image_20").image == str(rows[0].image)
        assert gallery.entry("other/image_01").image == str(rows[1].image)
        assert gallery.entry("image_02").image == str(rows[2].image)


def test_adding_to_an_incompatible_gallery_is_refused(
    tmp_path: Path, engine: Engine, manifest: Manifest, started: Path, make_tiny_model: Callable[..., Path],
    counter: CountedImages,
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
    with pytest.raises(GalleryError, match="keeps ids as they are: expected no key for pseudonyms, found one"):
        add_to_gallery(engine, manifest, started, pseudonyms=Pseudonyms.throw_away())


def test_pseudonyms(tmp_path: Path, engine: Engine, manifest: Manifest, counter: CountedImages) -> None:
    key = Pseudonyms.throw_away()
    build_gallery(engine, manifest, tmp_path / "g", splits=["test"], pseudonyms=key)
    counter.limit = counter.images
    to_write, other = "their key to look up or write an id, found none", "the key for pseudonyms, found another"
    for wrong, message in ((None, to_write), (Pseudonyms.throw_away(), other)):
        with pytest.raises(GalleryError, match=f"expected {message}"):
            add_to_gallery(engine, manifest, tmp_path / "g", pseudonyms=wrong)
    counter.limit = 10**9
    assert add_to_gallery(engine, manifest, tmp_path / "g", pseudonyms=key).images == 20
    with Gallery.open(tmp_path / "g", pseudonyms=key) as gallery:
        assert gallery.has_patient("patient_03") and gallery.has_patient("patient_11")
        assert gallery.entry("image_06").patient_id == key.patient("patient_03")
    assert b"patient_03" not in (live_folder(tmp_path / "g") / "gallery.sqlite").read_bytes()
