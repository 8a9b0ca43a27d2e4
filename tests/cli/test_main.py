"""`cbmir` itself: exit codes, no tracebacks, and the output with -v and -q."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import cbmir
from cbmir import cli as module
from cbmir.errors import MissingDependencyError, ParityError, TrainingError, UserError
from command_line import run

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "cbmir"], [str(Path(sys.executable).with_name("cbmir"))]], ids=["-m", "script"]
)
def test_both_ways_to_start(command: list[str]) -> None:
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"cbmir, version {cbmir.__version__}\n", "")
    result = subprocess.run([*command, "data", "check", "absent.csv"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: absent.csv: no such manifest")


def test_help_lists_the_commands(capsys: Captured) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "Not a medical device" in text
    listed = text.split("Show this message and exit.\n")[1].split("Five steps")[0]
    assert re.findall(r"^(\S[^:]*):\n|^  (\S+)  ", listed, re.MULTILINE) == [
        ("Data", ""), ("", "data"),
        ("Train and evaluate", ""), ("", "train"), ("", "evaluate"), ("", "benchmark"), ("", "final"),
        ("Export", ""), ("", "export"), ("", "parity"), ("", "speed"),
        ("Gallery", ""), ("", "index"), ("", "embed"),
        ("Answer", ""), ("", "models"), ("", "query"), ("", "demo"),
        ("Serve and PACS", ""), ("", "serve"), ("", "pacs"),
        ("Installation", ""), ("", "doctor"),
    ]  # fmt: skip


@pytest.mark.parametrize("group", [(), ("data",), ("index",), ("pacs",)])
def test_no_command_summary_is_cut_off(group: tuple[str, ...], capsys: Captured) -> None:
    assert run(*group, "--help") == 0
    assert not re.search(r"(\.\.\.|…)$", capsys.readouterr().out.partition("\n")[2], re.MULTILINE)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-command"], "No such command 'no-such-command'"),
        (["exprt"], "No such command 'exprt'. Did you mean 'export'?"),
        (["benchmarc"], "No such command 'benchmarc'. Did you mean 'benchmark'?"),
        (["index", "verfy"], "No such command 'verfy'. Did you mean 'verify'?"),
        (["build"], "No such command 'build'. Did you mean 'index build'?"),
        (["index", "nih"], "No such command 'nih'."),
        (["query", "--pseudonym"], "No such option '--pseudonym'. Did you mean '--pseudonyms'?"),
        (["data", "check"], "Missing argument 'MANIFEST'"),
        (["doctor", "--colour"], "No such option"),
        (["data", "check", "absent.csv"], "Error: absent.csv: no such manifest"),
    ],
)
def test_the_users_mistakes_exit_2(args: list[str], message: str, capsys: Captured) -> None:
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("found a knee"), 2, "Error: found a knee\n"),
        (MissingDependencyError("torch is needed"), 2, "Error: torch is needed\n"),
        (PermissionError(13, "Permission denied", "run"), 2, "Error: [Errno 13] Permission denied: 'run'\n"),
        (ParityError("fp16 is off"), 1, "Error: fp16 is off\n"),
        (TrainingError("NaN in epoch 3"), 1, "Error: NaN in epoch 3\n"),
        (KeyboardInterrupt(), 130, "Stopped.\n"),
        (click.Abort(), 130, "Stopped.\n"),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def command(**options: object) -> None:
        raise raised

    monkeypatch.setattr(module.cli.get_command(click.Context(module.cli), "doctor"), "callback", command)
    assert run("doctor") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().endswith(message.strip())
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(**options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module.cli.get_command(click.Context(module.cli), "doctor"), "callback", command)
    with pytest.raises(ZeroDivisionError):
        module.main(["doctor"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ["ours info", "ours warning", "theirs warning"]),
        (["-q"], ["ours warning", "theirs warning"]),
        (["-v"], ["ours debug", "ours info", "ours warning", "theirs warning"]),
        (["-vv"], [f"{who} {level}" for who in ("ours", "theirs") for level in ("debug", "info", "warning")]),
    ],
)
def test_log_levels(options: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def command(**_: object) -> None:
        for name, logger in (("ours", "cbmir"), ("theirs", "somelibrary")):
            for level in ("debug", "info", "warning"):
                logging.getLogger(logger).log(getattr(logging, level.upper()), "%s %s", name, level)

    monkeypatch.setattr(module.cli.get_command(click.Context(module.cli), "doctor"), "callback", command)
    assert run(*options, "doctor") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == said


@pytest.mark.parametrize("name", ["PIL", "PIL.TiffImagePlugin", "pydicom", "pydicom.filereader"])
def test_image_readers_never_log_the_values_of_tags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def command(**_: object) -> None:
        logging.getLogger(name).debug("tag: PatientName - value: SECRET")
        logging.getLogger(name).info("SECRET")

    monkeypatch.setattr(module.cli.get_command(click.Context(module.cli), "doctor"), "callback", command)
    assert run("-vv", "doctor") == 0
    assert "SECRET" not in capsys.readouterr().err
