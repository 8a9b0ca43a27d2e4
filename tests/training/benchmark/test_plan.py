"""What a benchmark is made of: cells and their order, the configuration of each, what --resume accepts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbmir.errors import ManifestError, RunError
from cbmir.manifest import Manifest, read_manifest
from cbmir.training.benchmark.methods import METHODS
from cbmir.training.benchmark.plan import Cell, Part, Plan, make_plan, prepare, selection_path
from cbmir.training.benchmark.protocols import NIH, TABLE

TRAINING: dict[str, Any] = {"encoder": "resnet18", "proxies_per_class": "2", "class_weights": None, "code_bits": 16}


def plan_of(manifest: Path, **options: Any) -> tuple[Plan, dict[Part, Manifest]]:
    asked: dict[str, Any] = {"methods": (), "sweeps": (), "seeds": 1, "folds": 0, "pairs": (), "training": TRAINING}
    asked["command"] = "cbmir benchmark"
    return make_plan(TABLE, read_manifest(manifest), manifest, **asked | options)


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
    assert names(plan) == [f"seed{seed}-fold{fold}/proxy-m2" for seed in (0, 1) for fold in (1, 2, 3)]
    tested = [row.image for fold in (1, 2, 3) for row in selections[Part(0, fold, 0)].split("test")]
    assert sorted(tested) == sorted(row.image for row in read_manifest(squares))


def test_sweeps_are_crossed(squares: Path) -> None:
    """48 images train; proxies are swept only where a method has several."""
    plan, selections = plan_of(squares, sweeps=("proxies-per-class", "train-size"))
    assert plan.sizes == (6, 12, 24, 0)
    assert {cell.method for cell in plan.cells()} == {"bce", "proxy", "proxy-negative"}
    assert len(names(plan)) == 4 * (1 + 6 + 6)
    assert "seed0-6/proxy-m32" in names(plan) and "seed0/bce" in names(plan)
    assert [len(selections[part].split("train")) for part in plan.parts()] == [6, 12, 24, 48]


def test_negative_proxies_sweep_adds_both(squares: Path) -> None:
    plan, _ = plan_of(squares, methods=("bce",), sweeps=("negative-proxies",))
    assert names(plan) == ["seed0/bce", "seed0/proxy-m2", "seed0/proxy-negative-m2"]


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
        ({"pairs": ("Mass",)}, "a pair of labels"),
    ],
)
def test_what_cannot_be_planned(squares: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        plan_of(squares, **options)


def test_a_pair_of_labels_that_are_not_there_is_refused_before_anything_is_trained(squares: Path) -> None:
    assert plan_of(squares, pairs=("Mass / Effusion",))[0].pairs == ("Mass / Effusion",)
    with pytest.raises(ManifestError, match="Edema"):
        plan_of(squares, pairs=("Mass/Edema",))


def test_negative_proxies_are_not_swept_where_every_image_has_a_finding(squares: Path) -> None:
    protocol = replace(TABLE, negatives=False)
    options: dict[str, Any] = {"seeds": 1, "folds": 0, "pairs": (), "training": TRAINING, "command": ""}
    for sweeps in ((), ("train-size",)):
        plan, _ = make_plan(protocol, read_manifest(squares), squares, methods=(), sweeps=sweeps, **options)
        assert "proxy-negative" not in plan.methods and "proxy" in plan.methods


def test_a_protocol_that_draws_its_images_has_no_folds(squares: Path) -> None:
    with pytest.raises(RunError, match="no folds with protocol nih"):
        make_plan(
            NIH, read_manifest(squares), squares,
            methods=(), sweeps=(), seeds=1, folds=5, pairs=(), training=TRAINING, command="",
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
    more, more_selections = plan_of(squares, methods=("bce",), seeds=2, command="cbmir benchmark --seeds 2")
    merged = prepare(report, more, more_selections, resume=True)
    assert (merged.methods, merged.seeds) == (("proxy", "bce"), 2), "what was asked before stays"
    assert merged.command == "cbmir benchmark\ncbmir benchmark --seeds 2"
    assert Plan.read(report) == merged
    assert selection_path(report, Part(1, 0, 0)).exists()
    for options in ({"encoder": "resnet34"}, {"code_bits": 32}):
        with pytest.raises(RunError, match=f"{next(iter(options))}: "):
            prepare(report, replace(more, training=TRAINING | options), {}, resume=True)
    prepare(report, replace(more, training=TRAINING | {"devices": "2"}), {}, resume=True)


def test_sweeps_that_are_added_keep_what_is_finished(squares: Path, tmp_path: Path) -> None:
    plan, selections = plan_of(squares, methods=("proxy",))
    prepare(tmp_path / "report", plan, selections, resume=False)
    more, more_selections = plan_of(squares, methods=("proxy",), sweeps=("proxies-per-class", "train-size"))
    merged = prepare(tmp_path / "report", more, more_selections, resume=True)
    assert merged.sizes == (6, 12, 24, 0) and merged.proxies == ("2", "1", "4", "8", "16", "32")
    assert names(plan) == ["seed0/proxy-m2"] and "seed0/proxy-m2" in names(merged)
    assert (merged.shown_size, merged.shown_proxies) == (0, "2")


def test_images_that_were_moved_are_found_and_a_changed_selection_is_refused(squares: Path, tmp_path: Path) -> None:
    plan, selections = plan_of(squares, methods=("proxy",))
    (part, selection), report = next(iter(selections.items())), tmp_path / "report"
    prepare(report, plan, selections, resume=False)
    moved = replace(selection, rows=tuple(replace(row, image=tmp_path / row.image.name) for row in selection))
    prepare(report, plan, {part: moved}, resume=True)
    assert read_manifest(selection_path(report, part)).rows[0].image.parent == tmp_path
    with pytest.raises(RunError, match="another version"):
        prepare(report, plan, {part: selection.split("train")}, resume=True)


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
