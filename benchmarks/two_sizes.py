"""Measure whether a network of the recipe `fitted` does better if it also sees each image at a second size.

    cbmir train nih.csv -o run --fold 1/5 --encoder timm:tf_efficientnet_lite0 --weights lite0.pt --image-size 128
    python benchmarks/two_sizes.py nih.csv run

The trained network computes the features of each image at its own size and at the second one. The linear maps are
fitted to the features of one size, of the other, and of both together. The validation and test images are the queries,
and the training images the gallery. Give the runs of several folds to pool their queries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from cbmir.training.config import TrainConfig
from cbmir.training.dataset import cache_folder, cached_images, label_array, split_rows, split_targets, training_targets
from cbmir.training.evaluate import Evaluation, Vectors, evaluate
from cbmir.training.linear_fit import Stages, fit_linear
from cbmir.training.pool import Pool
from cbmir.training.run import RunFolder, build_model, training_manifest
from cbmir.training.validation import SELECTION_K, Validation

FIGURES = (("auc", ""), ("corrected_ndcg", "all queries"), ("corrected_jaccard_ndcg", "all queries"))


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--size", default=192, show_default=True, help="The second size, in pixels.")
def main(manifest: Path, runs: tuple[Path, ...], size: int) -> None:
    """Print AUC and corrected nDCG of the RUNS, trained on folds of MANIFEST, with differences from their own size."""
    parts: dict[str, list[Evaluation]] = {}
    for run in runs:
        config = replace(RunFolder(run).read_config(), manifest=str(manifest))
        sides = [features(run, replace(config, image_size=pixels)) for pixels in (config.image_size, size)]
        sides.append({split: joined(sides[0][split], sides[1][split]) for split in sides[0]})
        for name, side in zip((f"{config.image_size} pixels", f"{size} pixels", "both"), sides, strict=True):
            parts.setdefault(name, []).extend(results(config, side))
    pools = {name: Pool(found, [0] * len(found)) for name, found in parts.items()}
    own = next(iter(pools.values()))
    for name, pool in pools.items():
        for metric, queries in FIGURES:
            low, high = np.percentile(pool.samples(metric, queries) - own.samples(metric, queries), (2.5, 97.5))
            value = pool.mean(metric, queries)
            difference = f"{value - own.mean(metric, queries):+.3f} [{low:+.3f}, {high:+.3f}]"
            click.echo(f"{name:12} {metric:24} {value:.3f} {difference if pool is not own else ''}")


def features(run: Path, config: TrainConfig) -> dict[str, Stages]:
    """Return a trained network's mean features of both stages, for each split, at the image size of `config`."""
    manifest = training_manifest(config)
    model, _ = build_model(config, split_targets(manifest, "train"), weights="none")
    model.load_state_dict(RunFolder(run).best_state())
    images = cached_images(manifest, config.preprocess, cache_folder(Path(config.manifest)))
    validation = Validation(config, manifest, images)
    return {
        split: validation.pooled(model.eval(), np.array(split_rows(manifest, split)))
        for split in ("train", "val", "test")
    }


def joined(one: Stages, other: Stages) -> Stages:
    """Join the features of two sizes, stage by stage."""
    last, finer = (np.hstack(pair) for pair in zip(one, other, strict=True))
    return last, finer


def results(config: TrainConfig, side: dict[str, Stages]) -> list[Evaluation]:
    """Fit the linear maps to the training images; evaluate them on the val and test images."""
    manifest = training_manifest(config)
    rows = np.array(split_rows(manifest, "train"))
    fit = fit_linear(side["train"], training_targets(label_array(manifest)[rows]), config.projection)
    gallery = Vectors.of_split(manifest, "train", *fit.apply(side["train"]))
    return [
        evaluate(Vectors.of_split(manifest, split, *fit.apply(side[split])), gallery, config.labels, k=SELECTION_K)
        for split in ("val", "test")
    ]


if __name__ == "__main__":
    main()
