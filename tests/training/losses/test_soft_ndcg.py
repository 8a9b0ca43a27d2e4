"""The smooth nDCG against loops in float64, values computed by hand, and the metric that it bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cbmir.training.losses.proxy import MultiLabelProxyLoss
from cbmir.training.losses.soft_ndcg import SoftNDCGLoss, smooth_ndcg, without_own
from cbmir.training.metrics import add_negative_class, inner_products, positives, retrieval_values
from cbmir.training.model import ProxyHead

NAN = float("nan")


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def problem(seed: int, n: int = 10, labels: int = 3, negative: bool = False) -> tuple[ProxyHead, Tensor, Tensor]:
    """A float64 head, unit embeddings and targets with unknown entries."""
    generator = torch.Generator().manual_seed(seed)
    counts = (2,) * (labels + negative)
    head = ProxyHead(4, counts, labels).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(sum(counts), 4, generator=generator, dtype=torch.float64))
    embedding = unit(torch.randn(n, 4, generator=generator, dtype=torch.float64))
    targets = torch.randint(0, 2, (n, labels), generator=generator).double()
    targets[torch.rand(n, labels, generator=generator) < 0.15] = NAN
    targets[:2] = 0
    return head, embedding, targets


def true_ndcg(embedding: Tensor, targets: Tensor, *, negative: bool) -> np.ndarray:
    """nDCG of each image among the others of the batch, computed by the metric; NaN if it is undefined."""
    classes = (add_negative_class if negative else positives)(targets.numpy())
    similarity = inner_products(embedding.detach().numpy(), embedding.detach().numpy())
    everyone = [str(i) for i in range(len(targets))]
    return retrieval_values(similarity, classes, classes, everyone, everyone, k=len(targets)).ndcg


def smooth_step(t: float) -> float:
    """The step for a less relevant image that is t above."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    if t < 0:
        return sigmoid(t / 0.01)
    if t <= 0.05:
        return sigmoid(t / 0.01) + 0.5
    return 100 * (t - 0.05) + sigmoid(5) + 0.5


def brute_query(similarity: list[float], relevance: list[int]) -> float:
    dcg = 0.0
    for s, r in zip(similarity, relevance, strict=True):
        rank = 0.0
        for t, q in zip(similarity, relevance, strict=True):
            rank += smooth_step(t - s) if q < r else float(t >= s)
        dcg += (2**r - 1) / math.log2(1 + rank)
    best = sorted(relevance, reverse=True)
    return dcg / sum((2**r - 1) / math.log2(1 + n) for n, r in enumerate(best, 1))


@pytest.mark.parametrize("negative", [True, False])
def test_against_brute_force(negative: bool) -> None:
    head, embedding, targets = problem(0, negative=negative)
    rows = [[v == 1 for v in row] for row in targets.tolist()]
    if negative:
        rows = [[*own, all(v == 0 for v in row)] for own, row in zip(rows, targets.tolist(), strict=True)]
    mistakes = []
    for q, own in enumerate(rows):
        others = [i for i in range(len(rows)) if i != q]
        relevance = [sum(a and b for a, b in zip(own, rows[i], strict=True)) for i in others]
        if any(relevance):
            mistakes.append(1 - brute_query([float(embedding[q] @ embedding[i]) for i in others], relevance))
    assert len(mistakes) > 2 and (negative or len(mistakes) < len(rows))  # the first two have no finding
    loss = SoftNDCGLoss(targets, negative=negative)
    proxy = MultiLabelProxyLoss(targets, negative=negative)(head, embedding, embedding, targets).item()
    expected = 0.5 * sum(mistakes) / len(mistakes) + 0.5 * proxy
    assert loss(head, embedding, embedding, targets).item() == pytest.approx(expected)


def test_by_hand() -> None:
    """The images share 2, 0 and 1 labels, in order of similarity; the second is 0.15 above the third.

    The first has rank 1, except for smooth steps of sigmoid(-50) and sigmoid(-65). The third has its own 1, a full step
    for the first, and 100 * 0.1 + sigmoid(5) + 1/2 for the second.
    """
    ndcg = smooth_ndcg(torch.tensor([[0.9, 0.4, 0.25]]), torch.tensor([[2.0, 0.0, 1.0]]))
    rank = 1 + 1 + 10 + 1 / (1 + math.exp(-5)) + 0.5
    expected = (3 + 1 / math.log2(1 + rank)) / (3 + 1 / math.log2(3))
    assert ndcg.tolist() == pytest.approx([expected])


def test_perfect_order_approaches_one_as_the_temperature_falls_and_reversed_order_is_worse() -> None:
    relevance = torch.tensor([[3.0, 2.0, 2.0, 1.0, 0.0]])
    similarity = torch.tensor([[0.9, 0.87, 0.85, 0.83, 0.8]])
    values = [smooth_ndcg(similarity, relevance, temperature=t).item() for t in (0.1, 0.03, 0.01, 0.001)]
    assert values == sorted(values) and values[0] < 0.9 and values[-1] == pytest.approx(1, abs=1e-5)
    assert smooth_ndcg(similarity.flip(1), relevance).item() < values[2] - 0.2


def test_order_among_equals_does_not_matter() -> None:
    relevance = torch.tensor([[1.0, 1.0, 0.0]])
    assert smooth_ndcg(torch.tensor([[0.9, 0.5, 0.1]]), relevance).item() == pytest.approx(
        smooth_ndcg(torch.tensor([[0.5, 0.9, 0.1]]), relevance).item()
    )


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_never_above_the_true_ndcg(seed: int, negative: bool) -> None:
    _, embedding, targets = problem(seed, n=20, labels=4)
    classes = torch.from_numpy((add_negative_class if negative else positives)(targets.numpy())).double()
    bound = smooth_ndcg(without_own(embedding @ embedding.T), without_own(classes @ classes.T)).numpy()
    truth = true_ndcg(embedding, targets, negative=negative)
    known = ~np.isnan(truth)
    assert known.sum() > 10 and (bound[known] <= truth[known] + 1e-12).all() and (bound[known] > 0).all()


def test_the_query_image_is_left_out() -> None:
    assert without_own(torch.arange(9).view(3, 3)).tolist() == [[1, 2], [3, 5], [6, 7]]


def test_unknown_labels_are_not_shared() -> None:
    """The two images share a NaN but no finding: there is no ranking, only the proxy loss."""
    head, embedding, _ = problem(1, labels=2)
    targets = torch.tensor([[NAN, 1.0], [NAN, 0.0]], dtype=torch.float64)
    v = embedding[:2]
    proxy = MultiLabelProxyLoss(targets, negative=False)(head, v, v, targets)
    assert SoftNDCGLoss(targets, negative=False)(head, v, v, targets).item() == pytest.approx(proxy.item() / 2)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("negative", [True, False])
def test_a_batch_without_known_labels_gives_zero(negative: bool, n: int) -> None:
    head = ProxyHead(4, (2, 2, 2) if negative else (2, 2), 2)
    v = unit(torch.randn(n, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    loss = SoftNDCGLoss(torch.eye(2), negative=negative)(head, v, v, torch.full((n, 2), NAN))
    loss.backward()
    assert loss.item() == 0 and v.grad is not None and (v.grad == 0).all()


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 1.0])
def test_finite_in_float32_for_equal_and_spread_images(spread: float) -> None:
    generator = torch.Generator().manual_seed(2)
    v = unit(torch.ones(48, 8) + spread * torch.randn(48, 8, generator=generator)).requires_grad_()
    targets = torch.randint(0, 2, (48, 14), generator=generator).float()
    head = ProxyHead(8, (2,) * 15, 14)
    loss = SoftNDCGLoss(targets, negative=True)(head, v, v, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert v.grad is not None and torch.isfinite(v.grad).all()
    assert head.weight.grad is not None and torch.isfinite(head.weight.grad).all()


def test_gradient() -> None:
    """Check away from the jumps of the steps, which have no derivative."""
    _, embedding, targets = problem(6)
    positive = (targets == 1).double()
    relevance = without_own(positive @ positive.T)
    similarity = without_own(embedding @ embedding.T).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: smooth_ndcg(s, relevance), similarity)


def test_the_gradient_corrects_a_large_error() -> None:
    """At 0.8 above, a sigmoid with this temperature would be flat."""
    similarity = torch.tensor([[0.1, 0.9]], requires_grad=True)
    smooth_ndcg(similarity, torch.tensor([[1.0, 0.0]])).sum().backward()
    assert similarity.grad is not None and similarity.grad[0, 0] > 0.01 and similarity.grad[0, 1] < -0.01


def test_descent_raises_the_true_ndcg() -> None:
    """Only the ranking term is used, without proxies, starting from random features."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(24, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 2, (24, 3), generator=generator).float()
    relevance, optimiser = without_own(targets @ targets.T), torch.optim.SGD([features], lr=1.0)
    before = np.nanmean(true_ndcg(unit(features), targets, negative=False))
    for _ in range(60):
        embedding = unit(features)
        optimiser.zero_grad()
        (1 - smooth_ndcg(without_own(embedding @ embedding.T), relevance)).mean().backward()
        optimiser.step()
    after = np.nanmean(true_ndcg(unit(features), targets, negative=False))
    assert before < 0.8 and after > before + 0.1
