"""What tests of int8 need of the processor."""

from __future__ import annotations

import pytest

from cbmir.machine import describe_machine


@pytest.fixture(scope="session")
def exact_int8() -> None:
    """Skips where a sum of two int8 products is cut at 16 bits (x86 without VNNI), which moves answers."""
    features = set(describe_machine()["features"])
    if "avx2" in features and not features & {"avx512_vnni", "avx_vnni"}:
        pytest.skip("this processor adds int8 products in 16 bits")
