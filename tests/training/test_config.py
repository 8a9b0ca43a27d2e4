"""A run's config.json, a benchmark's plan and tuned.json: any value in any place is valid or a RunError."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbmir.errors import RunError
from cbmir.training.comparison.plan import PLAN, Plan, read_tuned
from cbmir.training.config import TrainConfig
from cbmir.training.run import RunFolder
from json_values import PROPERTY, VALUES, places, with_value

CONFIG = json.loads(json.dumps(asdict(TrainConfig("m.csv", "abc", ("Effusion", "Mass")))))
PLANNED = json.loads(json.dumps(asdict(Plan("nih", "m.csv", "abc", ("bce",), tuned={"bce": {"lr": 0.5, "epochs": 7}}))))
SHARED_FOLDER = settings(PROPERTY, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@SHARED_FOLDER
@given(st.sampled_from(sorted(places(CONFIG), key=str)), VALUES)
def test_any_value_is_a_config_or_a_run_error(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(with_value(CONFIG, place, value)))
    try:
        read = RunFolder(tmp_path).read_config()
    except RunError:
        return
    assert TrainConfig.from_json(json.loads(json.dumps(asdict(read)))) == read


@pytest.mark.slow
@SHARED_FOLDER
@given(st.sampled_from(sorted(places(PLANNED), key=str)), VALUES)
def test_any_value_is_a_plan_or_a_run_error(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    (tmp_path / PLAN).write_text(json.dumps(with_value(PLANNED, place, value)))
    (tmp_path / "tuned.json").write_text(json.dumps(with_value(PLANNED, place, value)["tuned"] if place else "null"))
    for read in (Plan.read, lambda folder: read_tuned(folder / "tuned.json")):
        try:
            read(tmp_path)
        except RunError:
            continue


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        (("lr",), "0.1", "lr: expected a finite number, found '0.1'"),
        (("epochs",), 1.5, "epochs: expected a whole number"),
        (("labels",), "Mass", "labels: expected a list"),
        (("precision",), "64", "precision: expected one of auto, 32"),
        (("sigma",), float("nan"), "sigma: expected a finite number, found nan"),
        ((), [], "no object of options"),
    ],
)
def test_the_message_names_the_option(tmp_path: Path, place: tuple[Any, ...], value: Any, found: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(with_value(CONFIG, place, value)))
    with pytest.raises(RunError, match=found):
        RunFolder(tmp_path).read_config()


def test_a_deeply_nested_config_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(RunError, match="nested more than 64 deep"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RunError, match="found a folder"):
        RunFolder(tmp_path).read_config()
