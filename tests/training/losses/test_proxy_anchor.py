"""Proxy Anchor against loops in float64 and against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cbmir.training.losses.proxy import ProxyAnchorLoss
from cbmir.training.model import ProxyHead

NAN = float("nan")


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def head_of(proxies: Tensor) -> ProxyHead:
    head = ProxyHead(proxies.shape[1], (1,) * len(proxies), len(proxies)).to(proxies.dtype)
    with torch.no_grad():
        head.weight.copy_(proxies)
    return head


def problem(seed: int, classes: int, labels: int) -> tuple[ProxyHead, Tensor, Tensor]:
    """A float64 head, unit embeddings, and targets: the last label is always unknown, the others sometimes."""
    generator = torch.Generator().manual_seed(seed)
    head = head_of(torch.randn(classes, 5, generator=generator, dtype=torch.float64))
    embedding = unit(torch.randn(8, 5, generator=generator, dtype=torch.float64))
    targets = torch.randint(0, 2, (8, labels), generator=generator).double()
    targets[torch.rand(8, labels, generator=generator) < 0.2] = NAN
    targets[:, -1] = NAN
    targets[:, 0] = 0
    return head, embedding, targets


def extended(row: list[float]) -> list[float]:
    if 1 in row:
        return [*row, 0.0]
    return [*row, 1.0 if all(v == 0 for v in row) else NAN]


def brute(head: ProxyHead, embedding: Tensor, rows: list[list[float]]) -> float:
    pulls, pushes = [], []
    for column, proxy in enumerate(head.weight.detach()):
        cosine = [float(v @ unit(proxy)) for v in embedding]
        label = [row[column] for row in rows]
        positive = [c for c, y in zip(cosine, label, strict=True) if y == 1]
        negative = [c for c, y in zip(cosine, label, strict=True) if y == 0]
        if positive:
            pulls.append(math.log(1 + sum(math.exp(-32 * (c - 0.1)) for c in positive)))
        if positive or negative:
            pushes.append(math.log(1 + sum(math.exp(32 * (c + 0.1)) for c in negative)))
    return sum(pulls) / max(len(pulls), 1) + sum(pushes) / max(len(pushes), 1)


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_against_brute_force(seed: int, negative: bool) -> None:
    head, embedding, targets = problem(seed, 5 if negative else 4, 4)
    targets[0] = 0  # the only image known to be of the negative class
    rows = [extended(row) if negative else row for row in targets.tolist()]
    loss = ProxyAnchorLoss(targets, negative=negative)
    assert loss(head, embedding, embedding, targets).item() == pytest.approx(brute(head, embedding, rows))


def test_by_hand() -> None:
    """One image is at the proxy of its class, and at a right angle to the other class, which has no positives.

    Pull: log(1 + exp(-32 * 0.9)) from the only class with a positive. Push: log(1 + exp(32 * 0.1)) from the other
    class, divided by the two classes with known labels. A third class is unknown and does not count.
    """
    head = head_of(torch.eye(3, dtype=torch.float64))
    embedding = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0, NAN]], dtype=torch.float64)
    expected = math.log1p(math.exp(-28.8)) + math.log1p(math.exp(3.2)) / 2
    assert ProxyAnchorLoss(targets, negative=False)(head, embedding, embedding, targets).item() == pytest.approx(
        expected
    )


def test_an_unknown_label_has_no_gradient() -> None:
    head, embedding, _ = problem(3, 2, 2)
    targets = torch.tensor([[1.0, 0.0], [NAN, NAN], *[[0.0, 1.0]] * 6], dtype=torch.float64)
    v = embedding.clone().requires_grad_()
    ProxyAnchorLoss(targets, negative=False)(head, v, v, targets).backward()
    assert v.grad is not None and (v.grad[1] == 0).all() and (v.grad[0] != 0).any()


@pytest.mark.parametrize("negative", [True, False])
def test_a_batch_without_known_labels_gives_zero(negative: bool) -> None:
    head = ProxyHead(4, (1, 1, 1) if negative else (1, 1), 2)
    v = unit(torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    targets = torch.full((3, 2), NAN)
    loss = ProxyAnchorLoss(targets, negative=negative)(head, v, v, targets)
    loss.backward()
    assert loss.item() == 0 and v.grad is not None and (v.grad == 0).all()
    assert head.weight.grad is not None and (head.weight.grad == 0).all()


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_finite_in_float32_on_a_proxy_and_opposite_it(value: float, side: float) -> None:
    direction = unit(torch.randn(1, 8, generator=torch.Generator().manual_seed(1)))
    head, v = head_of(direction), (side * direction).expand(48, 8).clone().requires_grad_()
    targets = torch.full((48, 1), value)
    loss = ProxyAnchorLoss(targets, negative=False)(head, v, v, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert v.grad is not None and torch.isfinite(v.grad).all()
    assert head.weight.grad is not None and torch.isfinite(head.weight.grad).all()


def test_gradient() -> None:
    head, embedding, targets = problem(4, 5, 4)
    loss = ProxyAnchorLoss(targets, negative=True)
    assert torch.autograd.gradcheck(lambda v: loss(head, v, v, targets), embedding.clone().requires_grad_())


def test_training_pulls_images_to_the_proxies_of_all_their_labels() -> None:
    """There are eight images per combination of two labels; after some steps a proxy's cosine predicts its label."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.cartesian_prod(torch.arange(2), torch.arange(2)).float().repeat(2, 1)
    head = head_of(torch.randn(2, 6, generator=generator))
    features = torch.randn(8, 6, generator=generator, requires_grad=True)
    loss, optimiser = ProxyAnchorLoss(targets, negative=False), torch.optim.SGD([features, *head.parameters()], lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        loss(head, features, unit(features), targets).backward()
        optimiser.step()
    cosine = unit(features) @ unit(head.weight).T
    assert cosine[targets == 1].min() > cosine[targets == 0].max()
