"""Shared parts of the losses: the negative class, class weights from known labels, and which images share a class."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class UnweightedLoss(nn.Module):
    """A loss that does not use the training targets and has no class weights, even with `balanced`."""

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative


class WeightedLoss(nn.Module):
    """A loss with class weights from the training targets, [N, C] in {0, 1, NaN}; all are 1 unless `balanced`."""

    positive_weight: Tensor
    negative_weight: Tensor

    def __init__(self, targets: Tensor, *, balanced: bool) -> None:
        super().__init__()
        positive_weight, negative_weight = class_weights(targets, balanced=balanced)
        self.register_buffer("positive_weight", positive_weight, persistent=False)
        self.register_buffer("negative_weight", negative_weight, persistent=False)


def with_negative_class(targets: Tensor) -> Tensor:
    """Append the negative class to targets [N, C] -> [N, C + 1].

    It is 1 if every label is known to be 0, 0 if any label is 1, and NaN otherwise.
    """
    negative = torch.full_like(targets[:, 0], torch.nan)
    negative[(targets == 0).all(dim=1)] = 1
    negative[(targets == 1).any(dim=1)] = 0
    return torch.cat([targets, negative[:, None]], dim=1)


def class_weights(targets: Tensor, *, balanced: bool) -> tuple[Tensor, Tensor]:
    """Return w+_j = n-_j / (n+_j + n-_j) and w-_j = n+_j / (n+_j + n-_j) from known labels: [N, K] -> two of [K].

    A class without any known label gets (0, 0). Unless `balanced`, all weights are 1.
    """
    if not balanced:
        return torch.ones(targets.shape[1]), torch.ones(targets.shape[1])
    positive, negative = (targets == 1).sum(dim=0).double(), (targets == 0).sum(dim=0).double()
    known = (positive + negative).clamp(min=1)
    return (negative / known).float(), (positive / known).float()


def shared_classes(targets: Tensor, *, negative: bool) -> Tensor:
    """Count the classes for which both images are positive: [N, C] in {0, 1, NaN} -> float32 [N, N].

    An unknown label counts as not positive. With `negative`, images without a finding share a class; without it they
    share no class, even with themselves.
    """
    positive = ((with_negative_class(targets) if negative else targets) == 1).float()
    return positive @ positive.T


def similar_pairs(targets: Tensor, *, negative: bool) -> tuple[Tensor, Tensor]:
    """Return which pairs share a class and which certainly do not: [N, C] in {0, 1, NaN} -> two of bool [N, N].

    A pair that may share an unknown label is in neither, nor is an image with itself.
    """
    possible = ((with_negative_class(targets) if negative else targets) != 0).float()
    others = ~torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    return (shared_classes(targets, negative=negative) > 0) & others, (possible @ possible.T == 0) & others
