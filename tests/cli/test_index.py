"""`cbmir index`: what is typed, what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbmir.cli import main
from cbmir.runtime import Gallery


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    assert isinstance(stop.value.code, int)
    return stop.value.code


Captured = pytest.CaptureFixture[str]


def test_build_and_info(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    path = tmp_path / "gallery"
    assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--workers", 1) == 0
    assert capsys.readouterr().out == f"{path}: 20 images\n"
    assert run("index", "info", path, "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["images"], info["patients"], info["fingerprint"], info["splits"]) == (20, 10, "tiny-0", {"train": 20})
    assert run("index", "info", path) == 0
    text = capsys.readouterr().out
    assert "images:        20\n" in text
    assert f"  {'Effusion':<26} {10:>8}\n" in text


def test_splits_replace_what_was_there(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    path = tmp_path / "gallery"
    for splits, count in (
        (["--split", "all"], 24),
        (["--split", "test"], 4),
        (["--split", "test", "--split", "train"], 24),
    ):
        assert run("index", "build", tiny_model, tiny_manifest, "-o", path, *splits) == 0
        with Gallery.open(path) as gallery:
            assert len(gallery) == count
    assert run("index", "build", tiny_model, tiny_manifest, "-o", path, "--split", "val") == 2
    assert "choose others with --split" in capsys.readouterr().err


def test_unreadable_images_give_exit_code_2_and_a_gallery(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured
) -> None:
    manifest = tmp_path / "manifest.csv"
    (tmp_path / "text.png").write_text("not an image")
    manifest.write_text(
        "image,patient_id,split,Mass\n"
        f"{tiny_manifest.parent / 'image_00.png'},a,train,1\n"
        "text.png,b,train,0\n"
        "missing.png,c,train,0\n"
    )
    assert run("index", "build", tiny_model, manifest, "-o", tmp_path / "g") == 2
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'g'}: 1 images\n"
    assert f"2 images could not be read and were left out: see {tmp_path / 'g'}/unreadable.csv" in captured.err
    assert len((tmp_path / "g" / "unreadable.csv").read_text().splitlines()) == 3


def test_mistakes(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    for args in (
        ("build", tmp_path / "no.onnx", tiny_manifest, "-o", tmp_path / "g"),
        ("build", tiny_model, tmp_path / "no.csv", "-o", tmp_path / "g"),
        ("build", tiny_model, tiny_manifest, "-o", tmp_path / "own"),
        ("build", tiny_model, tiny_manifest, "-o", tiny_manifest / "below a file"),
        ("build", tiny_model, tiny_manifest, "-o", tmp_path / ("x" * 300)),
        ("build", tmp_path / ("x" * 300), tiny_manifest, "-o", tmp_path / "g"),
        ("build", tiny_model, tiny_manifest),
        ("info", tmp_path / ("x" * 300)),
        ("info", tmp_path / "no"),
    ):
        assert run("index", *args) == 2
        captured = capsys.readouterr()
        assert "Error: " in captured.err
        assert "Traceback" not in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize("command", [["index"], ["index", "build"], ["index", "info"]])
def test_help_shows_an_example(command: list[str], capsys: Captured) -> None:
    assert run(*command, "--help") == 0
    example = capsys.readouterr().out.split("Example:")[1]
    assert example.strip().startswith("cbmir index ")
