"""Metrics and losses against independent implementations, on data for which both are defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.losses import ProxyAnchorLoss as PeerProxyAnchorLoss
from pytorch_metric_learning.losses import ProxyNCALoss as PeerProxyNCALoss
from sklearn.metrics import ndcg_score, roc_auc_score
from torch import Tensor
from torch.nn import functional
from torchmetrics.functional.retrieval import retrieval_normalized_dcg

from cbmir.training.losses.proxy import MLProxyNCALoss, ProxyAnchorLoss
from cbmir.training.metrics import auc, inner_products, resampled_auc, retrieval_values
from cbmir.training.model import ProxyHead

CLASSES, DIM = 5, 6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_auc_agrees_with_scikit_learn_including_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 8, 100) / 8, rng.integers(0, 2, 100).astype(float)
    weights = rng.integers(0, 4, (3, 100)).astype(float)
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    peer = [roc_auc_score(labels, scores, sample_weight=w) for w in weights]
    assert resampled_auc(scores, labels, weights) == pytest.approx(peer)


def ndcg_of(
    query: NDArray[np.float64],
    gallery: NDArray[np.float64],
    own: NDArray[np.float32],
    theirs: NDArray[np.float32],
    *,
    k: int,
) -> NDArray[np.float64]:
    """Our nDCG, with a different patient for every image."""
    patients = [f"q{i}" for i in range(len(query))], [f"g{i}" for i in range(len(gallery))]
    return retrieval_values(inner_products(query, gallery), own, theirs, *patients, k=k).ndcg


@pytest.mark.parametrize("k", [1, 10, 40])
@pytest.mark.parametrize("codes", [False, True])
def test_ndcg_agrees_with_torchmetrics_and_scikit_learn(codes: bool, k: int) -> None:
    """Their gain is the target itself, so they get 2^r - 1. Six-bit codes have ties, over which all take averages."""
    rng = np.random.default_rng(k)
    query, gallery = rng.normal(size=(12, DIM)), rng.normal(size=(40, DIM))
    if codes:
        query, gallery = np.sign(query), np.sign(gallery)
    own, theirs = (rng.integers(0, 2, (n, 4)).astype(np.float32) for n in (12, 40))
    own[:, 0] = theirs[0, 0] = 1  # so that every query has an ideal
    values = ndcg_of(query, gallery, own, theirs, k=k)
    for q in range(12):
        similarity, gain = gallery @ query[q], np.exp2(theirs @ own[q]).astype(int) - 1
        peer = retrieval_normalized_dcg(torch.from_numpy(similarity), torch.from_numpy(gain), top_k=k)
        assert values[q] == pytest.approx(peer.item(), rel=1e-5)  # float32
        assert values[q] == pytest.approx(ndcg_score(gain[None], similarity[None], k=k))


def single_label_problem(present: list[int]) -> tuple[ProxyHead, Tensor, Tensor, Tensor]:
    """A head, unit embeddings [N, D], the class of each image [N], and the same as targets [N, C] without unknowns."""
    generator = torch.Generator().manual_seed(len(present))
    head = ProxyHead(DIM, (1,) * CLASSES, CLASSES).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(CLASSES, DIM, generator=generator, dtype=torch.float64))
    classes = torch.tensor(present * 3)
    embedding = functional.normalize(torch.randn(len(classes), DIM, generator=generator, dtype=torch.float64))
    return head, embedding, classes, functional.one_hot(classes, CLASSES).double()


def assert_same(ours: torch.nn.Module, peer: torch.nn.Module, present: list[int]) -> None:
    """Compare the value, and the gradients of embedding and proxies."""
    head, embedding, classes, targets = single_label_problem(present)
    peer.proxies = torch.nn.Parameter(head.weight.detach().clone())
    mine, theirs = embedding.clone().requires_grad_(), embedding.clone().requires_grad_()
    # The peer normalises its input; so must we, to get the same gradient of the embedding.
    unit = functional.normalize(mine)
    own, other = ours(head, unit, unit, targets), peer(theirs, classes)
    assert own.item() == pytest.approx(other.item(), rel=1e-9)
    own.backward(), other.backward()
    for a, b in ((mine.grad, theirs.grad), (head.weight.grad, peer.proxies.grad)):
        assert a is not None and b is not None and b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4], [0, 1, 3, 4]])
def test_ml_proxy_nca_with_one_label_per_image_is_proxy_nca(present: list[int]) -> None:
    """The peer's denominator also sums over all proxies; its scale of the square distance is 1 / (2 sigma^2)."""
    _, _, _, targets = single_label_problem(present)
    peer = PeerProxyNCALoss(num_classes=CLASSES, embedding_size=DIM, softmax_scale=1 / (2 * 0.7**2))
    assert_same(MLProxyNCALoss(targets, negative=False), peer, present)


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4], [0, 1, 3, 4]])
def test_proxy_anchor_with_one_label_per_image(present: list[int]) -> None:
    """With all classes in the batch or one missing: pull is divided by the classes present, push by all classes."""
    _, _, _, targets = single_label_problem(present)
    peer = PeerProxyAnchorLoss(num_classes=CLASSES, embedding_size=DIM, margin=0.1, alpha=32)
    assert_same(ProxyAnchorLoss(targets, negative=False), peer, present)
