"""The final model: it is trained on every image, and the folds provide its figures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.training.comparison.conftest import TINY

import command_line
from cbmir.errors import ManifestError, RunError
from cbmir.manifest import read_manifest
from cbmir.training import metrics
from cbmir.training.comparison.cells import FACTS, cell_folder, read_answers, run_cell
from cbmir.training.comparison.final import train_final
from cbmir.training.comparison.plan import Plan, make_plan, prepare
from cbmir.training.comparison.protocols import TABLE
from cbmir.training.harness import train
from cbmir.training.run import RunFolder, load_model, training_manifest

FOLDS = 2


@pytest.fixture(scope="module")
def folds(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A REPORT with two finished folds of two methods."""
    folder = tmp_path_factory.mktemp("folds")
    shutil.copytree(squares.parent, folder / "squares")
    report, table = folder / "report", folder / "squares" / squares.name
    options = TINY | {"epochs": 3, "schedule": "cosine", "average": 0.5, "projection": 16}
    plan = make_plan(
        TABLE, read_manifest(table), table,
        methods=("proxy", "fitted", "itq"), sweeps=(), seeds=1, folds=FOLDS, pairs=(), training=options, command="",
    )  # fmt: skip
    plan = prepare(report, plan, read_manifest(table), resume=False)
    for cell in plan.cells():
        if cell.method in ("proxy", "fitted"):
            run_cell(report, plan, cell)
            facts = cell_folder(report, cell) / FACTS
            facts.write_text(json.dumps(json.loads(facts.read_text()) | {"best_epoch": 1}))
    return report


@pytest.mark.slow
@pytest.mark.parametrize("method", ["proxy", "fitted"])
def test_training_uses_every_image_and_the_settings_of_the_folds(method: str, folds: Path, tmp_path: Path) -> None:
    run = train_final(folds, tmp_path / "run", method)
    card, config = run.read_card(), run.read_config()
    plan = Plan.read(folds)
    table = read_manifest(Path(plan.manifest))
    assert card.training["images"] == {"train": len(table), "val": 0, "test": 0}
    assert {row.split for row in training_manifest(config)} == {"train"}

    rows = run.read_epochs()
    assert [row["epoch"] for row in rows] == ["0", "1"] and card.training["best_epoch"] == 1
    assert {row["val_choice"] for row in rows} == {""}
    assert float(rows[-1]["lr"]) > 0.1 * config.lr, "it ends amid the schedule of the folds, at its second of 3 epochs"
    assert run.curves.exists()

    cells = [cell for cell in plan.cells() if cell.method == method]
    answers = [read_answers(folds, plan, cell) for cell in cells]
    scores = np.concatenate([one.query.scores for one in answers])
    labels = np.concatenate([one.query.labels for one in answers])
    assert len(scores) == len(table), "each image is a test image once"
    points = [metrics.operating_points(scores[:, j], labels[:, j])["balanced"] for j in range(labels.shape[1])]
    assert card.thresholds == tuple(None if point is None else point.threshold for point in points)
    aucs = np.mean([metrics.class_aucs(one.query.scores, one.query.labels) for one in answers], axis=0)
    assert card.metrics["2 folds auc"]["value"] == pytest.approx(aucs.mean())
    assert card.training["held_out"] == "2 folds"

    model, _, _ = load_model(run.path)
    assert (type(model.encoder).__name__ == "TwoStageEncoder") is (method == "fitted")


@pytest.mark.slow
def test_a_finished_or_stopped_run_resumes(folds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path / "run")
    assert command_line.run("final", folds, "-o", run.path, "--method", "proxy", "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == run.read_card().metrics
    finished = run.card.read_bytes()
    with pytest.raises(RunError, match="--resume"):
        train_final(folds, run.path, "proxy")
    run.card.unlink()
    train_final(folds, run.path, "proxy", resume=True)
    assert run.card.read_bytes() == finished
    with pytest.raises(RunError, match="different: loss"):
        train_final(folds, run.path, "fitted", resume=True)


def test_unsuitable_reports_and_methods_are_refused(folds: Path, tiny_report: Path, tmp_path: Path) -> None:
    for report, method, seed, message in (
        (folds, "bce", 0, "expected a method of this benchmark"),
        (folds, "itq", 0, "a method whose network can be exported, found itq"),
        (folds, "proxy", 1, "2 folds, with 1 seeds"),
        (tiny_report, "proxy", 0, "0 folds"),
        (tiny_report, "dsh", 0, "can be exported, found dsh"),
        (tmp_path, "proxy", 0, "expected a folder made by 'cbmir benchmark'"),
    ):
        with pytest.raises(RunError, match=message):
            train_final(report, tmp_path / "run", method, seed=seed)
    assert not (tmp_path / "run").exists()


def test_an_unfinished_fold_is_named(folds: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    shutil.copytree(folds, report)
    (report / "cells/seed0-fold2/fitted" / FACTS).unlink()
    with pytest.raises(RunError, match="found these unfinished: seed0-fold2/fitted"):
        train_final(report, tmp_path / "run", "fitted")


def test_a_changed_table_is_refused(folds: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    shutil.copytree(folds, report)
    plan = json.loads((report / "benchmark.json").read_text())
    (report / "benchmark.json").write_text(json.dumps(plan | {"manifest_fingerprint": "another"}))
    with pytest.raises(RunError, match="the manifest has changed"):
        train_final(report, tmp_path / "run", "proxy")
    (report / "benchmark.json").write_text(json.dumps(plan | {"manifest": str(tmp_path / "gone.csv")}))
    with pytest.raises(ManifestError, match="no such manifest"):
        train_final(report, tmp_path / "run", "proxy")


def test_only_the_final_model_has_no_fold(folds: Path, tmp_path: Path) -> None:
    config = RunFolder(folds / "cells/seed0-fold1/proxy-m2/run").read_config()
    with pytest.raises(RunError, match="'cbmir final' trains on every image"):
        train(replace(config, fold="all"), tmp_path / "run")
