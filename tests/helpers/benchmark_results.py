"""Handwritten results of a benchmark: rows, figures and a whole results.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbmir.training.comparison.figures.sheet import ReportFigure
from cbmir.training.comparison.report.render import contents, markdown
from cbmir.training.metrics import RETRIEVAL_METRICS
from cbmir.training.rankings import CORRECTED

HOSTILE = "<script>alert(1)</script>|*x*](http://evil.example)"
LABELS = ["Mass", HOSTILE]
POSITIVE, EVERY = "positive queries", "all queries"
COMMANDS = ("cbmir benchmark nih 'a & b.csv' -o out", "cbmir benchmark nih 'a & b.csv' -o out --seeds 2 --resume")
DASH = "\N{EN DASH}"
REFERENCES = ["random ranking", "images with most labels first", "images without a finding first"]


def fig(value: float | None, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high} | more


def gain(value: float, low: float, high: float, p: float) -> dict[str, Any]:
    """`minus_bce`: equal for the paper's metrics, but over all queries the interval contains 0. AUC gains half, and
    the corrected nDCGs gain .001 and .002 more, over all queries with p + .001."""
    one = fig(value, low, high, p=p / 2, p_holm=p)
    wide = fig(value, -1.0, 1.0, p=p, p_holm=p)
    columns = {POSITIVE: dict.fromkeys(RETRIEVAL_METRICS, one), EVERY: dict.fromkeys(RETRIEVAL_METRICS, wide)}
    for place, metric in enumerate(CORRECTED):
        more = fig(value + 0.001 * (place + 1), low, high, p=p / 2, p_holm=p)
        columns = {POSITIVE: columns[POSITIVE] | {metric: more},
                   EVERY: columns[EVERY] | {metric: more | {"p_holm": p + 0.001}}}  # fmt: skip
    return {"auc": fig(value / 2, low / 2, high / 2, p=p / 4, p_holm=p / 2), "parts": 2} | columns


NO_AUC = {"auc": fig(None, p=None, p_holm=None)}


def proxies_of(method: str) -> str:
    return "2" if method == "proxy" else ""


def row(method: str, ndcg: float, *, auc: float | None = 0.7, sd: float | None = 0.004, **more: Any) -> dict[str, Any]:
    measure, corrected, jaccard = (fig(one, ndcg - 0.01, ndcg + 0.01, sd=sd) for one in (ndcg, ndcg / 2, ndcg / 4))
    column = {"queries": 12, "queries_left_out": 3, **dict.fromkeys(RETRIEVAL_METRICS, measure),
              "corrected_ndcg": corrected, "corrected_jaccard_ndcg": jaccard}  # fmt: skip
    share = {"queries": 12, "share": measure, "gallery": 0.25}
    interval = (None, None) if auc is None else (auc - 0.1, auc + 0.1)
    facts: dict[str, Any] = {
        "method": method, "size": 0, "proxies": proxies_of(method), "cells": 2, "finished": 2, "training_images": 1200,
        "seconds": 3723.0, "proxies_per_class": [2, 2], "negative_proxies": False,
        "auc": fig(auc, *interval, sd=None if auc is None else sd),
        "auc_by_label": {"Mass": fig(auc, *interval), HOSTILE: fig(None)}, "auc_without_both_values": [HOSTILE],
        POSITIVE: column, EVERY: column | {"queries": 15, "queries_left_out": 0}, "views": {}, "sources": {},
        "minus_bce": None, "calibration_error": {"value": 0.05}, "healthy_queries": share,
        "retrieval_by_label": dict.fromkeys(LABELS, share),
        "lists": {"labels_per_hit": measure, "labels_per_gallery_image": 1.25, "gallery_shown": 0.5,
                  "gallery_shown_at_random": 0.875, "hubness_skewness": 2.5},
    }  # fmt: skip
    return facts | more


def unfinished(method: str) -> dict[str, Any]:
    return {"method": method, "size": 0, "proxies": proxies_of(method), "cells": 2, "finished": 0}


def make(**changes: Any) -> dict[str, Any]:
    plan = {"protocol": "nih", "manifest": "nih.csv", "manifest_fingerprint": "ab12", "seeds": 2, "folds": 0,
            "sizes": [0], "proxies": ["2"], "training": {"encoder": "tiny"}, "tuned": {}}  # fmt: skip
    paper = {"ssh": {"ndcg": 0.15}, "bce": {"ndcg": 0.31}, "proxy": {"ndcg": 0.38}}
    methods = ("ssh", "texture", "community", "bce", "ml-proxy-nca", "proxy", "proxy-auto")
    chosen = {"texture": "Numbers chosen <here>."}
    chance = {"ndcg": 0.1, "acg": 0.2, "precision": 0.3, "jaccard_ndcg": 0.4}
    names = [f"{name}, {column}" for name in ("random", "most labels", "no finding") for column in (POSITIVE, EVERY)]
    views = {"AP": {POSITIVE: {"queries": 1020, "ndcg": fig(0.3, 0.2, 0.4)}}}
    results: dict[str, Any] = {
        "schema": 2, "notes": [],
        "protocol": {"name": "nih", "title": "NIH", "k": 100, "labels": LABELS},
        "made": "2025-01-02T03:04:05+00:00",
        "command": "\n".join(COMMANDS),
        "plan": plan,
        "shown": {"size": 0, "proxies": "2"},
        "versions": {"cbmir": "0.1.0"},
        "hardware": {"processor": "a CPU", "processors": 2, "memory_gib": 8.0, "gpus": []},
        "selections": [
            {"part": f"seed{seed}", "file": f"selections/seed{seed}.csv", "fingerprint": "cd",
             "images": {"train": 1200, "val": 9, "test": 15 + seed}, "patients": {"train": 800, "val": 8, "test": 7}}
            for seed in (0, 1)
        ],
        "methods": {
            m: {"title": m.upper(), "source": f"Who & Co, {m}", "chosen": chosen.get(m, ""), "paper": paper.get(m, {})}
            for m in methods
        },
        "references": {"0": dict.fromkeys(names, chance)},
        "best": {"method": None, "leaders": {}, "differences": {}},
        "rows": [
            row("bce", 0.25, auc=0.75),
            row("texture", 0.125, auc=None, sd=None, minus_bce=gain(-0.125, -0.2, -0.05, 0.0002) | NO_AUC),
            row("proxy", 0.3, minus_bce=gain(0.05, 0.01, 0.09, 0.04), views=views),
            row("proxy-auto", 0.29, minus_bce=gain(0.04, 0.01, 0.07, 0.06)),
            row("ml-proxy-nca", 0.9, finished=1, minus_bce=gain(0.65, 0.6, 0.7, 0.01) | {"parts": 1}),
            unfinished("ssh"), unfinished("community"),
        ],
        "failed": [
            {"cell": f"seed{s}/ssh", "method": "ssh", "error": "64 bits > 32", "exit": 1, "log": f"seed{s}/ssh/log.txt"}
            for s in (0, 1)
        ],
        "unfinished": ["seed0/community", "seed1/community", "seed1/ml-proxy-nca"],
    }  # fmt: skip
    return results | changes


def make_sweep() -> dict[str, Any]:
    rows = [
        row("proxy", 0.3, size=size, proxies=proxies, training_images=size or 1200)
        for size in (600, 0) for proxies in ("2", "8")
    ]  # fmt: skip
    results = make(rows=[row("bce", 0.25), *rows], failed=[], unfinished=[])
    plan = results["plan"] | {"sizes": [600, 0], "proxies": ["2", "8"]}
    return results | {"plan": plan}


def lines_of(results: dict[str, Any], pictures: Sequence[ReportFigure] = ()) -> list[str]:
    return markdown(contents(results, pictures)).splitlines()
