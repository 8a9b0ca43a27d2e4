"""The context of a figure of speed: the machine that it was measured on, and the model's arithmetic."""

from __future__ import annotations

import math
import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from cbmir.errors import ModelError, require
from cbmir.process import available_threads


def count_flops(path: Path) -> int:
    """Floating-point operations for one image, a multiply-add being two: of convolutions and matrix products, which
    are all but a few per cent of it. Raises ModelError for a graph whose shapes cannot be known."""
    onnx = require("onnx", "export")
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):  # 0 for a side that is not known
        shapes[value.name] = [side.dim_value for side in value.type.tensor_type.shape.dim]
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


#: What a processor says of its matrix and vector instructions, the ones that decide a model's speed.
_FEATURES = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f", "avx_vnni", "avx2",
             "asimd", "bf16", "i8mm", "sve")  # fmt: skip


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """`processor` (its name), `processors` and `usable` (counts), `features` (list), `system`, `python`, and
    `packages`: name -> version of those that are installed."""
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "processor": name[1].strip() if name else platform.processor() or platform.machine(),
        "processors": os.cpu_count() or 1,
        "usable": available_threads(),
        "features": [feature for feature in _FEATURES if feature in has],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": versions("cbmir", "numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "torch"),
    }


def in_words(machine: dict[str, Any]) -> str:
    """Two lines of `describe_machine`'s answer."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['processor']}, {machine['usable']} of {machine['processors']} processors, "
        f"{' '.join(machine['features']) or 'no matrix instructions known'}\n"
        f"{machine['system']}, Python {machine['python']}, {packages}"
    )


def versions(*packages: str) -> dict[str, str]:
    """Name -> version of the packages that are installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
