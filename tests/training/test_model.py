"""The model from uint8 image to scores, against the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from cbmir.training.model import LinearHead, ProxyHead, RetrievalModel


def test_scores_are_the_similarity_of_the_nearest_proxy() -> None:
    head = ProxyHead(2, (2, 1, 1), labels=2, sigma=0.5)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[2.0, 0], [0, 5], [-1, 0], [0, -1]]))
    v = torch.tensor([[1.0, 0.0]])
    # distances squared: 0 and 2 to the first class, 4 to the second; the negative class has no score
    assert head(v, v)[0].tolist() == pytest.approx([1, math.exp(-4 / 0.5)], rel=1e-5)


def test_log_mean_similarity_takes_the_mean_and_ignores_padding() -> None:
    head = ProxyHead(2, (3, 1), labels=2, sigma=1.0).double()
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]]))
    v = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    first = (1 + math.exp(-1) + math.exp(-2)) / 3
    assert head.log_mean_similarity(v)[0].exp().tolist() == pytest.approx([first, math.exp(-1)])


@pytest.mark.parametrize("head", [ProxyHead(4, (2, 2, 2), 2), LinearHead(4, 2)])
def test_forward(head: ProxyHead | LinearHead) -> None:
    model = RetrievalModel(torch.nn.Conv2d(1, 4, 3, stride=2), head).eval()
    image = torch.randint(0, 256, (3, 1, 9, 9), dtype=torch.uint8)
    embedding, scores, feature_map = model(image)
    expected = model.encoder(image.double().float() / 127.5 - 1)
    pooled = expected.mean(dim=(2, 3))
    assert torch.allclose(feature_map, expected)
    assert torch.allclose(embedding, pooled / pooled.norm(dim=1, keepdim=True), atol=1e-6)
    assert scores.shape == (3, 2) and ((scores >= 0) & (scores <= 1)).all()


def test_black_and_white_are_minus_one_and_one() -> None:
    class Keep(torch.nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return super().forward(x)

    encoder = Keep(1, 2, 1)
    RetrievalModel(encoder, LinearHead(2, 1))(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
    assert encoder.seen.flatten().tolist() == [-1, 1]


def test_head_stays_float32_behind_a_half_encoder() -> None:
    model = RetrievalModel(torch.nn.Conv2d(1, 4, 1).bfloat16(), ProxyHead(4, (1, 1), 1))
    assert all(t.dtype == torch.float32 for t in model(torch.zeros(1, 1, 4, 4, dtype=torch.uint8)))
