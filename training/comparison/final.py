"""The final model of a cross-validation: trained on every image, with the figures of its folds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median_high

import numpy as np

from cbmir.errors import RunError
from cbmir.manifest import read_manifest
from cbmir.training.comparison.cells import CellAnswers, is_finished, read_answers
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan
from cbmir.training.harness import train
from cbmir.training.losses import HASHING_LOSSES
from cbmir.training.pool import Pool
from cbmir.training.run import RunFolder
from cbmir.training.splits import EVERY_IMAGE
from cbmir.training.validation import HeldOut


def train_final(report: Path, run: Path, method: str, *, seed: int = 0, resume: bool = False) -> RunFolder:
    """Train a method of a cross-validation on every image of its table.

    The options are those of the folds. Training ends after the median of the folds' best numbers of epochs. Each image
    was a test image in one fold, and its scores there determine thresholds, operating points and calibration. The card
    has the figures of all folds together, although their models were trained on fewer images.

    Args:
        report: A folder made by `cbmir benchmark --folds`.
        run: As in `harness.train`.
        seed: Seed of the folds' runs, and of this one.

    Raises:
        RunError: The report has no folds, a fold of this method and seed is not finished, or the method has no network
            that can be exported; or as in `harness.train`.
        ManifestError: The table has changed or cannot be read.
    """
    plan = Plan.read(report)
    if method not in plan.methods:
        raise RunError(f"{report}: expected a method of this benchmark ({', '.join(plan.methods)}), found {method!r}")
    if METHODS[method].answer is not None or METHODS[method].training.get("loss") in HASHING_LOSSES:
        raise RunError(f"expected a method whose network can be exported, found {method}")
    cells = [
        cell
        for cell in plan.cells()
        if (cell.method, cell.part.seed, cell.part.size) == (method, seed, plan.shown_size)
        and cell.proxies in ("", plan.shown_proxies)
    ]  # fmt: skip
    unfinished = [cell.name for cell in cells if not is_finished(report, cell)]
    if not plan.folds or not cells or unfinished:
        missing = ", ".join(unfinished) or f"{plan.folds} folds, with {plan.seeds} seeds"
        raise RunError(f"{report}: expected finished folds of {method} with seed {seed}, found these unfinished: "
                       f"{missing}; finish them with 'cbmir benchmark … --folds 5'")  # fmt: skip
    answers = [read_answers(report, plan, cell) for cell in cells]
    path = Path(plan.manifest)
    config = replace(
        plan.config(cells[0], read_manifest(path), path),
        manifest_fingerprint=plan.manifest_fingerprint, fold=EVERY_IMAGE, stop_after=_epochs(answers),
    )  # fmt: skip
    return train(config, run, resume=resume, folds=_held_out(answers, seed))


def _epochs(answers: list[CellAnswers]) -> int:
    """Return the median over the folds of the number of epochs up to and including the best one."""
    return median_high(int(one.facts["best_epoch"]) + 1 for one in answers)


def _held_out(answers: list[CellAnswers], seed: int) -> HeldOut:
    return HeldOut(
        f"{len(answers)} folds", np.concatenate([one.query.scores for one in answers]),
        np.concatenate([one.query.labels for one in answers]), Pool(answers, [seed] * len(answers)).figures(),
    )  # fmt: skip
