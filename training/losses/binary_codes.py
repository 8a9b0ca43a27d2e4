"""The hashing baselines DSH, OSDH and SDH: losses that train binary codes of k bits. h is tanh of the layer's output.

As we read the papers, pairs and triplets come from one batch. Sums over them are means here, so that a loss does not
grow with the batch. Images are similar if they share a class; if an unknown label leaves that open, they do not form a
pair. With `negative`, images without a finding share a class. There are no class weights, even with `balanced`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cbmir.training.losses.targets import UnweightedLoss, shared_classes, similar_pairs
from cbmir.training.model import HashHead

# Weight of the relaxed code's distance from -1 or 1: alpha in DSH, beta in OSDH.
_QUANTISATION = 0.01
_SDH_ALPHA, _SDH_LAMBDA_1, _SDH_LAMBDA_2 = 1.0, 100.0, 0.001


class DSHLoss(UnweightedLoss):
    """Liu, Wang, Shan, Chen, "Deep supervised hashing for fast image retrieval", CVPR 2016, eq. 4.

    For each pair of images with raw network outputs b_1, b_2, where y = 0 for a similar pair and 1 for others:

        (1 - y) |b_1 - b_2|^2 / 2 + y max(m - |b_1 - b_2|^2, 0) / 2 + alpha (| |b_1| - 1 |_1 + | |b_2| - 1 |_1)

    with m = 2k and alpha = 0.01; float32 scalar, 0 for a batch without a pair.
    """

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes = head.relaxed(pooled)
        similar, dissimilar = similar_pairs(targets, negative=self.negative)
        distance = (codes[:, None] - codes).square().sum(dim=2)
        relaxation = (codes.abs() - 1).abs().sum(dim=1)
        terms = torch.where(similar, distance, (2 * codes.shape[1] - distance).clamp(min=0)) / 2
        return _mean(terms + _QUANTISATION * (relaxation[:, None] + relaxation), similar | dissimilar)


class OSDHLoss(UnweightedLoss):
    """Chen et al., "Order-sensitive deep hashing for multimorbidity medical image retrieval", MICCAI 2018.

    With the relaxed Hamming distance D(i, j) = (k - h_i . h_j) / 2, each query q of a batch gets

        sum over i, j with r_i > r_j of  (2^r_i - 2^r_j) / Z_q  max(0, D(q, i) - D(q, j) + rho)

    where r_i is the number of classes that i shares with q, so that a wrong order costs its difference in nDCG's gain.
    Two means over the images are added: the multi-label cross-entropy of a classifier on the codes (only known labels
    of findings, without weights), and the quantisation beta |h - sgn h|^2.

    The ranking term, as we read it, is that of Zhao et al., "Deep semantic ranking based hashing for multi-label image
    retrieval", CVPR 2015. Our choices: Z_q makes the weights of a query sum to 1, and a query without triplets does not
    count; rho = k / 8, so that four steps of similarity fit between equal codes and unrelated ones (D = k / 2); ranking
    and classification weigh the same; beta = 0.01 as in DSH.
    """

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes = head.relaxed(pooled).tanh()
        images, bits = codes.shape
        distance = (bits - codes @ codes.T) / 2
        hinge = (distance[:, :, None] - distance[:, None, :] + bits / 8).clamp(min=0)
        gain = shared_classes(targets, negative=self.negative).exp2()
        itself = torch.eye(images, dtype=torch.bool, device=codes.device)
        # i must not be the query. j never is, because the query shares most with itself.
        weight = (gain[:, :, None] - gain[:, None, :]).clamp(min=0).masked_fill(itself[:, :, None], 0)
        total = weight.sum(dim=(1, 2))
        # A triplet weighs at least 2 - 1, so the bounds below only matter without triplets.
        ranking = ((weight * hinge).sum(dim=(1, 2)) / total.clamp(min=1)).sum() / (total > 0).sum().clamp(min=1)

        logits, known = head.logits(pooled), targets.nan_to_num(0)
        terms = functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
        classification = terms.masked_fill(targets.isnan(), 0).sum(dim=1).mean()
        quantisation = (1 - codes.abs()).square().sum(dim=1).mean()
        return ranking + classification + _QUANTISATION * quantisation


class SDHLoss(UnweightedLoss):
    """Erin Liong, Lu, Wang, Moulin, Zhou, "Deep hashing for compact binary codes learning", CVPR 2015, supervised.

    With b = sgn(h) and W the hashing layer, as we read it:

        J = J_1 - lambda_1 J_2 + lambda_2 J_3 + lambda_3 J_4
        J_1 = |B - H|^2 / 2                                  quantisation
        J_2 = tr(H H^T / N) / 2 + alpha tr(S_B - S_W) / 2    variance of the bits; only similar pairs close together
        J_3 = |W W^T - I|^2 / 2                              independent bits

    where S_B and S_W are the means of (h_i - h_j)(h_i - h_j)^T over dissimilar and over similar pairs, so that their
    traces are mean squared distances; alpha = 1, lambda_1 = 100, lambda_2 = 0.001. The loss is usually negative, and 0
    for a batch of one image.

    The paper leaves open how to train on batches: here N, S_B and S_W are the batch's, and J_1 is a mean over images as
    J_2 is, so that their balance does not depend on the batch size. tr(H H^T / N) is the variance, and balances the
    bits, only if the mean of H is 0; here it is taken about the batch's mean, since otherwise one code for all images
    would maximise it. J_4 is the optimiser's weight decay.
    """

    def forward(self, head: HashHead, pooled: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        codes, weight = head.relaxed(pooled).tanh(), head.linear.weight
        if len(codes) < 2:
            return codes.sum() * 0
        quantisation = (1 - codes.abs()).square().sum(dim=1).mean() / 2
        distance = (codes[:, None] - codes).square().sum(dim=2)
        similar, dissimilar = similar_pairs(targets, negative=self.negative)
        scatter = _mean(distance, dissimilar) - _mean(distance, similar)
        variance = (codes.var(dim=0, correction=0).sum() + _SDH_ALPHA * scatter) / 2
        dependence = (weight @ weight.T - torch.eye(len(weight), device=weight.device)).square().sum() / 2
        return quantisation - _SDH_LAMBDA_1 * variance + _SDH_LAMBDA_2 * dependence


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the selected values, or 0 without any."""
    return values.masked_fill(~where, 0).sum() / where.sum().clamp(min=1)
