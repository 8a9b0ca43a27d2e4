"""The files of `cbmir evaluate`: report.md, metrics.json and per_query.csv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cbmir.files import write_csv, write_json, write_text
from cbmir.labels import spelled
from cbmir.training.evaluate import Evaluation
from cbmir.training.metrics import QUERIES, REFERENCES, RETRIEVAL_METRICS
from cbmir.training.rankings import CORRECTED

TITLES = {
    "auc": "AUC", "ndcg": "nDCG@{}", "acg": "ACG@{}", "precision": "precision@{}", "jaccard_ndcg": "Jaccard nDCG@{}",
    "corrected_ndcg": "corrected nDCG@{}", "corrected_jaccard_ndcg": "corrected Jaccard nDCG@{}",
    "calibration_error": "calibration error",
}  # fmt: skip
_OUTCOMES = ("sensitivity", "specificity", "positive_predictive_value", "negative_predictive_value")


def metric_title(metric: str, k: int) -> str:
    """Return a title such as `nDCG@100`."""
    return TITLES[metric].format(k)


def text_report(summary: dict[str, Any], title: str) -> str:
    """Format the figures as Markdown: the paper's metrics, rankings that ignore the query, the yardstick, labels."""
    k = summary["k"]

    def titles(metrics: Sequence[str]) -> list[str]:
        return [metric_title(metric, k) for metric in metrics]

    ranked = [
        [
            name,
            f"{row['queries']}",
            f"{row['queries_left_out']}",
            *(figure(row[metric]) for metric in RETRIEVAL_METRICS),
        ]
        for column in QUERIES
        for name, row in [(name, summary[name]) for name in (column, *(f"{one}, {column}" for one in REFERENCES))]
    ]
    corrected = [[name, *(figure(summary[column][metric]) for column in QUERIES)]
                 for metric, name in zip(CORRECTED, titles(list(CORRECTED)), strict=True)]  # fmt: skip
    scored = [[TITLES[metric], "", figure(summary[metric])] for metric in ("auc", "calibration_error")]
    lists, healthy, counts = summary["lists"], summary["healthy_queries"], summary["findings_per_image"]
    found = [
        [spelled(name), figure(summary["auc_by_label"][name]), figure(one["share"]), f"{one['queries']}",
         f"{one['gallery']:.3f}", figure(summary["calibration_error_by_label"][name])]
        for name, one in summary["retrieval_by_label"].items()
    ]  # fmt: skip
    outcomes = [
        [spelled(name), figure({"value": one["threshold"]}), *(figure(one[outcome]) for outcome in _OUTCOMES)]
        for name, one in summary["at_thresholds"].items()
    ]
    lost = ", ".join(map(spelled, summary["auc_without_both_values"]))
    thresholds = [
        "## At the thresholds",
        _table(["label", "threshold", *(outcome.replace("_", " ") for outcome in _OUTCOMES)], outcomes),
        f"Findings per image, of those with a threshold: {figure(counts['predicted'])} predicted, "
        f"{figure(counts['true'])} true.",
    ]
    if not summary["scores_findings"]:
        scored, lost, thresholds = [], "", ["This model scores no findings: metrics of scores are left out."]
    parts = [
        f"# {title}",
        *(f"**{note}**" for note in summary["notes"]),
        f"{summary['queries']} queries of {summary['patients']} patients against a gallery of {summary['gallery']} "
        f"images, k = {k}, each query's own patient left out. In brackets: 95% bootstrap interval over patients.",
        "## The paper's metrics",
        _table(["queries", "n with nDCG", "left out", *titles(RETRIEVAL_METRICS)], ranked),
        "## Yardstick",
        "nDCG corrected for chance: 0 for any list that ignores the query, 1 for the ideal.",
        _table(["", *QUERIES], corrected + scored),
        f"- Labels per hit: {figure(lists['labels_per_hit'])}; per gallery image: "
        f"{lists['labels_per_gallery_image']:.3f}.\n"
        f"- Share of the gallery that was shown: {lists['gallery_shown']:.3f}; random lists would show "
        f"{lists['gallery_shown_at_random']:.3f}.\n"
        f"- Hubness (skewness of how often an image is shown): {lists['hubness_skewness']:.2f}.\n"
        f"- Precision of the {healthy['queries']} healthy queries: {figure(healthy['share'])}; healthy images in the "
        f"gallery: {healthy['gallery']:.3f}.",
        "## By label",
        _table(["label", "AUC", f"its share of the first {k}", "queries that have it", "its share of the gallery",
                "calibration error"], found),
        *([f"Left out of the mean AUC, since the queries do not have both values: {lost}."] if lost else []),
        *thresholds,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def write_report(evaluation: Evaluation, summary: dict[str, Any], folder: Path, title: str) -> None:
    """Write metrics.json, report.md and per_query.csv (one row per query, in the order of the manifest)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", summary)
    write_text(folder / "report.md", text_report(summary, title))
    columns = {f"{name}, {side}": getattr(evaluation.retrieval[side], name)
               for side in QUERIES for name in RETRIEVAL_METRICS}  # fmt: skip
    queries = zip(evaluation.query.patients, *columns.values(), strict=True)
    rows = ([patient, *("" if np.isnan(v) else f"{v:.6f}" for v in values)] for patient, *values in queries)
    write_csv(folder / "per_query.csv", [("patient_id", *columns), *rows], private=True)


def figure(value: dict[str, float | None]) -> str:
    """Format a value with its interval, such as `0.219 [0.201, 0.236]`, or `n/a` without a value."""
    if value["value"] is None:
        return "n/a"
    shown = f"{value['value']:.3f}"
    return shown if value.get("low") is None else f"{shown} [{value['low']:.3f}, {value['high']:.3f}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
