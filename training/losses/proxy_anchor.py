"""Proxy Anchor (Kim, Kim, Cho and Kwak, "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020) for many labels.

The paper has one class an image. Here an image is a positive of every class whose label is 1 and a negative of every
class whose label is 0; a class with an unknown label is told nothing about that image. The paper divides the second sum
by the number of all classes; here a class without any known label in the batch is not counted, so that with full labels
both are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.training.losses.targets import with_negative_class
from cbmir.training.model import ProxyHead

# The paper's scale and margin.
_ALPHA, _DELTA = 32.0, 0.1


class ProxyAnchorLoss(nn.Module):
    """mean_P+ log(1 + sum_X+ exp(-alpha (s - delta))) + mean_P log(1 + sum_X- exp(alpha (s + delta))).

    s is the cosine of an image and the one proxy of a class, X+ and X- are the batch's positives and negatives of the
    class, P+ the classes with a positive in the batch. The hardest images of a class weigh most. With `negative` the
    images without a finding are one more class. It has no class weights, `balanced` or not.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        cosine = embedding @ functional.normalize(head.weight, dim=1).T
        pull = _log_one_plus_sum(-_ALPHA * (cosine - _DELTA), targets == 1)
        push = _log_one_plus_sum(_ALPHA * (cosine + _DELTA), targets == 0)
        with_positive, known = (targets == 1).any(dim=0).sum(), (~targets.isnan()).any(dim=0).sum()
        return pull.sum() / with_positive.clamp(min=1) + push.sum() / known.clamp(min=1)


def _log_one_plus_sum(exponent: Tensor, chosen: Tensor) -> Tensor:
    """log(1 + the sum of exp over the chosen rows): two of [N, K] -> [K], 0 with zero gradient for an empty column."""
    one = exponent.new_zeros(1, exponent.shape[1])
    return torch.logsumexp(torch.cat([one, exponent.masked_fill(~chosen, -torch.inf)]), dim=0)
