"""`cbmir final`: the final model of a cross-validation."""

from __future__ import annotations

from pathlib import Path

import click

from cbmir.cli.options import PATH, command, json_option, option, print_answer
from cbmir.errors import require


@command(
    "cbmir final report -o run --method fitted",
    "cbmir final report -o run --method fitted --resume      # continue after an interruption",
)
@click.argument("report", type=PATH)
@option("-o", "--output", "run", required=True, type=PATH, help="RUN folder to create.")
@option("--method", required=True, help="A method of REPORT whose folds are finished.")
@option("--seed", default=0, help="Seed of the folds' runs, and of this one.")
@option("--resume", is_flag=True, help="Continue the run in -o from its last complete epoch.")
@json_option
def final(report: Path, run: Path, method: str, seed: int, resume: bool, as_json: bool) -> None:
    """Train a method of a cross-validation in REPORT on every image of its table.

    Uses the options and the number of epochs of the folds. Thresholds and calibration come from the scores that each
    image got as a test image, and the card has the figures of all folds together.

    REPORT is the folder of 'cbmir benchmark table … --folds 5'. Writes a RUN folder, as 'cbmir train' does.
    """
    require("lightning", "train")
    from cbmir.training.comparison.final import train_final
    from cbmir.training.harness import first_process

    finished = train_final(report, run, method, seed=seed, resume=resume)
    if first_process():
        card = finished.read_card()
        value = {"run": finished.path, "fingerprint": card.fingerprint, "metrics": card.metrics}
        print_answer(as_json, value, str(finished.path))
