"""Each hashing loss against loops written from its formula, and against values computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cbmir.training.losses.binary_codes import DSHLoss, OSDHLoss, SDHLoss
from cbmir.training.losses.targets import shared_classes
from cbmir.training.model import HashHead

NAN = float("nan")
LOSSES = [DSHLoss, SDHLoss, OSDHLoss]
HashingLoss = DSHLoss | SDHLoss | OSDHLoss


def make_head(dim: int, bits: int, labels: int) -> HashHead:
    return HashHead(dim, bits, labels, classifier=True)


def identity(bits: int, labels: int) -> HashHead:
    """A head whose relaxed codes are the features, and whose classifier always returns logit 0."""
    head = make_head(bits, bits, labels)
    assert head.classifier is not None
    with torch.no_grad():
        head.linear.weight.copy_(torch.eye(bits))
        for parameter in (head.linear.bias, head.classifier.weight, head.classifier.bias):
            parameter.zero_()
    return head


def value(loss: HashingLoss, head: HashHead, features: Tensor, targets: Tensor) -> Tensor:
    result: Tensor = loss(head, features, features, targets)
    return result


def problem(seed: int, n: int = 9, dim: int = 5, bits: int = 6, labels: int = 4) -> tuple[HashHead, Tensor, Tensor]:
    """A float64 head, features, and targets with unknown entries, an image without findings and one without labels."""
    generator = torch.Generator().manual_seed(seed)
    head = make_head(dim, bits, labels).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    features = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (n, labels), generator=generator).double()
    targets[torch.rand(n, labels, generator=generator) < 0.2] = NAN
    targets[0], targets[1], targets[2] = 0, 0, NAN
    return head, features, targets


def classes(row: list[float], negative: bool) -> set[int]:
    own = {j for j, v in enumerate(row) if v == 1}
    return {-1} if negative and all(v == 0 for v in row) else own


def shared(targets: Tensor, negative: bool) -> list[list[int]]:
    own = [classes(row, negative) for row in targets.tolist()]
    return [[len(a & b) for b in own] for a in own]


def dissimilar(targets: Tensor, negative: bool) -> list[list[bool]]:
    """Pairs that cannot share a class for any value of the unknown labels."""
    possible = [{j for j, v in enumerate(row) if v != 0} for row in targets.tolist()]
    for row, own in zip(targets.tolist(), possible, strict=True):
        if negative and 1 not in row:
            own.add(-1)
    return [[not a & b for b in possible] for a in possible]


def relaxed(head: HashHead, features: Tensor) -> np.ndarray:
    return np.asarray(features.numpy() @ head.linear.weight.detach().numpy().T + head.linear.bias.detach().numpy())


def brute_dsh(head: HashHead, features: Tensor, targets: Tensor, negative: bool) -> float:
    codes, r, apart = relaxed(head, features), shared(targets, negative), dissimilar(targets, negative)
    losses = []
    for i, j in itertools.combinations(range(len(codes)), 2):
        if not r[i][j] and not apart[i][j]:
            continue
        d = sum((a - b) ** 2 for a, b in zip(codes[i], codes[j], strict=True))
        pair = d / 2 if r[i][j] else max(2 * codes.shape[1] - d, 0) / 2
        losses.append(pair + 0.01 * sum(abs(abs(v) - 1) for v in [*codes[i], *codes[j]]))
    return float(np.mean(losses))


def brute_sdh(head: HashHead, features: Tensor, targets: Tensor, negative: bool) -> float:
    """The loss with the paper's full matrices: B, H and the two scatters."""
    h, r, apart = np.tanh(relaxed(head, features)).T, shared(targets, negative), dissimilar(targets, negative)
    bits, n = h.shape
    scatter = {True: np.zeros((bits, bits)), False: np.zeros((bits, bits))}
    pairs = {True: 0, False: 0}
    for i, j in itertools.combinations(range(n), 2):
        similar = r[i][j] > 0
        if not similar and not apart[i][j]:
            continue
        scatter[similar] += np.outer(h[:, i] - h[:, j], h[:, i] - h[:, j])
        pairs[similar] += 1
    centred = h - h.mean(axis=1, keepdims=True)
    j1 = np.linalg.norm(np.sign(h) - h) ** 2 / n / 2
    between, within = scatter[False] / pairs[False], scatter[True] / pairs[True]
    j2 = np.trace(centred @ centred.T / n) / 2 + np.trace(between - within) / 2
    w = head.linear.weight.detach().numpy()
    j3 = np.linalg.norm(w @ w.T - np.eye(bits)) ** 2 / 2
    return float(j1 - 100 * j2 + 0.001 * j3)


def brute_osdh(head: HashHead, features: Tensor, targets: Tensor, negative: bool) -> float:
    codes, r = np.tanh(relaxed(head, features)), shared(targets, negative)
    n, bits = codes.shape
    rankings = []
    for q in range(n):
        total = weights = 0.0
        for i, j in itertools.permutations([i for i in range(n) if i != q], 2):
            if r[q][i] > r[q][j]:
                di, dj = (bits - codes[q] @ codes[i]) / 2, (bits - codes[q] @ codes[j]) / 2
                weight = 2 ** r[q][i] - 2 ** r[q][j]
                weights += weight
                total += weight * max(0, di - dj + bits / 8)
        if weights:
            rankings.append(total / weights)
    assert head.classifier is not None
    logits = codes @ head.classifier.weight.detach().numpy().T + head.classifier.bias.detach().numpy()
    entropy = 0.0
    for z, y in zip(logits.ravel(), targets.ravel().tolist(), strict=True):
        p = 1 / (1 + math.exp(-z))
        entropy -= 0 if math.isnan(y) else math.log(p) if y == 1 else math.log(1 - p)
    quantisation = np.linalg.norm(codes - np.sign(codes)) ** 2
    return float(np.mean(rankings) + (entropy + 0.01 * quantisation) / n)


@pytest.mark.parametrize("negative", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("loss_type", "brute"), [(DSHLoss, brute_dsh), (SDHLoss, brute_sdh), (OSDHLoss, brute_osdh)])
def test_by_brute_force(loss_type: type[HashingLoss], brute: object, seed: int, negative: bool) -> None:
    head, features, targets = problem(seed)
    got = value(loss_type(targets, negative=negative), head, features, targets)
    assert callable(brute)
    assert got.item() == pytest.approx(brute(head, features, targets, negative), rel=1e-9)
    assert brute(head, features, targets, negative) != brute(head, features, targets, not negative)


def test_shared_classes_by_hand() -> None:
    targets = torch.tensor([[1.0, 1, 0], [1, NAN, 1], [0, 0, 0], [0, 0, 0], [0, NAN, 0]])
    without = [[2.0, 1, 0, 0, 0], [1, 2, 0, 0, 0], [0] * 5, [0] * 5, [0] * 5]
    assert shared_classes(targets, negative=False).tolist() == without
    # The last image may have the unknown finding, so it does not count as one without findings.
    expected = [*without[:2], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0] * 5]
    assert shared_classes(targets, negative=True).tolist() == expected


def test_dsh_by_hand() -> None:
    """The codes are (1, 1), (1, -1), (0.5, 1); m = 4. The first two share a class, the third shares none.

    Pair 1-2: 4 / 2 = 2. Pair 1-3: (4 - 0.25) / 2 = 1.875. Pair 2-3: d^2 = 4.25 > m, so 0. The third is 0.5 from +-1,
    which costs 0.005 in each of its pairs. If the second may have the third's finding, they do not form a pair.
    """
    codes = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.5, 1.0]])
    for second, pairs in ((0.0, 3), (NAN, 2)):
        targets = torch.tensor([[1.0, 0.0], [1.0, second], [0.0, 1.0]])
        got = value(DSHLoss(targets, negative=False), identity(2, 2), codes, targets)
        assert got.item() == pytest.approx((2 + 1.875 + 0.005 * (pairs - 1)) / pairs)


def test_sdh_by_hand() -> None:
    """With one bit, the tanh values are 0.5, 0.5, -0.5; the first two are similar, and W = 1, so J_3 = 0.

    J_1 = 0.25 / 2; variance 0.25 - (1/6)^2 = 2/9; scatter 1 - 0; J_2 = (2/9 + 1) / 2.
    """
    codes = torch.tensor([[0.5], [0.5], [-0.5]]).atanh()
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    head = identity(1, 2)
    loss = SDHLoss(targets, negative=False)
    assert value(loss, head, codes, targets).item() == pytest.approx(0.125 - 100 * (2 / 9 + 1) / 2)
    with torch.no_grad():
        head.linear.weight.fill_(2)
    assert value(loss, head, codes / 2, targets).item() == pytest.approx(
        0.125 - 100 * (2 / 9 + 1) / 2 + 0.001 * (4 - 1) ** 2 / 2
    )


def test_osdh_by_hand() -> None:
    """8 bits have tanh +-0.5, so rho = 1; D = 4 - h.h / 2 is 3 between equal codes and 5 between opposite ones.

    Images 0 and 1 have both classes, 2 has the first, 3 none; codes are +, -, +, +. Weights are 2^r_i - 2^r_j:
    query 0: (1 over 2) 2 * (5 - 3 + 1), (1 over 3) 3 * (5 - 3 + 1), (2 over 3) 1 * (3 - 3 + 1), sum 16 / 6;
    query 1: (0 over 2) 2 * 1, (0 over 3) 3 * 1, (2 over 3) 1 * 1, sum 6 / 6;
    query 2: (0 over 3) 1 * 1, (1 over 3) 1 * (5 - 3 + 1), sum 4 / 2; query 3 shares nothing and does not count.
    Logits of 0 cost 2 log 2; each image has a quantisation error of 8 * 0.25.
    """
    codes = (torch.tensor([[1.0], [-1.0], [1.0], [1.0]]) * 0.5).atanh().expand(4, 8)
    targets = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    got = value(OSDHLoss(targets, negative=False), identity(8, 2), codes, targets)
    assert got.item() == pytest.approx((16 / 6 + 1 + 2) / 3 + 2 * math.log(2) + 0.01 * 2)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("negative", [True, False])
def test_gradient(loss_type: type[HashingLoss], negative: bool) -> None:
    head, features, targets = problem(4, n=6)
    loss = loss_type(targets, negative=negative)
    assert torch.autograd.gradcheck(lambda x: value(loss, head, x, targets), features.requires_grad_())


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_equal_zero_and_saturated_codes_stay_finite(loss_type: type[HashingLoss], scale: float) -> None:
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, NAN], [0.0, 0.0]])
    head, features = identity(3, 2), torch.full((4, 3), scale).requires_grad_()
    loss = value(loss_type(targets, negative=True), head, features, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.shape == () and torch.isfinite(loss)
    assert features.grad is not None and torch.isfinite(features.grad).all()
    assert head.linear.weight.grad is not None and torch.isfinite(head.linear.weight.grad).all()


@pytest.mark.parametrize("loss_type", [DSHLoss, SDHLoss])
def test_a_single_image_has_zero_loss(loss_type: type[HashingLoss]) -> None:
    head, targets = make_head(4, 8, 2), torch.tensor([[1.0, 0.0]])
    features = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = value(loss_type(targets, negative=True), head, features, targets)
    loss.backward()
    assert loss.item() == 0 and features.grad is not None and (features.grad == 0).all()


@pytest.mark.parametrize("targets", [torch.tensor([[1.0, 0.0]]), *(torch.full((3, 2), v) for v in (0.0, 1.0))])
def test_osdh_without_an_order_still_classifies(targets: Tensor) -> None:
    """With one image, or images that share nothing or all share the same, there are no triplets: the ranking is 0."""
    head = make_head(4, 8, 2)
    features = torch.randn(len(targets), 4, generator=torch.Generator().manual_seed(0))
    codes = head.relaxed(features).tanh()
    entropy = functional.binary_cross_entropy_with_logits(head.logits(features), targets, reduction="none")
    expected = entropy.sum(dim=1).mean() + 0.01 * (codes - codes.sign()).square().sum(dim=1).mean()
    assert value(OSDHLoss(targets, negative=True), head, features, targets).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("loss_type", [DSHLoss, SDHLoss])
@pytest.mark.parametrize("target", [0.0, 1.0])
def test_only_similar_pairs(loss_type: type[HashingLoss], target: float) -> None:
    """Images that all have the findings, or are all known to have none, move closer together."""
    targets = torch.full((4, 2), target)
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = value(loss_type(targets, negative=True), identity(6, 2), features, targets)
    (gradient,) = torch.autograd.grad(loss, features)
    before = features.detach().tanh()
    after = (features.detach() - 1e-4 * gradient).tanh()
    assert after.var(dim=0).sum() < before.var(dim=0).sum()


def test_images_without_known_labels_form_no_pairs() -> None:
    """DSH is then 0; the variance and quantisation terms of SDH do not depend on labels."""
    targets = torch.full((4, 2), NAN)
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = value(DSHLoss(targets, negative=True), identity(6, 2), features, targets)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.item() == 0 and (gradient == 0).all()
    codes = features.detach().tanh()
    alone = (1 - codes.abs()).square().sum(dim=1).mean() / 2 - 100 * codes.var(dim=0, correction=0).sum() / 2
    assert value(SDHLoss(targets, negative=True), identity(6, 2), features, targets).item() == pytest.approx(
        alone.item()
    )


@pytest.mark.parametrize("loss_type", LOSSES)
def test_training_brings_codes_of_similar_images_together(loss_type: type[HashingLoss]) -> None:
    """Features contain the labels and stronger noise, so the codes hardly depend on the labels before training."""
    torch.manual_seed(0)
    targets = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    targets = targets.repeat(12, 1)
    features = torch.cat([targets, 2 * torch.randn(48, 4)], dim=1)
    head, loss = make_head(8, 16, 4), loss_type(targets, negative=False)
    shared, itself = shared_classes(targets, negative=False), torch.eye(48, dtype=torch.bool)

    def distances() -> list[float]:
        """Mean Hamming distances between images that share no, one and two classes."""
        codes = head.codes(features)
        hamming = (16 - codes @ codes.T) / 2
        return [hamming[(shared == count) & ~itself].mean().item() for count in range(3)]

    before = distances()
    optimiser = torch.optim.SGD(head.parameters(), lr=0.01 if loss_type is SDHLoss else 0.1)
    for _ in range(100):
        optimiser.zero_grad()
        value(loss, head, features, targets).backward()
        optimiser.step()
    none, one, two = distances()
    assert before[0] - before[1] < 1 and none - one > 5
    if loss_type is OSDHLoss:
        assert one - two > 1  # the others do not order similar images
