"""Binary cross-entropy on a conventional classifier: the paper's baseline "DenseNet w/ BCE"."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from cbmir.training.model import LinearHead


class BCELoss(nn.Module):
    """Unweighted multi-label binary cross-entropy: the sum over known labels, the mean over the batch."""

    def __init__(self, targets: Tensor, *, negative: bool) -> None:
        super().__init__()

    def forward(self, head: LinearHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        terms = functional.binary_cross_entropy_with_logits(
            head.logits(pooled), targets.nan_to_num(0), reduction="none"
        )
        return terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()
