"""The learning rate of each method, by the validation part of one fold: what `cbmir benchmark --tuned` takes.

    python benchmarks/tune.py nih.csv -o FOLDER --weights lite0.pt --jobs 2

Each method is trained on fold 1 of 5 at each rate, with the options that the benchmark gives all of them. The epoch is
chosen as in training; its `val_choice` (AUC and corrected nDCG of the validation part) decides. Test images are never
looked at. FOLDER gets a run for each method and rate, which a later call goes on with, tuned.csv with every figure, and
tuned.json. A method that shares another's network takes its rate (`SAME`); hashing methods take `--rates`' middle one.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from cbmir.files import replacing, write_json
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.runner import environment
from cbmir.training.run import RunFolder

SEARCHED = ("bce", "fitted", "proxy-negative", "soft-ndcg", "ml-proxy-nca", "proxy-anchor")
SAME = {"proxy": "proxy-negative", "proxy-auto": "proxy-negative", "proxy-fitted": "proxy-negative"}


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--weights", required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--encoder", default="timm:tf_efficientnet_lite0", show_default=True)
@click.option("--image-size", default=128, show_default=True)
@click.option("--rates", default="0.0001,0.0003,0.0006", show_default=True)
@click.option("--methods", default=",".join(SEARCHED), show_default=True)
@click.option("--jobs", default=2, show_default=True)
def main(
    manifest: Path, output: Path, weights: Path, encoder: str, image_size: int, rates: str, methods: str, jobs: int
) -> None:
    """Search the learning rate of each method on validation."""
    cells = [(method, rate) for method in methods.split(",") for rate in rates.split(",")]
    shared = ["--encoder", encoder, "--weights", str(weights), "--image-size", str(image_size), "--fold", "1/5"]

    def train(cell: tuple[str, str]) -> None:
        method, rate = cell
        folder = output / f"{method}-{rate}"
        own = {"linear_fit": False, "negative_proxies": True} | dict(METHODS[method].training)
        command = [sys.executable, "-m", "cbmir", "train", str(manifest), "-o", str(folder), "--resume", "--lr", rate]
        command += [*shared, "--devices", "1", "--loss", str(own["loss"])]
        command += ["--linear-fit" if own["linear_fit"] else "--no-linear-fit"]
        if own["loss"] != "bce":
            command += ["--negative-proxies" if own["negative_proxies"] else "--no-negative-proxies"]
        folder.mkdir(parents=True, exist_ok=True)
        with (output / f"{method}-{rate}.log").open("ab") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environment(0, jobs))
        click.echo(f"{method} {rate}: {choice(folder)}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train, cells))
    write(output, cells, rates.split(","))


def choice(folder: Path) -> dict[str, str]:
    """The row of metrics.csv of the chosen epoch."""
    return max(RunFolder(folder).read_epochs(), key=lambda row: float(row["val_choice"]))


def write(output: Path, cells: list[tuple[str, str]], rates: list[str]) -> None:
    """Write tuned.csv and tuned.json."""
    found = {cell: choice(output / "-".join(cell)) for cell in cells}
    with replacing(output / "tuned.csv") as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["method", "lr", "epoch", "val_auc", "val_corrected_ndcg", "val_choice"])
        for (method, rate), row in found.items():
            writer.writerow([method, rate, row["epoch"], row["val_auc"], row["val_corrected_ndcg"], row["val_choice"]])
    best = {}
    for method, _ in cells:
        best[method] = max(rates, key=lambda rate: float(found[method, rate]["val_choice"]))
    best |= {method: best[other] for method, other in SAME.items() if other in best}
    write_json(output / "tuned.json", {method: {"lr": float(rate)} for method, rate in best.items()})
    click.echo(json.dumps(best))


if __name__ == "__main__":
    main()
