"""What rounding one tensor to int8, and nothing else, does to the embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tqdm import tqdm

from cbmir.export.calibrating import open_session
from cbmir.export.quantisable import Graph

#: Scale and zero point of a tensor: value = scale * (q - zero point), q in 0..255.
Grid = tuple[np.float32, np.uint8]


def turned_by_rounding(graph: Graph, grids: dict[str, Grid], images: NDArray[np.uint8]) -> dict[str, float]:
    """1 - cosine of the embedding to its float one, in the mean over the images, with one tensor rounded at a time."""
    session = open_session(_with_rounding(graph, grids), [])

    def embedding(which: int) -> NDArray[np.float64]:
        feeds = {"image": images, "which": np.array(which, np.int64)}
        return np.asarray(session.run(["embedding"], feeds)[0], np.float64)

    exact = embedding(-1)
    numbered = tqdm(enumerate(grids), total=len(grids), desc="Sensitive layers", unit="tensor", disable=None)
    return {name: float(1 - (exact * embedding(number)).sum(axis=1).mean()) for number, name in numbered}


def _with_rounding(graph: Graph, grids: dict[str, Grid]) -> ModelProto:
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
