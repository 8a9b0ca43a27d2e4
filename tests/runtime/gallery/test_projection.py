"""The map of a gallery: its shape, its file, and the command that makes it."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from cbmir.errors import GalleryError
from cbmir.runtime import Gallery
from cbmir.runtime.gallery.gallery import MAP, is_gallery_file
from cbmir.runtime.gallery.projection import GalleryProjection, principal_plane
from command_line import run


@pytest.fixture
def folder(tiny_gallery: Path, tmp_path: Path) -> Path:
    """A gallery that tests may change."""
    return Path(shutil.copytree(tiny_gallery, tmp_path / "gallery"))


def made(folder: Path, **how: int) -> GalleryProjection:
    with Gallery.open(folder) as gallery:
        return GalleryProjection.make(gallery, principal_plane, "principal components", **how)


def test_principal_plane_by_hand() -> None:
    points = np.array([[0, 0, 5], [4, 0, 5], [0, 1, 5], [4, 1, 5]], np.float32)
    np.testing.assert_allclose(principal_plane(points), [[-2, -0.5], [2, -0.5], [-2, 0.5], [2, 0.5]], atol=1e-6)


def test_points_lie_in_the_unit_square_in_one_scale(folder: Path) -> None:
    chart = made(folder)
    low, high = chart.points.min(axis=0), chart.points.max(axis=0)
    assert chart.points.shape == (20, 2)
    assert (high - low).max() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose((low + high) / 2, 0.5, atol=1e-6)


def test_large_galleries_are_sampled(folder: Path) -> None:
    chart = made(folder, most=7)
    assert len(chart.ids) == len(set(chart.ids)) == 7
    assert made(folder, most=7, seed=1).ids != chart.ids


def test_an_image_is_placed_between_its_neighbours() -> None:
    chart = GalleryProjection(("a", "b", "c"), np.array([[0, 0], [1, 0], [1, 1]], np.float32), "", "")
    assert chart.place([("b", 0.0), ("a", 0.5)]) == pytest.approx((1, 0), abs=1e-5)
    assert chart.place([("a", 0.2), ("x", 0.2), ("c", 0.2)]) == pytest.approx((0.5, 0.5))
    assert chart.place([("x", 0.1)]) is None


def test_round_trip(folder: Path) -> None:
    assert GalleryProjection.load(folder) is None
    chart = made(folder)
    chart.save(folder)
    loaded = GalleryProjection.load(folder)
    assert loaded is not None
    assert (loaded.ids, loaded.method, loaded.fingerprint) == (chart.ids, chart.method, "tiny-0")
    np.testing.assert_array_equal(loaded.points, chart.points)
    assert stat.S_IMODE((folder / MAP).stat().st_mode) == 0o600
    assert is_gallery_file(MAP)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"no map at all"])
def test_damaged_file(folder: Path, damage: bytes) -> None:
    (folder / MAP).write_bytes(damage)
    with pytest.raises(GalleryError, match="cbmir index map"):
        GalleryProjection.load(folder)


def test_file_with_pickles_is_refused(folder: Path) -> None:
    np.savez(folder / MAP, ids=np.array([object()]), points=np.zeros((1, 2)), about=np.array(["", ""]))
    with pytest.raises(GalleryError, match="expected a map"):
        GalleryProjection.load(folder)


def test_it_is_deleted_before_a_removal_is_final(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process that is killed after the removal would leave it for good."""
    made(folder).save(folder)
    with Gallery.open(folder) as gallery:
        monkeypatch.setattr(gallery._connections, "empty_log", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            gallery.remove(ids=[gallery.ids()[0]])
    assert not (folder / "map.npz").exists()


def test_it_is_deleted_if_an_image_is_removed(folder: Path) -> None:
    made(folder).save(folder)
    with Gallery.open(folder) as gallery:
        gallery.remove(ids=[gallery.ids()[0]])
    assert GalleryProjection.load(folder) is None


@pytest.mark.parametrize(("method", "name"), [("pca", "principal components"), ("tsne", "t-SNE"), ("auto", "t-SNE")])
def test_command(folder: Path, method: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if method != "pca":
        pytest.importorskip("sklearn")
    assert run("index", "map", folder, "--method", method) == 0
    assert f"a map of 20 images by {name}" in capsys.readouterr().out
    chart = GalleryProjection.load(folder)
    assert chart is not None
    assert np.isfinite(chart.points).all()


def test_too_few_images(folder: Path) -> None:
    with Gallery.open(folder) as gallery:
        gallery.remove(ids=gallery.ids()[2:])
    with pytest.raises(GalleryError, match="at least 3"):
        made(folder)


def test_command_refuses_milvus(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("index", "map", "milvus://localhost:19530/chest") == 2
    assert "Milvus" in capsys.readouterr().err
