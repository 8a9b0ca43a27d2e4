"""Rewritings of a DenseNet's ONNX graph that leave its function alone: is any of them faster?

    python benchmarks/graph_work.py model.onnx [--rounds 30] [--only clamp --only depthwise]

For each: the largest differences from the file as it is, in ONNX Runtime float32 and in OpenVINO bfloat16, and the
milliseconds an image (the least of all rounds, which take turns) in OpenVINO bfloat16 with one stream of two threads,
with two streams of one thread, in ONNX Runtime float32 with two threads, and summed over OpenVINO's layers with one
thread, each layer at its best. docs/performance.md tells what came of it.
"""

from __future__ import annotations

import functools
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

from cbmir.export.graph_rewrite import (
    Floats,
    affine,
    array,
    bound_channels,
    constant,
    graph_bytes,
    insert_before,
    norms,
    pointwise_reader,
    read_graph,
)
from cbmir.runtime.engines.openvino import import_openvino

Array = NDArray[np.float32]


def depthwise(model: ir.Model) -> None:
    """Each batch norm as a depthwise 1x1 convolution, into which an engine can fuse the ReLU."""
    for norm, _ in norms(model.graph):
        slope, shift = affine(norm)
        inputs = [norm.inputs[0], *constants(norm, slope.reshape(-1, 1, 1, 1), shift)]
        replace(norm, insert_before(norm, "Conv", inputs, group=len(slope), kernel_shape=[1, 1]))


def norm_first(model: ir.Model) -> None:
    """BN + ReLU on each map before they are joined: a Concat that nothing else reads may then cost no copy."""
    for norm, relu in norms(model.graph):
        parts, _ = normed_parts(norm, 1, {})
        if len(parts) > 1:
            replace(relu, insert_before(relu, "Concat", parts, axis=1))


def split(model: ir.Model, group: int = 1) -> None:
    """The 1x1 convolution of joined maps as the sum of a 1x1 convolution of each `group` of them.

    By one, nothing is joined; by more, a group that is complete is joined once, not again for each layer.
    """
    joined: dict[tuple[ir.Value, ...], ir.Value] = {}
    for norm, relu in norms(model.graph):
        conv = pointwise_reader(relu.outputs[0])
        if conv is None:
            continue
        parts, starts = normed_parts(norm, group, joined)
        pieces = constants(conv, *np.split(array(conv.inputs[1]), starts, axis=1))
        terms = [
            insert_before(conv, "Conv", [part, piece, *(conv.inputs[2:] if not number else ())])
            for number, (part, piece) in enumerate(zip(parts, pieces, strict=True))
        ]
        replace(conv, functools.reduce(lambda a, b: insert_before(conv, "Add", [a, b]), terms))


def nested(model: ir.Model) -> None:
    """Each Concat reads the one before it and the newest map, in place of all maps from the block's first."""
    known = {}
    for node in list(model.graph):
        if node.op_type == "Concat":
            sources = tuple(node.inputs)
            known[sources] = node.outputs[0]
            if sources[:-1] in known:
                node.resize_inputs(2)
                node.replace_input_with(0, known[sources[:-1]])
                node.replace_input_with(1, sources[-1])


def constants(node: ir.Node, *values: Floats) -> list[ir.Value]:
    """For what takes the place of a node."""
    name = node.outputs[0].name
    return [constant(node.graph, f"{name}.{number}", one) for number, one in enumerate(values)]


def replace(node: ir.Node, value: ir.Value) -> None:
    """Let what read `node` read `value`, in a graph's output by its name."""
    old = node.outputs[0]
    if old.is_graph_output():
        old.name, value.name = f"{old.name}.old", old.name
    old.replace_all_uses_with(value, replace_graph_outputs=True)


def normed_parts(
    norm: ir.Node, group: int, joined: dict[tuple[ir.Value, ...], ir.Value]
) -> tuple[list[ir.Value], list[int]]:
    """BN + ReLU of each `group` of the maps that a batch norm reads through a Concat, and where but the first start."""
    maker = norm.inputs[0].producer()
    sources = maker.inputs if maker is not None and maker.op_type == "Concat" else norm.inputs[:1]
    groups = [tuple(sources[i : i + group]) for i in range(0, len(sources), group)]
    starts = np.cumsum([sum(value.shape[1] for value in values) for values in groups])[:-1].tolist()
    pieces = [np.split(array(value), starts) for value in norm.inputs[1:]]
    parts = []
    for number, (values, *four) in enumerate(zip(groups, *pieces, strict=True)):
        if values not in joined:
            joined[values] = values[0] if len(values) == 1 else insert_before(norm, "Concat", values, axis=1)
        names = [f"{norm.outputs[0].name}.{number}.{which}" for which in range(4)]
        facts = [constant(norm.graph, name, one) for name, one in zip(names, four, strict=True)]
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        normed = insert_before(norm, "BatchNormalization", [joined[values], *facts], epsilon=epsilon)
        parts.append(insert_before(norm, "Relu", [normed]))
    return parts, starts


VARIANTS: dict[str, tuple[Callable[[ir.Model], None], ...]] = {
    "as it is": (),
    "clamp": (bound_channels,),
    "depthwise": (depthwise,),
    "nested": (nested,),
    "norm_first": (norm_first,),
    "nested, clamp": (nested, bound_channels),
    "split": (split,),
    "split by 8": (functools.partial(split, group=8),),
    "split by 8, clamp": (functools.partial(split, group=8), bound_channels),
}


@dataclass
class Trial:
    """One variant, ready to run: `ways` are timed in turns, `best` keeps the least milliseconds an image of each."""

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
@click.option("--only", multiple=True, type=click.Choice(list(VARIANTS)[1:]), help="These, and the file as it is.")
def main(file: Path, rounds: int, only: tuple[str, ...]) -> None:
    model = file.read_bytes()
    size = read_graph(model).graph.inputs[0].shape[2]
    images = np.random.default_rng(0).integers(0, 256, (4, 1, size, size), dtype=np.uint8)
    core = import_openvino().Core()
    chosen = ["as it is", *(only or list(VARIANTS)[1:])]
    trials = {name: prepare(model, name, core, images) for name in chosen}
    best: dict[tuple[str, str], float] = {}
    layers: dict[str, dict[str, float]] = {name: {} for name in chosen}
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
