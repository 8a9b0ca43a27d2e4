"""Feature maps of an encoder's stages, and the linear maps of distilled and fitted models on them."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.errors import EncoderError
from cbmir.training.encoders.patch_tokens import PatchTokens

_PROBE = 256  # pixels


def with_projection(encoder: nn.Module, dim: int, to: int) -> nn.Sequential:
    """Append a 1x1 convolution that maps the encoder's feature map from `dim` to `to` channels.

    It is linear and comes before the mean, so an embedding is still the mean of a feature map, and evidence maps remain
    exact.
    """
    return nn.Sequential(OrderedDict(encoder=encoder, projection=nn.Conv2d(dim, to, 1)))


class TwoStageEncoder(nn.Module):
    """An encoder with a linear map of two feature maps: its own, and that of an earlier stage with twice as many cells
    per side.

    [N, 1, S, S] -> [N, to, h, w] with the finer stage's cells; those of the last stage are repeated. The map comes
    before the mean, so an embedding is still the mean of a feature map. Raises EncoderError if the encoder has no such
    stage.
    """

    def __init__(self, encoder: nn.Module, to: int) -> None:
        super().__init__()
        self.encoder = encoder
        self._stage, finer, dim = finer_stage(encoder)
        self.projection = nn.Conv2d(dim, to, 1)
        self.finer = nn.Conv2d(finer, to, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        last, finer = stage_maps(self.encoder, self._stage, image)
        # Always in float32, because these maps depend on small differences.
        last, finer = aligned(self.projection(last.float()), finer.float())
        return last + cast(Tensor, self.finer(finer))


def aligned(last: Tensor, finer: Tensor) -> tuple[Tensor, Tensor]:
    """Return both feature maps with the same cells, repeating the last stage's. If the encoder halves an odd number of
    cells, the sizes may differ by a row or column; cells that only one stage has are left out."""
    twice = functional.interpolate(last, scale_factor=2, mode="nearest")
    height, width = (min(one, other) for one, other in zip(twice.shape[2:], finer.shape[2:], strict=True))
    return twice[:, :, :height, :width], finer[:, :, :height, :width]


def stage_maps(encoder: nn.Module, stage: str, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the encoder's feature map and that of its module named `stage`, [N, D, h, w] each."""
    found: list[Tensor] = []
    hook = encoder.get_submodule(stage).register_forward_hook(lambda module, given, output: found.append(output))
    try:
        return encoder(image), found[-1]
    finally:
        hook.remove()


@torch.inference_mode()
def finer_stage(encoder: nn.Module) -> tuple[str, int, int]:
    """Find the last stage with twice as many cells per side as the feature map; return its module name, its channels
    and the feature map's. Raises EncoderError if there is no such stage."""
    made: list[tuple[str, torch.Size]] = []

    def note(name: str, module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            made.append((name, output.shape))

    stages = [(name, module) for name, module in encoder.named_modules() if name and name.count(".") < 2]
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in stages]
    training, weight = encoder.training, next(encoder.parameters())
    finer = []
    if not isinstance(encoder, PatchTokens):  # whose stages all have the same cells
        last = encoder.eval()(weight.new_zeros(1, 1, _PROBE, _PROBE)).shape
        finer = [(name, shape) for name, shape in made if shape[2] == 2 * last[2]]
    encoder.train(training)
    for hook in hooks:
        hook.remove()
    if not finer:
        raise EncoderError("expected, for the linear fit, an encoder with a stage of twice as many cells as its last, "
                           "found none; choose another, or train without the fit, as with --recipe paper")  # fmt: skip
    name, shape = finer[-1]
    return name, int(shape[1]), int(last[1])
