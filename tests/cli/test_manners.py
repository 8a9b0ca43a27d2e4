"""Common to all commands: JSON for programs, shell completion, lines that fit the terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbmir.card import NOT_A_DEVICE
from cbmir.cli import query
from cbmir.runtime import Finder
from cbmir.runtime.neighbours import NOTHING_ALIKE
from command_line import run
from dicom_files import make_dicom

Captured = pytest.CaptureFixture[str]


def asked(capsys: Captured, *args: object, code: int = 0) -> Any:
    """The JSON that a command prints with --json; it must print nothing else."""
    capsys.readouterr()
    assert run(*args, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_a_gallerys_life_in_json(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    path, copy, images = tmp_path / "gallery", tmp_path / "copy", tiny_manifest.parent
    built = asked(capsys, "index", "build", tiny_model, tiny_manifest, "-o", path, "--workers", 1)
    nothing: list[str] = []
    assert built == {
        "gallery": str(path), "images": 20, "resumed": 0, "there": 0, "unreadable": nothing, "duplicates": nothing,
        "changed": nothing, "warnings": {},
    }  # fmt: skip
    more = tmp_path / "more.csv"
    more.write_text(
        f"image,patient_id,split,Mass\n{images / 'image_00.png'},x,train,1\nabsent.png,y,train,0\n", encoding="utf-8"
    )
    added = asked(capsys, "index", "add", path, tiny_model, more, code=2)
    assert (added["images"], added["there"]) == (0, 1)
    assert [(Path(one["path"]).name, "no such file" in one["reason"].lower()) for one in added["unreadable"]] == [
        ("absent.png", True)
    ]
    updated = asked(capsys, "index", "update", path, tiny_manifest, "--split", "train")
    assert updated == {"gallery": str(path), "found": 20, "changed": 0, "absent": []}
    assert asked(capsys, "index", "export", path, "-o", copy) == {"gallery": str(copy), "images": 20}
    assert asked(capsys, "index", "remove", path, "--id", "image_00") == {"gallery": str(path), "removed": ["image_00"]}
    merged = asked(capsys, "index", "merge", path, copy)
    assert merged == {
        "gallery": str(path), "merged": [{"other": str(copy), "added": 1, "there": 19, "renamed": {}}]
    }  # fmt: skip
    assert asked(capsys, "index", "rebuild", path)["images"] == 20
    sizes = asked(capsys, "index", "compact", path)
    assert sizes["bytes_before"] >= sizes["bytes_after"] > 0
    assert asked(capsys, "index", "map", path, "--method", "pca") == {
        "gallery": str(path), "images": 20, "method": "principal components"
    }  # fmt: skip
    assert asked(capsys, "index", "verify", path) == []


def test_embedding_in_json(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    made = asked(capsys, "embed", tiny_model, tiny_manifest, "-o", tmp_path / "e.npy", "--workers", 1)
    assert made == {"embeddings": str(tmp_path / "e.npy"), "images": 24, "unreadable": [], "warnings": {}}


def test_manifests_in_json(tmp_path: Path, capsys: Captured) -> None:
    made = asked(capsys, "data", "phantom", "-n", 6, "--size", 64, "--format", "dicom", "-o", tmp_path / "phantoms")
    manifest = tmp_path / "phantoms" / "manifest.csv"
    assert (made["manifest"], made["images"]) == (str(manifest), 6)
    assert sum(part["images"] for part in made["splits"].values()) == 6
    again = asked(capsys, "data", "table", manifest, "--labels", "Effusion", "-o", tmp_path / "own.csv")
    assert (again["manifest"], again["images"], [*again["labels"]]) == (str(tmp_path / "own.csv"), 6, ["Effusion"])

    whole = next(tmp_path.glob("phantoms/**/*.dcm"))
    whole.with_name("cut.dcm").write_bytes(whole.read_bytes()[:3000])
    found = asked(capsys, "data", "dicom", whole.parent, "-o", tmp_path / "dicom.csv", "--workers", 0, code=2)
    assert (found["images"], found["left_out"]) == (6, {"files": 1, "damaged": 1})


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_an_export_in_json(tmp_path: Path, tiny_run: Path, capsys: Captured) -> None:
    (file,) = asked(capsys, "export", tiny_run, "-o", tmp_path)
    assert file.pop("file") == str(tmp_path / "model.onnx")
    assert file == json.loads((tmp_path / "parity.json").read_text("utf-8"))["model.onnx"]


def test_results_for_a_pacs_in_json(tmp_path: Path, tiny_model: Path, capsys: Captured) -> None:
    pytest.importorskip("highdicom")
    chest, knee = tmp_path / "chest.dcm", tmp_path / "knee.dcm"
    chest.write_bytes(make_dicom(SeriesInstanceUID="1.2.5"))
    knee.write_bytes(make_dicom(BodyPartExamined="KNEE", SeriesInstanceUID="1.2.5"))
    options = ("-o", tmp_path / "out", "--model", tiny_model, "--sr", "--fhir")
    found = asked(capsys, "pacs", "analyze", chest, knee, *options, code=2)
    (done,), (failed,) = found["analysed"], found["failed"]
    stem = str(tmp_path / "out" / "chest")
    assert (done["image"], done["results"]) == (str(chest), [f"{stem}.sr.dcm", f"{stem}.fhir.json"])
    assert (failed["image"], "KNEE" in failed["error"]) == (str(knee), True)
    assert found["notice"] == NOT_A_DEVICE


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cbmir ind", ["index"]),
        ("cbmir index ver", ["verify"]),
        ("cbmir query --exa", ["--exact"]),
        ("cbmir query --engine open", ["openvino"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    environment = os.environ | {
        "_CBMIR_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "cbmir"], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == ([f"plain,{word}" for word in offered], "")


def test_a_terminal_breaks_lines_between_words_and_cuts_only_reports(
    tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        found = finder.analyze(tiny_manifest.parent / "image_20.png", 3)
    report = "Findings: " + "a long-winded report, " * 20
    labels = tuple(f"Well_known-finding_{n}" for n in range(9))
    neighbours = tuple(replace(one, report=report, labels=labels) for one in found.neighbours)
    found = replace(found, warnings=(NOTHING_ALIKE,), neighbours=neighbours)
    whole = query._text(found)
    assert f"  Warning: {NOTHING_ALIKE}\n" in whole and "█" not in whole
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = query._text(found).splitlines()
    assert max(map(len, lines)) <= 80
    reports = [line for line in lines if "long-winded" in line]
    assert len(reports) == 3 and all(line.endswith((" report, …", " a …", " long-winded …")) for line in reports)
    shown = [word for line in lines if line not in reports for word in line.split() if not set(word) & set("█·#")]
    assert shown == [word for line in whole.splitlines() if "long-winded" not in line for word in line.split()]


@pytest.mark.parametrize(("share", "bar"), [(0.0, "." * 10), (0.31, "###......."), (1.0, "#" * 10), (None, "." * 10)])
def test_a_probability_as_a_bar(share: float | None, bar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert query._bar(share) == ""
    for encoding, signs in (("ascii", "#."), ("utf-8", "█·")):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("sys.stdout", terminal)
        assert query._bar(share) == " " + bar.translate(str.maketrans("#.", signs))
        monkeypatch.undo()


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_the_five_steps_and_the_exit_codes_are_shown(args: list[str], capsys: Captured) -> None:
    run(*args)
    out, err = capsys.readouterr()
    text = out + err
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("    cbmir ")]
    assert steps == ["data", "index", "query", "data", "train", "export", "index", "demo"]
    assert "Exit codes: 0 done; 1 " in text and "'cbmir doctor'" in text


@pytest.mark.skipif(os.name != "posix", reason="a terminal is POSIX's here")
@pytest.mark.parametrize("args", [["--help"], ["doctor", "--no-such"], ["index", "info", "absent"]])
def test_no_colour_is_printed(tmp_path: Path, args: list[str]) -> None:
    """Not even on a terminal, so NO_COLOR has nothing to turn off."""
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", 0) as terminal:
        subprocess.run([sys.executable, "-m", "cbmir", *args], stdout=theirs, stderr=theirs, cwd=tmp_path, check=False)
        os.close(theirs)
        said = b""
        with suppress(OSError):  # Linux's error at the end of a terminal
            while block := terminal.read(4096):
                said += block
    assert said and b"\x1b" not in said
