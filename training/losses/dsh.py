"""DSH, a baseline of the paper: Liu, Wang, Shan, Chen, "Deep supervised hashing for fast image retrieval", CVPR 2016.

For each pair of images with network outputs b_1, b_2 of k values, not squashed (eq. 4; y = 0 for a similar pair):

    (1 - y) |b_1 - b_2|^2 / 2 + y max(m - |b_1 - b_2|^2, 0) / 2 + alpha (| |b_1| - 1 |_1 + | |b_2| - 1 |_1)

with m = 2k and alpha = 0.01. The pairs are all those of the mini-batch, as we read the paper, and its sum over them is
a mean here, so that the loss does not grow with the batch. Images are similar where they share a class; where an
unknown label leaves that open, they are no pair.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbmir.training.losses.targets import similar_pairs
from cbmir.training.model import HashHead

_ALPHA = 0.01


class DSHLoss(nn.Module):
    """The mean of the pair loss above over the pairs of a batch, float32 scalar; 0 for a batch without a pair.

    `negative`: images without a finding are similar to each other. It has no class weights, `balanced` or not.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes = head.relaxed(pooled)
        similar, dissimilar = similar_pairs(targets, negative=self.negative)
        distance = (codes[:, None] - codes).square().sum(dim=2)
        relaxation = (codes.abs() - 1).abs().sum(dim=1)
        terms = torch.where(similar, distance, (2 * codes.shape[1] - distance).clamp(min=0)) / 2
        terms = terms + _ALPHA * (relaxation[:, None] + relaxation)
        pairs = similar | dissimilar
        return terms.masked_fill(~pairs, 0).sum() / pairs.sum().clamp(min=1)
