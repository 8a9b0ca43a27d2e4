"""Build TensorRT plans from exported ONNX files. TensorRT for RTX can build for a GPU that the machine does not have.

Networks are strongly typed: a plan computes in the precision of its source file.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from onnx import load_model_from_string

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import CardError, EngineError, ModelError, UserError, installing
from cbmir.files import replacing, write_json
from cbmir.runtime.engines.base import decode_head
from cbmir.runtime.engines.nvidia import current_gpu, find_tensorrt, tensorrt_logger
from cbmir.runtime.engines.tensorrt import PlanInfo, sidecar_of

log = logging.getLogger("cbmir")

#: The batch size that a plan is tuned for; it accepts 1 to `max_batch`.
OPTIMUM = 8
PRECISIONS = ("float32", "float16")


def resolve_target(target: str) -> str:
    """Return the name (sm86 …) of a target, also for `current`. Raises as `write_plan` if it cannot be built here."""
    return _builder_for(target)[2]


def write_plan(model: bytes, path: Path, target: str, max_batch: int = 32) -> None:
    """Build a plan from the bytes of a float32 or float16 file of `cbmir export`, and write it and its sidecar.

    The sidecar is written first, so that a plan always has one. Until the plan follows, an older plan does not match
    the SHA-256 in it and is refused.

    Args:
        target: A GPU's compute capability (sm75, sm86 …), or `current` for this machine's GPU. TensorRT for RTX builds
            for any GPU that it supports; TensorRT builds only for this machine's GPU.
        max_batch: The largest batch size that the plan accepts.

    Raises:
        ModelError: TensorRT's parser or builder refuses the file; the message quotes its errors.
        CardError: The file has no card.
        EngineError: Plans for the target cannot be built here.
        MissingDependencyError: TensorRT is not installed.
    """
    if max_batch < 1:
        raise UserError(f"expected a largest batch of at least 1, found {max_batch}")
    card, head = _card_and_head(model)
    trt, flavour, target = _builder_for(target)
    logger = tensorrt_logger(trt)
    builder = trt.Builder(logger)
    network = _parse(trt, builder, logger, model)
    _check_tensors(trt, network, card)
    config = _configure(trt, flavour, target, builder, network.get_input(0), max_batch)
    built = builder.build_serialized_network(network, config)
    if logger.warnings:
        log.info("TensorRT's warnings: %s", "; ".join(logger.warnings))
    if built is None:
        raise ModelError(f"{flavour} cannot build a plan for {target}: {'; '.join(logger.errors) or 'unknown reason'}")
    plan = bytes(built)
    info = PlanInfo(
        card=card.with_(versions=card.versions | {flavour: trt.__version__}), head=decode_head(head, card, path),
        target=target, max_batch=max_batch, flavour=flavour, version=trt.__version__,
        sha256=hashlib.sha256(plan).hexdigest(), source_sha256=hashlib.sha256(model).hexdigest(),
    )  # fmt: skip
    with replacing(path) as temporary:
        temporary.write_bytes(plan)
        write_json(sidecar_of(path), info.to_json())


def _card_and_head(model: bytes) -> tuple[ModelCard, str]:
    try:
        metadata = {entry.key: entry.value for entry in load_model_from_string(model).metadata_props}
    except Exception as error:  # protobuf's DecodeError is not part of onnx's interface
        raise ModelError(f"expected the bytes of an ONNX file of 'cbmir export', found others: {error}") from error
    if CARD_KEY not in metadata:
        raise CardError(f"expected a model card inside the ONNX file ({CARD_KEY}), found none; only files written by "
                        f"'cbmir export' can become a plan")  # fmt: skip
    card = ModelCard.loads(metadata[CARD_KEY])
    if card.precision not in PRECISIONS:
        raise ModelError(f"expected a file in {' or '.join(PRECISIONS)} for a TensorRT plan, found {card.precision}")
    return card, metadata.get(HEAD_KEY, "")


def _builder_for(target: str) -> tuple[Any, str, str]:
    """Return TensorRT's module, its flavour and the target's name. Raises EngineError, MissingDependencyError."""
    current = target == "current"
    trt, flavour = find_tensorrt() if current else find_tensorrt("tensorrt-rtx", "tensorrt")
    here = current_gpu().target if current or flavour == "tensorrt" else ""
    target = here if current else target
    if flavour == "tensorrt":
        if target != here:
            raise EngineError(f"TensorRT builds only for this machine's GPU ({here}), but {target} was requested; "
                              f"to build for others, {installing('tensorrt-rtx')}")  # fmt: skip
        return trt, flavour, target
    known = [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    if target not in known:
        raise EngineError(f"expected a target of {', '.join(known)}, or current, found {target!r} ({flavour} "
                          f"{trt.__version__} builds for no other)")  # fmt: skip
    return trt, flavour, target


def _parse(trt: Any, builder: Any, logger: Any, model: bytes) -> Any:
    flags = trt.NetworkDefinitionCreationFlag.__members__
    typed = 1 << int(flags["STRONGLY_TYPED"]) if "STRONGLY_TYPED" in flags else 0  # later versions have no other kind
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if parser.parse(model):
        return network
    errors = [parser.get_error(number) for number in range(parser.num_errors)]
    words = [f"node {e.node()} {e.node_name()!r} ({e.node_operator()}): {e.desc()}" if e.node() >= 0 else e.desc()
             for e in errors]  # fmt: skip
    raise ModelError(f"TensorRT's parser does not accept this file: {'; '.join(words or logger.errors)}")


def _check_tensors(trt: Any, network: Any, card: ModelCard) -> None:
    """Check inputs and outputs as TensorRT reads them; -1 is a dynamic dimension, allowed only for the batch."""
    size, dim = card.preprocess.crop, card.embedding_dim
    expected = {
        "image": (trt.uint8, (-1, 1, size, size)),
        "embedding": (trt.float32, (-1, dim)),
        "scores": (trt.float32, (-1, len(card.labels))),
        "feature_map": (trt.float32, (-1, dim, ...)),
    }
    if not card.has_findings:
        del expected["scores"]
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    found = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in tensors}
    seen = {name: (kind, (*shape[:2], ...) if len(shape) == 4 and name != "image" else shape)
            for name, (kind, shape) in found.items()}  # fmt: skip
    if seen != expected or -1 in found["feature_map"][1][1:]:
        raise ModelError(f"expected the tensors {expected}, TensorRT reads {found}; export the model again")


def _configure(trt: Any, flavour: str, target: str, builder: Any, image: Any, max_batch: int) -> Any:
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)  # limit of a plan's scratch memory
    profile = builder.create_optimization_profile()
    profile.set_shape(image.name, *((n, *image.shape[1:]) for n in (1, min(OPTIMUM, max_batch), max_batch)))
    config.add_optimization_profile(profile)
    if flavour == "tensorrt-rtx":
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # required for CUDA graphs
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.__members__[target.upper()], 0)
    return config
