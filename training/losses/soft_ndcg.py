"""A smooth nDCG of the batch, so that training optimises the metric itself (SupRank: Ramzi, Audebert, Rambour, Araujo,
Bitot and Thome, "Optimization of Rank Losses for Image Retrieval", IEEE TPAMI 2025, arXiv 2309.08250).

The rank of an image is a sum of steps, one for each image above it. For a less relevant image the step is smooth, is
never below the true step and keeps rising, so that gross mistakes keep their gradient. For a more or equally relevant
image it is the true step, which has no gradient. So the ranking term is never below 1 - nDCG. As in the paper, a second
loss, which does not depend on the batch, compensates for the difference between ranking a batch and the whole data set.

The paper ranks by a tree of classes; here relevance is the number of shared labels, as in `cbmir.training.metrics`. The
second loss is the multi-label proxy loss, which also trains the scores. The authors weight theirs by 0.1 or 0.5; here
the weight is 0.5, since a batch of 48 reveals little about the ranking of a whole gallery.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbmir.training.losses.proxy import MultiLabelProxyLoss
from cbmir.training.losses.targets import shared_classes
from cbmir.training.model import ProxyHead

_PROXY_SHARE = 0.5
# The authors' published settings, in cosine: width of the step, start of its straight part, and slope of that part.
_TEMPERATURE, _BEND, _SLOPE = 0.01, 0.05, 100.0


class SoftNDCGLoss(nn.Module):
    """(1 - share) * (1 - smooth nDCG) + share * the multi-label proxy loss, share = 0.5.

    Every image of the batch is a query, all others are its gallery, and relevance is the number of shared labels,
    including the negative class with `negative`. Queries that share no label with any other image are left out.
    `targets` and `balanced` are as in the proxy loss. Memory grows with the cube of the batch size: 0.4 MB per array
    at 48.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = True) -> None:
        super().__init__()
        self.negative = negative
        self.proxy = MultiLabelProxyLoss(targets, negative=negative, balanced=balanced)

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        relevance = without_own(shared_classes(targets, negative=self.negative))
        ranked = (relevance > 0).any(dim=1)
        mistakes = (1 - smooth_ndcg(without_own(embedding @ embedding.T), relevance)).masked_fill(~ranked, 0)
        ranking = mistakes.sum() / ranked.sum().clamp(min=1)
        proxy: Tensor = self.proxy(head, pooled, embedding, targets)
        return (1 - _PROXY_SHARE) * ranking + _PROXY_SHARE * proxy


def smooth_ndcg(similarity: Tensor, relevance: Tensor, *, temperature: float = _TEMPERATURE) -> Tensor:
    """Return a differentiable lower bound of each query's nDCG over its whole gallery; ties count as mistakes.

    similarity [Q, G] (cosine), relevance [Q, G] (shared labels r, gain 2^r - 1) -> [Q] in [0, 1]; 0 without an ideal.
    """
    difference = similarity[:, None, :] - similarity[:, :, None]  # [q, i, j]: by how much j is above i
    wrong = relevance[:, None, :] < relevance[:, :, None]  # j should not be above i
    step = (difference >= 0).to(similarity.dtype)
    smooth = torch.sigmoid(difference.clamp(max=_BEND) / temperature) + step / 2
    straight = _SLOPE * (difference - _BEND).clamp(min=0)
    # An image ties with itself, so ranks begin at 1.
    rank = torch.where(wrong, smooth + straight, step).sum(dim=2)
    gain = torch.exp2(relevance) - 1
    ideal_rank = torch.arange(1, gain.shape[1] + 1, dtype=similarity.dtype, device=gain.device)
    ideal = (gain.sort(dim=1, descending=True).values / torch.log2(1 + ideal_rank)).sum(dim=1)
    # An ideal above 0 is at least 1, the gain of one shared label at rank 1.
    return (gain / torch.log2(1 + rank)).sum(dim=1) / ideal.clamp(min=1)


def without_own(matrix: Tensor) -> Tensor:
    """Remove the diagonal, [B, B] -> [B, B - 1]: each image against all others."""
    others = ~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)
    return matrix[others].view(len(matrix), max(len(matrix) - 1, 0))
