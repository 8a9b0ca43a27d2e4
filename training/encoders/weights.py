"""Weights from a file: a state dict from PyTorch or safetensors, or a whole pickled model.

Code in a file never runs, because only the tensors of a pickled model are read.
"""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cbmir.errors import EncoderError, require
from cbmir.input_file import MOST_MODEL, open_input, read_input

log = logging.getLogger("cbmir")


def load_weights(encoder: nn.Module, path: Path, *, complete: bool = False) -> None:
    """Load weights from a file into an encoder; the log lists tensors that did not match.

    Tensor names are converted from Hugging Face's vision transformers to timm, and from torchvision's published
    DenseNet files to its modules. Position embeddings are resampled to the encoder's grid. Three-channel first
    convolutions are summed over the channels if the encoder reads one channel.

    Args:
        complete: Whether the file must contain all of the encoder's tensors. Missing ones keep their random values.

    Raises:
        EncoderError: The file cannot be read, fewer than half of the encoder's tensors match (training would silently
            start from noise), or one is missing although `complete` is set.
    """
    state = _in_timms_names(read_state(path))
    if hasattr(encoder, "patch_embed"):
        state = require("timm.models.vision_transformer", "train").checkpoint_filter_fn(state, encoder)
    prefix = re.compile(r"^(module\.)?(model\.)?(encoder\.)?")
    given = {_OLD_DENSENET.sub(r"\1\2.", prefix.sub("", key)): value
             for key, value in state.items() if _is_weight(key, value)}  # fmt: skip
    own = {key: value for key, value in encoder.state_dict().items() if _is_weight(key, value)}
    fitting = {}
    for key, value in own.items():
        found = given.get(key)
        if found is not None and found.ndim == 4 and found.shape[1] == 3 and value.shape[1] == 1:
            found = found.sum(dim=1, keepdim=True)
        if found is not None and found.shape == value.shape:
            fitting[key] = found
    missing, unused = sorted(own.keys() - fitting), sorted(given.keys() - fitting)
    if 2 * len(fitting) < len(own) or (complete and missing):
        raise EncoderError(
            f"{path}: only {len(fitting)} of the encoder's {len(own)} tensors have a match by name and shape "
            f"(first without: {', '.join(missing[:3])}; the file has {', '.join(unused[:3])} …); "
            f"use weights of this encoder"
        )
    encoder.load_state_dict(fitting, strict=False)
    log.info("Weights from %s: %d of %d tensors match.", path.name, len(fitting), len(own))
    if missing:
        log.warning("Left as initialised: %s", ", ".join(missing))
    if unused:
        log.warning("In the file and not used: %s", ", ".join(unused))


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the named tensors of a file. Raises EncoderError if it cannot be read."""
    try:
        if path.suffix == ".safetensors":
            open_input(path).close()  # checked here, because the library opens the path itself
            state: Any = require("safetensors.torch", "train").load_file(path)
        else:
            state = _unpickled(path)
    except EncoderError:
        raise
    except Exception as error:  # torch.load may raise anything
        raise EncoderError(f"{path}: expected a PyTorch state dict, found {type(error).__name__}: {error}") from error
    for key in ("state_dict", "model"):
        inner = state.get(key) if isinstance(state, dict) else None
        state = inner if isinstance(inner, dict) else state
    found = state if isinstance(state, dict) else dict(_tensors_of(state))
    return {str(key): value for key, value in found.items() if isinstance(value, Tensor)}


def _unpickled(path: Path) -> Any:
    try:
        with open_input(path) as stream:
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # a whole model, as torchxrayvision ships them
        content = BytesIO(read_input(path, MOST_MODEL))  # no path: PyTorch would try to unpack the file as a tar
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.serialization.SourceChangeWarning)  # the model's code is not used
            return torch.load(content, map_location="cpu", pickle_module=_INERT, weights_only=False)


class Inert:
    """A stand-in for any class or function that a pickled model names. It keeps its attributes and does nothing."""

    dump_patches = False

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __call__(self, *given: object) -> Inert:
        return self

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


#: Classes and functions that only create tensors and their containers.
_HARMLESS = {
    ("collections", "OrderedDict"), ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
}  # fmt: skip


class InertUnpickler(pickle.Unpickler):
    """An unpickler that creates tensors, and `Inert` in place of everything else."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if (module, name) in _HARMLESS else Inert


def _load(file: Any, **options: Any) -> Any:
    return InertUnpickler(file, **options).load()


_INERT = SimpleNamespace(Unpickler=InertUnpickler, load=_load, __name__="inert")


def _tensors_of(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a module that was unpickled as `Inert`, as in its state dict."""
    inside: Mapping[str, Any] = vars(module) if isinstance(module, Inert) else {}
    for kind in ("_parameters", "_buffers"):
        yield from ((prefix + name, value) for name, value in inside.get(kind, {}).items())
    for name, child in inside.get("_modules", {}).items():
        yield from _tensors_of(child, f"{prefix}{name}.")


#: Names of Hugging Face's ViT and DINOv2 tensors (files and models) -> timm's names.
_RENAMED = [(re.compile(pattern), name) for pattern, name in (
    (r"^embeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
)]  # fmt: skip
#: `norm.1` in torchvision's published DenseNet files is `norm1` in its modules.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")
_PATCHES = "embeddings.patch_embeddings.projection.weight"


def _in_timms_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Hugging Face vision transformer to timm's names; return other models unchanged."""
    prefix = next((key.removesuffix(_PATCHES) for key in state if key.endswith(_PATCHES)), None)
    if prefix is None:
        return state
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        key = key.removeprefix(prefix)
        for pattern, name in _RENAMED:
            key = pattern.sub(name, key)
        renamed[key] = value
    queries = [key for key in renamed if ".attn.q." in key]
    for key in queries:  # three tensors in a Hugging Face file, one in timm
        parts = [renamed.pop(key.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        renamed[key.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return renamed


def _is_weight(key: str, value: object) -> bool:
    # BatchNorm's batch counter is not a weight, and many files lack it.
    return isinstance(value, Tensor) and not key.endswith("num_batches_tracked")
