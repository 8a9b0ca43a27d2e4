"""The plan of a benchmark: cells and their order, their configurations, and what --resume accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cbmir.errors import ManifestError, RunError
from cbmir.labels import CHEXPERT_9, LabelSet
from cbmir.manifest import Manifest, Row, read_manifest
from cbmir.training.comparison import protocols
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import (
    Cell,
    Part,
    Plan,
    make_plan,
    prepare,
    read_tuned,
    select_parts,
    selection_path,
)
from cbmir.training.comparison.protocols import CHEXPERT, NIH, PROTOCOLS, TABLE

TRAINING: dict[str, Any] = {"encoder": "resnet18", "proxies_per_class": "2", "class_weights": None, "code_bits": 16}


def plan_of(manifest: Path, **options: Any) -> tuple[Plan, Manifest]:
    """The plan, and its table."""
    asked: dict[str, Any] = {"methods": (), "sweeps": (), "seeds": 1, "folds": 0, "pairs": (), "training": TRAINING}
    asked["command"] = "cbmir benchmark"
    table = read_manifest(manifest)
    return make_plan(TABLE, table, manifest, **asked | options), table


def names(plan: Plan) -> list[str]:
    return [cell.name for cell in plan.cells()]


def test_methods_that_need_bce_come_last(squares: Path) -> None:
    plan, table = plan_of(squares)
    methods = [cell.method for cell in plan.cells()]
    assert sorted(methods) == sorted(METHODS)
    assert methods[-3:] == ["ssh", "itq", "community"]
    assert select_parts(plan, table) == {Part(0, 0, 0): table}


def test_bce_is_added_if_a_method_needs_it(squares: Path) -> None:
    assert names(plan_of(squares, methods=("itq",))[0]) == ["seed0/bce", "seed0/itq"]
    assert names(plan_of(squares, methods=("texture",))[0]) == ["seed0/texture"]


def test_seeds_and_folds(squares: Path) -> None:
    plan, table = plan_of(squares, methods=("proxy",), seeds=2, folds=3)
    selections = select_parts(plan, table)
    assert names(plan) == [f"seed{seed}-fold{fold}/proxy-m2" for seed in (0, 1) for fold in (1, 2, 3)]
    tested = [row.image for fold in (1, 2, 3) for row in selections[Part(0, fold, 0)].split("test")]
    assert sorted(tested) == sorted(row.image for row in read_manifest(squares))


def test_sweeps_are_crossed(squares: Path) -> None:
    """There are 48 training images; proxies are only swept for methods with several."""
    plan, table = plan_of(squares, sweeps=("proxies-per-class", "train-size"))
    selections = select_parts(plan, table)
    assert plan.sizes == (6, 12, 24, 0)
    assert {cell.method for cell in plan.cells()} == {"bce", "proxy", "proxy-negative"}
    assert len(names(plan)) == 4 * (1 + 6 + 6)
    assert "seed0-6/proxy-m32" in names(plan) and "seed0/bce" in names(plan)
    assert [len(selections[part].split("train")) for part in plan.parts()] == [6, 12, 24, 48]


def test_negative_proxies_sweep_adds_both(squares: Path) -> None:
    plan, _ = plan_of(squares, methods=("bce",), sweeps=("negative-proxies",))
    assert names(plan) == ["seed0/bce", "seed0/proxy-m2", "seed0/proxy-negative-m2"]


def test_how_a_cell_is_trained(squares: Path) -> None:
    plan, table = plan_of(squares, training=TRAINING | {"class_weights": False}, sweeps=("proxies-per-class",))
    part = Part(0, 0, 0)

    def config(method: str, proxies: str = "") -> Any:
        return plan.config(Cell(part, method, proxies), table, squares)

    assert config("proxy", "8").proxies_per_class == "8" and not config("proxy", "8").negative_proxies
    assert config("proxy-negative").negative_proxies and config("proxy-negative").class_weights is False
    assert config("proxy-auto").proxies_per_class == "auto"
    assert config("dsh").loss == "dsh" and config("dsh").class_weights is None and config("dsh").code_bits == 16
    assert config("itq").loss == "bce"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("proxy", "magic")}, "found magic"),
        ({"seeds": 0}, "1 seed or more"),
        ({"folds": 1}, "no folds or 2 or more"),
        ({"pairs": ("Mass",)}, "a pair of labels"),
        ({"tuned": {"fitted": {"seeds": 3}}}, "at most 1 seeds in --tuned, as in --seeds, found more for fitted"),
    ],
)
def test_invalid_plans(squares: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        plan_of(squares, **options)


def test_a_pair_of_unknown_labels_is_refused_before_training(squares: Path) -> None:
    assert plan_of(squares, pairs=("Mass / Effusion",))[0].pairs == ("Mass / Effusion",)
    with pytest.raises(ManifestError, match="Edema"):
        plan_of(squares, pairs=("Mass/Edema",))


def test_a_pair_must_be_of_the_protocols_labels(squares: Path) -> None:
    """They are the labels of the maps."""
    table = replace(read_manifest(squares), labels=LabelSet(("Mass", "Hernia")))
    options: dict[str, Any] = {"seeds": 1, "folds": 0, "training": TRAINING, "command": "", "methods": (), "sweeps": ()}
    assert "Hernia" not in NIH.labels
    with pytest.raises(ManifestError, match="Hernia"):
        make_plan(NIH, table, squares, pairs=("Hernia/Mass",), **options)


def test_negative_proxies_are_not_swept_if_every_image_has_a_finding(squares: Path) -> None:
    protocol = replace(TABLE, negatives=False)
    options: dict[str, Any] = {"seeds": 1, "folds": 0, "pairs": (), "training": TRAINING, "command": ""}
    for sweeps in ((), ("train-size",)):
        plan = make_plan(protocol, read_manifest(squares), squares, methods=(), sweeps=sweeps, **options)
        assert "proxy-negative" not in plan.methods and "proxy" in plan.methods
    with pytest.raises(RunError, match=r"no sweep of negative proxies .* whose images all have a finding"):
        make_plan(protocol, read_manifest(squares), squares, methods=(), sweeps=("negative-proxies",), **options)


def test_a_protocol_that_draws_its_images_has_no_folds(squares: Path) -> None:
    with pytest.raises(RunError, match="no folds with protocol nih"):
        make_plan(
            NIH, read_manifest(squares), squares,
            methods=(), sweeps=(), seeds=1, folds=5, pairs=(), training=TRAINING, command="",
        )  # fmt: skip


def test_resume_adds_methods_and_refuses_other_options(squares: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    plan, table = plan_of(squares, methods=("proxy",))
    prepare(report, plan, table, resume=False)
    assert Plan.read(report) == plan
    selected = read_manifest(selection_path(report, Part(0, 0, 0)))
    assert selected.fingerprint == read_manifest(squares).fingerprint
    with pytest.raises(RunError, match="--resume"):
        prepare(report, plan, table, resume=False)
    more, _ = plan_of(squares, methods=("bce",), seeds=2, command="cbmir benchmark --seeds 2")
    merged = prepare(report, more, table, resume=True)
    assert (merged.methods, merged.seeds) == (("proxy", "bce"), 2), "what was asked before stays"
    assert merged.command == "cbmir benchmark\ncbmir benchmark --seeds 2"
    assert Plan.read(report) == merged
    assert selection_path(report, Part(1, 0, 0)).exists()
    for options in ({"encoder": "resnet34"}, {"code_bits": 32}):
        with pytest.raises(RunError, match=f"{next(iter(options))}: "):
            prepare(report, replace(more, training=TRAINING | options), table, resume=True)
    prepare(report, replace(more, training=TRAINING | {"devices": "2"}), table, resume=True)


def test_added_sweeps_keep_finished_cells(squares: Path, tmp_path: Path) -> None:
    plan, table = plan_of(squares, methods=("proxy",))
    prepare(tmp_path / "report", plan, table, resume=False)
    more, _ = plan_of(squares, methods=("proxy",), sweeps=("proxies-per-class", "train-size"))
    merged = prepare(tmp_path / "report", more, table, resume=True)
    assert merged.sizes == (6, 12, 24, 0) and merged.proxies == ("2", "1", "4", "8", "16", "32")
    assert names(plan) == ["seed0/proxy-m2"] and "seed0/proxy-m2" in names(merged)
    assert (merged.shown_size, merged.shown_proxies) == (0, "2")


def test_every_part_of_a_resumed_plan_has_a_selection(squares: Path, tmp_path: Path) -> None:
    """Two seeds come first, then sizes for one seed: they are crossed."""
    report = tmp_path / "report"
    prepare(report, *plan_of(squares, methods=("proxy",), seeds=2), resume=False)
    more = prepare(report, *plan_of(squares, methods=("proxy",), sweeps=("train-size",)), resume=True)
    assert len(more.parts()) == 8
    assert all(selection_path(report, part).exists() for part in more.parts())


def test_resume_continues_if_the_selections_were_not_finished(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, given = tmp_path / "report", plan_of(squares, methods=("proxy",), seeds=2)
    with monkeypatch.context() as patch:
        patch.setattr("cbmir.training.comparison.plan.write_manifest", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(report, *given, resume=False)
    assert all(selection_path(report, part).exists() for part in prepare(report, *given, resume=True).parts())


def test_an_added_sweep_keeps_the_existing_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images selected without a sweep are also those of this size in the sweep, within the larger sizes."""
    protocol = replace(CHEXPERT, sizes=(4, 8, 16), size=8, queries=4)
    monkeypatch.setitem(PROTOCOLS, "chexpert", protocol)
    monkeypatch.setattr(protocols, "VALIDATION", 4)
    rows = tuple(Row(Path(f"/{p}.png"), str(p), (p % 2,) * 9) for p in range(40))
    table = Manifest(LabelSet(CHEXPERT_9), rows)
    options: dict[str, Any] = {"seeds": 1, "folds": 0, "pairs": (), "training": TRAINING, "command": ""}
    for sweeps, resume in (((), False), (("train-size",), True)):
        plan = make_plan(protocol, table, tmp_path / "m.csv", methods=("bce",), sweeps=sweeps, **options)
        merged = prepare(tmp_path / "report", plan, table, resume=resume)
    assert merged.sizes == (4, 8, 16)
    kept = read_manifest(selection_path(tmp_path / "report", Part(0, 0, 8)))
    assert {split: len(kept.split(split)) for split in ("train", "val", "test", "")} == {
        "train": 8, "val": 4, "test": 4, "": 0,
    }  # fmt: skip


def test_moved_images_are_found_and_a_changed_selection_is_refused(squares: Path, tmp_path: Path) -> None:
    plan, table = plan_of(squares, methods=("proxy",))
    part, report = Part(0, 0, 0), tmp_path / "report"
    prepare(report, plan, table, resume=False)
    moved = replace(table, rows=tuple(replace(row, image=tmp_path / row.image.name) for row in table))
    prepare(report, plan, moved, resume=True)
    assert read_manifest(selection_path(report, part)).rows[0].image.parent == tmp_path
    with pytest.raises(RunError, match="another version"):
        prepare(report, plan, replace(table, rows=table.rows[:-1]), resume=True)


def test_a_folder_with_other_files_is_left_alone(squares: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    plan, table = plan_of(squares)
    for resume in (False, True):
        with pytest.raises(RunError, match="new or empty folder"):
            prepare(tmp_path, plan, table, resume=resume)
    with pytest.raises(RunError, match="made by 'cbmir benchmark'"):
        Plan.read(tmp_path)
    with pytest.raises(RunError, match="a cell of this benchmark"):
        plan.cell("seed9/proxy")


def test_a_method_has_its_own_learning_rate_and_epochs(squares: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text('{"bce": {"lr": 0.5, "epochs": 7}}')
    plan, table = plan_of(squares, methods=("bce", "proxy"), tuned=read_tuned(path))
    configs = {cell.method: plan.config(cell, table, squares) for cell in plan.cells()}
    assert (configs["bce"].lr, configs["bce"].epochs) == (0.5, 7)
    assert configs["proxy"].lr == TRAINING.get("lr", 1e-4)
    assert plan.differences(replace(plan, tuned={})) == ["tuned: {'bce': {'lr': 0.5, 'epochs': 7}} -> {}"]
    for text, message in (
        ('{"bce": {"sigma": 1}}', "expected lr, epochs, head_rate, seeds of methods of the benchmark, found bce"),
        ('{"magic": {}}', "found magic"),
        ("[]", "expected a JSON object of methods"),
    ):
        path.write_text(text)
        with pytest.raises(RunError, match=message):
            read_tuned(path)


def test_a_method_may_have_fewer_seeds(squares: Path) -> None:
    plan, table = plan_of(squares, methods=("bce", "fitted"), seeds=3, tuned={"bce": {"seeds": 1}})
    assert names(plan) == ["seed0/bce", "seed0/fitted", "seed1/fitted", "seed2/fitted"]
    assert plan.config(next(plan.cells()), table, squares).seed == 0


def test_only_fitted_methods_end_with_a_linear_fit(squares: Path) -> None:
    plan, table = plan_of(squares, methods=("bce", "proxy-fitted", "fitted"))
    fits = {cell.method: plan.config(cell, table, squares).linear_fit for cell in plan.cells()}
    assert fits == {"bce": False, "proxy-fitted": True, "fitted": True}


def test_bce_has_as_many_seeds_as_the_methods_that_need_it(squares: Path) -> None:
    plan, _ = plan_of(squares, methods=("bce", "itq"), seeds=2, tuned={"bce": {"seeds": 1}})
    assert names(plan) == ["seed0/bce", "seed0/itq", "seed1/bce", "seed1/itq"]


def test_methods_on_the_features_of_bce_have_its_options(squares: Path) -> None:
    plan, table = plan_of(squares, methods=("itq",), tuned={"bce": {"lr": 0.5}})
    assert [plan.config(cell, table, squares).lr for cell in plan.cells()] == [0.5] * len(list(plan.cells()))
    assert plan.differences(replace(plan, tuned={})) == ["tuned: {'bce': {'lr': 0.5}} -> {}"]


def test_a_resumed_plan_keeps_finished_seeds(squares: Path) -> None:
    plans = [plan_of(squares, methods=("bce",), seeds=3, tuned={"bce": {"seeds": n}})[0] for n in (2, 1)]
    assert plans[0].differences(plans[1]) == []
    assert plans[0].extended(plans[1]).tuned == plans[1].extended(plans[0]).tuned == {"bce": {"seeds": 2}}


def test_an_added_method_keeps_its_own_options(squares: Path) -> None:
    before, _ = plan_of(squares, methods=("bce",), tuned={"bce": {"lr": 0.5, "seeds": 1}})
    after, _ = plan_of(squares, methods=("fitted",), tuned={"bce": {"lr": 0.5}, "fitted": {"lr": 0.1}})
    assert before.differences(after) == []
    both = before.extended(after)
    assert (both.methods, both.tuned) == (("bce", "fitted"), {"bce": {"lr": 0.5}, "fitted": {"lr": 0.1}})
