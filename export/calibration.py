"""The ranges of a graph's activations over real images, one image at a time, so that memory stays flat.

What rounding one tensor to int8, and nothing else, does to the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tqdm import tqdm

from cbmir.errors import UserError, require
from cbmir.export.graph_rewrite import Floats, QuantizableGraph
from cbmir.process import available_threads
from cbmir.runtime.engines.ort import DISABLED_OPTIMIZERS


def check_percentile(percentile: float | None) -> None:
    """Raises UserError unless it is None or in (50, 100]."""
    if percentile is not None and not 50 < percentile <= 100:
        raise UserError(f"expected a percentile above 50, at most 100, found {percentile}")


def evenly_spread(images: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """At most so many of the images, spread over all of them."""
    return images[:: -(-len(images) // most)]


def channel_ranges(
    model: ModelProto, names: Sequence[str], images: NDArray[np.uint8]
) -> dict[str, tuple[Floats, Floats]]:
    """The least and the greatest value of each channel: two float64 [C] for every tensor [1, C, h, w] named."""
    low: dict[str, Floats] = {}
    high: dict[str, Floats] = {}
    for tensors in activations(model, names, images, "Channel ranges"):
        for name, tensor in zip(names, tensors, strict=True):
            least, most = tensor.min(axis=(0, 2, 3)), tensor.max(axis=(0, 2, 3))
            low[name] = np.minimum(low.get(name, np.inf), least, dtype=np.float64)
            high[name] = np.maximum(high.get(name, -np.inf), most, dtype=np.float64)
    return {name: (low[name], high[name]) for name in names}


def tensor_ranges(
    model: ModelProto, names: Sequence[str], images: NDArray[np.uint8], percentile: float | None = None
) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of each tensor named; with `percentile` p, the mean over the images of an
    image's own (100 - p)th and pth percentile, which a rare value moves little."""
    cuts = (0.0, 100.0) if percentile is None else (100 - percentile, percentile)
    found = [
        [np.percentile(tensor, cuts) if percentile is not None else (tensor.min(), tensor.max()) for tensor in tensors]
        for tensors in activations(model, names, images, "Ranges")
    ]
    low, high = np.moveaxis(np.array(found, np.float64), 2, 0)  # [2, M, T]
    if percentile is None:
        low, high = low.min(axis=0), high.max(axis=0)
    else:
        low, high = low.mean(axis=0), high.mean(axis=0)
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def activations(
    model: ModelProto, names: Sequence[str], images: NDArray[np.uint8], what: str
) -> Iterator[list[NDArray[np.float32]]]:
    """The tensors of these names for each image of uint8 [M, 1, S, S] alone, with a progress bar called `what`."""
    session = open_session(model, names)
    for image in tqdm(images, desc=what, unit="image", disable=None):
        yield session.run(list(names), {"image": image[None]})


def open_session(model: ModelProto, names: Sequence[str]) -> Any:
    """The graph in ONNX Runtime, with the tensors of these names among its outputs."""
    ort = require("onnxruntime", "export")
    watched = ModelProto()
    watched.CopyFrom(model)
    known = {output.name for output in model.graph.output}
    watched.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = available_threads()
    options.log_severity_level = 3  # a constant that nothing reads any more is no news
    return ort.InferenceSession(
        watched.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=DISABLED_OPTIMIZERS,
    )


#: Scale and zero point of a tensor: value = scale * (q - zero point), q in 0..255.
Grid = tuple[np.float32, np.uint8]


def turned_by_rounding(graph: QuantizableGraph, grids: dict[str, Grid], images: NDArray[np.uint8]) -> dict[str, float]:
    """1 - cosine of the embedding to its float one, in the mean over the images, with one tensor rounded at a time."""
    session = open_session(_with_rounding(graph, grids), [])

    def embedding(which: int) -> NDArray[np.float64]:
        feeds = {"image": images, "which": np.array(which, np.int64)}
        return np.asarray(session.run(["embedding"], feeds)[0], np.float64)

    exact = embedding(-1)
    numbered = tqdm(enumerate(grids), total=len(grids), desc="Sensitive layers", unit="tensor", disable=None)
    return {name: float(1 - (exact * embedding(number)).sum(axis=1).mean()) for number, name in numbered}


def _with_rounding(graph: QuantizableGraph, grids: dict[str, Grid]) -> ModelProto:
    """The float graph with one more input, `which`: the number of the tensor that is rounded, -1 for none."""
    model = ModelProto()
    model.CopyFrom(graph.model)
    model.graph.input.append(helper.make_tensor_value_info("which", TensorProto.INT64, []))
    del model.graph.node[:]
    number = {name: i for i, name in enumerate(grids)}
    for node in graph.nodes:
        reader = model.graph.node.add()
        reader.CopyFrom(node)
        reader.input[:] = [f"{name}.rounded" if name in number else name for name in node.input]
        for name in number.keys() & set(node.output):
            scale, zero = grids[name]
            model.graph.initializer.extend(
                numpy_helper.from_array(np.asarray(value), f"{name}.{what}")
                for what, value in (("scale", scale), ("zero", zero), ("number", np.int64(number[name])))
            )
            model.graph.node.append(helper.make_node("Equal", ["which", f"{name}.number"], [f"{name}.asked"]))
            grid = [f"{name}.scale", f"{name}.zero"]
            rounding = [
                helper.make_node("QuantizeLinear", [name, *grid], [f"{name}.int8"]),
                helper.make_node("DequantizeLinear", [f"{name}.int8", *grid], [f"{name}.yes"]),
            ]
            branches = {"then_branch": rounding, "else_branch": [helper.make_node("Identity", [name], [f"{name}.no"])]}
            model.graph.node.append(
                helper.make_node("If", [f"{name}.asked"], [f"{name}.rounded"], **{
                    branch: helper.make_graph(nodes, branch, [], [
                        helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
                    ])
                    for branch, nodes in branches.items()
                })
            )  # fmt: skip
    return model
