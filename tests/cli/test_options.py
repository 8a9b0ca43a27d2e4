"""Options that several commands share."""

from __future__ import annotations

import click
import pytest

from cbmir.cli import cli
from cbmir.runtime.engine import ENGINES


@pytest.mark.parametrize("path", ["demo", "query", "index build"])
def test_engines_are_the_runtime_s(path: str) -> None:
    command: click.Command = cli
    for name in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    (option,) = [option for option in command.params if option.name == "engine"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == ENGINES
    assert option.default == "auto"
