"""Shards of a build: merged, they equal the gallery of one build; mixed-up shards are refused."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cbmir.errors import GalleryError, UserError, WorkerError
from cbmir.manifest import Manifest, write_manifest
from cbmir.runtime import Engine, Gallery, build_gallery, open_engine
from cbmir.runtime.gallery.build import build_on_ray, merge, merge_galleries
from cbmir.runtime.gallery.build.folder import GalleryFolder
from cbmir.runtime.gallery.build.merge import read_card, task_needs
from cbmir.runtime.gallery.database import live_folder
from cbmir.runtime.gallery.maintenance import export, export_deidentified
from cbmir.runtime.gallery.pseudonyms import Pseudonyms
from counted_images import CountedImages


@pytest.fixture
def table(manifest: Manifest, tmp_path: Path) -> Manifest:
    """24 images; the 10th is missing, and the 20th is a copy of the 2nd with the name of another."""
    rows = list(manifest.rows)
    rows[9] = replace(rows[9], image=tmp_path / "missing.png")
    (tmp_path / "other").mkdir()
    rows[19] = replace(rows[19], image=tmp_path / "other" / rows[3].image.name)
    shutil.copy(rows[1].image, rows[19].image)
    return replace(manifest, rows=tuple(rows))


@pytest.fixture
def shards(engine: Engine, table: Manifest, tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"shard{number}" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        build_gallery(engine, table, path, splits=["all"], shard=(number, 3))
    return paths


def assert_equal(one: Path, other: Path) -> None:
    with Gallery.open(one) as first, Gallery.open(other) as second:
        assert list(first.every_entry()) == list(second.every_entry())
        for name in first.ids():
            assert np.array_equal(first.vector(name), second.vector(name))
            assert first.thumbnail(name) == second.thumbnail(name)
    for name in ("unreadable.csv", "duplicates.csv"):
        assert (one / name).read_text() == (other / name).read_text()


def test_merged_shards_equal_a_single_build(
    engine: Engine, table: Manifest, shards: list[Path], tmp_path: Path
) -> None:
    whole = build_gallery(engine, table, tmp_path / "whole", splits=["all"])
    told: list[tuple[str, int]] = []
    report = merge_galleries(
        tmp_path / "g", shards[::-1], merged=lambda path, added: told.append((path.name, len(added.ids)))
    )
    assert told == [("shard1", 8), ("shard2", 7), ("shard3", 7)]
    assert report == whole
    assert (report.images, len(report.unreadable), len(report.duplicates)) == (22, 1, 1)
    assert_equal(tmp_path / "g", tmp_path / "whole")
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.write_index()
    assert not (live_folder(shards[0]) / "derived-000000000001").exists(), "a shard is not searched"


def test_a_shard_resumes_and_is_built_once(
    engine: Engine, table: Manifest, counter: CountedImages, small_batches: None, tmp_path: Path
) -> None:
    counter.limit = 4
    with pytest.raises(KeyboardInterrupt):
        build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(2, 3))
    counter.limit = 10**9
    report = build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(2, 3))
    assert (report.images, report.resumed, len(report.unreadable), counter.images) == (7, 4, 1, 7)
    again = build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(2, 3))
    assert (again.images, again.resumed, again.unreadable, counter.images) == (7, 7, report.unreadable, 7)
    with pytest.raises(GalleryError, match="found 7 others in it, which would be lost"):
        build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(3, 3))


def test_a_copy_of_a_shard_counts_as_that_shard(shards: list[Path], tmp_path: Path) -> None:
    with Gallery.open(shards[1]) as gallery:
        export(gallery, tmp_path / "copy")
        with pytest.raises(GalleryError, match="found a shard of a build; merge all shards"):
            export_deidentified(gallery, tmp_path / "nobody")
    with pytest.raises(GalleryError, match=r"found 1; missing: 1, 3\."):
        merge_galleries(tmp_path / "g", [tmp_path / "copy"])
    assert merge_galleries(tmp_path / "g", [shards[0], tmp_path / "copy", shards[2]]).images == 22
    assert not (tmp_path / "nobody").exists()


def test_a_stopped_merge_resumes(engine: Engine, shards: list[Path], tmp_path: Path, table: Manifest) -> None:
    """There is no gallery until all shards are merged; then it equals that of one build."""

    def stop(path: Path, added: object) -> None:
        if path.name == "shard2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_galleries(tmp_path / "g", shards, merged=stop)
    assert not GalleryFolder(tmp_path / "g").has_gallery()
    assert merge_galleries(tmp_path / "g", shards).images == 22
    build_gallery(engine, table, tmp_path / "whole", splits=["all"])
    assert_equal(tmp_path / "g", tmp_path / "whole")
    assert GalleryFolder(tmp_path / "g").unfinished() == []


def test_a_merge_does_not_resume_with_a_changed_shard(shards: list[Path], tmp_path: Path) -> None:
    def stop(path: Path, added: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_galleries(tmp_path / "g", shards, merged=stop)
    with Gallery.open(shards[0]) as gallery:
        gallery.remove(ids=["image_00"])
    assert merge_galleries(tmp_path / "g", shards).images == 21


def test_a_shard_killed_before_its_lists_are_written_is_built_again(
    engine: Engine, table: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cbmir.runtime.gallery.build.build.write_lists", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(1, 1))
    assert len(build_gallery(engine, table, tmp_path / "s", splits=["all"], shard=(1, 1)).unreadable) == 1
    assert len((tmp_path / "s" / "unreadable.csv").read_text().splitlines()) == 2


def test_shards_must_belong_to_one_build(
    engine: Engine, table: Manifest, shards: list[Path], tiny_gallery: Path, tmp_path: Path
) -> None:
    with pytest.raises(GalleryError, match=r"all 3 shards of the build, found 1; missing: 1, 3\. .*--shard NUMBER/3"):
        merge_galleries(tmp_path / "g", shards[1:2])
    with pytest.raises(GalleryError, match="expected each shard once, found 4 galleries of 3 shards"):
        merge_galleries(tmp_path / "g", [*shards, shards[0]])
    with pytest.raises(GalleryError, match=f"found others: {tiny_gallery}"):
        merge_galleries(tmp_path / "g", [*shards, tiny_gallery])
    build_gallery(engine, table, tmp_path / "int8", splits=["all"], shard=(3, 3), index="int8")
    with pytest.raises(GalleryError, match=f"found others: {tmp_path / 'int8'}"):
        merge_galleries(tmp_path / "g", [*shards[:2], tmp_path / "int8"])
    (live_folder(shards[0]) / "shard.json").write_text("{}")
    with pytest.raises(GalleryError, match="cannot read which build it is a shard of"):
        merge_galleries(tmp_path / "g", shards)
    assert not (tmp_path / "g").exists()


def test_other_galleries_are_merged_into_a_new_one(
    engine: Engine, manifest: Manifest, make_tiny_model: Callable[..., Path], tiny_gallery: Path, tmp_path: Path
) -> None:
    build_gallery(engine, manifest, tmp_path / "test", splits=["test"])
    assert merge_galleries(tmp_path / "g", [tmp_path / "test", tiny_gallery]).images == 24
    with open_engine(make_tiny_model(tmp_path / "other.onnx", fingerprint="tiny-1"), threads=1) as other:
        build_gallery(other, manifest, tmp_path / "other")
    with pytest.raises(GalleryError, match="expected a gallery of this model"):
        merge_galleries(tmp_path / "mixed", [tiny_gallery, tmp_path / "other"])


def test_a_shard_without_images_is_empty(engine: Engine, table: Manifest, tmp_path: Path) -> None:
    """There are more shards than images, and one shard's image is unreadable."""
    rows = replace(table, rows=(table.rows[0], table.rows[9]))
    paths = [tmp_path / f"shard{number}" for number in range(1, 6)]
    for number, path in enumerate(paths, 1):
        build_gallery(engine, rows, path, splits=["all"], shard=(number, 5))
    assert merge_galleries(tmp_path / "g", paths).images == 1
    build_gallery(engine, replace(table, rows=table.rows[9:10]), tmp_path / "empty", splits=["all"], shard=(1, 1))
    with pytest.raises(GalleryError, match="expected at least one readable image, found none among 1"):
        merge_galleries(tmp_path / "none", [tmp_path / "empty"])


def test_pseudonyms_of_shards(engine: Engine, table: Manifest, shards: list[Path], tmp_path: Path) -> None:
    key = Pseudonyms.throw_away()
    merge_galleries(tmp_path / "g", shards, pseudonyms=key)
    with Gallery.open(tmp_path / "g", pseudonyms=key) as gallery:
        assert gallery.entry("image_06").patient_id == key.patient("patient_03")
    build_gallery(engine, table, tmp_path / "kept", splits=["all"], shard=(1, 1), pseudonyms=key)
    with pytest.raises(GalleryError, match=r"keeps pseudonyms, and .* none"):
        merge_galleries(tmp_path / "clear", [tmp_path / "kept"])
    assert merge_galleries(tmp_path / "clear", [tmp_path / "kept"], pseudonyms=key).images == 22


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0), (-1, 3)])
def test_invalid_shards(engine: Engine, manifest: Manifest, tmp_path: Path, shard: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="expected a shard from 1/"):
        build_gallery(engine, manifest, tmp_path / "s", shard=shard)
    with pytest.raises(UserError, match="found a Milvus collection"):
        build_gallery(engine, manifest, "milvus:here.db", shard=(1, 2))


# -- Ray


def test_a_task_requests_what_every_node_has_per_gpu() -> None:
    nodes = [{"CPU": 64.0}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 30.0, "GPU": 2.0}]
    assert task_needs(nodes) == {"num_gpus": 1, "num_cpus": 4}
    assert task_needs([{"CPU": 2.0, "GPU": 8.0}]) == {"num_gpus": 1, "num_cpus": 1}
    assert task_needs([{"CPU": 64.0}, {}]) == {"num_cpus": 1}


def test_the_card_needs_a_file(tiny_model: Path) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        assert read_card(tiny_model) == engine.card
    with pytest.raises(UserError, match="expected a model file, found a folder"):
        read_card(tiny_model.parent)


class RayHere:
    """The used part of Ray, run immediately in this process; task `fails_at` raises."""

    class exceptions:  # noqa: N801
        RayError = RuntimeError

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at, self.tasks, self.address = fails_at, 0, ""

    def is_initialized(self) -> bool:
        return bool(self.address)

    def init(self, address: str, **_: bool) -> None:
        self.address = address

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": False, "Resources": {"GPU": 1.0}}]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **needs: int) -> Callable[..., Any]:
        assert needs == {"max_calls": 0, "num_cpus": 1}
        return lambda function: SimpleNamespace(remote=partial(partial, function))

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[:1], waiting[1:]

    def get(self, done: list[Any]) -> list[int]:
        self.tasks += 1
        if self.tasks == self.fails_at:
            raise RuntimeError("a node is gone\nand more")
        return [task() for task in done]


def test_a_build_with_ray_resumes_with_missing_shards(
    engine: Engine, tiny_model: Path, table: Manifest, tmp_path: Path, counter: CountedImages,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The 20th image is embedded too: only the merge finds that it is a copy of the 2nd."""
    build_gallery(engine, table, tmp_path / "whole", splits=["all"])
    monkeypatch.setattr(merge, "TASK_IMAGES", 10)
    ray = RayHere(fails_at=3)
    monkeypatch.setattr(merge, "require", lambda *_: ray)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    counter.images = 0
    with pytest.raises(
        WorkerError, match=r"Ray could not build a shard \(a node is gone\); the same command continues"
    ):
        build_on_ray("auto", tiny_model, table, tmp_path / "ray", splits=["all"])
    assert (counter.images, ray.address) == (15, "head:6379")
    assert not GalleryFolder(tmp_path / "ray").has_gallery()
    assert len(GalleryFolder(tmp_path / "ray").unfinished()) == 3, "two shards, and what they are to be merged into"
    monkeypatch.setattr(merge, "require", lambda *_: RayHere())
    report = build_on_ray("auto", tiny_model, table, tmp_path / "ray", splits=["all"])
    assert (report.images, len(report.unreadable), counter.images) == (22, 1, 23)
    assert_equal(tmp_path / "ray", tmp_path / "whole")
    assert GalleryFolder(tmp_path / "ray").unfinished() == []
    assert not [message for message in caplog.messages if "removed" in message]
    with pytest.raises(GalleryError, match="found 4 others in it, which would be lost"):
        build_on_ray("auto", tiny_model, replace(table, rows=table.rows[:20]), tmp_path / "ray", splits=["all"])
    with pytest.raises(UserError, match="found a Milvus collection"):
        build_on_ray("auto", tiny_model, table, "milvus:here.db")


RAY = """
import logging, sys
from cbmir.manifest import read_manifest
from cbmir.runtime.gallery.build import build_on_ray, merge
import ray
ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
logging.basicConfig(level=logging.INFO)
merge.TASK_IMAGES = 10
model, manifest, gallery = sys.argv[1:]
report = build_on_ray("auto", model, read_manifest(manifest), gallery, splits=["all"])
print(report.images, len(report.unreadable), len(report.duplicates))
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_tasks_build_the_same_gallery(engine: Engine, tiny_model: Path, table: Manifest, tmp_path: Path) -> None:
    """This runs the real Ray in its own process."""
    write_manifest(table, tmp_path / "manifest.csv")
    build_gallery(engine, table, tmp_path / "whole", splits=["all"])
    words = [sys.executable, "-c", RAY, tiny_model, tmp_path / "manifest.csv", tmp_path / "ray"]
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "22 1 1\n"
    assert "Ray: 3 shards, each on {'num_cpus': 1}." in found.stderr
    assert_equal(tmp_path / "ray", tmp_path / "whole")
    assert GalleryFolder(tmp_path / "ray").unfinished() == []
