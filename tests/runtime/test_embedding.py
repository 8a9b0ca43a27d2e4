"""Embedding a manifest into block files: the same bytes whoever does it, and nothing done twice."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbmir.errors import GalleryError, ImageError, UserError
from cbmir.manifest import Manifest, read_manifest, write_manifest
from cbmir.runtime import Engine, embedded_blocks, open_engine, read_image
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.embedding import embed_manifest
from cbmir.runtime.embedding_on_ray import actor_needs, read_card
from cbmir.runtime.imaging.preprocess import preprocess


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with open_engine(tiny_model, threads=1, mode="throughput") as opened:
        yield opened


@pytest.fixture
def manifest(tiny_manifest: Path, tmp_path: Path) -> Manifest:
    """24 images of which the 10th is missing."""
    table = read_manifest(tiny_manifest)
    rows = list(table.rows)
    rows[9] = replace(rows[9], image=tiny_manifest.parent / "missing.png")
    return replace(table, rows=tuple(rows))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 10 rows in batches of 4."""
    monkeypatch.setattr(embedded_blocks, "BLOCK", 10)
    monkeypatch.setattr("cbmir.runtime.embedding.BATCH", 4)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.npz")}


def test_a_block_holds_what_the_engine_says(
    engine: Engine, manifest: Manifest, small_blocks: None, tmp_path: Path
) -> None:
    report = embed_manifest(engine, manifest, tmp_path / "e", workers=0)
    assert (report.images, report.there_already) == (24, 0)
    assert [path for path, _ in report.unreadable] == [str(manifest.rows[9].image)]
    names = ["part-000000.npz", "part-000001.npz", "part-000002.npz", "unreadable.csv"]
    assert sorted(file.name for file in (tmp_path / "e").iterdir()) == names
    with (tmp_path / "e" / "unreadable.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [["image", "reason"], *map(list, report.unreadable)]
    with np.load(tmp_path / "e" / "part-000000.npz") as arrays:
        assert (arrays["embedding"].dtype, arrays["embedding"].shape) == (np.float32, (10, 8))
        assert not arrays["embedding"][9].any()
    pictures = list(Blocks.of(tmp_path / "e", engine.card, manifest.rows).read_all(range(24)))
    assert len(pictures) == 24
    for row, picture in zip(manifest, pictures, strict=True):
        if isinstance(picture, ImageError):
            assert row.image.name == "missing.png"
            assert str(picture) == report.unreadable[0][1]
            continue
        radiograph = read_image(row.image)
        assert picture.sha256 == radiograph.sha256
        assert picture.thumbnail.startswith(b"\xff\xd8") and picture.thumbnail.endswith(b"\xff\xd9")
        assert picture.embedding is not None
        expected = engine.run(preprocess(radiograph, engine.card.preprocess)[None, None]).embedding[0]
        assert np.array_equal(picture.embedding, expected)


def test_shards_threads_and_workers_give_the_same_bytes(
    engine: Engine, tiny_model: Path, manifest: Manifest, small_blocks: None, tmp_path: Path
) -> None:
    embed_manifest(engine, manifest, tmp_path / "one", workers=0)
    expected = content(tmp_path / "one")
    assert len(expected) == 3
    embed_manifest(engine, manifest, tmp_path / "workers", workers=2)
    assert content(tmp_path / "workers") == expected
    with open_engine(tiny_model, threads=2, mode="throughput") as other:
        reports = [embed_manifest(other, manifest, tmp_path / "shards", shard=(n, 2), workers=0) for n in (2, 1)]
    assert [(report.images, len(report.unreadable)) for report in reports] == [(10, 0), (14, 1)]
    assert content(tmp_path / "shards") == expected
    assert sorted(file.name for file in (tmp_path / "shards").glob("*.csv")) == ["unreadable-1-of-2.csv"]
    embed_manifest(engine, manifest, tmp_path / "many", shard=(9, 9), workers=0)  # more shards than blocks
    assert content(tmp_path / "many") == {}


def test_what_is_there_is_not_embedded_again(
    engine: Engine, manifest: Manifest, small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within the second block: the first stays, and the next run does the others, and the third run nothing."""
    images, limit = 0, 15
    real = type(engine).run

    def counted(self: Engine, batch: np.ndarray, **options: bool) -> object:
        nonlocal images
        images += len(batch)
        if images > limit:
            raise KeyboardInterrupt
        return real(self, batch, **options)

    monkeypatch.setattr(type(engine), "run", counted)
    with pytest.raises(KeyboardInterrupt):
        embed_manifest(engine, manifest, tmp_path / "e", workers=0)
    assert list(content(tmp_path / "e")) == ["part-000000.npz"]
    images, limit = 0, 1000
    report = embed_manifest(engine, manifest, tmp_path / "e", workers=0)
    assert (report.images, report.there_already, images) == (24, 10, 14)
    assert len(report.unreadable) == 1, "those of earlier runs are listed too"
    assert embed_manifest(engine, manifest, tmp_path / "e", workers=0).there_already == 24
    assert images == 14


def test_labels_and_folders_may_change_and_images_not(
    engine: Engine, manifest: Manifest, small_blocks: None, tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    embed_manifest(engine, manifest, tmp_path / "e", workers=0)

    def there(table: Manifest) -> int:
        return embed_manifest(engine, table, tmp_path / "e", workers=0).there_already

    relabelled = replace(manifest, rows=tuple(replace(row, labels=(0, 0, 0), report="") for row in manifest))
    assert there(relabelled) == 24
    moved = tmp_path / "moved"
    moved.mkdir()
    assert there(replace(manifest, rows=tuple(replace(row, image=moved / row.image.name) for row in manifest))) == 24
    with pytest.raises(GalleryError, match=r"part-000000\.npz: expected embeddings of these images"):
        there(replace(manifest, rows=manifest.rows[::-1]))
    with pytest.raises(GalleryError, match=r"part-000001\.npz: expected 1 blocks of 9 images, found one more"):
        there(replace(manifest, rows=manifest.rows[:9]))
    with pytest.raises(GalleryError, match="'reduced_jpeg2000': True"):
        embed_manifest(engine, manifest, tmp_path / "e", workers=0, reduced_jpeg2000=True)
    other = make_tiny_model(tmp_path / "other.onnx", fingerprint="tiny-1")
    with (
        open_engine(other, threads=1) as another,
        pytest.raises(GalleryError, match=r"expected embeddings of this model \(fingerprint tiny-1\)"),
    ):
        embed_manifest(another, manifest, tmp_path / "e", workers=0)
    half = replace(engine.card, precision="float16")
    with pytest.raises(GalleryError, match=r"of this precision \(precision float16\), found those of others"):
        Blocks.of(tmp_path / "e", half, manifest.rows).is_there(0)


def test_damage_and_gaps_are_errors(engine: Engine, manifest: Manifest, small_blocks: None, tmp_path: Path) -> None:
    embed_manifest(engine, manifest, tmp_path / "e", workers=0)
    blocks = Blocks.of(tmp_path / "e", engine.card, manifest.rows)
    whole = blocks.path(1).read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"embedding.npy") + 300] ^= 4
    for data in (bytes(flipped), whole[:-100], whole[:50], b"", b"no zip", b"\x93NUMPY\x01\x00"):
        blocks.path(1).write_bytes(data)
        with pytest.raises(GalleryError, match=r"part-000001\.npz: expected a whole block of embeddings"):
            blocks.read(1)
    blocks.path(1).write_bytes(blocks.path(0).read_bytes())
    with pytest.raises(GalleryError, match="expected a block made with"):
        blocks.read(1)
    blocks.path(1).unlink()
    with pytest.raises(GalleryError, match=r"found 1 of 3 blocks missing, part-000001\.npz first; 'cbmir embed'"):
        blocks.read_all(range(24))
    assert len(list(blocks.read_all([0, 3, 20, 23]))) == 4, "a missing block matters only where it is asked for"


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0), (-1, 3)])
def test_shards_that_are_none(engine: Engine, manifest: Manifest, tmp_path: Path, shard: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="expected a shard from 1/"):
        embed_manifest(engine, manifest, tmp_path / "e", shard=shard)


def test_a_file_is_no_folder(engine: Engine, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "e").write_text("a file")
    with pytest.raises(GalleryError, match="found a file"):
        embed_manifest(engine, manifest, tmp_path / "e")


def test_an_actor_takes_what_every_node_has_for_a_gpu() -> None:
    nodes = [{"CPU": 64.0}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 30.0, "GPU": 2.0}]
    assert actor_needs(nodes) == {"num_gpus": 1, "num_cpus": 4}
    assert actor_needs([{"CPU": 2.0, "GPU": 8.0}]) == {"num_gpus": 1, "num_cpus": 1}
    assert actor_needs([{"CPU": 64.0}, {}]) == {"num_cpus": 1}


def test_the_card_needs_a_file(tiny_model: Path) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        assert read_card(tiny_model) == engine.card
    with pytest.raises(UserError, match="expected a model file, found a folder"):
        read_card(tiny_model.parent)


RAY = """
import logging, sys
from pathlib import Path
from cbmir.manifest import read_manifest
from cbmir.runtime import embedded_blocks, embedding, open_engine
from cbmir.runtime.embedding_on_ray import on_ray
import ray, ray.data
ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
ray.data.DataContext.get_current().wait_for_min_actors_s = 300  # else one may do all before the other has started
logging.basicConfig(level=logging.INFO)
model, manifest, folder = sys.argv[1:]
embedded_blocks.BLOCK = 10
table = read_manifest(manifest)
with open_engine(model, threads=1) as engine:
    blocks = embedded_blocks.Blocks.of(folder, engine.card, table.rows)
report = embedding.embed_blocks(blocks, table, on_ray("auto", model, "auto"))
print(report.images, len(report.unreadable))
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_actors_of_ray_write_the_same_bytes(
    engine: Engine, tiny_model: Path, manifest: Manifest, small_blocks: None, tmp_path: Path
) -> None:
    """Ray in a process of its own, with a block there already: its actors write just the others."""
    write_manifest(manifest, tmp_path / "manifest.csv")
    embed_manifest(engine, manifest, tmp_path / "one", workers=0)
    embed_manifest(engine, manifest, tmp_path / "ray", shard=(2, 3), workers=0)
    first = (tmp_path / "ray" / "part-000001.npz").stat().st_mtime_ns
    words = [sys.executable, "-c", RAY, tiny_model, tmp_path / "manifest.csv", tmp_path / "ray"]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "24 1\n"
    assert "Ray: 2 blocks by 2 models." in found.stderr
    assert content(tmp_path / "ray") == content(tmp_path / "one")
    assert (tmp_path / "ray" / "part-000001.npz").stat().st_mtime_ns == first
