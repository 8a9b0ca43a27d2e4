"""OSDH, a baseline of the paper: Chen et al., "Order-sensitive deep hashing for multimorbidity medical image
retrieval", MICCAI 2018.

With codes h in [-1, 1]^k and the relaxed Hamming distance D(i, j) = (k - h_i . h_j) / 2, each query q of a batch gets

    sum over i, j with r_i > r_j of  (2^r_i - 2^r_j) / Z_q  max(0, D(q, i) - D(q, j) + rho)

where r_i is the number of classes that i shares with q, so that a wrong order costs its difference in nDCG's gain. To
its mean over the queries come the multi-label cross-entropy of a classifier on the codes (known labels of the findings
only, not weighted) and the quantisation beta |h - sgn h|^2, each a mean over the images.

The ranking term, as we read it, is that of Zhao et al., "Deep semantic ranking based hashing for multi-label image
retrieval", CVPR 2015. The rest is chosen here: triplets are all those of the batch; Z_q makes the weights of a query
sum to 1, and a query without triplets does not count; h = tanh; rho = k / 8, so that four steps of similarity fit
between equal codes and unrelated ones (D = k / 2); ranking and classification weigh the same; beta = 0.01 as in DSH.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cbmir.training.losses.targets import shared_classes
from cbmir.training.model import HashHead

_BETA = 0.01


class OSDHLoss(nn.Module):
    """Ranking, classification and quantisation of a batch, float32 scalar; ranking is 0 without any triplet.

    `negative`: images without a finding share a class, in the ranking. It has no class weights, `balanced` or not.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes = head.relaxed(pooled).tanh()
        images, bits = codes.shape
        distance = (bits - codes @ codes.T) / 2
        hinge = (distance[:, :, None] - distance[:, None, :] + bits / 8).clamp(min=0)
        gain = shared_classes(targets, negative=self.negative).exp2()
        itself = torch.eye(images, dtype=torch.bool, device=codes.device)
        # The query is no i; it is never a j, as no image shares more with it than it does itself.
        weight = (gain[:, :, None] - gain[:, None, :]).clamp(min=0).masked_fill(itself[:, :, None], 0)
        total = weight.sum(dim=(1, 2))
        # A triplet weighs at least 2 - 1, so that the bounds below act only where there is none.
        ranking = ((weight * hinge).sum(dim=(1, 2)) / total.clamp(min=1)).sum() / (total > 0).sum().clamp(min=1)

        terms = functional.binary_cross_entropy_with_logits(
            head.logits(pooled), targets.nan_to_num(0), reduction="none"
        )
        classification = terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()
        quantisation = (1 - codes.abs()).square().sum(dim=1).mean()
        return ranking + classification + _BETA * quantisation
