"""Each loss against a brute-force version of its formula in float64, and against values computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from cbmir.choices import TRAINING_LOSSES
from cbmir.training.config import TrainConfig
from cbmir.training.losses import HASHING_LOSSES, LOSSES, BCELoss, MLProxyNCALoss, MultiLabelProxyLoss
from cbmir.training.losses.targets import class_weights, with_negative_class
from cbmir.training.model import LinearHead, ProxyHead

NAN = float("nan")
SIGMA = 0.7


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def problem(
    seed: int, counts: tuple[int, ...], labels: int, n: int = 12, dim: int = 5
) -> tuple[ProxyHead, Tensor, Tensor]:
    """A float64 head, unit embeddings and targets with unknown entries."""
    generator = torch.Generator().manual_seed(seed)
    head = ProxyHead(dim, counts, labels, SIGMA).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(sum(counts), dim, generator=generator, dtype=torch.float64))
    embedding = unit(torch.randn(n, dim, generator=generator, dtype=torch.float64))
    targets = torch.randint(0, 2, (n, labels), generator=generator).double()
    targets[torch.rand(n, labels, generator=generator) < 0.2] = NAN
    targets[0] = 0
    return head, embedding, targets


def gaussian(v: np.ndarray, p: np.ndarray) -> float:
    p = p / math.sqrt(sum(x * x for x in p))
    return math.exp(-sum((a - b) ** 2 for a, b in zip(v, p, strict=True)) / (2 * SIGMA**2))


def classes_of(head: ProxyHead) -> list[np.ndarray]:
    rows, starts = head.weight.detach().numpy(), np.cumsum([0, *head.counts])
    return [rows[a:b] for a, b in itertools.pairwise(starts)]


def extended(targets: np.ndarray) -> np.ndarray:
    column = []
    for row in targets:
        if any(v == 1 for v in row):
            column.append(0.0)
        elif all(v == 0 for v in row):
            column.append(1.0)
        else:
            column.append(NAN)
    return np.column_stack([targets, column])


def brute_proxy(head: ProxyHead, embedding: Tensor, targets: Tensor, training: Tensor, negative: bool) -> float:
    y, t = targets.numpy(), training.numpy()
    if negative:
        y, t = extended(y), extended(t)
    total = 0.0
    for v, row in zip(embedding.numpy(), y, strict=True):
        for j, proxies in enumerate(classes_of(head)):
            if math.isnan(row[j]):
                continue
            plus, minus = int((t[:, j] == 1).sum()), int((t[:, j] == 0).sum())
            s = sum(gaussian(v, p) for p in proxies) / len(proxies)
            total -= minus / (plus + minus) * row[j] * math.log(s)
            total -= plus / (plus + minus) * (1 - row[j]) * math.log(1 - s)
    return total / len(y)


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 3, 2), (1, 1, 1)])
def test_proxy_loss_is_that_of_the_paper_with_the_sign_corrected(counts: tuple[int, ...], negative: bool) -> None:
    head, embedding, targets = problem(3, (*counts, 2) if negative else counts, len(counts))
    loss = MultiLabelProxyLoss(targets, negative=negative)
    got = loss(head, embedding, embedding, targets)
    # the weights are float32, and log(1 - S) is kept finite by 1e-6
    assert got.item() == pytest.approx(brute_proxy(head, embedding, targets, targets, negative), rel=5e-6)


def test_proxy_loss_by_hand() -> None:
    """One class has one proxy at a right angle: d^2 = 2, S = exp(-2 / 0.98). With two images w+ = w- = 1/2."""
    head = ProxyHead(2, (1,), 1, SIGMA)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[3.0, 0.0]]))
    embedding = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    targets = torch.tensor([[1.0], [0.0]])
    s = math.exp(-2 / 0.98)
    expected = (0.5 * 2 / 0.98 - 0.5 * math.log(1 - s)) / 2
    assert MultiLabelProxyLoss(targets, negative=False)(head, embedding, embedding, targets).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_a_negative_is_pushed_away_and_a_positive_pulled() -> None:
    """This fails with the sign as printed in the paper, which would pull negatives towards the proxy."""
    head = ProxyHead(3, (1,), 1, SIGMA)
    embedding = unit(torch.tensor([[1.0, 0.4, 0.0]]))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0, 0.0]]))
    for value, direction in ((1.0, 1), (0.0, -1)):
        targets = torch.tensor([[value]])
        loss = MultiLabelProxyLoss(torch.tensor([[0.0], [1.0]]), negative=False)
        v = embedding.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(head, v, v, targets), v)
        assert math.copysign(1, -float(gradient[0] @ head.weight.detach()[0])) == direction


@pytest.mark.parametrize("negative", [True, False])
def test_proxy_loss_gradient(negative: bool) -> None:
    head, embedding, targets = problem(5, (2, 1, 3, 2) if negative else (2, 1, 3), 3, n=4)
    loss = MultiLabelProxyLoss(targets, negative=negative)
    proxies = head.weight.detach().clone().requires_grad_()

    def function(v: Tensor, p: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(_Bound(head, loss, targets), {"head.weight": p}, (v,))
        return result

    assert torch.autograd.gradcheck(function, (embedding.clone().requires_grad_(), proxies))


class _Bound(torch.nn.Module):
    def __init__(self, head: ProxyHead, loss: torch.nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.head, self.loss, self.targets = head, loss, targets

    def forward(self, v: Tensor) -> Tensor:
        result: Tensor = self.loss(self.head, v, v, self.targets)
        return result


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("distance", [0.0, 1e-7, 1e-4, 2.0])
def test_proxy_loss_is_finite_on_and_near_a_proxy_and_opposite_it(value: float, distance: float) -> None:
    head = ProxyHead(8, (2,), 1, SIGMA)
    direction = unit(torch.randn(8, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        head.weight.copy_(direction.expand(2, 8))
    pooled = -direction if distance == 2 else direction + distance
    v = unit(pooled[None]).requires_grad_()
    loss = MultiLabelProxyLoss(torch.tensor([[0.0], [1.0]]), negative=False)(head, v, v, torch.tensor([[value]]))
    loss.backward()
    assert torch.isfinite(loss) and v.grad is not None and torch.isfinite(v.grad).all()
    assert head.weight.grad is not None and torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("loss_type", [MultiLabelProxyLoss, BCELoss, MLProxyNCALoss])
@pytest.mark.parametrize("negative", [True, False])
def test_a_batch_without_known_labels_gives_zero(loss_type: type, negative: bool) -> None:
    training = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    head = LinearHead(4, 2) if loss_type is BCELoss else ProxyHead(4, (1, 1, 1) if negative else (1, 1), 2, SIGMA)
    v = unit(torch.randn(3, 4)).requires_grad_()
    loss = loss_type(training, negative=negative)(head, v, v, torch.full((3, 2), NAN))
    loss.backward()
    assert loss.item() == 0 and v.grad is not None and (v.grad == 0).all()


@pytest.mark.parametrize("loss_type", [MultiLabelProxyLoss, MLProxyNCALoss])
def test_a_class_without_positives_or_without_known_labels_stays_finite(loss_type: type) -> None:
    training = torch.tensor([[0.0, NAN, 1.0], [0.0, NAN, 0.0]])
    head = ProxyHead(4, (2, 2, 2), 3, SIGMA)
    v = unit(torch.randn(2, 4)).requires_grad_()
    loss = loss_type(training, negative=False)(head, v, v, training)
    loss.backward()
    assert torch.isfinite(loss) and v.grad is not None and torch.isfinite(v.grad).all()


def test_class_weights_count_known_labels_only() -> None:
    targets = torch.tensor([[1.0, NAN], [0.0, NAN], [0.0, NAN], [NAN, NAN]])
    plus, minus = class_weights(targets, balanced=True)
    assert plus.tolist() == pytest.approx([2 / 3, 0]) and minus.tolist() == pytest.approx([1 / 3, 0])


def test_without_balancing_all_class_weights_are_one() -> None:
    head, embedding, targets = problem(3, (2, 2, 2), 3)
    s = head.log_mean_similarity(embedding).exp()
    terms = torch.where(targets == 1, s.log(), (1 - s).log()).masked_fill(targets.isnan(), 0)
    loss = MultiLabelProxyLoss(targets, negative=False, balanced=False)
    assert loss(head, embedding, embedding, targets).item() == pytest.approx(-terms.sum(1).mean().item(), rel=1e-5)


def test_the_negative_class_follows_the_method() -> None:
    targets = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, NAN], [0.0, NAN], [NAN, NAN]])
    column = with_negative_class(targets)[:, 2].tolist()
    assert column[:3] == [1, 0, 0] and all(math.isnan(v) for v in column[3:])


def test_bce_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    head = LinearHead(4, 3).double()
    pooled = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (6, 3), generator=generator).double()
    targets[0, 0] = NAN
    total = 0.0
    for row, y in zip(head.logits(pooled).detach().numpy(), targets.numpy(), strict=True):
        for logit, value in zip(row, y, strict=True):
            p = 1 / (1 + math.exp(-logit))
            total -= 0.0 if math.isnan(value) else math.log(p) if value == 1 else math.log(1 - p)
    assert BCELoss(targets, negative=False)(head, pooled, pooled, targets).item() == pytest.approx(total / 6)


def test_balanced_bce_by_hand() -> None:
    """One of four is positive: w+ = 3/4, w- = 1/4. Logits are 0 everywhere, and cost log 2 each."""
    head = LinearHead(2, 1)
    with torch.no_grad():
        head.linear.weight.zero_(), head.linear.bias.zero_()
    targets = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    loss = BCELoss(targets, negative=False, balanced=True)(head, torch.ones(4, 2), torch.ones(4, 2), targets)
    assert loss.item() == pytest.approx((0.75 + 3 * 0.25) / 4 * math.log(2))


@pytest.mark.parametrize("negative", [True, False])
def test_ml_proxy_nca_by_brute_force(negative: bool) -> None:
    head, embedding, targets = problem(7, (1,) * (4 if negative else 3), 3)
    y = extended(targets.numpy()) if negative else targets.numpy()
    losses = []
    for v, row in zip(embedding.numpy(), y, strict=True):
        a = [gaussian(v, p[0]) for p in classes_of(head)]
        above = sum(x for x, value in zip(a, row, strict=True) if value == 1)
        below = sum(x for x, value in zip(a, row, strict=True) if not math.isnan(value))
        if above > 0:
            losses.append(-math.log(above / below))
    loss = MLProxyNCALoss(targets, negative=negative)(head, embedding, embedding, targets)
    assert loss.item() == pytest.approx(sum(losses) / len(losses))
    v = embedding.clone().requires_grad_()
    MLProxyNCALoss(targets, negative=negative)(head, v, v, targets).backward()
    assert v.grad is not None and torch.isfinite(v.grad).all()


def test_the_command_line_offers_every_loss_except_those_for_codes() -> None:
    assert [*TRAINING_LOSSES, *HASHING_LOSSES] == list(LOSSES)
    assert set().union(*TRAINING_LOSSES.values()) <= {field.name for field in fields(TrainConfig)}
