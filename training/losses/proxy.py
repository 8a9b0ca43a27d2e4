"""The paper's loss, its baselines ML-Proxy-NCA and BCE (a conventional classifier), and Proxy Anchor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cbmir.training.losses.targets import UnweightedLoss, WeightedLoss, with_negative_class
from cbmir.training.model import LinearHead, ProxyHead

# Keeps log(1 - S) and its gradient finite; 1e-6 is a few float32 steps near 1.
_EPSILON = 1e-6
# Proxy Anchor's scale and margin.
_ALPHA, _DELTA = 32.0, 0.1


class MultiLabelProxyLoss(WeightedLoss):
    """-sum_j [ w+_j y_j log S_j + w-_j (1 - y_j) log(1 - S_j) ], where S_j is the mean similarity to class j.

    The paper's eq. "loss_function", as a loss to minimise, with Gaussian similarity to proxies. The training set's
    `targets`, [N, C] in {0, 1, NaN}, determine the class weights. With `negative`, images without a finding form a
    class with its own proxies. Unless `balanced`, all weights are 1, so common findings count more than rare ones.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = True) -> None:
        super().__init__(with_negative_class(targets) if negative else targets, balanced=balanced)
        self.negative = negative

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        log_s = head.log_mean_similarity(embedding)
        log_not_s = torch.log(-torch.expm1(log_s) + _EPSILON)
        y = targets.nan_to_num(0)
        terms = self.positive_weight * y * log_s + self.negative_weight * (1 - y) * log_not_s
        return -terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()


class BCELoss(WeightedLoss):
    """Multi-label binary cross-entropy, summed over known labels and averaged over the batch.

    The paper's baseline has no weights; `balanced` adds the class weights of the proxy loss.
    """

    def __init__(self, targets: Tensor, *, negative: bool, balanced: bool = False) -> None:
        super().__init__(targets, balanced=balanced)

    def forward(self, head: LinearHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        y = targets.nan_to_num(0)
        weight = self.positive_weight * y + self.negative_weight * (1 - y)
        terms = weight * functional.binary_cross_entropy_with_logits(head.logits(pooled), y, reduction="none")
        return terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()


class MLProxyNCALoss(UnweightedLoss):
    """-log( sum_i y_i a_i / sum_j a_j ), where a_i is the Gaussian similarity to the only proxy of class i.

    The naive multi-label extension of Proxy-NCA, a baseline of the paper (eq. "proxynca"). Classes with an unknown
    label are left out of both sums. An image without a positive class has no loss (log 0); with `negative`, images
    without a finding are positive for the negative class, and have a loss too.
    """

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        log_a = head.log_mean_similarity(embedding)
        counted = (targets == 1).any(dim=1)
        # Rows that do not count get finite values: a NaN gradient would survive the mask below.
        positive = (targets == 1) | ~counted[:, None]
        known = ~targets.isnan() | ~counted[:, None]
        log_positive = torch.logsumexp(log_a.masked_fill(~positive, -torch.inf), dim=1)
        log_all = torch.logsumexp(log_a.masked_fill(~known, -torch.inf), dim=1)
        return (log_all - log_positive).masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


class ProxyAnchorLoss(UnweightedLoss):
    """mean_P+ log(1 + sum_X+ exp(-alpha (s - delta))) + mean_P log(1 + sum_X- exp(alpha (s + delta))).

    Kim, Kim, Cho and Kwak, "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020. s is the cosine between an image
    and the only proxy of a class, X+ and X- are the batch's positives and negatives of the class, P+ the classes with a
    positive in the batch. A class's hardest images weigh most. With `negative`, images without a finding are a class.

    The paper has one class per image. Here an image is a positive of every class whose label is 1, a negative of every
    class whose label is 0, and neither if the label is unknown. The paper divides the second sum by the number of all
    classes; here classes without any known label in the batch do not count. With full labels both are equal.
    """

    def forward(self, head: ProxyHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        if self.negative:
            targets = with_negative_class(targets)
        cosine = embedding @ functional.normalize(head.weight, dim=1).T
        pull = _log_one_plus_sum(-_ALPHA * (cosine - _DELTA), targets == 1)
        push = _log_one_plus_sum(_ALPHA * (cosine + _DELTA), targets == 0)
        with_positive, known = (targets == 1).any(dim=0).sum(), (~targets.isnan()).any(dim=0).sum()
        return pull.sum() / with_positive.clamp(min=1) + push.sum() / known.clamp(min=1)


def _log_one_plus_sum(exponent: Tensor, chosen: Tensor) -> Tensor:
    """Return log(1 + sum of exp over the chosen rows): two [N, K] -> [K]; 0 with zero gradient for an empty column."""
    one = exponent.new_zeros(1, exponent.shape[1])
    return torch.logsumexp(torch.cat([one, exponent.masked_fill(~chosen, -torch.inf)]), dim=0)
