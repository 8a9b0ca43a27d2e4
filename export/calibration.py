"""Int8 calibration on real images: ranges of activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.errors import UserError, require
from cbmir.export.graph_rewrite import Floats
from cbmir.process import available_threads
from cbmir.runtime.engines.ort import DISABLED_OPTIMIZERS


def check_percentile(percentile: float | None) -> None:
    """Raise UserError unless `percentile` is None or in (50, 100]."""
    if percentile is not None and not 50 < percentile <= 100:
        raise UserError(f"expected a percentile above 50, at most 100, found {percentile}")


def channel_ranges(
    model: ir.Model, names: Sequence[str], images: NDArray[np.uint8]
) -> dict[str, tuple[Floats, Floats]]:
    """Return the smallest and largest value of each channel: two float64 [C] per named tensor [1, C, h, w]."""
    low: dict[str, Floats] = {}
    high: dict[str, Floats] = {}
    for tensors in activations(model, names, images, "Channel ranges"):
        for name, tensor in zip(names, tensors, strict=True):
            least, most = tensor.min(axis=(0, 2, 3)), tensor.max(axis=(0, 2, 3))
            low[name] = np.minimum(low.get(name, np.inf), least, dtype=np.float64)
            high[name] = np.maximum(high.get(name, -np.inf), most, dtype=np.float64)
    return {name: (low[name], high[name]) for name in names}


def tensor_ranges(
    model: ir.Model, names: Sequence[str], images: NDArray[np.uint8], percentile: float | None = None
) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each named tensor. With `percentile` p, the (100 - p)th and pth
    percentile per image, averaged over the images, so that rare values hardly count."""
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
    model: ir.Model, names: Sequence[str], images: NDArray[np.uint8], what: str
) -> Iterator[list[NDArray[np.float32]]]:
    """Yield the named tensors for each image of uint8 [M, 1, S, S], run one at a time to save memory."""
    session = open_session(model, names)
    for image in tqdm(images, desc=what, unit="image", disable=None):
        yield session.run(list(names), {"image": image[None]})


def open_session(model: ir.Model, names: Sequence[str]) -> Any:
    """Open an ONNX Runtime session that also outputs the named tensors."""
    ort = require("onnxruntime", "export")
    watched = ir.to_proto(model)
    known = {output.name for output in watched.graph.output}
    watched.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names if name not in known
    )
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = available_threads()
    options.log_severity_level = 3  # do not report unused constants
    providers = ["CPUExecutionProvider"]
    model_bytes = watched.SerializeToString()
    return ort.InferenceSession(model_bytes, options, providers=providers, disabled_optimizers=DISABLED_OPTIMIZERS)
