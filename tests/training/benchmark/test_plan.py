"""What a benchmark is made of: cells and their order, the configuration of each, what --resume accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import RunError
from cbmir.manifest import Manifest, read_manifest
from cbmir.training.benchmark.methods import METHODS
from cbmir.training.benchmark.plan import Cell, Part, Plan, make_plan, prepare, selection_path
from cbmir.training.benchmark.protocols import NIH, TABLE

TRAINING: dict[str, Any] = {"encoder": "resnet18", "proxies_per_class": "2", "class_weights": None, "code_bits": 16}


def plan_of(manifest: Path, **options: Any) -> tuple[Plan, dict[Part, Manifest]]:
    asked: dict[str, Any] = {"methods": (), "sweeps": (), "seeds": 1, "folds": 0, "pairs": (), "training": TRAINING}
    return make_plan(TABLE, read_manifest(manifest), manifest, command="cbmir benchmark", **asked | options)


def names(plan: Plan) -> list[str]:
    return [cell.name for cell in plan.cells()]


def test_all_methods_and_those_that_rest_on_bce_come_last(squares: Path) -> None:
    plan, selections = plan_of(squares)
    methods = [cell.method for cell in plan.cells()]
    assert sorted(methods) == sorted(METHODS)
    assert methods[-3:] == ["ssh", "itq", "community"]
    assert selections == {Part(0, 0, 0): read_manifest(squares)}


def test_bce_is_added_where_a_method_rests_on_it(squares: Path) -> None:
    assert names(plan_of(squares, methods=("itq",))[0]) == ["seed0/bce", "seed0/itq"]
    assert names(plan_of(squares, methods=("texture",))[0]) == ["seed0/texture"]


def test_seeds_and_folds(squares: Path) -> None:
    plan, selections = plan_of(squares, methods=("proxy",), seeds=2, folds=3)
    assert names(plan) == [f"seed{seed}-fold{fold}/proxy" for seed in (0, 1) for fold in (1, 2, 3)]
    tested = [row.image for fold in (1, 2, 3) for row in selections[Part(0, fold, 0)].split("test")]
    assert sorted(tested) == sorted(row.image for row in read_manifest(squares))


def test_sweeps_are_crossed(squares: Path) -> None:
    """48 images train; proxies are swept only where a method has several."""
    plan, selections = plan_of(squares, sweeps=("proxies-per-class", "train-size"))
    assert plan.sizes == (6, 12, 24, 0)
    assert {cell.method for cell in plan.cells()} == {"bce", "proxy", "proxy-negative"}
    assert len(names(plan)) == 4 * (1 + 6 + 6)
    assert "seed0-6/proxy-32" in names(plan) and "seed0/bce" in names(plan)
    assert [len(selections[part].split("train")) for part in plan.parts()] == [6, 12, 24, 48]


def test_negative_proxies_sweep_adds_both(squares: Path) -> None:
    plan, _ = plan_of(squares, methods=("bce",), sweeps=("negative-proxies",))
    assert names(plan) == ["seed0/bce", "seed0/proxy", "seed0/proxy-negative"]


def test_how_a_cell_is_trained(squares: Path) -> None:
    plan, selections = plan_of(squares, training=TRAINING | {"class_weights": False}, sweeps=("proxies-per-class",))
    part = Part(0, 0, 0)

    def config(method: str, proxies: str = "") -> Any:
        return plan.config(Cell(part, method, proxies), selections[part], squares)

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
    ],
)
def test_what_cannot_be_planned(squares: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        plan_of(squares, **options)


def test_a_protocol_that_draws_its_images_has_no_folds(squares: Path) -> None:
    with pytest.raises(RunError, match="no folds with protocol nih"):
        make_plan(
            NIH, read_manifest(squares), squares,
            methods=(), sweeps=(), seeds=1, folds=5, pairs=(), training={}, command="",
        )  # fmt: skip


def test_resume_adds_methods_and_refuses_other_options(squares: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    plan, selections = plan_of(squares, methods=("proxy",))
    prepare(report, plan, selections, resume=False)
    assert Plan.read(report) == plan
    selected = read_manifest(selection_path(report, Part(0, 0, 0)))
    assert selected.fingerprint == read_manifest(squares).fingerprint
    with pytest.raises(RunError, match="--resume"):
        prepare(report, plan, selections, resume=False)
    more, more_selections = plan_of(squares, methods=("proxy", "bce"), seeds=2)
    prepare(report, more, more_selections, resume=True)
    assert selection_path(report, Part(1, 0, 0)).exists()
    with pytest.raises(RunError, match=r"training: .*encoder"):
        prepare(report, replace(more, training=TRAINING | {"encoder": "resnet34"}), {}, resume=True)
    assert Plan.read(report) == more


def test_a_folder_of_something_else_is_left_alone(squares: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    plan, selections = plan_of(squares)
    for resume in (False, True):
        with pytest.raises(RunError, match="new or empty folder"):
            prepare(tmp_path, plan, selections, resume=resume)
    with pytest.raises(RunError, match="made by 'cbmir benchmark'"):
        Plan.read(tmp_path)
    with pytest.raises(RunError, match="a cell of this benchmark"):
        plan.cell("seed9/proxy")
