"""The ranges of a graph's activations over real images, one image at a time, so that memory stays flat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from tqdm import tqdm

from cbmir.errors import UserError, require
from cbmir.export.quantisable import Floats
from cbmir.runtime.engine import available_threads
from cbmir.runtime.onnx_engine import DISABLED_OPTIMIZERS


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
