"""Options shared by several commands."""

from __future__ import annotations

import click
import pytest

from cbmir.choices import ENGINES, MODES
from cbmir.cli import cli
from cbmir.preprocessing import INTENSITIES


def command_of(path: str) -> click.Command:
    command: click.Command = cli
    for name in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


@pytest.mark.parametrize("path", ["demo", "query", "index build"])
def test_engines_are_those_of_the_runtime(path: str) -> None:
    (option,) = [option for option in command_of(path).params if option.name == "engine"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == ENGINES
    assert option.default == "auto"


def test_speed_takes_all_engines_and_modes_of_the_runtime() -> None:
    given = ["model.onnx", "--engine", ",".join(ENGINES), "--mode", ", ".join(MODES)]
    parsed = command_of("speed").make_context("speed", given).params
    assert (parsed["engines"], parsed["modes"]) == (ENGINES, MODES)
    parsed = command_of("speed").make_context("speed", ["model.onnx"]).params
    assert (parsed["engines"], parsed["modes"]) == (("auto",), ("auto",))
    (option,) = [option for option in command_of("speed").params if option.name == "engines"]
    assert isinstance(option, click.Option) and option.help is not None
    assert option.help.endswith(f"{', '.join(ENGINES)}.")


@pytest.mark.parametrize("path", ["train", "benchmark"])
def test_intensities_are_those_of_the_spec(path: str) -> None:
    (option,) = [option for option in command_of(path).params if option.name == "intensity"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == INTENSITIES
    assert option.default == "header"
