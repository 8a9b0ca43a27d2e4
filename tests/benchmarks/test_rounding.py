"""Rounding single layers to bfloat16: values by hand, and the layer that changes the embedding."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "rounding.py"))


def test_rounded_values_by_hand(script: dict[str, Any]) -> None:
    """bfloat16 has 8 bits of precision: the numbers next to 1 are 1 - 2^-8 and 1 + 2^-7."""
    assert script["rounded"](np.array([1 + 2**-9, 1 - 2**-8, 3.0])).tolist() == [1, 1 - 2**-8, 3]


def test_the_change_of_one_layer(
    script: dict[str, Any], tiny_model: Path, make_xray: Callable[..., NDArray[np.uint8]]
) -> None:
    """Rounding the weights changes nothing if bfloat16 holds them exactly."""
    model = onnx.load(tiny_model)
    kernel = next(tensor for tensor in model.graph.initializer if tensor.name == "kernel")
    coarse = script["rounded"](numpy_helper.to_array(kernel)).astype(np.float32)
    kernel.CopyFrom(numpy_helper.from_array(coarse, "kernel"))
    pixels = np.stack([make_xray(seed, 32)[None] for seed in range(8)])
    ((_, _, of_fine_weights),) = script["changes"](tiny_model.read_bytes(), pixels)
    ((name, of_input, of_weights),) = script["changes"](model.SerializeToString(), pixels)
    assert name.startswith("Conv:") and 1e-8 < of_input < 1e-3
    assert of_weights == 0 < of_fine_weights < 1e-3
