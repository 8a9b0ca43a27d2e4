"""Real cells: the output of each method, and finished cells are not run again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbmir.errors import RunError
from cbmir.manifest import read_manifest
from cbmir.training.comparison import cells as module
from cbmir.training.comparison.cells import (
    FACTS,
    VALUES,
    cell_folder,
    check_finished,
    read_answers,
    read_vectors,
    run_cell,
)
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Cell, Part, Plan, prepare, selection_path
from cbmir.training.metrics import inner_products, positives, retrieval_values
from cbmir.training.rankings import SPARE
from cbmir.training.run import load_model

PART = Part(0, 0, 0)
HASHING = ("ssh", "itq", "sdh", "dsh", "osdh")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_answers_every_query(
    method: str, tiny_report: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell]
) -> None:
    folder = cell_folder(tiny_report, tiny_cells[method])
    answers, vectors = read_answers(tiny_report, tiny_plan, tiny_cells[method]), read_vectors(folder)
    selection = read_manifest(selection_path(tiny_report, PART))
    query, gallery = selection.split("test"), selection.split("train")
    assert list(answers.query.patients) == [row.patient_id for row in query]
    assert answers.query.labels.tolist() == [list(row.labels) for row in query]
    assert set(answers.views) == {"PA"} and set(answers.sources) == {""}
    assert len(vectors["query"]) == len(query) and len(vectors["gallery"]) == len(gallery)
    assert np.isfinite(vectors["gallery"]).all()
    assert ((answers.neighbours >= 0) & (answers.neighbours < len(gallery))).all()
    assert 0 < np.nanmean(answers.retrieval["positive queries"].ndcg) <= 1
    assert answers.facts["training_images"] == len(gallery)
    assert answers.facts["seconds"] >= answers.facts.get("training_seconds", 0)
    if method in HASHING:
        assert vectors["gallery"].shape[1] == 8 and set(np.unique(vectors["gallery"])) == {-1, 1}
    has_scores = method not in ("ssh", "itq", "sdh", "dsh", "texture")
    scores = answers.query.scores
    assert np.isfinite(scores).all() if has_scores else np.isnan(scores).all()
    assert np.isfinite(answers.calibration_errors).all() == has_scores, (
        "without scores there is no error, not an error of 0"
    )
    assert answers.neighbours.shape == (len(query), 10 + SPARE)


def test_the_figures_match_the_vectors(tiny_report: Path, tiny_plan: Plan) -> None:
    cell = Cell(PART, "dsh")
    answers, vectors = read_answers(tiny_report, tiny_plan, cell), read_vectors(cell_folder(tiny_report, cell))
    gallery = read_manifest(selection_path(tiny_report, PART)).split("train")
    labels = positives(np.array([row.labels for row in gallery], dtype=np.float32))
    expected = retrieval_values(
        inner_products(vectors["query"], vectors["gallery"]),
        positives(answers.query.labels), labels, answers.query.patients, [row.patient_id for row in gallery], k=10,
    )  # fmt: skip
    np.testing.assert_allclose(answers.retrieval["positive queries"].ndcg, expected.ndcg, rtol=1e-6)
    np.testing.assert_allclose(answers.retrieval["positive queries"].jaccard_ndcg, expected.jaccard_ndcg, rtol=1e-6)


def test_stored_answers_are_small_and_those_of_another_version_are_refused(
    tiny_report: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell], tmp_path: Path
) -> None:
    cell = tiny_cells["proxy"]
    path = cell_folder(tiny_report, cell) / VALUES
    with np.load(path) as data:
        kept = {name: (array.dtype, len(array)) for name, array in data.items()}
    assert {dtype.itemsize for dtype, _ in kept.values()} <= {1, 4} and {count for _, count in kept.values()} == {12}
    assert not {"patients", "labels", "views", "sources"} & kept.keys()
    shutil.copytree(tiny_report / "selections", tmp_path / "selections")
    folder = cell_folder(tmp_path, cell)
    folder.mkdir(parents=True)
    (folder / FACTS).write_text('{"seconds": 1, "training_images": 48}')
    np.savez(folder / VALUES, scores=np.zeros((12, 2)))
    with pytest.raises(RunError, match=r"found no .positive queries/.*--resume"):
        read_answers(tmp_path, tiny_plan, cell)


def test_thresholds_and_calibration_match_the_card(
    tiny_report: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell]
) -> None:
    card = load_model(cell_folder(tiny_report, tiny_cells["bce"]) / "run")[1]
    for method in ("bce", "community"):  # community has the scores of bce
        answers = read_answers(tiny_report, tiny_plan, tiny_cells[method])
        assert tuple(answers.thresholds) == card.thresholds and tuple(answers.calibration) == card.calibration
    assert read_answers(tiny_report, tiny_plan, tiny_cells["itq"]).calibration == []


def test_the_run_of_a_cell_can_be_exported_unless_it_hashes(tiny_report: Path) -> None:
    model, card, _ = load_model(cell_folder(tiny_report, Cell(PART, "proxy-anchor")) / "run")
    assert model.head.kind == card.head == "proxy"
    with pytest.raises(RunError, match="only for the benchmark"):
        load_model(cell_folder(tiny_report, Cell(PART, "dsh")) / "run")


def test_proxies_follow_the_method(tiny_report: Path, tiny_plan: Plan, tiny_cells: dict[str, Cell]) -> None:
    """About 24 of 48 training images show each finding, so `auto` gives one proxy per class."""

    def facts(method: str) -> tuple[list[int], bool]:
        found = read_answers(tiny_report, tiny_plan, tiny_cells[method]).facts
        return found["proxies_per_class"], found["negative_proxies"]

    assert facts("proxy") == ([2, 2], False)
    assert facts("proxy-negative") == ([2, 2, 2], True)
    assert facts("proxy-auto") == ([1, 1, 1], True)
    assert facts("ml-proxy-nca") == ([1, 1, 1], True)
    assert facts("bce") == ([], False)


def test_a_finished_cell_is_not_trained_again(
    tiny_report: Path, tiny_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train", refuse)
    run_cell(tiny_report, tiny_plan, Cell(PART, "proxy", "2"))


def test_unfinished_answers_are_made_from_the_finished_run(tiny_report: Path, tiny_plan: Plan, tmp_path: Path) -> None:
    cell, report = Cell(PART, "bce"), tmp_path / "report"
    shutil.copytree(tiny_report, report)
    folder = cell_folder(report, cell)
    before, trained = (
        read_answers(report, tiny_plan, cell),
        (folder / "run/checkpoints/last.ckpt").stat().st_mtime_ns,
    )
    for name in (FACTS, VALUES):
        (folder / name).unlink()
    run_cell(report, tiny_plan, cell)
    after = read_answers(report, tiny_plan, cell)
    assert (folder / "run/checkpoints/last.ckpt").stat().st_mtime_ns == trained
    np.testing.assert_array_equal(after.query.scores, before.query.scores)
    np.testing.assert_array_equal(after.retrieval["all queries"].ndcg, before.retrieval["all queries"].ndcg)


def test_a_method_that_cannot_run_gives_a_clear_error(
    squares: Path, tiny_plan: Plan, tiny_report: Path, tmp_path: Path
) -> None:
    plan = replace(tiny_plan, methods=("itq",), training=tiny_plan.training | {"code_bits": 10_000})
    prepare(tmp_path / "r", plan, read_manifest(selection_path(tiny_report, PART)), resume=False)
    bce = cell_folder(tmp_path / "r", Cell(PART, "bce"))
    bce.parent.mkdir(parents=True)
    with pytest.raises(RunError, match="seed0/bce is not finished"):
        run_cell(tmp_path / "r", plan, Cell(PART, "itq"))
    bce.symlink_to(cell_folder(tiny_report, Cell(PART, "bce")))
    with pytest.raises(RunError, match=r"10,?000"):
        run_cell(tmp_path / "r", plan, Cell(PART, "itq"))
    assert not (cell_folder(tmp_path / "r", Cell(PART, "itq")) / FACTS).exists()


def test_cells_from_another_machine_are_accepted_for_the_same_images_and_options(
    tiny_report: Path, tiny_plan: Plan, squares: Path, tmp_path: Path
) -> None:
    table, report = read_manifest(squares), tmp_path / "report"
    for name in ("bce", "dsh"):
        source, target = (folder / "cells/seed0" / name for folder in (tiny_report, report))
        target.mkdir(parents=True)
        for file in (FACTS, VALUES):
            shutil.copy(source / file, target)
    with pytest.raises(RunError, match="new or empty folder"):
        prepare(report, tiny_plan, table, resume=False)
    plan = prepare(report, tiny_plan, table, resume=True)
    check_finished(report, plan)
    assert read_answers(report, plan, Cell(PART, "dsh")).query.scores.shape
    with pytest.raises(RunError, match=r"which .*bce lacks: it was copied from elsewhere"):
        run_cell(report, plan, Cell(PART, "itq"))

    file = report / "cells/seed0/dsh" / FACTS
    facts = json.loads(file.read_text())
    earlier = {name: value for name, value in facts["options"].items() if name != "stop_after"}
    file.write_text(json.dumps(facts | {"options": earlier}))
    check_finished(report, plan)
    options = facts["options"] | {"lr": 0.5}
    for changed, message in (({"selection": "other"}, "selection: other -> "), ({"options": options}, "'lr': 0.5")):
        file.write_text(json.dumps(facts | changed))
        with pytest.raises(RunError, match=message):
            check_finished(report, plan)


def test_cell_facts_are_json(tiny_report: Path) -> None:
    facts = json.loads((cell_folder(tiny_report, Cell(PART, "bce")) / FACTS).read_text())
    assert {"training_images", "queries", "seconds", "best_epoch", "precision"} <= facts.keys()
