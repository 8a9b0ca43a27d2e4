"""Training against rounding: rounded layers by hand, and steps that make the features less sensitive."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cbmir.training.model import LinearHead, RetrievalModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "rounding.py"))


def test_rounding_keeps_the_gradient(script: dict[str, Any]) -> None:
    """bfloat16 has 8 bits of precision: the numbers next to 1 are 1 - 2^-8 and 1 + 2^-7."""
    values = torch.tensor([1 + 2**-9, 1 - 2**-8, 3.0], requires_grad=True)
    found = script["rounded"](values)
    assert found.tolist() == [1, 1 - 2**-8, 3]
    (2 * found).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2, 2, 2]


def test_convolutions_round_weights_and_inputs_and_get_their_weights_back(script: dict[str, Any]) -> None:
    layer = nn.Conv2d(1, 1, 1, bias=False)
    weight = layer.weight
    nn.init.constant_(weight, 1 + 2**-9)
    image = torch.full((1, 1, 1, 1), 3 + 2**-8)
    with script["rounded_convolutions"](nn.Sequential(layer)):
        assert layer(image).item() == 3
    assert layer.weight is weight and next(iter(layer.parameters())) is weight
    assert layer(image).item() == pytest.approx((1 + 2**-9) * (3 + 2**-8), abs=1e-6)
    with pytest.raises(ZeroDivisionError), script["rounded_convolutions"](layer):
        raise ZeroDivisionError
    assert layer.weight is weight


def test_steps_make_the_features_less_sensitive(script: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model = RetrievalModel(encoder, LinearHead(8, 2))
    batch = [torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8), torch.tensor([[0, 1], [1, torch.nan]] * 4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    angles = [script["step"](model, batch, optimizer, 100.0) for _ in range(60)]
    assert sum(angles[-10:]) < sum(angles[:10]) / 2
