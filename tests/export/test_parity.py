"""The comparison itself, on answers made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.export.parity import LIMITS, Limits, compare
from cbmir.runtime import Outputs

STRICT = Limits(0.999999, 1e-5, 0.98)


def unit(angles: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture
def reference() -> Outputs:
    """40 unit vectors on a circle, 0.1 rad apart, so that neighbours are known by hand."""
    angles = np.arange(40) * 0.1
    return Outputs(unit(angles), np.linspace(0, 1, 80, dtype=np.float32).reshape(40, 2))


def test_the_same_answers(reference: Outputs) -> None:
    parity = compare(reference, reference, queries=8, limits=STRICT)
    assert parity.failures == ()
    assert (parity.images, parity.queries, parity.overlap, parity.score_difference) == (40, 8, 1.0, 0.0)
    assert parity.cosine_min == pytest.approx(1, abs=1e-15)
    assert parity.to_json()["limits"] == {"cosine": 0.999999, "score_difference": 1e-5, "overlap": 0.98}


def test_a_turned_embedding(reference: Outputs) -> None:
    angles = np.arange(40) * 0.1
    angles[3] += 0.01
    parity = compare(reference, Outputs(unit(angles), reference.scores), queries=8, limits=STRICT)
    assert parity.cosine_min == pytest.approx(np.cos(0.01), abs=1e-7)
    assert parity.cosine_mean == pytest.approx((39 + np.cos(0.01)) / 40, abs=1e-7)
    assert len(parity.failures) == 1 and parity.failures[0].startswith("cosine of the embeddings at least 0.999999")


def test_finer_than_a_cosine_in_float32(reference: Outputs) -> None:
    """1 - cos = 2e-8 is lost in float32, where 1 - 6e-8 is the number next to 1."""
    angles = np.arange(40) * 0.1 + 2e-4
    parity = compare(reference, Outputs(unit(angles), reference.scores), queries=8, limits=STRICT)
    assert 1 - parity.cosine_min == pytest.approx(2e-8, rel=0.01)


def test_scores(reference: Outputs) -> None:
    scores = reference.scores.copy()
    scores[39, 1] -= 0.25
    parity = compare(reference, Outputs(reference.embedding, scores), queries=8, limits=LIMITS["float16"])
    assert parity.score_difference == pytest.approx(0.25)
    assert parity.failures == ("score difference at most 0.005, found 0.25",)


def test_overlap(reference: Outputs) -> None:
    """Query 0 has 1..10 as its neighbours. When image 10 goes far away it has 1..9 and 11; no other query is asked."""
    embedding = reference.embedding.copy()
    embedding[10] = -embedding[0]
    parity = compare(reference, Outputs(embedding, reference.scores), queries=1, limits=STRICT)
    assert parity.overlap == pytest.approx(0.9)
    assert any("neighbours at least 98%, found 90.0%" in text for text in parity.failures)


def test_few_images() -> None:
    """Fewer than ten others: all of them are neighbours, the query itself never."""
    outputs = Outputs(unit(np.arange(4) * 0.1), np.zeros((4, 1), np.float32))
    assert compare(outputs, outputs, queries=4, limits=STRICT).overlap == 1.0


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_what_is_no_number_fails(reference: Outputs, value: float) -> None:
    embedding, scores = reference.embedding.copy(), reference.scores.copy()
    embedding[0], scores[1, 1] = value, np.nan
    failures = compare(reference, Outputs(embedding, scores), queries=8, limits=STRICT).failures
    assert [text.split()[0] for text in failures[:2]] == ["cosine", "score"]
