"""The help of every command, and its examples, which must parse."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from cbmir.cli import cli
from command_line import run

COMMANDS = [
    "data nih", "data chexpert", "data mimic", "data brax", "data padchest", "data vindr", "data rsna", "data siim",
    "data openi", "data covid", "data ralo", "data tuberculosis", "data tbx11k", "data object-cxr",
    "data table", "data dicom", "data phantom", "data check", "train", "final", "evaluate", "models",
    "benchmark", "export", "parity", "speed", "embed", "index build", "index add", "index update", "index remove",
    "index info", "index verify", "index map", "index rebuild", "index compact", "index export", "index merge", "query",
    "pacs analyze", "pacs follow", "pacs node", "pacs retry", "demo", "serve", "doctor",
]  # fmt: skip


def resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words call, and its remaining words."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        name, *words = words
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"no command {name!r}"
        command = found
    return command, words


def leaves(group: click.Group, prefix: str = "") -> list[str]:
    context = click.Context(group)
    found = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += leaves(command, f"{prefix}{name} ") if isinstance(command, click.Group) else [f"{prefix}{name}"]
    return found


def examples(command: click.Command) -> list[list[str]]:
    """The words of each example in a command's epilog, split as by a shell, without `cbmir` and `> FILE`."""
    lines = [line for line in (command.epilog or "").split("\n") if line.startswith("  cbmir ")]
    assert not [line for line in lines if re.search(r"\S {2,}[^ #]", line)], "expected # before the note"
    typed = [shlex.split(line, comments=True)[1:] for line in lines]
    return [words[: words.index(">")] if ">" in words else words for words in typed]


def test_these_are_all_commands() -> None:
    assert sorted(leaves(cli)) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*name.split(), "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: cbmir {name} ")
    assert re.search(rf"^ *Examples?.*:\n +cbmir {name}\b", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 130
    assert not re.search(r"\w-$", text, re.MULTILINE)  # no word is split


#: These run until they are stopped; a benchmark's answer is REPORT/results.json.
WITHOUT_JSON = {"demo", "serve", "pacs node", "pacs follow", "benchmark"}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_output_is_available(name: str) -> None:
    command, _ = resolve(name.split())
    assert ("as_json" in {option.name for option in command.params}) == (name not in WITHOUT_JSON)


@pytest.mark.parametrize("name", ["", "data", "index", "pacs", *COMMANDS])
def test_examples_are_valid(name: str) -> None:
    command, _ = resolve(name.split())
    found = examples(command)
    assert found
    for words in found:
        called, rest = resolve(words)
        called.make_context(called.name, rest)  # parses, and raises UsageError for invalid arguments
        assert not isinstance(called, click.Group)
