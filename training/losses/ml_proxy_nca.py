"""ML-Proxy-NCA: the naive multi-label extension of Proxy-NCA, a baseline of the paper (eq. "proxynca")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cbmir.training.losses.targets import with_negative_class
from cbmir.training.model import ProxyHead


class MLProxyNCALoss(nn.Module):
    """-log( sum_i y_i a_i / sum_j a_j ), a_i the Gaussian similarity to the one proxy of class i.

    Classes with an unknown label are left out of both sums. An image without a positive class has no loss (log 0); with
    `negative` the images without a finding are positive for the negative class, so that they are used too. It has no
    class weights, `balanced` or not.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        log_a = head.log_mean_similarity(embedding)
        counted = (targets == 1).any(dim=1)
        # Rows that do not count get finite stand-ins: a NaN gradient would survive the mask below.
        positive = (targets == 1) | ~counted[:, None]
        known = ~targets.isnan() | ~counted[:, None]
        log_positive = torch.logsumexp(log_a.masked_fill(~positive, -torch.inf), dim=1)
        log_all = torch.logsumexp(log_a.masked_fill(~known, -torch.inf), dim=1)
        return (log_all - log_positive).masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)
