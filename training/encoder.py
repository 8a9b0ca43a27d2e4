"""Image encoders: any torchvision classification backbone by name, any timm model as `timm:NAME`.

An encoder maps one grey channel, float [N, 1, S, S] in [-1, 1], to a feature map [N, D, h, w]; classifier and pooling
are taken off. The first convolution reads one channel: its three input channels are summed, which is the same as
feeding it the grey image three times, at a third of the cost.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.card import ModelCard
from cbmir.errors import EncoderError, require

log = logging.getLogger("cbmir")

# torchvision families whose forward() is the chain of their children.
_CHAINS = ("resnet", "resnext", "wide_resnet", "regnet", "shufflenet", "mnasnet")
_PROBES = (128, 256)


def build_encoder(name: str, weights: str = "none") -> tuple[nn.Module, int]:
    """Build an encoder.

    Args:
        name: Of a torchvision classification model, or `timm:NAME`.
        weights: `none` (random), `imagenet` (the library's own, downloaded by it) or a file with a state dict.

    Returns:
        The encoder in training mode, and its embedding dimension D.

    Raises:
        EncoderError: An unknown name, an architecture without a feature map, or weights that do not fit.
    """
    library_weights = weights == "imagenet"
    encoder = _timm(name[5:], library_weights) if name.startswith("timm:") else _torchvision(name, library_weights)
    if weights not in ("none", "imagenet"):
        load_weights(encoder, Path(weights))
    dimension = _dimension(name, encoder.eval())
    return encoder.train(), dimension


def encoder_of(card: ModelCard) -> nn.Module:
    """The encoder that a card describes, with random weights and, where the model has one, its projection."""
    encoder, dim = build_encoder(card.encoder)
    if "distilled_from" in card.training:
        return with_projection(encoder, dim, card.embedding_dim)
    return TwoStageEncoder(encoder, card.embedding_dim) if card.training.get("linear_fit") else encoder


def with_projection(encoder: nn.Module, dim: int, to: int) -> nn.Sequential:
    """The encoder and a 1x1 convolution that takes its feature map from `dim` to `to` channels.

    It is linear and stands before the mean, so that an embedding is still the mean of a feature map, and the evidence
    maps are still exact.
    """
    return nn.Sequential(OrderedDict(encoder=encoder, projection=nn.Conv2d(dim, to, 1)))


class TwoStageEncoder(nn.Module):
    """An encoder, and one linear map of its feature map together with that of an earlier stage, which is twice as fine.

    [N, 1, S, S] -> [N, to, h, w] with the finer stage's cells: those of the last stage are repeated. The map stands
    before the mean, so that an embedding is still the mean of a feature map. Raises EncoderError for an encoder without
    such a stage.
    """

    def __init__(self, encoder: nn.Module, to: int) -> None:
        super().__init__()
        self.encoder = encoder
        self._stage, finer, dim = finer_stage(encoder)
        self.projection = nn.Conv2d(dim, to, 1)
        self.finer = nn.Conv2d(finer, to, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        last, finer = stage_maps(self.encoder, self._stage, image)
        # In float32 whatever the encoder's precision is: these maps tell small differences.
        last, finer = aligned(self.projection(last.float()), finer.float())
        return last + cast(Tensor, self.finer(finer))


def aligned(last: Tensor, finer: Tensor) -> tuple[Tensor, Tensor]:
    """Both feature maps with the same cells: the last stage's are repeated. The finer stage may have one row and column
    more or less than twice as many, by how an encoder halves odd numbers: what only one of them has is left out."""
    twice = functional.interpolate(last, scale_factor=2, mode="nearest")
    height, width = (min(one, other) for one, other in zip(twice.shape[2:], finer.shape[2:], strict=True))
    return twice[:, :, :height, :width], finer[:, :, :height, :width]


def stage_maps(encoder: nn.Module, stage: str, image: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's feature map and that of an earlier stage, a name of its modules: [N, D, h, w] each."""
    found: list[Tensor] = []
    hook = encoder.get_submodule(stage).register_forward_hook(lambda module, given, output: found.append(output))
    try:
        return encoder(image), found[-1]
    finally:
        hook.remove()


@torch.inference_mode()
def finer_stage(encoder: nn.Module) -> tuple[str, int, int]:
    """The last stage with twice as many cells along each side: its name in the encoder, its channels and the last's.

    Raises EncoderError where there is none.
    """
    made: list[tuple[str, torch.Size]] = []

    def note(name: str, module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            made.append((name, output.shape))

    stages = [(name, module) for name, module in encoder.named_modules() if name and name.count(".") < 2]
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in stages]
    training, weight = encoder.training, next(encoder.parameters())
    last = encoder.eval()(weight.new_zeros(1, 1, _PROBES[1], _PROBES[1])).shape
    encoder.train(training)
    for hook in hooks:
        hook.remove()
    finer = [(name, shape) for name, shape in made if shape[2] == 2 * last[2]]
    if not finer:
        raise EncoderError("expected an encoder with a stage of twice as many cells as its last, found none; train "
                           "with --no-linear-fit, or choose another")  # fmt: skip
    name, shape = finer[-1]
    return name, int(shape[1]), int(last[1])


def for_inference(name: str, encoder: nn.Module) -> nn.Module:
    """An encoder that answers as this one does, a block's parallel branches (RepVGG, MobileOne) made one convolution.

    `name` is that of `build_encoder`. The encoder itself is not changed.
    """
    if not name.startswith("timm:"):
        return encoder
    fused: nn.Module = require("timm.utils", "train").reparameterize_model(encoder)
    return fused


@torch.inference_mode()
def _dimension(name: str, encoder: nn.Module) -> int:
    """D of a feature map [N, D, h, w]. Two sizes tell: h and w follow the image, D does not."""
    try:
        small, large = (encoder(torch.zeros(1, 1, size, size)).shape for size in _PROBES)
    except (AssertionError, RuntimeError, ValueError) as error:  # a transformer of a fixed image size
        raise EncoderError(
            f"encoder {name}: takes no image of {_PROBES[0]} pixels ({error}); choose another"
        ) from error
    if len(small) != 4 or small[1] != large[1] or not (small[2] < large[2] and small[3] < large[3]):
        raise EncoderError(
            f"encoder {name}: expected a feature map [N, D, h, w], found {list(small)}; choose a convolutional encoder"
        )
    return int(small[1])


def load_weights(encoder: nn.Module, path: Path) -> None:
    """Load a state dict into an encoder; what did not match is listed in the log.

    Three-channel first convolutions are summed to one. Raises EncoderError when the file is no state dict or when
    less than half of the encoder's tensors find their match, since training would then start from noise unnoticed.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise EncoderError(f"{path}: expected a PyTorch state dict, found {type(error).__name__}: {error}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else {}
    prefix = re.compile(r"^(module\.)?(model\.)?(encoder\.)?")
    given = {prefix.sub("", key): value for key, value in state.items() if _is_weight(key, value)}
    own = {key: value for key, value in encoder.state_dict().items() if _is_weight(key, value)}
    fitting = {}
    for key, value in own.items():
        found = given.get(key)
        if found is not None and found.ndim == 4 and found.shape[1] == 3 and value.shape[1] == 1:
            found = found.sum(dim=1, keepdim=True)
        if found is not None and found.shape == value.shape:
            fitting[key] = found
    missing, unused = sorted(own.keys() - fitting), sorted(given.keys() - fitting)
    if 2 * len(fitting) < len(own):
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


def _is_weight(key: str, value: object) -> bool:
    # BatchNorm's batch counter is no weight, and many files leave it out.
    return isinstance(value, Tensor) and not key.endswith("num_batches_tracked")


def _torchvision(name: str, pretrained: bool) -> nn.Module:
    models = require("torchvision.models", "train")
    if name not in models.list_models(module=models):
        raise EncoderError(
            f"expected a torchvision classification model such as densenet121 or resnet18, or timm:NAME; found {name!r}"
        )
    model: nn.Module = models.get_model(name, weights="DEFAULT" if pretrained else None)
    children = dict(model.named_children())
    if "features" in children:
        layers = {"features": children["features"]}
        if name.startswith("densenet"):  # its last ReLU lives in forward()
            layers["relu"] = nn.ReLU(inplace=True)
    elif name.startswith(_CHAINS):
        layers = {key: module for key, module in children.items() if key not in ("avgpool", "fc", "classifier")}
    else:
        raise EncoderError(f"encoder {name}: no feature map to take from it; choose a DenseNet, ResNet, EfficientNet …")
    encoder = nn.Sequential(OrderedDict(layers))  # under torchvision's own names, so that its weights fit
    _read_one_channel(encoder)
    return encoder


def _timm(name: str, pretrained: bool) -> nn.Module:
    timm = require("timm", "train")
    if not timm.is_model(name):
        raise EncoderError(f"expected a timm model after 'timm:', found {name!r}; timm.list_models() names them")
    model: nn.Module = timm.create_model(name, pretrained=pretrained, in_chans=1, num_classes=0, global_pool="")
    return model


def _read_one_channel(encoder: nn.Module) -> None:
    """Make the first three-channel convolution read grey: its weights summed over the channels."""
    for conv in encoder.modules():
        if isinstance(conv, nn.Conv2d) and conv.in_channels == 3 and conv.groups == 1:
            conv.weight = nn.Parameter(conv.weight.detach().sum(dim=1, keepdim=True))
            conv.in_channels = 1
            return
    raise EncoderError("no first convolution with three input channels found in this encoder")
