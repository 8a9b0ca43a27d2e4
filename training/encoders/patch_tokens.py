"""The feature map of a vision transformer: its patch tokens, so that evidence is still an exact sum over cells."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cbmir.errors import EncoderError


class PatchTokens(nn.Module):
    """A vision transformer of timm: float [N, 1, S, S] -> its patch tokens after the last norm, [N, D, S/p, S/p].

    Class and register tokens take part in the attention and are then left out. The embedding is the mean of the patch
    tokens, so each cell contributes a part of it. The class token is not a sum over cells, and gives other neighbours.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        facts: Any = model
        self._prefix, self._grid = int(facts.num_prefix_tokens), tuple(facts.patch_embed.grid_size)
        self.dimension = int(facts.num_features)

    def forward(self, image: Tensor) -> Tensor:
        tokens: Tensor = self.model(image)  # [N, T, D], without pooling and classifier
        return tokens[:, self._prefix :].transpose(1, 2).reshape(-1, self.dimension, *self._grid)


def check_patches(name: str, model: nn.Module, image_size: int) -> None:
    """Raise EncoderError unless the image divides into whole patches."""
    embedding: Any = model.patch_embed
    patch = embedding.patch_size[0]
    if image_size % patch:
        below = image_size // patch * patch
        raise EncoderError(f"encoder {name}: expected an image size that its patches of {patch} pixels divide, found "
                           f"{image_size}; choose {below or patch} or {below + patch}")  # fmt: skip
