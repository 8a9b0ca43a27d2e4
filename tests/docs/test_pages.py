"""Run the examples of the pages: Python unchanged, and quick commands. Other commands are only parsed.

A page's `python` blocks run in order in one namespace, in a folder with the files that `folder` makes. A `csv` block
with a title is written to that file first. A `bash` block can be pasted: notes come after `#`. A `bash` block below
`<!-- run -->` is run, and may only have lines of `cbmir`; a `python` block below `<!-- not run: why -->` is not run.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.cli import cli
from cbmir.demo.feedback import Feedback
from cbmir.runtime import open_gallery
from cbmir.training.losses import LOSSES

ROOT = Path(__file__).resolve().parents[2]
#: Without reports, which `cbmir benchmark` writes.
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.name != "report.md"
)
#: Its blocks need a service: tests/test_integration_docs.py runs them.
WITH_A_SERVICE = "docs/integration.md"
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>run|not run: .+?) -->\n)?"
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

#: A line that is typed at a prompt, and a note after it without `#`.
_COMMAND = re.compile(r"^(?:cbmir|python|pip|make|git|curl) ", re.MULTILINE)
_NOTE = re.compile(r"\S {2,}[^ #\\]")


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the number of its first line of text, `note` the comment above it."""

    language: str
    title: str
    note: str
    text: str
    line: int

    def commands(self) -> list[list[str]]:
        """The words after `cbmir` of each command."""
        lines = re.sub(r"\\\n\s*|\s*&&\s*", lambda found: "\n" if "&&" in found[0] else "", self.text).splitlines()
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("cbmir ")]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(
            one["language"], one["title"] or "", one["note"] or "", one["text"],
            text.count("\n", 0, one.start("text")) + 1,
        )
        for one in _BLOCK.finditer(text)
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page: str) -> None:
    fences = re.findall(r"^\s*```.*$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(page))


def _runs(page: str) -> bool:
    return any(block.language == "python" or block.note == "run" for block in blocks_of(page))


@pytest.fixture
def folder(
    examples: Path, tiny_gallery: Path, tiny_manifest: Path, tiny_run: Path,
    make_xray: Callable[..., NDArray[Any]],
) -> Path:  # fmt: skip
    """The folder `examples`, with the other files that the pages mention."""
    (examples / "models").mkdir()
    shutil.copy(examples / "model.onnx", examples / "models")
    shutil.copytree(tiny_run, examples / "run")
    shutil.copytree(tiny_manifest.parent, examples, dirs_exist_ok=True)
    (examples / "images").mkdir()
    for number in range(1, 7):
        Image.fromarray(make_xray(number + 50)).save(examples / "images" / f"xray-{number}.png")
    for name in ("studies", "archive"):
        (examples / name).mkdir()
        shutil.copy(examples / "chest.dcm", examples / name / "1.dcm")
    (examples / "my.csv").write_text("image,patient_id\nimages/xray-1.png,p1\nimages/xray-2.png,p2\n")
    (examples / "more.csv").write_text("image,patient_id,Effusion,Mass,Nodule\nimages/xray-3.png,0001234,1,0,\n")
    (examples / "corrected.csv").write_text("image,patient_id,Effusion,Mass,Nodule\nimages/xray-3.png,0001234,0,0,0\n")
    shutil.copytree(tiny_gallery, examples / "other")
    feedback = Feedback(examples / "feedback.csv")
    with open_gallery(examples / "gallery") as gallery:
        asked = [gallery.case_id(id) for id in gallery.ids()]
    asked += [hashlib.sha256((examples / "images" / "xray-1.png").read_bytes()).hexdigest(), "of another folder"]
    for image in asked:
        feedback.add("model", image, label="Mass", value=1)
        feedback.add("model", image, label="Effusion", value=None)
    return examples


@pytest.mark.parametrize("page", [page for page in PAGES if page != WITH_A_SERVICE and _runs(page)])
def test_blocks_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")  # so that a block's classes and functions can be looked up
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.setitem(LOSSES, "focal", None)  # docs/extend.md adds it: remove it for later tests
    module.__dict__["data"] = (folder / "chest.dcm").read_bytes()
    if any("-o gallery" in block.text for block in blocks_of(page) if block.note == "run"):
        shutil.rmtree("gallery")  # the page builds it
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.text, "utf-8")
        elif block.language == "bash" and block.note == "run":
            run(block)
        elif block.language == "python" and not block.note:
            code = "\n" * (block.line - 1) + block.text  # so that errors have the page's line numbers
            exec(compile(code, str(ROOT / page), "exec"), module.__dict__)


def run(block: Block) -> None:
    lines = block.text.replace("\\\n", "").splitlines()
    assert all(line.startswith("cbmir ") and not set("|><;&$`") & set(line.partition(" #")[0]) for line in lines)
    for words in block.commands():
        cli.main(args=words, prog_name="cbmir", standalone_mode=False)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.commands() for block in blocks_of(page))])
def test_commands_are_valid(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "bash":
            for words in block.commands():
                try:
                    parse(words)
                except click.ClickException as error:
                    pytest.fail(f"{page}, after line {block.line}: cbmir {shlex.join(words)}: {error.format_message()}")


def parse(words: list[str]) -> None:
    """Parse a command line without running it. Raises click.ClickException for invalid arguments."""
    command: click.Command = cli
    context = click.Context(cli, info_name="cbmir")
    while isinstance(command, click.Group):
        name, words = words[0], words[1:]
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no such command: {name}")
        command, context = found, click.Context(found, info_name=name, parent=context)
    command = copy(command)
    command.params = [copy(option) for option in command.params]
    for option in command.params:
        option.callback = None  # it may open a file
    command.make_context(context.info_name, list(words), parent=context.parent)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("query model.onnx gallery", "Missing argument"),
        ("query model.onnx gallery chest.png --closest 3", "No such option"),
        ("query model.onnx gallery chest.png -k many", "not a valid integer"),
        ("export run -o models --openvino fp8", "is not one of"),
        ("index repair gallery", "no such command"),
        ("index map gallery model.onnx", "unexpected extra argument"),
    ],
)
def test_a_slip_in_a_command_is_found(line: str, said: str) -> None:
    with pytest.raises(click.ClickException) as slip:
        parse(line.split())
    assert said.lower() in slip.value.format_message().lower()


@pytest.mark.parametrize("page", ["docs/quickstart.md"])
def test_the_steps_by_hand_are_those_of_make_demo(page: str) -> None:
    # With a folder that does not exist, so that all steps are still to do.
    command = ["make", "-n", "demo", "DATA=no-data", "OPEN="]
    make = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = make.stdout.replace("no-data", "demo-data").splitlines()
    made = [shlex.split(line)[1:] for line in lines if line.startswith(".venv/bin/cbmir ")]
    by_hand = [words for block in blocks_of(page) for words in block.commands()]
    assert made
    assert [words for words in by_hand if words[0] != "query"] == made


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_pasted(page: str) -> None:
    for block in blocks_of(page):
        if block.language != "bash":
            assert not _COMMAND.search(block.text), f"{page}, line {block.line}: expected a `bash` block"
            continue
        checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{page}, line {block.line}: {checked.stderr}"
        for number, line in enumerate(block.text.splitlines(), start=block.line):
            assert not _NOTE.search(line), f"{page}, line {number}: expected `#` before the note in: {line}"


@pytest.mark.parametrize(
    ("line", "prose"),
    [
        ("cbmir index info gallery      what it holds", True),
        ("cbmir index info gallery   # what it holds", False),
        ("    --epochs 12 --resume  \\", False),
    ],
)
def test_prose_on_a_command_line_is_found(line: str, prose: bool) -> None:
    assert bool(_NOTE.search(line)) == prose


@pytest.mark.parametrize("page", PAGES)
def test_python_can_be_pasted(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, f"{page}, line {block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_targets_exist(page: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for block in blocks_of(page):
        if block.language == "bash":
            for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE):
                assert target in targets
            for script in re.findall(r"^python (\S+\.py)\b", block.text, re.MULTILINE):
                assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    folders = "benchmarks|demo|docs|export|runtime|src|tests|training"
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", (ROOT / page).read_text("utf-8"))
    missing = [name for name in named if not ((ROOT / name).exists() or (ROOT / "docs" / name).exists())]
    assert not missing
