"""`cbmir embed`: arguments, output and exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from cbmir.manifest import read_manifest
from cbmir.runtime import Finder
from command_line import run

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_row_per_row_of_the_manifest(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, workers: int
) -> None:
    """Rows of unreadable images are NaN, and only the owner can read the file."""
    folder, output = tmp_path / "images", tmp_path / "e.npy"
    shutil.copytree(tiny_manifest.parent, folder)
    (folder / "image_05.png").write_text("not an image")
    assert run("embed", tiny_model, folder / "manifest.csv", "-o", output, "--workers", workers) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{output}: 24 images\n"
    assert "image_05.png" in captured.err
    assert "1 images could not be read, and their rows are NaN" in captured.err
    found = np.load(output)
    assert (found.shape, found.dtype) == ((24, 8), np.float32)
    with Finder.open(tiny_model, threads=1) as finder:
        for row, embedding in zip(read_manifest(folder / "manifest.csv"), found, strict=True):
            if row.image.name == "image_05.png":
                assert np.isnan(embedding).all()
            else:
                np.testing.assert_allclose(embedding, finder.embed([row.image])[0], atol=1e-6)
    assert output.stat().st_mode & 0o777 == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"images", "e.npy"}


def test_an_interrupted_run_leaves_the_previous_file(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "e.npy").write_text("of before")

    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Finder, "embed_many", pressed)
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e.npy") == 130
    assert (tmp_path / "e.npy").read_text() == "of before"
    assert [file.name for file in tmp_path.iterdir()] == ["e.npy"]


def test_mistakes(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    for args in (
        (tmp_path / "no.onnx", tiny_manifest, "-o", tmp_path / "e.npy"),
        (tiny_model, tmp_path / "no.csv", "-o", tmp_path / "e.npy"),
        (tiny_model, tiny_manifest, "-o", tmp_path / "no" / "e.npy"),
        (tiny_model, tiny_manifest),
    ):
        assert run("embed", *args) == 2
        captured = capsys.readouterr()
        assert "Error: " in captured.err
        assert "Traceback" not in captured.err
