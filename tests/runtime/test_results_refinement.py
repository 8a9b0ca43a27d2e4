"""A refined search: Rocchio's rule, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cbmir.errors import UserError
from cbmir.runtime.results import Refinement


def unit(*values: float) -> np.ndarray:
    return (np.array(values) / np.linalg.norm(values)).astype(np.float32)


X, Y, Z = (unit(*row) for row in np.eye(3).tolist())


def test_the_rule_by_hand() -> None:
    refinement = Refinement(alike=("a", "b"), unlike=("c",), findings={"Mass": 0.5, "Edema": -1.0})
    vector = refinement.vector(X, [X, Y], [Z], {"Mass": 7 * Y, "Edema": Z})
    # X + 0.75 (X + Y) / 2 - 0.15 Z + 0.5 Y - 1 Z
    np.testing.assert_allclose(vector, unit(1.375, 0.875, -1.15), atol=1e-6)
    assert vector.dtype == np.float32


def test_parts_of_a_refinement_are_optional() -> None:
    np.testing.assert_allclose(Refinement(unlike=("a",)).vector(X, [], [Y], {}), unit(1, -0.15, 0), atol=1e-6)
    np.testing.assert_allclose(Refinement(findings={"Mass": 0.0}).vector(X, [], [], {"Mass": Y}), X, atol=1e-6)


def test_invalid_refinements() -> None:
    with pytest.raises(UserError, match="found none"):
        Refinement()
    with pytest.raises(UserError, match="either alike or unlike, found as both: a"):
        Refinement(alike=("a", "b"), unlike=("a",))
    for weight in (1.5, float("nan")):
        with pytest.raises(UserError, match="a weight from -1 to 1 for Mass"):
            Refinement(findings={"Mass": weight})
    with pytest.raises(UserError, match="cancel out"):
        Refinement(findings={"Mass": -1.0}).vector(X, [], [], {"Mass": X})
