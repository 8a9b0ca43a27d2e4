"""The comparison, with made-up answers."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.errors import UserError
from cbmir.export.parity import LIMITS, Cases, ParityLimits, measure_parity
from cbmir.runtime import Outputs

STRICT = ParityLimits(cosine=0.999999, score=1e-5, overlap=0.98)


def unit(angles: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture
def reference() -> Outputs:
    """40 unit vectors on a circle, 0.1 rad apart, so that their neighbours are known."""
    angles = np.arange(40) * 0.1
    return Outputs(unit(angles), np.linspace(0, 1, 80, dtype=np.float32).reshape(40, 2))


def cases(queries: int, images: int = 40, patients: list[str] | None = None) -> Cases:
    """Cases with labels 10, 01, 00, 11 in turn, and one patient per image."""
    labels = np.array([(1, 0), (0, 1), (0, 0), (1, 1)] * images, np.float32)[:images]
    return Cases(queries, labels, patients or [f"p{n}" for n in range(images)], (0.5, float("nan")))


def test_the_same_answers(reference: Outputs) -> None:
    parity = measure_parity(reference, reference, cases(8), STRICT)
    assert parity.failures == ()
    assert (parity.images, parity.queries, parity.overlap.value, parity.score_difference) == (40, 8, 1.0, 0.0)
    assert parity.cosine_min == pytest.approx(1, abs=1e-15)
    assert (parity.ndcg.value, parity.ndcg_all.value, parity.auc.value, parity.decisions) == (0, 0, 0, 1)
    assert parity.to_json()["limits"] == {
        "cosine": 0.999999, "score": 1e-5, "overlap": 0.98, "cross": None, "ndcg": None, "auc": None
    }  # fmt: skip


def test_a_rotated_embedding(reference: Outputs) -> None:
    angles = np.arange(40) * 0.1
    angles[3] += 0.01
    parity = measure_parity(reference, Outputs(unit(angles), reference.scores), cases(8), STRICT)
    assert parity.cosine_min == pytest.approx(np.cos(0.01), abs=1e-7)
    assert parity.cosine_mean == pytest.approx((39 + np.cos(0.01)) / 40, abs=1e-7)
    assert len(parity.failures) == 1 and parity.failures[0].startswith("cosine of the embeddings at least 0.999999")


def test_differences_below_the_resolution_of_float32(reference: Outputs) -> None:
    """1 - cos = 2e-8 is lost in float32, where the next number below 1 is 1 - 6e-8."""
    angles = np.arange(40) * 0.1 + 2e-4
    parity = measure_parity(reference, Outputs(unit(angles), reference.scores), cases(8), STRICT)
    assert 1 - parity.cosine_min == pytest.approx(2e-8, rel=0.01)


def test_scores(reference: Outputs) -> None:
    """Image 39 has the scores 78/79 and 1: the first falls below its threshold 0.5, the second has no threshold."""
    scores = reference.scores.copy()
    scores[39] -= 0.75
    parity = measure_parity(reference, Outputs(reference.embedding, scores), cases(8), STRICT)
    assert parity.score_difference == pytest.approx(0.75)
    assert parity.decisions == pytest.approx(39 / 40)
    assert parity.failures == ("difference of scores at most 1e-05, found 0.75",)


def test_overlap(reference: Outputs) -> None:
    """Query 0 has neighbours 1..10. If image 10 moves away, it has 1..9 and 11. There are no other queries.

    In the old gallery it still finds the same, since only a gallery image has moved.
    """
    embedding = reference.embedding.copy()
    embedding[10] = -embedding[0]
    parity = measure_parity(reference, Outputs(embedding, reference.scores), cases(1), STRICT)
    assert parity.overlap.value == pytest.approx(0.9)
    assert parity.cross_overlap.value == 1
    assert any("neighbours at least 0.98, found 0.9000" in text for text in parity.failures)


def test_a_rotated_space_does_not_share_a_gallery() -> None:
    """Rotating all embeddings keeps all neighbours in the file's own gallery, but finds others in the source's."""
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(100, 8)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    rotation = np.linalg.qr(rng.normal(size=(8, 8)))[0].astype(np.float32)
    scores = rng.random((100, 2)).astype(np.float32)
    for precision, failures in (("float16", 1), ("bfloat16", 1), ("int8", 0)):
        parity = measure_parity(
            Outputs(embedding, scores), Outputs(embedding @ rotation, scores), cases(100, 100), LIMITS[precision]
        )
        assert parity.overlap.value == 1 and parity.cross_overlap.value < 0.5
        assert len(parity.failures) == failures, parity.failures
        assert all(text.startswith("unchanged top-10 neighbours across at least 0.95") for text in parity.failures)


def test_images_of_the_same_patient_are_not_neighbours(reference: Outputs) -> None:
    """Images 0 and 10 are of one patient: query 0 has neighbours 1..9 and 11, whether 10 is near or not."""
    embedding = reference.embedding.copy()
    embedding[10] = -embedding[0]
    patients = [f"p{n % 10 if n == 10 else n}" for n in range(40)]
    parity = measure_parity(reference, Outputs(embedding, reference.scores), cases(1, patients=patients), STRICT)
    assert parity.overlap.value == 1


def test_ndcg_leaves_out_the_same_patient() -> None:
    """The second image of the query's patient moves from first to last; the order of the others does not change."""
    before, after = unit(np.array([0, 0.1, 0.2, 0.3])), unit(np.array([0, 1.5, 0.2, 0.3]))
    scores = np.zeros((4, 1), np.float32)
    known = Cases(1, np.array([[1], [1], [0], [1]], np.float32), ["a", "a", "b", "c"], (0.5,))
    parity = measure_parity(Outputs(before, scores), Outputs(after, scores), known, LIMITS["int8"])
    assert parity.ndcg.value == parity.ndcg_all.value == 0


def test_intervals_are_over_patients() -> None:
    """Of four queries the first loses three neighbours, and the second none. If they are of one patient, resampling
    cannot change the mean."""
    angles = np.concatenate([np.arange(4), np.linspace(0.05, 3.05, 36)])
    before = unit(angles)
    angles[4:7] += 3
    after, scores = unit(angles), np.zeros((40, 2), np.float32)
    for patients, spread in ((["a"] * 4 + [f"p{n}" for n in range(36)], False), (None, True)):
        known = cases(4, patients=patients)
        overlap = measure_parity(Outputs(before, scores), Outputs(after, scores), known, STRICT).overlap
        assert (overlap.low < overlap.high) == spread and overlap.value < 1


def test_ndcg_by_hand() -> None:
    """There is one query with one label, and two other images. The one that shares the label comes second, not first.

    DCG is 1 / log2(3), the ideal is 1 / log2(2), so the difference is 1 / log2(3) - 1.
    """
    before, after = unit(np.array([0, 0.1, 0.2])), unit(np.array([0, 0.2, 0.1]))
    scores = np.zeros((3, 1), np.float32)
    known = Cases(1, np.array([[1], [1], [0]], np.float32), ["a", "b", "c"], (0.5,))
    parity = measure_parity(Outputs(before, scores), Outputs(after, scores), known, LIMITS["int8"])
    assert parity.ndcg.value == pytest.approx(1 / np.log2(3) - 1)
    assert parity.ndcg.low == parity.ndcg.high == pytest.approx(parity.ndcg.value)
    assert any(text.startswith("difference of nDCG@10 at most 0.005, found -0.3691") for text in parity.failures)


def test_auc_by_hand() -> None:
    """Two positives above two negatives have AUC 1. With one positive below one negative, 3 of 4 pairs are right."""
    embedding = unit(np.arange(4) * 0.1)
    known = Cases(4, np.array([[1], [1], [0], [0]], np.float32), list("abcd"), (0.5,))
    right, wrong = (np.array([column], np.float32).T for column in ([0.9, 0.8, 0.2, 0.1], [0.9, 0.15, 0.2, 0.1]))
    parity = measure_parity(Outputs(embedding, right), Outputs(embedding, wrong), known, LIMITS["float16"])
    assert parity.auc.value == pytest.approx(-0.25)
    assert next(text for text in parity.failures if "AUC" in text).startswith("difference of AUC at most 0.002")


def test_without_labels_the_limits_are_not_met(reference: Outputs) -> None:
    unknown = replace(cases(8), labels=np.full((40, 2), np.nan, np.float32))
    parity = measure_parity(reference, reference, unknown, LIMITS["int8"])
    assert [text.split(" at most")[0] for text in parity.failures] == [
        "difference of nDCG@10", "difference of nDCG@10 of all queries", "difference of AUC",
    ]  # fmt: skip
    assert all("not defined on these images; give labelled ones" in text for text in parity.failures)
    assert parity.to_json()["auc"] == {"value": None, "low": None, "high": None}


def test_few_images() -> None:
    """With fewer than ten other images, all of them are neighbours, but never the query itself."""
    outputs = Outputs(unit(np.arange(4) * 0.1), np.zeros((4, 2), np.float32))
    assert measure_parity(outputs, outputs, cases(4, 4), STRICT).overlap.value == 1.0


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_values_that_are_not_numbers_fail(reference: Outputs, value: float) -> None:
    embedding, scores = reference.embedding.copy(), reference.scores.copy()
    embedding[0], scores[1, 1] = value, np.nan
    limits = replace(STRICT, ndcg=0.1)
    failures = measure_parity(reference, Outputs(embedding, scores), cases(8), limits).failures
    assert {text.split(" at ")[0] for text in failures} >= {
        "cosine of the embeddings", "difference of scores", "difference of nDCG@10",
    }  # fmt: skip


def test_incompatible_models(reference: Outputs) -> None:
    with pytest.raises(UserError, match="found 2 and 1 dimensions, 2 and 2 labels"):
        measure_parity(reference, Outputs(reference.embedding[:, :1], reference.scores), cases(8), STRICT)


def test_tolerances() -> None:
    changed = LIMITS["int8"].changed("overlap=0.8", "cosine=0.9", "overlap=0.7")
    assert asdict(changed) == {
        "cosine": 0.9, "score": None, "overlap": 0.7, "cross": None, "ndcg": 0.005, "auc": 0.005
    }  # fmt: skip
    for wrong in ("overlap", "overlap=", "overlap=nan", "overlap=-1", "recall=0.5", "=1"):
        with pytest.raises(UserError, match="NAME one of cosine, score, overlap, cross, ndcg, auc"):
            LIMITS["int8"].changed(wrong)


def test_the_table_lists_exceeded_limits(reference: Outputs) -> None:
    embedding = reference.embedding.copy()
    embedding[10] = -embedding[0]
    text = measure_parity(reference, Outputs(embedding, reference.scores), cases(1), STRICT).table()
    assert "unchanged top-10 neighbours:           0.9000 [0.9000, 0.9000]; across: 1.0000" in text
    assert text.splitlines()[-1].startswith("Beyond its limit: unchanged top-10 neighbours at least 0.98")
