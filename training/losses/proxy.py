"""The multi-label proxy loss of the paper (eq. "loss_function", with the sign of METHOD.md)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbmir.training.losses.targets import class_weights, with_negative_class
from cbmir.training.model import ProxyHead

# Keeps log(1 - S) and its gradient finite where S reaches 1; 1e-6 is a few float32 steps at 1.
_EPSILON = 1e-6


class MultiLabelProxyLoss(nn.Module):
    """-sum_j [ w+_j y_j log S_j + w-_j (1 - y_j) log(1 - S_j) ], S_j the mean Gaussian similarity to class j.

    An image may belong to many proxies of many classes. `targets` are the training set's, [N, C] in {0, 1, NaN}: they
    give the class weights. With `negative` the images without a finding are a class of their own, with proxies. Not
    `balanced`: all weights are 1, so that common findings count more than rare ones.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = True) -> None:
        super().__init__()
        self.negative = negative
        positive_weight, negative_weight = class_weights(
            with_negative_class(targets) if negative else targets, balanced=balanced
        )
        self.register_buffer("positive_weight", positive_weight, persistent=False)
        self.register_buffer("negative_weight", negative_weight, persistent=False)
        self.positive_weight: Tensor
        self.negative_weight: Tensor

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        log_s = head.log_mean_similarity(embedding)
        log_not_s = torch.log(-torch.expm1(log_s) + _EPSILON)
        y = targets.nan_to_num(0)
        terms = self.positive_weight * y * log_s + self.negative_weight * (1 - y) * log_not_s
        return -terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()
