"""Merge galleries, such as the shards of a build, into one; and build shards as Ray tasks, locally or on a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbmir.card import ModelCard
from cbmir.errors import UserError, WorkerError, require
from cbmir.manifest import Manifest
from cbmir.runtime.engines.base import Engine
from cbmir.runtime.gallery.build.build import build_gallery, build_version, open_collection
from cbmir.runtime.gallery.build.folder import GalleryFolder, digest_of
from cbmir.runtime.gallery.build.shard import in_order
from cbmir.runtime.gallery.build.work import IndexReport, Work, read_list, with_all_warnings, write_lists
from cbmir.runtime.gallery.entry import Added
from cbmir.runtime.gallery.gallery import DUPLICATES, UNREADABLE, Gallery
from cbmir.runtime.gallery.maintenance import merge
from cbmir.runtime.gallery.protocol import is_milvus
from cbmir.runtime.gallery.pseudonyms import Pseudonyms

if TYPE_CHECKING:
    from cbmir.runtime.gallery.milvus.gallery import MilvusGallery

log = logging.getLogger("cbmir")

#: Number of images in a Ray task, which builds one shard.
TASK_IMAGES = 1024


def merge_galleries(
    path: str | Path,
    others: Sequence[Path],
    *,
    pseudonyms: Pseudonyms | None = None,
    merged: Callable[[Path, Added], None] = lambda path, added: None,
) -> IndexReport:
    """Merge galleries of one model into the gallery at `path`, which is created if it is missing; one transaction each.

    A new gallery appears when it is complete. Merged shards give the same gallery as a build of the whole manifest. An
    existing gallery keeps what was merged before a stop. A Milvus collection is filled in place and in batches. If the
    call is stopped, the same call continues.

    Args:
        merged: Called with each merged gallery and what happened to its entries.

    Raises:
        GalleryError: Shards are missing or from different builds, the galleries have different models, labels or
            pseudonyms, or another process is building here.
    """
    others = in_order([Path(other).resolve() for other in others])
    states = list[tuple[str, str, int]]()
    for other in others:
        with Gallery.open(other) as source, source.reading() as reader:
            if not states:
                card, labels, index, codec = source.card, source.labels, reader.index_setting, source.cell_codec
            source.check_model(card)
            states.append((str(other), source.uuid, reader.generation))
    if is_milvus(path):
        with open_collection(str(path), card, labels, pseudonyms, index) as collection:
            report = _merge_each(collection, others, merged)
            collection.calibrate()
        return report
    folder = GalleryFolder(path)
    if folder.has_gallery():
        with Gallery.open(folder.path, pseudonyms=pseudonyms) as target, folder.locked():
            report = with_all_warnings(_merge_each(target, others, merged), target)
            target.settle()
            write_lists(folder.path, report, [image for image, _ in (*report.unreadable, *report.duplicates)])
        return report

    def fill(gallery: Gallery) -> IndexReport:
        return _merge_each(gallery, others, merged)

    digest = digest_of(pseudonyms.check if pseudonyms else "", *states)
    with folder.locked(make=True):
        return build_version(
            folder, digest, fill, card, labels, pseudonyms, index=index, images=(),
            cells=None if codec is None else lambda: codec,
        )  # fmt: skip


def _merge_each(
    target: Gallery | MilvusGallery, others: Sequence[Path], merged: Callable[[Path, Added], None]
) -> IndexReport:
    unreadable, duplicates = list[tuple[str, str]](), list[tuple[str, str]]()
    for other in others:
        with Gallery.open(other) as source:
            added = merge(target, source)
            # An entry with the same id was merged by an earlier run.
            duplicates += [(source.entry(own).image, same) for own, same in added.duplicates if own != same]
        unreadable += read_list(other / UNREADABLE)
        duplicates += read_list(other / DUPLICATES)
        merged(other, added)
    return IndexReport(len(target), 0, 0, tuple(unreadable), tuple(duplicates))


def build_on_ray(
    address: str, model: str | Path, manifest: Manifest, path: str | Path, *, engine: str = "auto",
    splits: Sequence[str] = ("train",), reduced_jpeg2000: bool = False, pseudonyms: Pseudonyms | None = None,
    index: str = "auto", replace_others: bool = False,
) -> IndexReport:  # fmt: skip
    """Build a gallery with Ray: each task builds a shard of 1,024 images in the folder, and the shards are merged.

    Every node must see the model, the images and `path` under the same paths. Finished shards are kept, so the same
    call continues after a stop. The key of the pseudonyms never leaves this process, so shards store ids unchanged
    until they are merged. Other arguments are those of `build_gallery`.

    Args:
        address: Address of a cluster, or "auto" for the cluster that RAY_ADDRESS names, else this machine.
        model: A model file that each node opens with `open_engine` and `engine`.

    Raises:
        MissingDependencyError: Ray is not installed.
        WorkerError: A task failed.
        GalleryError: As in `build_gallery`.
    """
    ray = require("ray", "distributed")
    from tqdm import tqdm

    if is_milvus(str(path)):
        raise UserError(f"{path}: expected a folder to build in with Ray, found a Milvus collection")
    card = read_card(model)
    work = Work.of(card, manifest, splits, reduced_jpeg2000, None)
    digest = work.digest(index, pseudonyms.check if pseudonyms else "")
    folder = GalleryFolder(path)
    shards = [folder.path / f"shards-{digest}" / f"{at:06}" for at in range(1, 1 + -(-len(work.rows) // TASK_IMAGES))]
    options = {"splits": splits, "reduced_jpeg2000": reduced_jpeg2000}

    def fill(gallery: Gallery) -> IndexReport:
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no data leaves the cluster
            cluster = os.environ.get("RAY_ADDRESS", "local") if address == "auto" else address
            ray.init(address=cluster, log_to_driver=False, include_dashboard=False)
        needs = task_needs([node["Resources"] for node in ray.nodes() if node["Alive"]])
        log.info("Ray: %d shards, each on %s.", len(shards), needs)
        # With max_calls=0, a process keeps its model for the next task, even on a GPU.
        task = ray.remote(max_calls=0, **needs)(_build_shard)
        given = str(Path(model).resolve()), engine, needs["num_cpus"], ray.put(manifest)
        waiting = [task.remote(*given, str(one), (at, len(shards)), options) for at, one in enumerate(shards, 1)]
        with tqdm(total=len(work.rows), desc="Indexing", unit="image", disable=None) as progress:
            while waiting:
                done, waiting = ray.wait(waiting)
                try:
                    progress.update(sum(ray.get(done)))
                except ray.exceptions.RayError as error:
                    raise WorkerError(f"Ray could not build a shard ({str(error).splitlines()[0]}); the same command "
                                      "continues with the others") from error  # fmt: skip
        return _merge_each(gallery, in_order(shards), lambda path, added: None)

    with folder.locked(make=True):
        images = None if replace_others else work.images
        return build_version(folder, digest, fill, card, work.labels, pseudonyms, index=index, images=images)


def task_needs(nodes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the resources of a task on a cluster with these nodes: one processor; or, if there are GPUs, one GPU and
    as many processors as every node with GPUs has per GPU."""
    ratios = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU", 0) >= 1]
    return {"num_gpus": 1, "num_cpus": max(1, int(min(ratios)))} if ratios else {"num_cpus": 1}


def read_card(model: str | Path) -> ModelCard:
    """Read the card of a model file, on a machine that may lack the engine or GPU to run it."""
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.engines.tensorrt import read_plan_info
    from cbmir.runtime.models.catalog import find_model

    model = find_model(model)
    if model.is_dir():
        raise UserError(f"{model}: expected a model file, found a folder: nodes could choose different files of it")
    if model.suffix.lower() == ".plan":
        return read_plan_info(model).card
    with open_engine(model, engine="openvino" if model.suffix.lower() == ".xml" else "onnxruntime") as opened:
        return opened.card


def _build_shard(
    model: str, engine: str, cpus: int, manifest: Manifest, place: str, shard: tuple[int, int], options: dict[str, Any]
) -> int:
    """Build a shard as a Ray task; return how many images were processed."""
    workers = cpus if cpus > 1 else 0  # with one processor, a second process gains nothing
    report = build_gallery(_engine(model, engine, cpus), manifest, place, shard=shard, workers=workers, **options)
    return report.images + len(report.unreadable) + len(report.duplicates)


@lru_cache(maxsize=1)
def _engine(model: str, engine: str, threads: int) -> Engine:
    from cbmir.runtime.engines.registry import open_engine

    return open_engine(model, engine=engine, threads=threads, mode="throughput")
