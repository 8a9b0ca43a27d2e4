"""Fixtures for tests of exported files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cbmir.machine import describe_machine
from cbmir.training.encoders.stages import TwoStageEncoder
from cbmir.training.model import LinearHead, RetrievalModel


@pytest.fixture(scope="session")
def exact_int8() -> None:
    """Skip on processors that saturate the sum of two int8 products at 16 bits (x86 without VNNI)."""
    features = set(describe_machine()["features"])
    if "avx2" in features and not features & {"avx512_vnni", "avx_vnni"}:
        pytest.skip("this processor adds int8 products in 16 bits")


@pytest.fixture
def two_stage_model() -> RetrievalModel:
    """A model for 32-pixel images: 16 dimensions, 3 labels, 8x8 cells in the finer stage and 4x4 in the last."""
    torch.manual_seed(0)
    finer = nn.Sequential(nn.Conv2d(1, 8, 5, 4, 2), nn.BatchNorm2d(8), nn.ReLU())
    encoder = nn.Sequential(finer, nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
    return RetrievalModel(TwoStageEncoder(encoder, 16), LinearHead(16, 3)).eval()
