"""Figures over several parts, against values computed by hand and from repeated images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbmir.training.comparison.cells import CellAnswers
from cbmir.training.comparison.plan import Cell, Part, Plan
from cbmir.training.comparison.results import _best, _correct, best_method, differences, figures, reference_rankings
from cbmir.training.evaluate import Vectors
from cbmir.training.metrics import QUERIES, RetrievalValues
from cbmir.training.pool import Pool
from cbmir.training.rankings import CORRECTED

NAN = float("nan")


def answers(ndcg: list[float], patients: list[str], **options: Any) -> CellAnswers:
    """Answers for one label: the first half of the queries is positive, and scores fall with the position. The gallery
    has an image with the label and one without; each query finds the right one, unless `lists` says otherwise."""
    count = len(ndcg)
    values = np.array(ndcg)
    labels = options.get("labels", (np.arange(count) < count / 2).astype(np.float32)[:, None])
    scores = options.get("scores", np.linspace(1, 0, count, dtype=np.float32)[:, None])
    gallery = Vectors(np.empty(0), np.empty(0), np.array([[1], [0]], np.float32), ["x", "y"])
    return CellAnswers(
        ("Mass",), 1, Vectors(np.empty(0), scores, labels, patients), gallery,
        np.array(options.get("lists", [[0 if one else 1] for one in labels[:, 0]])),
        dict.fromkeys(QUERIES, RetrievalValues(values, values / 2, values / 4, values / 8)),
        facts={}, views=options.get("views", [""] * count), sources=[""] * count,
    )  # fmt: skip


def test_queries_of_all_parts_are_pooled_and_the_deviation_is_over_seeds() -> None:
    parts = [answers(v, p) for v in ([0.2, 0.4], [0.6, NAN]) for p in (["a", "b"], ["c", "d"])]
    found = figures(Pool(parts, [0, 1, 0, 1]))
    ndcg = found["positive queries"]["ndcg"]
    assert ndcg["value"] == pytest.approx((0.2 + 0.4 + 0.2 + 0.4 + 0.6 + 0.6) / 6)
    assert ndcg["sd"] == pytest.approx(0)
    high, low = [answers([0.9, 0.9], p) for p in (["a", "b"], ["c", "d"])], answers([0.1, 0.1], ["a", "b"])
    incomplete = figures(Pool([*parts[:2], *high, low], [0, 0, 1, 1, 2]))
    assert incomplete["positive queries"]["ndcg"]["sd"] == pytest.approx(np.std([0.3, 0.9], ddof=1)), "not of seed 2"
    assert ndcg["low"] <= ndcg["value"] <= ndcg["high"]
    assert found["positive queries"]["acg"]["value"] == pytest.approx(ndcg["value"] / 2)
    assert (found["positive queries"]["queries"], found["positive queries"]["queries_left_out"]) == (6, 2)
    assert found["auc"]["value"] == 1


def test_one_seed_has_no_sd() -> None:
    assert figures(Pool([answers([0.2, 0.4], ["a", "b"])], [0]))["positive queries"]["ndcg"]["sd"] is None


def test_auc_is_the_mean_over_parts_that_have_both_values() -> None:
    """Ranked together, the scores of the two models would give another AUC; the third part has no negatives."""
    right = answers([0.1] * 4, list("abcd"))
    wrong = answers([0.1] * 4, list("efgh"), scores=np.array([[0.7], [0.4], [0.6], [0.5]], np.float32) + 5)
    lost = answers([0.1] * 2, list("ij"), labels=np.ones((2, 1), np.float32))
    found = figures(Pool([right, wrong, lost], [0, 0, 0]))
    assert found["auc"]["value"] == pytest.approx((1 + 0.5) / 2)
    assert found["auc_by_label"]["Mass"]["value"] == pytest.approx(0.75)


def test_a_method_without_scores_has_no_auc() -> None:
    found = figures(Pool([answers([0.1, 0.2], ["a", "b"], scores=np.full((2, 1), NAN, np.float32))], [0]))
    assert found["auc"] == {"value": None, "low": None, "high": None, "sd": None}
    assert found["auc_without_both_values"] == ["Mass"]


def test_difference_to_bce_is_paired_and_by_patient() -> None:
    """Every query of every patient gains 0.1, so the interval is a point, and p is two-sided 2^-5."""
    base = [0.1, 0.5, 0.3, 0.9, 0.2, 0.4]
    patients = list("aabcde")
    bce, own = (Pool([answers(values, patients)], [0]) for values in (base, [v + 0.1 for v in base]))
    found = differences(own, bce, auc=True)["positive queries"]["ndcg"]
    assert [found[name] for name in ("value", "low", "high")] == pytest.approx([0.1] * 3)
    assert found["p"] == pytest.approx(2 / 2**5, abs=0.01)
    assert differences(own, bce, auc=True)["auc"]["p"] == 1
    assert differences(own, bce, auc=True)["auc"]["value"] == 0
    with pytest.raises(ValueError, match="same queries"):
        differences(own, Pool([answers(base, list("zabcde"))], [0]), auc=True)


def test_p_is_corrected_by_metric_and_column() -> None:
    """By hand: of .01, .02 and .04, the smallest is multiplied by 3 and the next by 2; a missing p does not count."""
    every = {
        "auc": (0.01, None, 0.04), ("all queries", "ndcg"): (0.01, 0.04, 0.02),
        ("positive queries", "corrected_ndcg"): (0.5, None, 0.7),
    }  # fmt: skip
    compared: list[dict[str, Any]] = [
        {"auc": {"p": every["auc"][i]}} | {c: {m: {"p": every[c, m][i]}} for c, m in list(every)[1:]} for i in range(3)
    ]
    del compared[1]["auc"]
    _correct(compared)
    assert [one["auc"]["p_holm"] for one in compared if "auc" in one] == [0.02, 0.04]
    assert [one["all queries"]["ndcg"]["p_holm"] for one in compared] == [0.03, 0.04, 0.04]
    assert [one["positive queries"]["corrected_ndcg"]["p_holm"] for one in compared] == [1, None, 1]


def test_breakdown_by_view_and_source_leaves_small_groups_out() -> None:
    views = ["PA"] * 20 + ["AP"] * 19 + [""]
    part = answers([0.5] * 20 + [0.1] * 20, [str(i) for i in range(40)], views=views)
    found = figures(Pool([part], [0]))
    assert found["views"].keys() == {"PA"} and found["sources"] == {}
    assert found["views"]["PA"]["positive queries"]["queries"] == 20
    assert found["views"]["PA"]["positive queries"]["ndcg"]["value"] == pytest.approx(0.5)


def test_rankings_that_ignore_the_query() -> None:
    """There are two queries, one with the label, and a gallery of one image with it and one without; k = 1."""
    found = reference_rankings(Pool([answers([0.2, 0.4], ["a", "b"])], [0]))
    assert {name: values["ndcg"] for name, values in found.items()} == {
        "random, positive queries": 0.5, "most labels, positive queries": 1, "no finding, positive queries": 0,
        "random, all queries": 0.5, "most labels, all queries": 0.5, "no finding, all queries": 0.5,
    }  # fmt: skip


def test_corrected_ndcg_is_pooled_over_parts() -> None:
    """In the first part each query has its ideal list, which also suits one of the three others: own 1, shuffled 1/3.
    In the second all have the same list, which is right for half of them: own and shuffled 1/2."""
    right, blind = (answers([0.5] * 4, patients, **more) for patients, more in (
        (list("abcd"), {}), (list("efgh"), {"lists": [[0]] * 4})
    ))  # fmt: skip
    found = figures(Pool([right, blind], [0, 0]))["all queries"]
    own, shuffled = (1 + 1 / 2) / 2, (1 / 3 + 1 / 2) / 2
    for metric in ("corrected_ndcg", "corrected_jaccard_ndcg"):
        assert found[metric]["value"] == pytest.approx((own - shuffled) / (1 - shuffled))
        assert found[metric]["low"] <= found[metric]["value"] <= found[metric]["high"]
    assert figures(Pool([blind], [0]))["all queries"]["corrected_ndcg"]["value"] == pytest.approx(0)
    assert figures(Pool([blind], [0]))["lists"]["labels_per_hit"]["value"] == 1
    assert figures(Pool([right, blind], [0, 0]))["lists"]["gallery_shown"] == pytest.approx((1 + 1 / 2) / 2)


def test_the_best_method_leads_in_all_three_metrics_with_intervals() -> None:
    patients = [str(i) for i in range(40)]
    turned = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    right = answers([0.5] * 40, patients)
    noisy = answers([0.5] * 40, patients, lists=[[i % 2] for i in range(40)], scores=turned)
    no_scores = answers([0.5] * 40, patients, lists=[[0]] * 40, scores=np.full((40, 1), NAN, np.float32))
    pools = {name: Pool([part], [0]) for name, part in (("right", right), ("noisy", noisy), ("hash", no_scores))}
    found = best_method(pools)
    assert found["method"] == "right" and set(found["leaders"].values()) == {"right"}
    noisier = found["differences"]["noisy"]
    assert noisier["all queries"].keys() == noisier["positive queries"].keys() == CORRECTED.keys()
    assert noisier["parts"] == 1
    assert "auc" not in found["differences"]["hash"], "where one has no AUC, there is none to compare"
    assert noisier["auc"]["value"] == pytest.approx(1)
    assert (noisier["auc"]["p"], noisier["auc"]["p_holm"]) == (2 / 1001, 2 / 1001), "the only AUC: nothing to correct"
    one = noisier["all queries"]["corrected_ndcg"]
    assert one["p"] < one["p_holm"] == pytest.approx(2 * 2 / 1001), "corrected for two methods"

    twin = best_method(pools | {"twin": Pool([right], [0])})
    assert twin["method"] is None and twin["differences"]["twin"]["auc"]["low"] == 0
    graph = Pool([answers([0.5] * 40, patients, lists=[[0]] * 40)], [0])
    lent = best_method({"graph": graph} | pools, ["graph"])
    assert lent["method"] == "right" and "auc" not in lent["differences"]["graph"], "its scores are those of the other"
    assert best_method({"graph": graph} | pools)["method"] is None
    split = best_method(pools | {"right": Pool([answers([0.5] * 40, patients, scores=turned)], [0]),
                                 "noisy": Pool([answers([0.5] * 40, patients, lists=[[0]] * 40)], [0])})  # fmt: skip
    assert split["method"] is None and split["differences"] == {}
    assert (split["leaders"]["auc"], split["leaders"]["corrected_ndcg"]) == ("noisy", "right")
    assert best_method({"right": pools["right"]})["method"] is None, "there is no other to lead"
    assert best_method({})["leaders"] == {}


def test_methods_with_fewer_seeds_are_compared_on_common_parts() -> None:
    plan = Plan("table", "m.csv", "", ("bce", "soft-ndcg", "fitted"), seeds=2, tuned={"bce": {"seeds": 1}})
    right, wrong = (
        answers([0.1] * 4, list("abcd"), scores=np.array(scores, np.float32)[:, None], lists=lists)
        for scores, lists in (([4, 3, 2, 1], [[0], [0], [1], [1]]), ([1, 2, 3, 4], [[1], [1], [0], [0]]))
    )
    first, second = Part(0, 0, 0), Part(1, 0, 0)
    found = _best(plan, {
        Cell(first, "bce"): wrong, Cell(first, "soft-ndcg", ""): wrong, Cell(first, "fitted"): right,
        Cell(second, "soft-ndcg", ""): right, Cell(second, "fitted"): right,
    })  # fmt: skip
    assert set(found["leaders"].values()) == {"fitted"}
    gains = {name: one["auc"]["value"] for name, one in found["differences"].items()}
    assert gains == {"bce": 1, "soft-ndcg": 0.5}, "each pair on all parts that both have"
