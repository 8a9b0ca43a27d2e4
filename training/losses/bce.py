"""Binary cross-entropy on a conventional classifier: the paper's baseline "DenseNet w/ BCE"."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cbmir.training.losses.targets import WeightedLoss
from cbmir.training.model import LinearHead


class BCELoss(WeightedLoss):
    """Multi-label binary cross-entropy: the sum over known labels, the mean over the batch.

    Not weighted as the paper's baseline; `balanced` gives it the class weights of the proxy loss.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__(targets, balanced=balanced)

    def forward(self, head: LinearHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        y = targets.nan_to_num(0)
        weight = self.positive_weight * y + self.negative_weight * (1 - y)
        terms = weight * functional.binary_cross_entropy_with_logits(head.logits(pooled), y, reduction="none")
        return terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()
