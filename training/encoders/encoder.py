"""Image encoders by name, and the input that their published weights expect.

An encoder maps one grey channel, float [N, 1, S, S] in [-1, 1], to a feature map [N, D, h, w]; it has no pooling and no
classifier. Its name is that of a torchvision classification model, `timm:NAME`, `xrv:NAME` for a torchvision model
trained by torchxrayvision, or `rad-dino`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cbmir.card import ModelCard
from cbmir.errors import EncoderError, require
from cbmir.training.encoders.grey_range import RAD_DINO, SIGNED, XRV, GreyRange, read_grey
from cbmir.training.encoders.patch_tokens import PatchTokens, check_patches
from cbmir.training.encoders.stages import TwoStageEncoder, with_projection
from cbmir.training.encoders.weights import load_weights

# torchvision families whose forward() just chains their children.
_CHAINS = ("resnet", "resnext", "wide_resnet", "regnet", "shufflenet", "mnasnet")
_PROBES = (128, 256)
_SIZE = 224
_RAD_DINO_ARCHITECTURE = "vit_base_patch14_dinov2"


@dataclass(frozen=True)
class OwnInput:
    """The input that published weights expect: squares of `image_size` pixels, with grey values in `grey_range`."""

    image_size: int
    grey_range: GreyRange


_NOTHING_STATED = OwnInput(_SIZE, SIGNED)


def own_input(name: str) -> OwnInput:
    """Return the input that an encoder's library specifies, by default [-1, 1] and 224 pixels.

    For torchxrayvision it comes from `normalize` and the model URLs, for RAD-DINO from its image processor. Raises
    EncoderError for an unknown name.
    """
    if name == "rad-dino":
        return OwnInput(518, RAD_DINO)
    if name.startswith("xrv:"):
        return OwnInput(512 if name.startswith("xrv:resnet") else _SIZE, XRV)
    if name.startswith("timm:"):
        config = _timm_config(name[5:])
        known = config and config.mean and config.std
        return OwnInput(config.input_size[-1], GreyRange.of(config.mean, config.std)) if known else _NOTHING_STATED
    models = _known_to_torchvision(name)
    preset = models.get_model_weights(name).DEFAULT.transforms()
    return OwnInput(preset.crop_size[0], GreyRange.of(preset.mean, preset.std))


def grey_range_of(name: str, chosen: str = "auto") -> GreyRange:
    """Return the grey range that an option selects.

    Args:
        chosen: `own` for that of the encoder's published weights, `signed` for [-1, 1], or MEAN,STD of grey in [0, 1].
            `auto` means `own` for weights that were trained on X-rays (`xrv:NAME`, `rad-dino`), else `signed`.

    Raises:
        EncoderError: `chosen` or the encoder is unknown.
    """
    if chosen == "own" or (chosen == "auto" and (name == "rad-dino" or name.startswith("xrv:"))):
        return own_input(name).grey_range
    return SIGNED if chosen in ("auto", "signed") else GreyRange.parse(chosen)


def build_encoder(
    name: str, weights: str = "none", *, image_size: int = _SIZE, grey_range: GreyRange | None = None,
    complete: bool = False,
) -> tuple[nn.Module, int]:  # fmt: skip
    """Build an encoder.

    Args:
        name: A torchvision classification model, `timm:NAME`, `xrv:NAME` or `rad-dino`.
        weights: `none` (random), `imagenet` (the library's weights, which it downloads) or a file (`load_weights`).
        image_size: Side of the images in pixels; transformers are built for one size.
        grey_range: The values for black and white that the weights expect. None means `grey_range_of(name)`.
        complete: Whether the file must contain all of the encoder's tensors.

    Returns:
        The encoder in training mode, and its embedding dimension D.

    Raises:
        EncoderError: The name is unknown, the architecture has no feature map, or the image size or the weights do not
            fit.
    """
    grey_range = grey_range or grey_range_of(name)
    library_weights = weights == "imagenet"
    if library_weights and (name == "rad-dino" or name.startswith("xrv:")):
        raise EncoderError(f"encoder {name}: expected its weights as a file, found 'imagenet', which it lacks")
    if name.startswith("timm:") or name == "rad-dino":
        architecture = _RAD_DINO_ARCHITECTURE if name == "rad-dino" else name[5:]
        encoder = _timm(architecture, library_weights, grey_range.channels, image_size)
    else:
        encoder = _torchvision(name.removeprefix("xrv:"), library_weights, grey_range.channels)
    if weights not in ("none", "imagenet"):
        load_weights(encoder, Path(weights), complete=complete)
    if grey_range != SIGNED:
        read_grey(encoder, grey_range)
    if _is_transformer(encoder):
        tokens = PatchTokens(encoder)
        return tokens.train(), tokens.dimension
    dimension = _dimension(name, encoder.eval())
    return encoder.train(), dimension


def encoder_of(card: ModelCard) -> nn.Module:
    """Build the encoder that a card describes, with random weights and, if the model has one, its projection."""
    grey_range = GreyRange.from_json(card.training.get("grey_range"))
    encoder, dim = build_encoder(card.encoder, image_size=card.preprocess.crop, grey_range=grey_range)
    if "distilled_from" in card.training:
        return with_projection(encoder, dim, card.embedding_dim)
    return TwoStageEncoder(encoder, card.embedding_dim) if card.training.get("linear_fit") else encoder


def for_inference(name: str, encoder: nn.Module) -> nn.Module:
    """Return an equivalent encoder with the parallel branches of each block (RepVGG, MobileOne) fused.

    `name` is as in `build_encoder`. The given encoder does not change.
    """
    if not name.startswith("timm:"):
        return encoder
    fused: nn.Module = require("timm.utils", "train").reparameterize_model(encoder)
    return fused


@torch.inference_mode()
def _dimension(name: str, encoder: nn.Module) -> int:
    """Return D of the feature map [N, D, h, w]. Two image sizes check the layout: only h and w depend on the size."""
    try:
        small, large = (encoder(torch.zeros(1, 1, size, size)).shape for size in _PROBES)
    except (AssertionError, RuntimeError, ValueError) as error:  # a transformer has a fixed image size
        raise EncoderError(
            f"encoder {name}: does not accept images of {_PROBES[0]} pixels ({error}); choose another"
        ) from error
    if len(small) != 4 or small[1] != large[1] or not (small[2] < large[2] and small[3] < large[3]):
        raise EncoderError(
            f"encoder {name}: expected a feature map [N, D, h, w], found {list(small)}; choose a convolutional encoder "
            f"or a vision transformer of timm"
        )
    return int(small[1])


def _known_to_torchvision(name: str) -> Any:
    """Return the module `torchvision.models`. Raises EncoderError for a name that torchvision does not have."""
    models = require("torchvision.models", "train")
    if name not in models.list_models(module=models):
        raise EncoderError(
            f"expected a torchvision classification model such as densenet121 or resnet18, timm:NAME, xrv:NAME or "
            f"rad-dino; found {name!r}"
        )
    return models


def _torchvision(name: str, pretrained: bool, channels: int) -> nn.Module:
    models = _known_to_torchvision(name)
    model: nn.Module = models.get_model(name, weights="DEFAULT" if pretrained else None)
    children = dict(model.named_children())
    if "features" in children:
        layers = {"features": children["features"]}
        if name.startswith("densenet"):  # its last ReLU is in forward()
            layers["relu"] = nn.ReLU(inplace=True)
    elif name.startswith(_CHAINS):
        layers = {key: module for key, module in children.items() if key not in ("avgpool", "fc", "classifier")}
    else:
        raise EncoderError(f"encoder {name}: it provides no feature map; choose a DenseNet, ResNet, EfficientNet …")
    encoder = nn.Sequential(OrderedDict(layers))  # with torchvision's names, so that its weights fit
    if channels == 1:
        _read_one_channel(encoder)
    return encoder


def _timm_config(name: str) -> Any:
    """Return timm's configuration of a model's weights, or None. Raises EncoderError for an unknown name."""
    timm = require("timm", "train")
    if not timm.is_model(name):
        raise EncoderError(f"expected a timm model after 'timm:', found {name!r}; timm.list_models() names them")
    return timm.get_pretrained_cfg(name)


def _timm(name: str, pretrained: bool, channels: int, image_size: int) -> nn.Module:
    config, timm = _timm_config(name), require("timm", "train")
    options: dict[str, Any] = {"in_chans": channels, "num_classes": 0, "global_pool": ""}
    if config and config.fixed_input_size:
        options["img_size"] = image_size
    model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    if _is_transformer(model):
        check_patches(name, model, image_size)
    return model


def _is_transformer(encoder: nn.Module) -> bool:
    """Return whether the encoder returns tokens [N, T, D]: a few prefix tokens, then the patches of the image."""
    return hasattr(encoder, "num_prefix_tokens") and hasattr(encoder, "patch_embed")


def _read_one_channel(encoder: nn.Module) -> None:
    """Make the first three-channel convolution read one grey channel, by summing its weights over the channels."""
    for conv in encoder.modules():
        if isinstance(conv, nn.Conv2d) and conv.in_channels == 3 and conv.groups == 1:
            conv.weight = nn.Parameter(conv.weight.detach().sum(dim=1, keepdim=True))
            conv.in_channels = 1
            return
    raise EncoderError("no first convolution with three input channels found in this encoder")
