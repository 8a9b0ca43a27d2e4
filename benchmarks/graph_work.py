"""Measure the gain of `bound_channels`, a rewrite of a DenseNet's ONNX graph that does not change its function.

    python benchmarks/graph_work.py model.onnx [--rounds 30]

With and without it: the maximum differences from the original file, in ONNX Runtime float32 and OpenVINO bfloat16; the
milliseconds per image (minimum over all rounds; variants take turns) in OpenVINO bfloat16 with one stream of two
threads and with two streams of one thread, in ONNX Runtime float32 with two threads, and summed over OpenVINO's layers
with one thread, each layer at its minimum.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import onnxruntime
from figures import table
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from cbmir.export.graph_rewrite import bound_channels, graph_bytes, read_graph
from cbmir.runtime.engines.openvino import import_openvino

Array = NDArray[np.float32]


VARIANTS: dict[str, tuple[Callable[[ir.Model], None], ...]] = {"as it is": (), "bounds of channels": (bound_channels,)}


@dataclass
class Trial:
    """One variant, ready to run. `ways` take turns and are timed; `layers` returns milliseconds per layer."""

    ways: dict[str, Callable[[], None]]
    layers: Callable[[], dict[str, float]]
    answers: dict[str, list[Array]]


def prepare(model: bytes, name: str, core: Any, images: NDArray[np.uint8]) -> Trial:
    graph = ShapeInferencePass()(read_graph(model)).model
    for change in VARIANTS[name]:
        change(graph)
        RemoveUnusedNodesPass()(graph)
    data = graph_bytes(graph)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    read = core.read_model(data)
    read.reshape([1, *images.shape[1:]])

    def compiled(threads: int, streams: int, **more: Any) -> Any:
        hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
        return core.compile_model(read, "CPU", hints | {"ENABLE_CPU_PINNING": False} | more)

    latency = compiled(2, 1).create_infer_request()
    both = compiled(2, 2)
    requests = [both.create_infer_request() for _ in range(2)]
    pool = ThreadPoolExecutor(2)
    profiled = compiled(1, 1, PERF_COUNT=True).create_infer_request()

    def streams() -> None:
        list(pool.map(lambda pair: pair[0].infer([pair[1][None]]), zip(itertools.cycle(requests), images[:2])))

    def layers() -> dict[str, float]:
        profiled.infer([images[:1]])
        return {layer.node_name: layer.real_time.total_seconds() * 1e3 for layer in profiled.profiling_info}

    names = ["embedding", "scores"]
    found = [latency.infer([image[None]]) for image in images]
    bf16 = [np.concatenate([answer[name] for answer in found]) for name in names]
    ways = {
        "bf16, 1 stream of 2": lambda: latency.infer([images[:1]]),
        "bf16, 2 streams of 1": streams,
        "ONNX Runtime fp32": lambda: session.run(names, {"image": images[:1]}),
    }
    return Trial(ways, layers, {"float32": session.run(names, {"image": images}), "bf16": bf16})


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rounds", default=30, show_default=True)
def main(file: Path, rounds: int) -> None:
    model = file.read_bytes()
    size = read_graph(model).graph.inputs[0].shape[2]
    images = np.random.default_rng(0).integers(0, 256, (4, 1, size, size), dtype=np.uint8)
    core = import_openvino().Core()
    trials = {name: prepare(model, name, core, images) for name in VARIANTS}
    best: dict[tuple[str, str], float] = {}
    layers: dict[str, dict[str, float]] = {name: {} for name in VARIANTS}
    for _, (name, trial) in itertools.product(range(rounds), trials.items()):
        for layer, took in itertools.chain.from_iterable(trial.layers().items() for _ in range(5)):
            layers[name][layer] = min(took, layers[name].get(layer, np.inf))
        for way, run in trial.ways.items():
            start = time.perf_counter()
            run()
            took = (time.perf_counter() - start) * 1e3 / (2 if "2 streams" in way else 1)
            best[name, way] = min(took, best.get((name, way), np.inf))
    ways = list(trials["as it is"].ways)
    reference = trials["as it is"].answers["float32"][0].astype(np.float64)
    rows = []
    for name, trial in trials.items():
        far = [1 - (reference * trial.answers[kind][0]).sum(axis=1).min() for kind in ("float32", "bf16")]
        times = [f"{best[name, way]:.2f}" for way in ways]
        rows.append((name, *(f"{one:.1e}" for one in far), *times, f"{sum(layers[name].values()):.2f}"))
    click.echo(table(("", "1 - cosine, fp32", "1 - cosine, bf16", *ways, "layers, 1 thread"), rows))


if __name__ == "__main__":
    main()
