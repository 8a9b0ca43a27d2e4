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
    """The encoder and a 1x1 convolution that maps its feature map from `dim` to `to` channels.

    It is linear and comes before the mean, so an embedding is still the mean of a feature map, and evidence maps are
    exact.
    """
    return nn.Sequential(OrderedDict(encoder=encoder, projection=nn.Conv2d(dim, to, 1)))


class TwoStageEncoder(nn.Module):
    """An encoder, and one linear map of its feature map together with that of an earlier stage with twice as many cells
    a side.

    [N, 1, S, S] -> [N, to, h, w] with the finer stage's cells; those of the last stage are repeated. The map comes
    before the mean, so an embedding is still the mean of a feature map. Raises EncoderError for an encoder without such
    a stage.
    """

    def __init__(self, encoder: nn.Module, to: int) -> None:
        super().__init__()
        self.encoder = encoder
        self._stage, finer, dim = finer_stage(encoder)
        self.projection = nn.Conv2d(dim, to, 1)
        self.finer = nn.Conv2d(finer, to, 1, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        last, finer = stage_maps(self.encoder, self._stage, image)
        # Always float32: these maps depend on small differences.
        last, finer = aligned(self.projection(last.float()), finer.float())
        return last + cast(Tensor, self.finer(finer))


def aligned(last: Tensor, finer: Tensor) -> tuple[Tensor, Tensor]:
    """Both feature maps with the same cells: the last stage's are repeated. An encoder may halve odd numbers so that
    the finer stage has a row or column more or fewer; cells that only one stage has are left out."""
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
    """The last stage with twice as many cells along each side: its name in the encoder, its channels and the last
    stage's.

    Raises EncoderError without such a stage.
    """
    made: list[tuple[str, torch.Size]] = []

    def note(name: str, module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            made.append((name, output.shape))

    stages = [(name, module) for name, module in encoder.named_modules() if name and name.count(".") < 2]
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in stages]
    training, weight = encoder.training, next(encoder.parameters())
    finer = []
    if not isinstance(encoder, PatchTokens):  # all stages have the same cells
        last = encoder.eval()(weight.new_zeros(1, 1, _PROBE, _PROBE)).shape
        finer = [(name, shape) for name, shape in made if shape[2] == 2 * last[2]]
    encoder.train(training)
    for hook in hooks:
        hook.remove()
    if not finer:
        raise EncoderError("expected an encoder with a stage of twice as many cells as its last, found none; train "
                           "with --no-linear-fit, or choose another")  # fmt: skip
    name, shape = finer[-1]
    return name, int(shape[1]), int(last[1])
