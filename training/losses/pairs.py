"""What the pairwise losses share: how many classes two images of a batch have in common."""

from __future__ import annotations

from torch import Tensor

from cbmir.training.losses.targets import with_negative_class


def shared_classes(targets: Tensor, *, negative: bool) -> Tensor:
    """Number of classes of which both images are positive: [N, C] in {0, 1, NaN} -> float32 [N, N].

    An unknown label counts as not positive. With `negative` the images without a finding share a class of their own;
    without it such an image shares nothing, not even with itself.
    """
    positive = ((with_negative_class(targets) if negative else targets) == 1).float()
    return positive @ positive.T
