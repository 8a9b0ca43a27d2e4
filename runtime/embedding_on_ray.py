"""Embed blocks by Ray Data: actors that hold the model, here or on a cluster whose nodes all see the images and files.

Each actor takes one processor, or a GPU with its share of the processors, reads and embeds whole blocks, and writes
their files itself; what comes back over the network is how many images are done. So a run that was stopped, here or on
a node, goes on by the files that are there, as it does without Ray.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cbmir.card import ModelCard
from cbmir.errors import UserError, WorkerError, require
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.embedding import Run, embed_block, reader
from cbmir.runtime.gallery.pictures import Source

log = logging.getLogger("cbmir")


def on_ray(address: str, model: str | Path, engine: str) -> Run:
    """A run for `embed_blocks`. `address` is that of a cluster, or auto: the one that RAY_ADDRESS names, else this
    machine. `model` and `engine` are as `open_engine` takes them, on each node. Raises MissingDependencyError."""
    ray = require("ray", "distributed")
    data = require("ray.data", "distributed")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", "local")
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (int(sum(node.get(kind, 0) for node in nodes)) for kind in ("CPU", "GPU"))
    needs = actor_needs(nodes)
    log.info("Ray: %d CPUs, %d GPUs; each model takes %s.", cpus, gpus, needs)

    def run(blocks: Blocks, sources: Sequence[Source], missing: Sequence[int]) -> Iterator[int]:
        if not missing:
            return
        context = data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        context.max_errored_blocks = 0
        work = [
            {
                "block": block,
                "paths": [str(sources[row].path) for row in blocks.rows(block)],
                "lateral": [sources[row].lateral for row in blocks.rows(block)],
            }
            for block in missing
        ]
        done = data.from_items(work, override_num_blocks=len(work)).map(
            _Embedder,
            fn_constructor_args=(str(Path(model).resolve()), engine, blocks, needs["num_cpus"]),
            # One block at a time each: a second in the queue of one would be a block that another could have begun.
            compute=data.ActorPoolStrategy(size=min(gpus or cpus, len(work)), max_tasks_in_flight_per_actor=1),
            **needs,
        )
        models = set[str]()
        try:
            for row in done.iter_rows():
                models.add(str(row["model"]))
                yield int(row["images"])
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"Ray could not embed a block ({str(error).splitlines()[0]}); the same command goes on with the others"
            ) from error
        log.info("Ray: %d blocks by %d models.", len(missing), len(models))

    return run


def actor_needs(nodes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What an actor takes on a cluster whose nodes have these resources: a processor, or where there are GPUs one of
    these with as many processors as there are for each on the node that has the fewest."""
    ratios = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU", 0) >= 1]
    return {"num_gpus": 1, "num_cpus": max(1, int(min(ratios)))} if ratios else {"num_cpus": 1}


def read_card(model: str | Path) -> ModelCard:
    """The card of a model file, on a machine that need not have the engine or GPU that is to run it."""
    from cbmir.runtime.engines.registry import open_engine
    from cbmir.runtime.engines.tensorrt_plan import read_plan_info

    model = Path(model)
    if model.is_dir():
        raise UserError(f"{model}: expected a model file, found a folder: nodes could choose different files of it")
    if model.suffix.lower() == ".plan":
        return read_plan_info(model).card
    with open_engine(model, engine="openvino" if model.suffix.lower() == ".xml" else "onnxruntime") as opened:
        return opened.card


class _Embedder:
    """An actor: a model, loaded once, that embeds blocks."""

    def __init__(self, model: str, engine: str, blocks: Blocks, cpus: int) -> None:
        from cbmir.runtime.engines.registry import open_engine

        self._engine = open_engine(model, engine=engine, threads=cpus, mode="throughput")
        self._blocks = blocks
        self._workers = cpus if cpus > 1 else 0  # on one processor nothing is gained by another process

    def __call__(self, work: dict[str, Any]) -> dict[str, Any]:
        from cbmir.runtime.imaging.workers import work_through

        sources = (
            Source(Path(path), bool(lateral)) for path, lateral in zip(work["paths"], work["lateral"], strict=True)
        )
        results = work_through(reader(self._engine, self._blocks), sources, workers=self._workers)
        with closing(results):
            images = sum(embed_block(self._engine, self._blocks, int(work["block"]), results))
        return {"images": images, "model": f"{platform.node()} {os.getpid()}"}
