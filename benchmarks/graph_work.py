"""Rewritings of a DenseNet's ONNX graph that leave its function alone: is any of them faster?

    python benchmarks/graph_work.py model.onnx [--rounds 30] [--only clamp --only depthwise]

For each: the largest differences from the file as it is, in ONNX Runtime float32 and in OpenVINO bfloat16, and the
milliseconds an image (the least of all rounds, which take turns) in OpenVINO bfloat16 with one stream of two threads,
with two streams of one thread, in ONNX Runtime float32 with two threads, and summed over OpenVINO's layers with one
thread, each layer at its best. docs/performance.md tells what came of it.
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
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto

from cbmir.export.graph_rewrite import Graph, bound_channels, epsilon
from cbmir.runtime.engines.openvino import import_openvino

Array = NDArray[np.float32]


class TrialGraph(Graph):
    """What the trials need beyond what the product keeps: channels by name, maps joined once, a node's place taken."""

    def __init__(self, model: ModelProto) -> None:
        super().__init__(model)
        inferred = onnx.shape_inference.infer_shapes(self.model).graph
        values = (*inferred.value_info, *inferred.output)
        sides = {value.name: value.type.tensor_type.shape.dim for value in values}
        self.channels = {name: dims[1].dim_value for name, dims in sides.items() if len(dims) == 4}
        self._joined: dict[tuple[str, ...], str] = {}

    def join(self, names: tuple[str, ...]) -> str:
        """The maps joined, once for all who ask."""
        if names not in self._joined:
            self._joined[names] = names[0] if len(names) == 1 else self.add("Concat", names, axis=1)
        return self._joined[names]

    def replace(self, node: NodeProto, output: str) -> None:
        """Let what read `node` read `output`; a graph output keeps its name."""
        if node.output[0] in {value.name for value in self.model.graph.output}:
            maker = next(other for other in self.nodes if output in other.output)
            for reader in self.readers(output):
                reader.input[:] = [node.output[0] if name == output else name for name in reader.input]
            maker.output[0] = node.output[0]
            self.nodes.remove(node)
        else:
            for reader in self.readers(node.output[0]):
                reader.input[:] = [output if name == node.output[0] else name for name in reader.input]


def depthwise(model: ModelProto) -> ModelProto:
    """Each batch norm as a depthwise 1x1 convolution, into which an engine can fuse the ReLU."""
    graph = TrialGraph(model)
    for norm, _ in list(graph.norms()):
        slope, shift = graph.affine(norm)
        inputs = [norm.input[0], graph.constant(slope.reshape(-1, 1, 1, 1)), graph.constant(shift)]
        graph.replace(norm, graph.add("Conv", inputs, group=len(slope), kernel_shape=[1, 1]))
    return graph.finish()


def norm_first(model: ModelProto) -> ModelProto:
    """BN + ReLU on each map before they are joined: a Concat that nothing else reads may then cost no copy."""
    graph = TrialGraph(model)
    for norm, relu in list(graph.norms()):
        parts, _ = _normed_parts(graph, norm)
        if len(parts) > 1:
            graph.replace(relu, graph.add("Concat", parts, axis=1))
    return graph.finish()


def split(model: ModelProto, group: int = 1) -> ModelProto:
    """The 1x1 convolution of joined maps as the sum of a 1x1 convolution of each `group` of them.

    By one, nothing is joined; by more, a group that is complete is joined once, not again for each layer.
    """
    graph = TrialGraph(model)
    for norm, relu in list(graph.norms()):
        readers = graph.readers(relu.output[0])
        if len(readers) != 1 or not graph.is_pointwise(readers[0]):
            continue
        (conv,), (parts, starts) = readers, _normed_parts(graph, norm, group)
        terms = [
            graph.add("Conv", [part, graph.constant(piece), *(conv.input[2:] if not number else ())])
            for number, (part, piece) in enumerate(
                zip(parts, np.split(graph.array(conv.input[1]), starts, axis=1), strict=True)
            )
        ]
        total = terms[0]
        for term in terms[1:]:
            total = graph.add("Add", [total, term])
        graph.replace(conv, total)
    return graph.finish()


def nested(model: ModelProto) -> ModelProto:
    """Each Concat reads the one before it and the newest map, in place of all maps from the block's first."""
    graph, known = TrialGraph(model), {}
    for node in graph.nodes:
        if node.op_type == "Concat":
            sources = tuple(node.input)
            known[sources] = node.output[0]
            if sources[:-1] in known:
                node.input[:] = [known[sources[:-1]], sources[-1]]
    return graph.finish()


def _normed_parts(graph: TrialGraph, norm: NodeProto, group: int = 1) -> tuple[list[str], list[int]]:
    """BN + ReLU of each `group` of the maps that a batch norm reads through a Concat, and where but the first start."""
    maker = next((node for node in graph.nodes if norm.input[0] in node.output), None)
    sources = list(maker.input) if maker is not None and maker.op_type == "Concat" else [norm.input[0]]
    groups = [tuple(sources[i : i + group]) for i in range(0, len(sources), group)]
    starts = np.cumsum([sum(graph.channels[name] for name in names) for names in groups])[:-1].tolist()
    pieces = [np.split(graph.array(name), starts) for name in norm.input[1:]]
    parts = []
    for names, *four in zip(groups, *pieces, strict=True):
        normed = graph.add("BatchNormalization", [graph.join(names), *map(graph.constant, four)], epsilon=epsilon(norm))
        parts.append(graph.add("Relu", [normed]))
    return parts, starts


VARIANTS: dict[str, Callable[[ModelProto], ModelProto]] = {
    "as it is": lambda model: model,
    "clamp": bound_channels,
    "depthwise": depthwise,
    "nested": nested,
    "norm_first": norm_first,
    "nested, clamp": lambda model: bound_channels(nested(model)),
    "split": split,
    "split by 8": lambda model: split(model, 8),
    "split by 8, clamp": lambda model: bound_channels(split(model, 8)),
}


@dataclass
class Trial:
    """One variant, ready to run: `ways` are timed in turns, `best` keeps the least milliseconds an image of each."""

    ways: dict[str, Callable[[], None]]
    layers: Callable[[], dict[str, float]]
    answers: dict[str, list[Array]]


def prepare(model: ModelProto, core: Any, images: NDArray[np.uint8]) -> Trial:
    data = model.SerializeToString()
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
    model = onnx.load(file)
    size = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    images = np.random.default_rng(0).integers(0, 256, (4, 1, size, size), dtype=np.uint8)
    core = import_openvino().Core()
    chosen = ["as it is", *(only or list(VARIANTS)[1:])]
    trials = {name: prepare(VARIANTS[name](model), core, images) for name in chosen}
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
    click.echo(f"| | 1 - cosine, fp32 | 1 - cosine, bf16 | {' | '.join(ways)} | layers, 1 thread |")
    click.echo(f"|---|{'---|' * (len(ways) + 3)}")
    reference = trials["as it is"].answers["float32"][0].astype(np.float64)
    for name, trial in trials.items():
        far = [1 - (reference * trial.answers[kind][0]).sum(axis=1).min() for kind in ("float32", "bf16")]
        times = [f"{best[name, way]:.2f}" for way in ways]
        click.echo(f"| {name} | {far[0]:.1e} | {far[1]:.1e} | {' | '.join(times)} | {sum(layers[name].values()):.2f} |")


if __name__ == "__main__":
    main()
