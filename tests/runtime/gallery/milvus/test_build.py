"""Building into Milvus (Lite, embedded), adding, and updating: as for a gallery on disk, but filled in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.errors import GalleryError
from cbmir.manifest import Manifest, read_manifest
from cbmir.runtime import Engine, Pseudonyms, add_to_gallery, build_gallery, open_engine, open_gallery
from cbmir.runtime.gallery.build import merge_galleries
from cbmir.runtime.gallery.entry import Added
from cbmir.runtime.gallery.maintenance import update_gallery
from cbmir.runtime.gallery.milvus.gallery import MilvusGallery


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    with open_engine(tiny_model, threads=1) as opened:
        yield opened


@pytest.fixture
def manifest(tiny_manifest: Path) -> Manifest:
    return read_manifest(tiny_manifest)


def test_shards_are_merged_into_a_collection(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption in the second shard, the same call continues. Answers equal those of one build on disk."""
    monkeypatch.setattr("cbmir.runtime.gallery.maintenance._BLOCK", 4)
    place, shards = f"milvus:{tmp_path}/m.db", [tmp_path / f"s{number}" for number in (1, 2)]
    for number, path in enumerate(shards, 1):
        build_gallery(engine, manifest, path, splits=["all"], shard=(number, 2))
    build_gallery(engine, manifest, tmp_path / "disk", splits=["all"])
    real, calls = MilvusGallery.add, 0

    def add(self: MilvusGallery, *given: Any) -> Added:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(MilvusGallery, "add", add)
    with pytest.raises(KeyboardInterrupt):
        merge_galleries(place, shards)
    with open_gallery(place) as one:
        assert len(one) == 16, "whole batches"
    told: list[int] = []
    report = merge_galleries(place, shards, merged=lambda path, added: told.append(len(added.ids)))
    assert (report.images, told, report.duplicates) == (24, [0, 8], ())
    with open_gallery(place) as one, open_gallery(tmp_path / "disk") as other:
        assert sorted(one.every_entry(), key=lambda entry: entry.id) == list(other.every_entry())
        query = other.vector("image_03")
        assert [hit.entry.id for hit in one.search(query, 5).hits] == [
            hit.entry.id for hit in other.search(query, 5).hits
        ]
        assert one.thumbnail("image_03") == other.thumbnail("image_03")
    build_gallery(engine, manifest, tmp_path / "kept", splits=["all"], pseudonyms=Pseudonyms.throw_away())
    with pytest.raises(GalleryError, match=r"keeps pseudonyms, and .* none"):
        merge_galleries(place, [tmp_path / "kept"])
    with pytest.raises(GalleryError, match="missing: 2"):
        merge_galleries(place, shards[:1])


def test_build_stop_resume_add_and_update(
    tmp_path: Path, engine: Engine, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbmir.runtime.gallery.build.work.BATCH", 4)
    place, images, real = f"milvus:{tmp_path}/m.db", 0, type(engine).run

    def run(self: Engine, batch: np.ndarray, **options: bool) -> object:
        nonlocal images
        if images == 8:
            images += 1
            raise KeyboardInterrupt
        images += len(batch)
        return real(self, batch, **options)

    monkeypatch.setattr(type(engine), "run", run)
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, manifest, place)
    report = build_gallery(engine, manifest, place)
    assert (report.images, report.there, images) == (12, 8, 21), "none was embedded twice"
    build_gallery(engine, manifest, tmp_path / "disk")
    with open_gallery(place) as one, open_gallery(tmp_path / "disk") as other:
        assert sorted(one.every_entry(), key=lambda entry: entry.id) == list(other.every_entry())
        query = other.vector("image_03")
        assert [hit.entry.id for hit in one.search(query, 5).hits] == [
            hit.entry.id for hit in other.search(query, 5).hits
        ]

    rows = list(manifest.rows)
    rows[23] = replace(rows[23], image=tmp_path / "missing.png")
    report = add_to_gallery(engine, replace(manifest, rows=tuple(rows)), place, splits=["all"])
    assert (report.images, report.there, len(report.unreadable)) == (3, 20, 1)
    assert "missing.png" in (tmp_path / "unreadable.csv").read_text()
    with pytest.raises(GalleryError, match="found other images in it"):
        build_gallery(engine, manifest, place)

    told = replace(manifest, rows=tuple(replace(row, report="New.", date="2020-02-03") for row in manifest))
    with open_gallery(place) as gallery:
        found = update_gallery(gallery, told)
        assert (found.found, found.changed, [path.name for path in found.absent]) == (23, 23, ["image_23.png"])
        assert {entry.date for entry in gallery.every_entry()} == {"2020-02-03"}
