"""`cbmir embed`: what is typed, what is printed, and the exit codes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cbmir.cli import main
from cbmir.runtime import Engine, Gallery, open_engine
from cbmir.runtime.embedded_blocks import Blocks
from cbmir.runtime.embedding import embed_here
from cbmir.runtime.gallery.pictures import Picture, Source, embed_pictures

Captured = pytest.CaptureFixture[str]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_embed_then_build(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    embed = ["embed", tiny_model, tiny_manifest, "-o", tmp_path / "e"]
    assert run(*embed, "--shard", "2/2") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'e'}: 0 images, 0 of them embedded before\n"
    assert run(*embed, "--workers", 0) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'e'}: 24 images, 0 of them embedded before\n"
    assert run(*embed) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'e'}: 24 images, 24 of them embedded before\n"
    build = ["index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g", "--embeddings", tmp_path / "e"]
    assert run(*build) == 0
    with Gallery.open(tmp_path / "g") as gallery:
        assert len(gallery) == 20


def test_by_ray(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --ray asks for; that Ray does it is tested in tests/runtime/test_embedding.py."""
    asked = []

    def on_ray(*given: object) -> Callable[..., Iterator[int]]:
        asked.append(given)

        def run(blocks: Blocks, sources: Sequence[Source], missing: Sequence[int]) -> Iterator[int]:
            with open_engine(tiny_model, threads=1) as engine:
                yield from embed_here(engine, 0, blocks, sources, missing)

        return run

    monkeypatch.setattr("cbmir.runtime.embedding_on_ray.on_ray", on_ray)
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e", "--ray", "auto") == 0
    assert asked == [("auto", tiny_model, "auto")]
    assert [file.name for file in (tmp_path / "e").iterdir()] == ["part-000000.npz"]


def test_unreadable_images_are_listed_and_give_exit_code_2(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured
) -> None:
    folder = tmp_path / "images"
    shutil.copytree(tiny_manifest.parent, folder)
    (folder / "image_05.png").write_text("not an image")
    for _ in range(2):  # also when it was done before
        assert run("embed", tiny_model, folder / "manifest.csv", "-o", tmp_path / "e") == 2
        assert "1 images could not be read: see the lists unreadable*.csv" in capsys.readouterr().err
        assert str(folder / "image_05.png") in (tmp_path / "e" / "unreadable.csv").read_text()


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "-1/2", ""])
def test_shards_that_are_none(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, shard: str
) -> None:
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e", "--shard", shard) == 2
    assert "expected a shard such as 3/64" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_mistakes(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("a file")
    for args in (
        (tmp_path / "no.onnx", tiny_manifest, "-o", tmp_path / "e"),
        (tiny_model, tmp_path / "no.csv", "-o", tmp_path / "e"),
        (tiny_model, tiny_manifest, "-o", tmp_path / "file"),
        (tiny_model, tiny_manifest),
    ):
        assert run("embed", *args) == 2
        captured = capsys.readouterr()
        assert "Error: " in captured.err
        assert "Traceback" not in captured.err


def test_after_ctrl_c_the_same_command_goes_on(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second file: the first is kept, and the second run embeds just the others."""
    monkeypatch.setattr("cbmir.runtime.embedded_blocks.BLOCK", 10)
    batches: list[int] = []

    def embedded(engine: Engine, pictures: Sequence[Picture]) -> NDArray[np.float32]:
        if len(batches) == stop_at:
            raise KeyboardInterrupt
        batches.append(len(pictures))
        return embed_pictures(engine, pictures)

    monkeypatch.setattr("cbmir.runtime.embedding.embed_pictures", embedded)
    stop_at = 1
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e") == 130
    assert "Finished files are kept: the same command goes on from there." in capsys.readouterr().err
    stop_at = -1
    batches.clear()
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'e'}: 24 images, 10 of them embedded before\n"
    assert batches == [10, 4]


def test_workers_mean_nothing_with_ray(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> None:
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e", "--ray", "auto", "--workers", 2) == 2
    assert "--workers means nothing with --ray" in capsys.readouterr().err


def test_files_are_for_their_owner_alone(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured
) -> None:
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "e") == 0
    assert "others can look into this folder" not in capsys.readouterr().err
    assert (tmp_path / "e").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "e" / "part-000000.npz").stat().st_mode & 0o777 == 0o600
    (tmp_path / "open").mkdir(mode=0o755)
    assert run("embed", tiny_model, tiny_manifest, "-o", tmp_path / "open") == 0
    assert "others can look into this folder" in capsys.readouterr().err
