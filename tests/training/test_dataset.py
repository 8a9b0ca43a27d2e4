"""The cache of decoded images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cbmir.errors import ManifestError
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.imaging.preprocess import centre_crop, preprocess, resize_square
from cbmir.runtime.imaging.reader import read_image
from cbmir.training import dataset
from cbmir.training.dataset import TrainingImages, cached_images, evaluation_batches, label_array, training_targets

SPEC = PreprocessSpec.for_image_size(32)


def manifest_of(folder: Path, count: int = 5) -> Manifest:
    rng = np.random.default_rng(0)
    rows = []
    for n in range(count):
        path = folder / f"{n}.png"
        Image.fromarray(rng.integers(0, 256, (50, 60), dtype=np.uint8)).save(path)
        rows.append(Row(path, f"p{n}", (1, None, -1)))
    return Manifest(LabelSet(("a", "b", "c")), tuple(rows))


def test_training_uses_the_same_pixels_as_the_runtime(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    images = cached_images(manifest, SPEC, tmp_path / "cache")
    batches = list(evaluation_batches(images, range(5), SPEC, size=2))
    assert [len(b) for b in batches] == [2, 2, 1]
    for row, crop in zip(manifest, np.concatenate(batches), strict=True):
        pixels = read_image(row.image).pixels
        assert np.array_equal(crop[0], centre_crop(resize_square(pixels, SPEC), SPEC))
        assert np.abs(crop[0].astype(int) - preprocess(pixels, SPEC)).max() <= 1


def test_the_cache_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)  # as created by earlier versions
    cached_images(manifest_of(tmp_path, 1), SPEC, tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_images_are_decoded_once_and_decoding_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(tmp_path)
    first = np.array(cached_images(manifest, SPEC, tmp_path / "cache"))
    done = np.load(next((tmp_path / "cache").glob("*/done.npy")), mmap_mode="r+")
    done[3] = False
    read: list[str] = []

    def counted(path: Path, **options: object) -> object:
        read.append(path.name)
        return read_image(path, **options)

    monkeypatch.setattr(dataset, "read_image", counted)
    assert (cached_images(manifest, SPEC, tmp_path / "cache") == first).all()
    assert read == ["3.png"]


def test_deleted_images_are_decoded_again(tmp_path: Path) -> None:
    """Otherwise all of them would be black."""
    manifest = manifest_of(tmp_path)
    first = np.array(cached_images(manifest, SPEC, tmp_path / "cache"))
    next((tmp_path / "cache").glob("*/images.npy")).unlink()
    assert (cached_images(manifest, SPEC, tmp_path / "cache") == first).all()


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    first = np.array(cached_images(manifest, SPEC, tmp_path / "cache"))
    Image.fromarray(np.arange(3000, dtype=np.uint16).reshape(50, 60).astype(np.uint8)).save(manifest.rows[0].image)
    assert (cached_images(manifest, SPEC, tmp_path / "cache")[0] != first[0]).any()


def test_unreadable_and_missing_images_are_named(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    manifest.rows[1].image.write_bytes(b"")
    manifest.rows[2].image.write_bytes(b"text")
    with pytest.raises(ManifestError, match=r"2 of 5 images(.|\n)*1\.png(.|\n)*2\.png"):
        cached_images(manifest, SPEC, tmp_path / "cache")
    manifest.rows[1].image.unlink()
    with pytest.raises(ManifestError, match=r"1\.png"):
        cached_images(manifest, SPEC, tmp_path / "cache")


def test_labels_and_targets(tmp_path: Path) -> None:
    labels = label_array(manifest_of(tmp_path, 1))
    assert labels.dtype == np.float32
    assert np.array_equal(labels, [[1, np.nan, -1]], equal_nan=True)
    assert np.array_equal(training_targets(labels).numpy(), [[1, np.nan, np.nan]], equal_nan=True)


def test_a_full_view_is_a_small_and_reproducible_change() -> None:
    """A bright square stays in about the same place: slightly rotated, scaled and moved, never mirrored."""
    image = np.full((54, 54), 80, np.uint8)
    image[10:18, 8:16] = 240
    spec = PreprocessSpec.for_image_size(45)
    assert spec.resize == 54
    images = TrainingImages(image[None], np.array([0]), np.zeros((1, 1), np.float32), spec, 3, full=True)
    views = []
    for epoch in range(20):
        images.epoch = epoch
        view, again = images[0][0], images[0][0]
        assert torch.equal(view, again) and view.dtype == torch.uint8 and view.shape == (1, 45, 45)
        bright = torch.nonzero(view[0] > 170).float().mean(dim=0)
        assert ((bright - torch.tensor([9.0, 7.5])).abs() < 9).all()
        views.append(view)
    assert len({view.numpy().tobytes() for view in views}) == 20
