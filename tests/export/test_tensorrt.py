"""TensorRT takes the exported graphs: parsed and built for a GPU that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX has wheels for Linux on x86_64 only")


@pytest.mark.parametrize("name", ["model.onnx", "model.fp16.onnx"])
def test_an_engine_is_built_with_a_dynamic_batch(name: str, tiny_export: Path) -> None:
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse((tiny_export / name).read_bytes())
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    image = network.get_input(0)
    assert image.dtype == trt.uint8 and image.shape[0] == -1
    outputs: list[Any] = [network.get_output(i) for i in range(network.num_outputs)]
    assert [(o.name, o.dtype) for o in outputs] == [
        ("embedding", trt.float32), ("scores", trt.float32), ("feature_map", trt.float32),
    ]  # fmt: skip

    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape(image.name, *[(batch, *image.shape[1:]) for batch in (1, 8, 32)])
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None and engine.nbytes > 0
