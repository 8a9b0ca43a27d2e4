"""The README's table: the proxy method against the paper's baselines, five folds by patient of an NIH manifest.

    python benchmarks/imagenet_weights.py WORK/weights.pt
    python benchmarks/nih_folds.py train manifest.csv WORK --jobs 2      hours on two cores; goes on where it stopped
    python benchmarks/nih_folds.py table manifest.csv WORK               writes WORK/table.md and WORK/table.json

Every image is a query once. All methods share encoder, starting weights, epochs and learning rate; the epoch is chosen
on the fold's own validation part, never on its queries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbmir.files import write_json, write_text
from cbmir.training.evaluation import Evaluation, figure_of
from cbmir.training.metrics import RETRIEVAL_METRICS, class_aucs, patient_weights, weighted_means
from cbmir.training.report import evaluate_model, figure

FOLDS = 5
RESAMPLES = 1000
METHODS = {
    "proxy, negative proxies": ["--loss", "proxy", "--negative-proxies"],
    "proxy, negative proxies, no class weights": ["--loss", "proxy", "--negative-proxies", "--no-class-weights"],
    "proxy": ["--loss", "proxy", "--no-negative-proxies"],
    "BCE": ["--loss", "bce"],
    "ML-Proxy-NCA": ["--loss", "ml-proxy-nca", "--negative-proxies"],
}
COMMON = [
    "--encoder", "timm:tf_efficientnet_lite0", "--image-size", "112", "--epochs", "8", "--lr", "3e-4", "--seed", "0",
]  # fmt: skip


# One thread a run, and memory kept between steps rather than given back to the kernel: together 1.3 times the speed.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def run_folder(work: Path, method: str, fold: int) -> Path:
    """Where one run lies."""
    return work / f"{method.replace(', ', '-').replace(' ', '-').lower()}-fold{fold}"


def train_all(manifest: Path, work: Path, jobs: int) -> int:
    """Train every fold of every method, `jobs` at a time, each in one thread; returns how many failed."""

    def one(task: tuple[int, str]) -> int:
        fold, method = task
        command = [
            sys.executable, "-m", "cbmir", "train", str(manifest), "-o", str(run_folder(work, method, fold)),
            *COMMON, *METHODS[method], "--weights", str(work / "weights.pt"), "--fold", f"{fold}/{FOLDS}", "--resume",
        ]  # fmt: skip
        return subprocess.run(command, env=os.environ | ENVIRONMENT, check=False).returncode

    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(one, [(fold, method) for fold in range(1, FOLDS + 1) for method in METHODS]))
    return sum(code != 0 for code in codes)


@dataclass(frozen=True, eq=False)
class Pooled:
    """One method over all folds: the queries of each fold, and per-query values [N] and patients over all of them."""

    folds: list[Evaluation]

    @property
    def patients(self) -> list[str]:
        return [patient for fold in self.folds for patient in fold.query.patients]

    def values(self, column: str, metric: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(fold.retrieval[column], metric) for fold in self.folds])

    def auc(self, weights: NDArray[np.float64] | None = None) -> float:
        """Mean over labels of the mean over folds: scores of different models are never ranked together.

        A label without a positive among a fold's queries (in a resample: among those drawn) has no AUC there.
        """
        ends = np.cumsum([len(fold.query.scores) for fold in self.folds])
        parts = [None] * len(self.folds) if weights is None else np.split(weights, ends[:-1])
        aucs = [class_aucs(f.query.scores, f.query.labels, w) for f, w in zip(self.folds, parts, strict=True)]
        return float(np.nanmean(np.nanmean(aucs, axis=0)))


def evaluate_all(manifest: Path, work: Path) -> dict[str, Pooled]:
    """Every method on the queries of its five folds, k = 10. Raises RunError for an unfinished run."""
    return {
        method: Pooled([evaluate_model(run_folder(work, method, fold), manifest) for fold in range(1, FOLDS + 1)])
        for method in METHODS
    }


def table(methods: dict[str, Pooled]) -> tuple[str, dict[str, Any]]:
    """The table as Markdown and as data; intervals are over patients, differences to BCE are paired."""
    reference = methods["BCE"]
    weights = patient_weights(reference.patients, resamples=RESAMPLES)
    aucs = {name: np.array([m.auc(w) for w in weights]) for name, m in methods.items()}
    data: dict[str, Any] = {}
    lines = []
    for column in ("positive queries", "all queries"):
        count = int((~np.isnan(reference.values(column, "ndcg"))).sum())
        lines += [
            f"\n**{column}** ({count})\n",
            "| method | AUC | nDCG@10 | ACG@10 | precision@10 | nDCG - BCE's | AUC - BCE's |",
            "|" + "---|" * 7,
        ]
        for name, method in methods.items():
            row = {"auc": figure_of(method.auc(), aucs[name])}
            for metric in RETRIEVAL_METRICS:
                values = method.values(column, metric)
                row[metric] = figure_of(float(np.nanmean(values)), weighted_means(values, weights))
            gain = method.values(column, "ndcg") - reference.values(column, "ndcg")
            row["ndcg_minus_bce"] = figure_of(float(np.nanmean(gain)), weighted_means(gain, weights))
            row["auc_minus_bce"] = figure_of(method.auc() - reference.auc(), aucs[name] - aucs["BCE"])
            data[f"{name}, {column}"] = row
            shown = [figure(row[key]) for key in ("auc", *RETRIEVAL_METRICS)]
            shown += ["", ""] if name == "BCE" else [figure(row["ndcg_minus_bce"]), figure(row["auc_minus_bce"])]
            lines.append(f"| {name} | {' | '.join(shown)} |")
        chance = [f"{np.nanmean(reference.values(f'random, {column}', metric)):.3f}" for metric in RETRIEVAL_METRICS]
        lines.append(f"| random ranking | 0.500 | {' | '.join(chance)} | | |")
    return "\n".join(lines) + "\n", data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "table"])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.step == "train":
        sys.exit(train_all(arguments.manifest, arguments.work, arguments.jobs))
    text, figures = table(evaluate_all(arguments.manifest, arguments.work))
    write_text(arguments.work / "table.md", text)
    write_json(arguments.work / "table.json", figures)
    print(text)  # noqa: T201
