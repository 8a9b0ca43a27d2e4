"""SDH, a baseline of the paper: Erin Liong, Lu, Wang, Moulin, Zhou, "Deep hashing for compact binary codes learning",
CVPR 2015, in its supervised, multi-label form.

With the codes' relaxation h = tanh(W x + c), b = sgn(h), and W the hashing layer, as we read it:

    J = J_1 - lambda_1 J_2 + lambda_2 J_3 + lambda_3 J_4
    J_1 = |B - H|^2 / 2                                  quantisation
    J_2 = tr(H H^T / N) / 2 + alpha tr(S_B - S_W) / 2    variance of the bits; dissimilar pairs apart, similar together
    J_3 = |W W^T - I|^2 / 2                              independent bits

where S_B and S_W are the means of (h_i - h_j)(h_i - h_j)^T over dissimilar and over similar pairs (those that share a
class; where an unknown label leaves that open, they are no pair), so that their traces are mean squared distances;
alpha = 1, lambda_1 = 100, lambda_2 = 0.001.

The paper leaves open how to train on batches: here N, S_B and S_W are the batch's, and J_1 is a mean over images as J_2
is, so that their balance does not depend on the batch size. tr(H H^T / N) is the variance, and balances the bits, only
where the mean of H is 0; here it is taken about the batch's mean, since one code for all images would maximise it
otherwise. J_4 is weight decay, which is the optimiser's. The network is the benchmark's encoder with this one layer, so
that J_3 is of this layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbmir.training.losses.targets import similar_pairs
from cbmir.training.model import HashHead

_ALPHA = 1.0
_LAMBDA_1 = 100.0
_LAMBDA_2 = 0.001


class SDHLoss(nn.Module):
    """J above over a batch, float32 scalar, most often negative; 0 for a batch of one image, which has no pair.

    `negative`: images without a finding are similar to each other. It has no class weights, `balanced` or not.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes, weight = head.relaxed(pooled).tanh(), head.linear.weight
        if len(codes) < 2:
            return codes.sum() * 0
        quantisation = (1 - codes.abs()).square().sum(dim=1).mean() / 2
        distance = (codes[:, None] - codes).square().sum(dim=2)
        similar, dissimilar = similar_pairs(targets, negative=self.negative)
        scatter = _mean(distance, dissimilar) - _mean(distance, similar)
        variance = (codes.var(dim=0, correction=0).sum() + _ALPHA * scatter) / 2
        dependence = (weight @ weight.T - torch.eye(len(weight), device=weight.device)).square().sum() / 2
        return quantisation - _LAMBDA_1 * variance + _LAMBDA_2 * dependence


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """The mean of the chosen values, 0 of none."""
    return values.masked_fill(~where, 0).sum() / where.sum().clamp(min=1)
