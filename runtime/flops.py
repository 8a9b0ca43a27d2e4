"""How much arithmetic a model is: counted from its ONNX file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from cbmir.errors import ModelError, require


def count_flops(path: Path) -> int:
    """Floating-point operations for one image, a multiply-add being two: of convolutions and matrix products, which
    are all but a few per cent of it. Raises ModelError for a graph whose shapes cannot be known."""
    onnx = require("onnx", "export")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = _shapes(graph)
    total = 0
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        weight, output = shapes.get(node.input[1], []), shapes.get(node.output[0], [])
        if not weight or not output or 0 in output:
            raise ModelError(f"{path}: the shape of {node.op_type} {node.output[0]} is not known; export it again")
        # Every output value is a sum over the weight's other dimensions: [M, C / groups, h, w], or the inner one.
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        summed = math.prod(weight[1:]) if node.op_type == "Conv" or transposed else weight[-2]
        total += 2 * math.prod(output) * summed
    return total


def _shapes(graph: Any) -> dict[str, list[int]]:
    """Name -> sides, 0 for one that is not known."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes[value.name] = [side.dim_value for side in value.type.tensor_type.shape.dim]
    return shapes
