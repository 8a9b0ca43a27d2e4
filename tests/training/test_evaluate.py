"""`cbmir evaluate` on a run and on an exported model."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbmir.errors import ManifestError, RunError, SplitError
from cbmir.labels import LabelSet
from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.evaluate import Vectors, evaluate, evaluate_model, text_report, write_report

NAN = float("nan")


def vectors(seed: int, n: int, labels: np.ndarray | None = None) -> Vectors:
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(n, 4)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    values = rng.integers(0, 2, (n, 2)).astype(np.float32) if labels is None else labels
    return Vectors(embedding, rng.random((n, 2)).astype(np.float32), values, [f"{seed}-{i // 2}" for i in range(n)])


def test_summary_has_both_columns_and_says_who_was_left_out() -> None:
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


def test_report_folder(tmp_path: Path) -> None:
    evaluation = evaluate(vectors(1, 6), vectors(2, 30), ("a", "b"), k=3)
    summary = evaluation.summary(resamples=50)
    write_report(evaluation, summary, tmp_path / "out", "model on table")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["metrics.json", "per_query.csv", "report.md"]
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == summary
    text = (tmp_path / "out/report.md").read_text()
    assert text == text_report(summary, "model on table") and "| random, all queries |" in text
    with (tmp_path / "out/per_query.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    values = [float(r["ndcg, positive queries"]) for r in rows if r["ndcg, positive queries"]]
    assert np.mean(values) == pytest.approx(summary["positive queries"]["ndcg"]["value"], abs=1e-5)


def test_an_exported_model_is_evaluated_by_the_runtime(tiny_model: Path, tiny_manifest: Path) -> None:
    summary = evaluate_model(tiny_model, tiny_manifest, k=5).summary(resamples=20)
    assert (summary["queries"], summary["gallery"], summary["k"]) == (4, 20, 5)


def test_labels_are_taken_in_the_models_order(tiny_model: Path, tiny_manifest: Path, tmp_path: Path) -> None:
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


def test_what_cannot_be_evaluated_is_refused(tiny_model: Path, tiny_manifest: Path, tmp_path: Path) -> None:
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
