"""Search the learning rate of each method on the validation part of one fold, for `cbmir benchmark --tuned`.

    python benchmarks/tune.py nih.csv -o runs --weights lite0.pt --results docs/benchmark/nih/tuned.csv

Each method is trained on fold 1 of 5 at each rate, with the options that the benchmark gives all methods. The epoch is
chosen as in training, and its `val_choice` (AUC and corrected nDCG of the validation part) decides. The fold's test
images are not used; its validation images are test images of other folds, for all methods equally. Only the rate is
searched; hashing methods keep the benchmark's --lr (3e-4). Each finished method and rate is added to the results as a
row, and a later call, even on another machine, runs only the missing ones; tuned.json beside the results has the best
rates, and how many seeds the benchmark trains. A method that shares the network of another takes its rate (`SAME`).
"""

from __future__ import annotations

import csv
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import click

from cbmir.files import replacing, write_json
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.runner import environment
from cbmir.training.run import RunFolder

SEARCHED = ("bce", "fitted", "proxy-negative", "soft-ndcg", "ml-proxy-nca", "proxy-anchor")
MEASURED = ("epoch", "val_auc", "val_corrected_ndcg", "val_choice")
#: Methods that the benchmark trains with all of its seeds; the others get one.
ALL_SEEDS = ("bce", "fitted", "proxy-negative", "soft-ndcg")
SAME = {"proxy": "proxy-negative", "proxy-auto": "proxy-negative", "proxy-fitted": "proxy-negative"}

Found = dict[tuple[str, str], dict[str, str]]


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="For the runs.")
@click.option("--results", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--weights", required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--encoder", default="timm:tf_efficientnet_lite0", show_default=True)
@click.option("--image-size", default=128, show_default=True)
@click.option("--rates", default="0.0003,0.0001,0.0006", show_default=True)
@click.option("--methods", default=",".join(SEARCHED), show_default=True)
@click.option("--jobs", default=2, show_default=True)
def main(
    manifest: Path, output: Path, results: Path, weights: Path, encoder: str, image_size: int, rates: str, methods: str,
    jobs: int,
) -> None:  # fmt: skip
    """Search the learning rate of each method on validation data."""
    found = read(results)
    cells = [(method, rate) for rate in rates.split(",") for method in methods.split(",")]
    lock = Lock()
    shared = ["--recipe", "fitted", "--encoder", encoder, "--weights", str(weights)]
    shared += ["--image-size", str(image_size), "--fold", "1/5"]

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
        best = max(RunFolder(folder).read_epochs(), key=lambda row: float(row["val_choice"]))
        with lock:
            found[cell] = {name: best[name] for name in MEASURED}
            write(results, found)
        click.echo(f"{method} {rate}: {found[cell]}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train, [cell for cell in cells if cell not in found]))


def read(results: Path) -> Found:
    """Read the rows that earlier calls have written."""
    if not results.exists():
        return {}
    with results.open(newline="", encoding="utf-8") as stream:
        return {(row["method"], row["lr"]): {name: row[name] for name in MEASURED} for row in csv.DictReader(stream)}


def write(results: Path, found: Found) -> None:
    """Write the rows, and tuned.json beside them with the best rate and the number of seeds of each method."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with replacing(results) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["method", "lr", *MEASURED])
        writer.writerows([*cell, *row.values()] for cell, row in sorted(found.items()))
    best: dict[str, str] = {}
    for method, rate in sorted(found, key=lambda cell: float(found[cell]["val_choice"])):
        best[method] = rate
    best |= {method: best[other] for method, other in SAME.items() if other in best}
    rates = {method: {"lr": float(rate)} for method, rate in best.items()}
    seeds = {method: {} if method in ALL_SEEDS else {"seeds": 1} for method in METHODS}
    write_json(results.with_name("tuned.json"), {method: rates.get(method, {}) | seeds[method] for method in METHODS})


if __name__ == "__main__":
    main()
