"""Figures of several parts, against values worked out by hand and by repeating images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbmir.training.comparison.cells import COLUMNS, CellAnswers
from cbmir.training.comparison.results import Pool, differences, figures, random_ranking
from cbmir.training.metrics import RetrievalValues

NAN = float("nan")


def answers(ndcg: list[float], patients: list[str], **options: Any) -> CellAnswers:
    """Of one label: the first half of the queries is positive, scores fall with the position."""
    count = len(ndcg)
    values = np.array(ndcg)
    given: dict[str, Any] = {"views": [""] * count, "sources": [""] * count}
    given["scores"] = np.linspace(1, 0, count, dtype=np.float32)[:, None]
    given["labels"] = (np.arange(count) < count / 2).astype(np.float32)[:, None]
    given["retrieval"] = {column: RetrievalValues(values, values / 2, values / 4) for column in COLUMNS}
    return CellAnswers(facts={}, patients=patients, neighbours=np.zeros((count, 1), np.intp), **given | options)


def test_queries_of_all_parts_are_pooled_and_sd_is_over_seeds() -> None:
    parts = [answers(v, p) for v in ([0.2, 0.4], [0.6, NAN]) for p in (["a", "b"], ["c", "d"])]
    found = figures(Pool(parts, [0, 1, 0, 1]), ["Mass"])
    ndcg = found["positive queries"]["ndcg"]
    assert ndcg["value"] == pytest.approx((0.2 + 0.4 + 0.2 + 0.4 + 0.6 + 0.6) / 6)
    assert ndcg["sd"] == pytest.approx(0)
    high, low = [answers([0.9, 0.9], p) for p in (["a", "b"], ["c", "d"])], answers([0.1, 0.1], ["a", "b"])
    incomplete = figures(Pool([*parts[:2], *high, low], [0, 0, 1, 1, 2]), ["Mass"])
    assert incomplete["positive queries"]["ndcg"]["sd"] == pytest.approx(np.std([0.3, 0.9], ddof=1)), "not of seed 2"
    assert ndcg["low"] <= ndcg["value"] <= ndcg["high"]
    assert found["positive queries"]["acg"]["value"] == pytest.approx(ndcg["value"] / 2)
    assert (found["positive queries"]["queries"], found["positive queries"]["queries_left_out"]) == (6, 2)
    assert found["auc"]["value"] == 1


def test_one_seed_has_no_sd() -> None:
    assert figures(Pool([answers([0.2, 0.4], ["a", "b"])], [0]), ["Mass"])["positive queries"]["ndcg"]["sd"] is None


def test_auc_is_the_mean_over_parts_that_have_both_values() -> None:
    """Ranked together, the scores of the two models would have another AUC; the third part has no negative."""
    right = answers([0.1] * 4, list("abcd"))
    wrong = answers([0.1] * 4, list("efgh"), scores=np.array([[0.7], [0.4], [0.6], [0.5]], np.float32) + 5)
    lost = answers([0.1] * 2, list("ij"), labels=np.ones((2, 1), np.float32))
    found = figures(Pool([right, wrong, lost], [0, 0, 0]), ["Mass"])
    assert found["auc"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert found["auc_by_label"]["Mass"]["value"] == pytest.approx(0.75)


def test_a_method_without_scores_has_no_auc() -> None:
    found = figures(Pool([answers([0.1, 0.2], ["a", "b"], scores=np.full((2, 1), NAN, np.float32))], [0]), ["Mass"])
    assert found["auc"] == {"value": None, "low": None, "high": None, "sd": None}
    assert found["auc_without_both_values"] == ["Mass"]


def test_difference_to_bce_is_paired_and_by_patient() -> None:
    """Every query of every patient gains 0.1: the interval is a point, and p is that of 2^-5 two-sided."""
    base = [0.1, 0.5, 0.3, 0.9, 0.2, 0.4]
    patients = list("aabcde")
    bce, own = (Pool([answers(values, patients)], [0]) for values in (base, [v + 0.1 for v in base]))
    found = differences(own, bce)["positive queries"]["ndcg"]
    assert [found[name] for name in ("value", "low", "high")] == pytest.approx([0.1] * 3)
    assert found["p"] == pytest.approx(2 / 2**5, abs=0.01)
    assert differences(own, bce)["auc"]["p"] == 1
    assert differences(own, bce)["auc"]["value"] == 0
    with pytest.raises(ValueError, match="same queries"):
        differences(own, Pool([answers(base, list("zabcde"))], [0]))


def test_breakdown_by_view_and_source_leaves_small_groups_out() -> None:
    views = ["PA"] * 20 + ["AP"] * 19 + [""]
    part = answers([0.5] * 20 + [0.1] * 20, [str(i) for i in range(40)], views=views)
    found = figures(Pool([part], [0]), ["Mass"])
    assert found["views"].keys() == {"PA"} and found["sources"] == {}
    assert found["views"]["PA"]["positive queries"]["queries"] == 20
    assert found["views"]["PA"]["positive queries"]["ndcg"]["value"] == pytest.approx(0.5)


def test_random_ranking() -> None:
    assert random_ranking(Pool([answers([0.2, 0.4], ["a", "b"])], [0]))["all queries"]["ndcg"] == pytest.approx(0.3)
