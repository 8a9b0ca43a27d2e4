"""What the pairwise losses share: how many classes two images of a batch have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from cbmir.training.losses.targets import with_negative_class


def shared_classes(targets: Tensor, *, negative: bool) -> Tensor:
    """Number of classes of which both images are positive: [N, C] in {0, 1, NaN} -> float32 [N, N].

    An unknown label counts as not positive. With `negative` the images without a finding share a class of their own;
    without it such an image shares nothing, not even with itself.
    """
    positive = ((with_negative_class(targets) if negative else targets) == 1).float()
    return positive @ positive.T


def similar_pairs(targets: Tensor, *, negative: bool) -> tuple[Tensor, Tensor]:
    """Which pairs share a class, and which surely share none: [N, C] in {0, 1, NaN} -> two of bool [N, N].

    An unknown label may be shared, so that such a pair is neither. An image is no pair with itself.
    """
    possible = ((with_negative_class(targets) if negative else targets) != 0).float()
    others = ~torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    return (shared_classes(targets, negative=negative) > 0) & others, (possible @ possible.T == 0) & others
