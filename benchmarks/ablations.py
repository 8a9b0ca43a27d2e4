"""Ablation of the recipe `fitted`: train it without each of its parts, on images with known findings.

    cbmir data phantom -n 800 --seed 0 -o phantoms
    python benchmarks/ablations.py phantoms/manifest.csv -o ablations --write-docs docs/benchmark.md

There is one training run for each part of the training. For the parts of the linear fit, the network of the whole
recipe is fitted again without them. All are tested on the same images; differences are paired, with intervals over
patients. A finished run is not trained again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from figures import filled, table

from cbmir.files import replacing, write_json
from cbmir.machine import describe_machine
from cbmir.training import linear_fit, validation
from cbmir.training.comparison.results import difference
from cbmir.training.comparison.runner import environment
from cbmir.training.dataset import cache_folder, cached_images, evaluation_batches, split_rows, split_targets
from cbmir.training.evaluate import Vectors, embed, evaluate
from cbmir.training.linear_fit import LinearFit, Stages, fit_linear
from cbmir.training.model import RetrievalModel
from cbmir.training.pool import Pool
from cbmir.training.run import RunFolder, build_model, load_model, training_manifest
from cbmir.training.validation import Validation

WHOLE = "the whole recipe"
#: Options of `cbmir train` that remove one part of the training.
TRAINED = {
    WHOLE: (),
    "no linear fit": ("--no-linear-fit",),
    "no averaged weights": ("--average", "0"),
    "no warm-up and cosine": ("--schedule", "constant"),
    "only random crops": ("--augment", "crop"),
    "no higher rate for the head": ("--head-rate", "1"),
    "no weight decay": ("--weight-decay", "0"),
}
#: Parts of the embedding in a linear fit, as `linear_fit` orders them.
PARTS = {"embedding without neighbours": 0, "embedding without scores": 1, "embedding without looks": 2}
NOTHING = 1e-6  # relative length of a removed part; not 0, since scores are computed from their part
COARSE = "only the last stage"
YARDSTICK = {"AUC": ("auc", ""), "corrected nDCG@10": ("corrected_ndcg", "all queries"),
             "with Jaccard gain": ("corrected_jaccard_ndcg", "all queries")}  # fmt: skip
K = 10


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="For the runs.")
@click.option("--encoder", default="resnet18", show_default=True)
@click.option("--weights", default="none", show_default=True)
@click.option("--image-size", default=64, show_default=True)
@click.option("--write-docs", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="The page to fill.")
def main(manifest: Path, output: Path, encoder: str, weights: str, image_size: int, write_docs: Path | None) -> None:
    """Train and measure the recipe without each of its parts."""
    shared = ["--recipe", "fitted", "--encoder", encoder, "--weights", weights, "--image-size", str(image_size)]
    pools: dict[str, Pool] = {}
    for name, options in TRAINED.items():
        folder = output / name.replace(" ", "-")
        command = [sys.executable, "-m", "cbmir", "train", str(manifest), "-o", str(folder), *shared, *options]
        subprocess.run([*command, "--devices", "1", "--resume"], check=True, env=environment(0, 1))
        pools[name] = measured(load_model(folder)[0], folder)
        click.echo(f"{name}: AUC {pools[name].mean('auc'):.3f}")
    whole = output / WHOLE.replace(" ", "-")
    for name, part in PARTS.items():
        shares = tuple(NOTHING if i == part else share for i, share in enumerate(linear_fit._PARTS))
        with patch.object(linear_fit, "_PARTS", shares):
            pools[name] = measured(fitted_again(whole), whole)
    with without_finer_stage():
        pools[COARSE] = measured(fitted_again(whole), whole)

    found = {
        name: {title: row(pool, pools[WHOLE], *one) for title, one in YARDSTICK.items()} for name, pool in pools.items()
    }
    write_json(output / "ablations.json", {"machine": describe_machine(), "rows": found})
    lines = table(["", *YARDSTICK], [[name, *map(words, own.values())] for name, own in found.items()])
    click.echo(lines)
    if write_docs:
        text = filled(write_docs.read_text("utf-8"), "ablations", {"table": lines})
        with replacing(write_docs) as temporary:
            temporary.write_text(text, "utf-8")


def row(pool: Pool, whole: Pool, metric: str, column: str) -> dict[str, Any]:
    """Return a figure and its difference from the whole recipe's."""
    more = None if pool is whole else difference(pool, whole, metric, column)
    return {"value": pool.mean(metric, column), "more": more}


def words(one: dict[str, Any]) -> str:
    if (more := one["more"]) is None:
        return f"{one['value']:.3f}"
    return f"{one['value']:.3f} ({more['value']:+.3f} [{more['low']:+.3f}, {more['high']:+.3f}])"


def measured(model: RetrievalModel, run: Path) -> Pool:
    """Evaluate the run's test images as queries, with its training images as the gallery."""
    config = RunFolder(run).read_config()
    manifest = training_manifest(config)
    images = cached_images(manifest, config.preprocess, cache_folder(Path(config.manifest)))

    def vectors(split: str) -> Vectors:
        rows = split_rows(manifest, split)
        return Vectors.of_split(manifest, split, *embed(model, evaluation_batches(images, rows, config.preprocess)))

    return Pool([evaluate(vectors("test"), vectors("train"), config.labels, k=K)], [0])


def fitted_again(run: Path) -> RetrievalModel:
    """Return the run's network before its linear fit, fitted again by the current `linear_fit`."""
    folder = RunFolder(run)
    config = folder.read_config()
    manifest = training_manifest(config)
    model, _ = build_model(config, split_targets(manifest, "train"), weights="none")
    model.load_state_dict(folder.best_state())
    images = cached_images(manifest, config.preprocess, cache_folder(Path(config.manifest)))
    return Validation(config, manifest, images).fitted(model.eval())


@contextmanager
def without_finer_stage() -> Iterator[None]:
    """Let the linear fit use only the last stage."""

    def fit(pooled: Stages, *more: Any) -> LinearFit:
        last, finer = pooled
        return fit_linear((last, np.zeros_like(finer)), *more)

    with patch.object(validation, "fit_linear", fit):
        yield


if __name__ == "__main__":
    main()
