"""`cbmir evaluate` on a run and on an exported model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbmir.card import Calibration
from cbmir.errors import ManifestError, RunError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.evaluate import Vectors, evaluate, evaluate_model
from cbmir.training.evaluation_report import text_report, write_report

NAN = float("nan")


def vectors(seed: int, n: int, labels: np.ndarray | None = None) -> Vectors:
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(n, 4)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    values = rng.integers(0, 2, (n, 2)).astype(np.float32) if labels is None else labels
    return Vectors(embedding, rng.random((n, 2)).astype(np.float32), values, [f"{seed}-{i // 2}" for i in range(n)])


def test_summary_has_both_columns_and_counts_queries_left_out() -> None:
    labels = np.array([[1, 0], [0, 0], [0, NAN], [1, 0], [0, 0]], dtype=np.float32)
    summary = evaluate(vectors(1, 5, labels), vectors(2, 30), ("a", "b"), k=3).summary(resamples=50)
    assert (summary["positive queries"]["queries"], summary["positive queries"]["queries_left_out"]) == (2, 3)
    assert (summary["all queries"]["queries"], summary["all queries"]["queries_left_out"]) == (4, 1)
    assert summary["auc_without_both_values"] == ["b"]
    assert summary["auc_by_label"]["b"]["value"] is None
    assert summary["auc"]["value"] == summary["auc_by_label"]["a"]["value"]
    ndcg = summary["all queries"]["ndcg"]
    assert ndcg["low"] <= ndcg["value"] <= ndcg["high"]
    json.dumps(summary, allow_nan=False)


@pytest.mark.slow
def test_rankings_that_ignore_the_query_against_loops() -> None:
    """Tied images count with the mean over their orders, computed here over many random orders."""
    labels = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [0, 0], [NAN, 0], [1, -1]], dtype=np.float32)
    query, gallery = vectors(1, 4, labels[:4]), vectors(2, 7, labels)
    found = evaluate(query, gallery, ("a", "b"), k=3).references
    assert len(found) == 6
    counts = [sum(v in (1, -1) for v in row) for row in labels]
    first = {
        "most labels": [g for g in range(7) if counts[g] == 2],
        "no finding": [g for g in range(7) if (labels[g] == 0).all()],
        "random": [],
    }
    rng = np.random.default_rng(0)
    for name, ahead in first.items():
        for column in ("positive queries", "all queries"):
            sets = [{j for j in range(2) if row[j] in (1, -1)} for row in labels]
            if column == "all queries":
                sets = [own or ({"none"} if (row == 0).all() else set()) for own, row in zip(sets, labels, strict=True)]
            orders = []
            for _ in range(4000):
                rest = [*rng.permutation([g for g in range(7) if g not in ahead])]
                if name == "most labels":
                    rest.sort(key=lambda g: -counts[g])
                orders.append([*rng.permutation(ahead).astype(int), *rest][:3])
            for q in range(4):
                values = [np.mean([len(sets[q] & sets[g]) > 0 for g in order]) for order in orders]
                own = found[f"{name}, {column}"].precision[q]
                assert np.isnan(own) if not sets[q] else own == pytest.approx(np.mean(values), abs=0.02)


def test_values_at_the_thresholds_by_hand() -> None:
    """For label a, two positive images have scores 0.9 and 0.2, and a negative one 0.6: the first and third are above
    0.5; the label is unknown for the last image. Label b has no threshold."""
    labels = np.array([[1, 1], [1, 0], [0, 0], [NAN, 1]], dtype=np.float32)
    query = replace(vectors(1, 4, labels), scores=np.array([[0.9, 1], [0.2, 1], [0.6, 1], [0.9, 1]], np.float32))
    evaluation = replace(evaluate(query, vectors(2, 30), ("a", "b"), k=3), thresholds=(0.5, None))
    summary = evaluation.summary(resamples=20)
    found = {name: value["value"] for name, value in summary["at_thresholds"]["a"].items() if name != "threshold"}
    assert summary["at_thresholds"]["a"]["threshold"] == 0.5
    assert found == {
        "sensitivity": 0.5, "specificity": 0, "positive_predictive_value": 0.5, "negative_predictive_value": 0,
    }  # fmt: skip
    assert {one["value"] for name, one in summary["at_thresholds"]["b"].items() if name != "threshold"} == {None}
    counts = summary["findings_per_image"]
    assert (counts["predicted"]["value"], counts["true"]["value"]) == pytest.approx((2 / 3, 2 / 3))


def test_without_a_card_or_scores_there_is_no_calibration_error() -> None:
    evaluation = evaluate(vectors(1, 6), vectors(2, 30), ("a", "b"), k=3)
    calibration = (Calibration(1.0, 0.0), None)
    scored = replace(evaluation, calibration=calibration).summary(resamples=5)
    assert scored["calibration_error"]["value"] == scored["calibration_error_by_label"]["a"]["value"] > 0
    assert scored["calibration_error_by_label"]["b"]["value"] is None
    mute = replace(evaluation.query, scores=np.full((6, 2), NAN, np.float32))
    for other in (evaluation, replace(evaluation, query=mute, calibration=calibration, thresholds=(0.5, 0.5))):
        summary = other.summary(resamples=5)
        assert summary["calibration_error"]["value"] is None
        assert summary["findings_per_image"]["predicted"]["value"] is None
        said = "| calibration error |  | n/a |" if other is evaluation else "This model scores no findings"
        assert said in text_report(summary, "t")


def test_summary_has_corrected_values_and_properties_of_the_lists() -> None:
    """With one label, healthy queries find one healthy image of two. Both columns equal `chance_values`."""
    gallery = Vectors(np.eye(3, dtype=np.float32), np.empty(0), np.array([[1], [0], [1]], np.float32), list("xyz"))
    towards = np.array([[1, 0, 0.5], [0, 1, 0.5], [0.5, 1, 0]], np.float32)
    labels = np.array([[1], [0], [1]], np.float32)
    query = Vectors(towards / np.linalg.norm(towards, axis=1, keepdims=True), labels / 2, labels, list("abc"))
    summary = evaluate(query, gallery, ("a",), k=2).summary(resamples=50)
    # The lists are x z, y z, y x. `second` is the discount of the second rank; an ideal list of two gets 1 + second.
    second = np.log(2) / np.log(3)
    own = [1, 1, second / (1 + second)]  # the healthy query's ideal is one image
    others = [[second / (1 + second)] * 2, [0, 1], [1, second / (1 + second)]]
    shuffled = np.mean([np.mean(one) for one in others])
    corrected = summary["all queries"]["corrected_jaccard_ndcg"]["value"]
    assert corrected == pytest.approx((np.mean(own) - shuffled) / (1 - shuffled))
    assert summary["all queries"]["corrected_ndcg"]["value"] == pytest.approx(corrected), (
        "one label: the gains are equal"
    )
    assert summary["healthy_queries"] == {
        "queries": 1, "share": {"value": 0.5, "low": 0.5, "high": 0.5}, "gallery": pytest.approx(1 / 3),
    }  # fmt: skip
    found = summary["retrieval_by_label"]["a"]
    assert (found["queries"], found["share"]["value"], found["gallery"]) == pytest.approx((2, 0.75, 2 / 3))
    lists = summary["lists"]
    assert (lists["labels_per_hit"]["value"], lists["labels_per_gallery_image"]) == pytest.approx((2 / 3, 2 / 3))
    assert (lists["gallery_shown"], lists["gallery_shown_at_random"]) == pytest.approx((1, 1 - (1 / 3) ** 3))
    assert lists["hubness_skewness"] == 0


def test_report_folder(tmp_path: Path) -> None:
    evaluation = evaluate(vectors(1, 6), vectors(2, 30), ("a", "b"), k=3)
    summary = evaluation.summary(resamples=50)
    write_report(evaluation, summary, tmp_path / "out", "model on table")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["metrics.json", "per_query.csv", "report.md"]
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == summary
    text = (tmp_path / "out/report.md").read_text()
    assert text == text_report(summary, "model on table") and "| random, all queries |" in text
    assert "| corrected nDCG@3 |" in text and "- Labels per hit: " in text and "| no finding, all queries |" in text
    with (tmp_path / "out/per_query.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    values = [float(r["ndcg, positive queries"]) for r in rows if r["ndcg, positive queries"]]
    assert np.mean(values) == pytest.approx(summary["positive queries"]["ndcg"]["value"], abs=1e-5)


def test_an_exported_model_is_evaluated_by_the_runtime(tiny_model: Path, tiny_manifest: Path) -> None:
    summary = evaluate_model(tiny_model, tiny_manifest, k=5).summary(resamples=20)
    assert (summary["queries"], summary["gallery"], summary["k"]) == (4, 20, 5)


def test_labels_are_put_into_the_order_of_the_model(tiny_model: Path, tiny_manifest: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_manifest)
    turned = replace(
        manifest,
        labels=LabelSet(manifest.labels.names[::-1]),
        rows=tuple(replace(row, labels=row.labels[::-1]) for row in manifest),
    )
    write_manifest(turned, tmp_path / "turned.csv")
    paths = (tiny_manifest, tmp_path / "turned.csv")
    summaries = [evaluate_model(tiny_model, path, k=5).summary(resamples=5) for path in paths]
    assert summaries[0] == summaries[1]


def test_a_model_of_every_image_has_no_queries_in_its_table(
    make_tiny_run: Callable[..., Path], tiny_manifest: Path, tmp_path: Path
) -> None:
    facts = {"fold": "all", "manifest_fingerprint": read_manifest(tiny_manifest).fingerprint}
    run = make_tiny_run(tmp_path / "run", tiny_manifest, fold="all", card={"training": facts})
    with pytest.raises(SplitError, match="trained on every image of this table"):
        evaluate_model(run, tiny_manifest)


def test_invalid_evaluations_are_refused(tiny_model: Path, tiny_manifest: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_manifest)
    with pytest.raises(SplitError, match="'val'"):
        evaluate_model(tiny_model, tiny_manifest, queries="val")
    with pytest.raises(RunError, match="k of 1"):
        evaluate_model(tiny_model, tiny_manifest, k=0)
    with pytest.raises(RunError, match="cbmir train"):
        evaluate_model(tmp_path, tiny_manifest)
    write_manifest(replace(manifest, labels=LabelSet(("Effusion", "Mass", "Wings"))), tmp_path / "other.csv")
    with pytest.raises(ManifestError, match="Nodule"):
        evaluate_model(tiny_model, tmp_path / "other.csv")
